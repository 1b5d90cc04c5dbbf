"""What the expert-parallel benchmark measures: sizes, fresh inputs of every rank, and what each call must give.

Letters: W ranks, T tokens of a rank, K experts of a token, H columns, R rows that a rank receives.

    dispatch       x [T, H] bfloat16, topk_idx [T, K], topk_weights [T, K]  ->  rows [R, H], local experts, weights
    dispatch_fp8   the same with x in float8_e4m3fn and a float32 scale for every 128 columns
    combine        y [R, H] bfloat16                                        ->  out [T, H], the sum over ranks

Routings are uniform: each token has K different experts, all equally probable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from triton_overlap import reference

#: Columns that share a scale.
SCALE_COLUMNS = 128
FP8 = torch.float8_e4m3fn


class EpOperation(str, Enum):
    """What is timed."""

    DISPATCH = "dispatch"
    DISPATCH_FP8 = "dispatch_fp8"
    COMBINE = "combine"


@dataclass(frozen=True)
class Inputs:
    """One rank's tensors of one call.

    Attributes:
        x: [T, H] bfloat16.
        fp8, scales: ``x`` in fp8.
        topk_idx: int64 [T, K].
        topk_weights: float32 [T, K].
    """

    x: Tensor
    fp8: Tensor
    scales: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class Received:
    """What a dispatch gives a rank, in the order of source rank and token.

    Attributes:
        x: [R, H].
        topk_idx: int64 [R, K], local experts, -1 elsewhere.
        topk_weights: float32 [R, K], 0 elsewhere; None where a call does not send them.
        scales: of fp8 rows.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    scales: Tensor | None = None


@dataclass(frozen=True)
class EpProblem:
    """One size.

    Attributes:
        tokens: of every rank.
        hidden: columns, a multiple of 128.
        topk: experts of a token.
        experts: of all ranks together.
        world_size: ranks.
    """

    tokens: int
    hidden: int
    topk: int
    experts: int
    world_size: int

    @classmethod
    def parse(cls, text: str, world_size: int) -> EpProblem:
        """From ``"4096x7168x8x256"``: tokens, hidden, topk, experts.

        Raises:
            ValueError: another form, or a hidden size that scales do not divide.
        """
        if not re.fullmatch(r"\d+x\d+x\d+x\d+", text):
            raise ValueError(f'a problem is written "4096x7168x8x256" (tokens, hidden, topk, experts), got {text!r}')
        tokens, hidden, topk, experts = map(int, text.split("x"))
        found = cls(tokens, hidden, topk, experts, world_size)
        if found.hidden % SCALE_COLUMNS:
            raise ValueError(f"hidden must be a multiple of {SCALE_COLUMNS}, got {found.hidden}")
        return found

    @property
    def input_bytes(self) -> int:
        """Bytes of the bfloat16 rows."""
        return 2 * self.tokens * self.hidden

    def row_bytes(self, operation: EpOperation) -> int:
        """Bytes of a row with its scales."""
        if operation == EpOperation.DISPATCH_FP8:
            return self.hidden + 4 * self.hidden // SCALE_COLUMNS
        return 2 * self.hidden

    def num_input_sets(self, cache_bytes: int) -> int:
        """Input sets to rotate over, so that a call never finds its rows in a cache of ``cache_bytes``."""
        return max(2, -(-2 * cache_bytes // self.input_bytes) + 1)

    def topk_idx(self, rank: int, seed: int, device: torch.device) -> Tensor:
        """``rank``'s routing of input set ``seed``; any rank can make it."""
        scores = torch.rand(self.tokens, self.experts, generator=self._generator(rank, seed, device), device=device)
        return scores.topk(self.topk, dim=1).indices

    def inputs(self, rank: int, seed: int, device: torch.device) -> Inputs:
        """``rank``'s input set ``seed``; any rank can make it."""
        topk_idx = self.topk_idx(rank, seed, device)
        generator = self._generator(rank, seed, device)
        x = torch.randn(self.tokens, self.hidden, generator=generator, device=device).to(torch.bfloat16)
        weights = torch.rand(self.tokens, self.topk, generator=generator, device=device)
        groups = x.float().view(self.tokens, -1, SCALE_COLUMNS)
        scales = groups.abs().amax(dim=2).clamp(min=1e-4) / torch.finfo(FP8).max
        fp8 = (groups / scales[..., None]).to(FP8).view_as(x)
        return Inputs(x, fp8, scales.contiguous(), topk_idx, weights)

    def _generator(self, rank: int, seed: int, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed * self.world_size + rank)

    def host_of(self, topk_idx: Tensor) -> Tensor:
        """bool [T, W]: the ranks that host an expert of each token."""
        host = topk_idx // (self.experts // self.world_size)
        ranks = torch.arange(self.world_size, device=topk_idx.device)
        return (host[:, :, None] == ranks).any(dim=1)

    def rows_moved(self, rank: int, seed: int, operation: EpOperation, device: torch.device) -> int:
        """Rows that ``rank`` sends to other ranks in input set ``seed``; in a group of one, all that it receives."""
        if self.world_size == 1:
            return int(self.host_of(self.topk_idx(0, seed, device)).sum())
        if operation != EpOperation.COMBINE:
            sent = self.host_of(self.topk_idx(rank, seed, device)).sum(dim=0)
            return int(sent.sum() - sent[rank])
        # What came in from others goes back to them.
        others = (other for other in range(self.world_size) if other != rank)
        return sum(int(self.host_of(self.topk_idx(other, seed, device))[:, rank].sum()) for other in others)


@dataclass(frozen=True)
class Expected:
    """What calls on one input set must give on one rank; from the twins in ``reference``.

    Attributes:
        dispatch, dispatch_fp8: exact.
        y: [R, H] bfloat16, what the rank's experts made of its rows.
        combine: [T, H] float64.
    """

    dispatch: Received
    dispatch_fp8: Received
    y: Tensor
    combine: Tensor

    @classmethod
    def of(cls, problem: EpProblem, rank: int, seed: int, device: torch.device) -> Expected:
        """Of input set ``seed``."""
        everyone = [problem.inputs(other, seed, device) for other in range(problem.world_size)]
        idx = [given.topk_idx for given in everyone]
        weights = [given.topk_weights for given in everyone]
        rows = reference.ep_dispatch([given.x for given in everyone], idx, problem.experts, weights)
        # Bytes, since few operations know fp8.
        fp8 = reference.ep_dispatch([given.fp8.view(torch.uint8) for given in everyone], idx, problem.experts)
        scales = reference.ep_dispatch([given.scales for given in everyone], idx, problem.experts)
        made = [made_by(other, x) for other, (x, _, _) in enumerate(rows)]
        x, local, own = rows[rank]
        return cls(
            dispatch=Received(x, local, own),
            dispatch_fp8=Received(fp8[rank][0].view(FP8), local, own, scales[rank][0]),
            y=made[rank],
            combine=reference.ep_combine([y.double() for y in made], idx, problem.experts)[rank],
        )


def made_by(rank: int, x: Tensor) -> Tensor:
    """What the experts of ``rank`` make of rows: another multiple on each rank, so that a mixed-up row shows."""
    return (x.float() * (1 + rank / 8)).to(x.dtype)
