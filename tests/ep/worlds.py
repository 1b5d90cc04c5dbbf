"""Routing cases and an all-to-all reference for expert buffers, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    """One set of sizes and of routings.

    Attributes:
        scale_out, scale_up: the topology.
        max_tokens, hidden, topk, experts: of the buffer.
        tokens: of each rank; shorter than the world, it repeats.
        masked: fraction of expert ids that are -1.
        one_expert: every token goes to expert 0 alone.
    """

    scale_out: int
    scale_up: int
    max_tokens: int = 6
    hidden: int = 16
    topk: int = 2
    experts_per_rank: int = 2
    tokens: tuple[int, ...] = (6, 3, 0, 5)
    masked: float = 0.2
    one_expert: bool = False
    settings: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def world_size(self) -> int:
        return self.scale_out * self.scale_up

    @property
    def experts(self) -> int:
        return self.world_size * self.experts_per_rank


@dataclass(frozen=True)
class Inputs:
    """What one rank dispatches."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def make_inputs(case: Case, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Inputs]:
    """Inputs of every rank, the same wherever they are made."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(case.world_size):
        tokens = min(case.tokens[(rank + seed) % len(case.tokens)], case.max_tokens)
        x = torch.randn(tokens, case.hidden, generator=generator).to(dtype)
        scores = torch.rand(tokens, case.experts, generator=generator)
        topk_idx = scores.topk(case.topk, dim=1).indices if tokens else torch.empty(0, case.topk, dtype=torch.int64)
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < case.masked] = -1
        if case.one_expert:
            topk_idx[:, 0], topk_idx[:, 1:] = 0, -1
        found.append(Inputs(x, topk_idx, torch.rand(tokens, case.topk, generator=generator)))
    return found


@dataclass(frozen=True)
class Expected:
    """What one rank receives, in the order of source rank and token.

    Attributes:
        x, topk_idx, topk_weights: [R, ...]; local experts, -1 and 0 elsewhere.
        sources: rank and token of each row.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    sources: list[tuple[int, int]]


def expected_dispatch(case: Case, inputs: list[Inputs], rank: int) -> Expected:
    """The all-to-all reference of a dispatch."""
    first = rank * case.experts_per_rank
    xs, indices, weights, sources = [], [], [], []
    for source, given in enumerate(inputs):
        local = given.topk_idx - first
        here = (local >= 0) & (local < case.experts_per_rank)
        rows = here.any(1).nonzero().flatten().tolist()
        xs.append(given.x[rows])
        indices.append(torch.where(here, local, -1)[rows])
        weights.append(torch.where(here, given.topk_weights, 0.0)[rows])
        sources += [(source, row) for row in rows]
    return Expected(torch.cat(xs), torch.cat(indices), torch.cat(weights), sources)


def expand(expected: Expected, case: Case, alignment: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows grouped by local expert, NaN in the padding, and the row of each (r, k), or -1."""
    groups = []
    place = torch.full_like(expected.topk_idx, -1)
    start = 0
    for expert in range(case.experts_per_rank):
        chosen = (expected.topk_idx == expert).nonzero().tolist()
        size = -(-len(chosen) // alignment) * alignment
        group = torch.full((size, case.hidden), float("nan"), dtype=expected.x.dtype)
        for index, (row, k) in enumerate(chosen):
            group[index] = expected.x[row]
            place[row, k] = start + index
        groups.append(group)
        start += size
    return torch.cat(groups), place


def expected_combine(
    case: Case,
    inputs: list[Inputs],
    outputs: Callable[[int], torch.Tensor],
    rank: int,
    biases: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """The combine of rank ``rank`` where rank r made ``outputs(r)`` [R, hidden] of its received rows: in fp32, biases
    first, then scale-out ranks in ascending order, those of others rounded on their way."""
    tokens = inputs[rank].x.shape[0]
    dtype = inputs[rank].x.dtype
    total = torch.zeros(tokens, outputs(0).shape[1])
    for bias in biases:
        total += bias.float()
    for scale_out in range(case.scale_out):
        partial = torch.zeros_like(total)
        for peer in range(scale_out * case.scale_up, (scale_out + 1) * case.scale_up):
            y = outputs(peer)
            for row, (source, token) in enumerate(expected_dispatch(case, inputs, peer).sources):
                if source == rank:
                    partial[token] += y[row].float()
        if scale_out == rank // case.scale_up:
            total += partial
        else:
            total += partial.to(outputs(0).dtype).float()
    return total.to(dtype)
