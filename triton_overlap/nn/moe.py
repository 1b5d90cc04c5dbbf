"""A mixture of experts: the feed-forward part of a transformer layer whose experts are spread over the ranks.

Shape ledger (W ranks, T tokens of a rank, E experts of all ranks, K of a token, F the experts' feed-forward size, G
received rows: one for each local expert of a token, grouped by expert)
    router.weight        [E, hidden]          whole on every rank
    experts.fc1_weight   [E/W, F, hidden]     of this rank's experts; gated [E/W, 2 F, hidden], gate above up
    experts.fc2_weight   [E/W, hidden, F]
    shared.fc1_weight    [F_s, hidden]        of the shared expert, whole on every rank; gated [2 F_s, hidden]
    shared.fc2_weight    [hidden, F_s]
    input                [T, hidden]
    router               scores(x @ w^T)      -> topk_idx, topk_weights [T, K]
    dispatch             x to its experts     -> [G, hidden]
    experts              fc1, activation, fc2 -> [G, hidden]
    combine              weighted sum, and the shared expert's output -> [T, hidden]

Backward communicates as forward does: combine becomes dispatch, and dispatch combine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import ACTIVATIONS, GATED_ACTIVATIONS, check_activation
from ..comm.group import Group
from ..expert_buffer import ExpertBuffer
from ..ops import activation, all_gather, ep_combine, ep_dispatch, gated_activation, grouped_matmul
from ..ops.autocast import without_autocast
from .arguments import (
    agree,
    check_choice,
    check_group,
    check_input_of,
    check_number,
    check_parameters_dtype,
    check_size,
    check_switches,
    device_of,
    main_grad_of,
)
from .initialization import common_generator, initial_values
from .marks import MarkedModule
from .settings import multiplied_dtype

__all__ = ["MoE", "RouterSettings"]

#: Key of the expert buffers in what a group keeps.
_KEPT = "nn.MoE"


@dataclass(frozen=True)
class RouterSettings:
    """How tokens choose their experts.

    Scores are computed in float32. A token goes to the K experts of its highest scores, and the scores are their
    weights.

    Attributes:
        score_function: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        normalize: divide the K weights by their sum.
        scale: factor on the weights.
        balance_coefficient: of the auxiliary loss, c in ``c * E * sum over experts of f_i * P_i``, where f_i is the
            share of all (token, k) that went to expert i and P_i the mean over tokens of its score, sigmoid scores
            divided by their sum: 1 * c where routing is even. Source: Fedus, Zoph and Shazeer, "Switch Transformers",
            2021, equations 4 to 6, with f over K experts a token. 0 for no loss.
    """

    score_function: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    balance_coefficient: float = 0.0

    def __post_init__(self) -> None:
        kind = type(self).__name__
        check_choice(kind, "score_function", self.score_function, ("softmax", "sigmoid"))
        check_switches(kind, normalize=self.normalize)
        check_number(kind, "scale", self.scale, positive=True)
        check_number(kind, "balance_coefficient", self.balance_coefficient)


class _Part(MarkedModule):
    """A part of the layer, whose parameters are all split in one way; where they are not, each rank sees its own
    tokens, so that its gradient is a partial sum."""

    def _marks_of(self, name: str) -> tuple[int | None, int, bool]:
        return self._split_dim, 1, self._split_dim is None


class _Router(_Part):
    """Scores of a rank's tokens, [T, hidden] -> topk_idx int64 [T, K], topk_weights float32 [T, K]."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, settings: RouterSettings, group: Group, **factory: Any
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.settings = num_experts, top_k, settings
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **factory))
        self._mark_parameters()
        # Tokens that each expert got, and the rank's tokens, in rows of whole 16 bytes.
        self._columns = -(-(num_experts + 1) // 4) * 4
        self._counts_buffer = (
            group.user_buffer(group.world_size, self._columns, torch.float32) if settings.balance_coefficient else None
        )

    def reset_parameters(self, generator: torch.Generator) -> None:
        with initial_values(self.weight) as weight:
            _draw(weight, weight.shape[1], generator)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """topk_idx, topk_weights, and this rank's share of the balance loss, if there is one."""
        with without_autocast(x.device):
            logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(dim=1) if self.settings.score_function == "softmax" else logits.sigmoid()
        weights, topk_idx = scores.topk(self.top_k, dim=1)
        if self.settings.normalize:
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        if self.settings.scale != 1.0:
            weights = weights * self.settings.scale
        loss = self._balance_loss(scores, topk_idx) if self.settings.balance_coefficient else None
        return topk_idx, weights, loss

    def _balance_loss(self, scores: Tensor, topk_idx: Tensor) -> Tensor:
        """A rank's terms of the sum over tokens in P_i; the counts in f_i are of all ranks, and have no gradient."""
        if self.settings.score_function == "sigmoid":
            scores = scores / scores.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        assert self._counts_buffer is not None
        with torch.no_grad():
            own = scores.new_zeros(self._columns)
            own.index_add_(0, topk_idx.reshape(-1), scores.new_ones(topk_idx.numel()))
            own[self.num_experts] = topk_idx.shape[0]
            total = all_gather(own[None], buffer=self._counts_buffer).sum(dim=0)
        tokens = total[self.num_experts].clamp(min=1)
        shares = total[: self.num_experts] / (tokens * self.top_k)
        factor = self.settings.balance_coefficient * self.num_experts
        return factor * (shares * scores.sum(dim=0)).sum() / tokens

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, {self.settings}"


class _Experts(_Part):
    """This rank's experts on the rows that came in for them, [G, hidden] -> [G, hidden]."""

    _split_dim = 0

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int, name: str, **factory: Any) -> None:
        super().__init__()
        self.activation = name
        parts = 2 if name in GATED_ACTIVATIONS else 1
        self.fc1_weight = nn.Parameter(torch.empty(num_experts, parts * ffn_hidden_size, hidden_size, **factory))
        self.fc2_weight = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size, **factory))
        self._mark_parameters()

    def reset_parameters(self, generator: torch.Generator, rank: int, world_size: int) -> None:
        """Draw all experts, one after another, and keep this rank's."""
        own = self.fc1_weight.shape[0]
        with initial_values(self.fc1_weight) as fc1, initial_values(self.fc2_weight) as fc2:
            spare = [torch.empty_like(weight[0]) for weight in (fc1, fc2)]
            for expert in range(own * world_size):
                local = expert - rank * own
                for weight, other in zip((fc1, fc2), spare, strict=True):
                    _draw(weight[local] if 0 <= local < own else other, weight.shape[2], generator)

    def forward(self, x: Tensor, counts: Tensor, active_tokens: Tensor | None) -> Tensor:
        """``counts`` int32 [E/W] on the device; ``active_tokens`` their sum, where ``x`` has more rows."""
        x = _grouped(x, self.fc1_weight, counts)
        function = gated_activation if self.activation in GATED_ACTIVATIONS else activation
        return _grouped(function(x, self.activation, active_tokens=active_tokens), self.fc2_weight, counts)

    def extra_repr(self) -> str:
        experts, hidden, ffn = self.fc2_weight.shape
        return f"num_local_experts={experts}, hidden={hidden}, ffn={ffn}, activation={self.activation}"


class _SharedExpert(_Part):
    """An expert that every token has, whole on every rank, [T, hidden] -> [T, hidden]."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, name: str, **factory: Any) -> None:
        super().__init__()
        self.activation = name
        parts = 2 if name in GATED_ACTIVATIONS else 1
        self.fc1_weight = nn.Parameter(torch.empty(parts * ffn_hidden_size, hidden_size, **factory))
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, **factory))
        self._mark_parameters()

    def reset_parameters(self, generator: torch.Generator) -> None:
        for parameter in (self.fc1_weight, self.fc2_weight):
            with initial_values(parameter) as weight:
                _draw(weight, weight.shape[1], generator)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.fc1_weight)
        if self.activation in GATED_ACTIVATIONS:
            gate, up = h.chunk(2, dim=1)
            return F.linear(GATED_ACTIVATIONS[self.activation](gate) * up, self.fc2_weight)
        return F.linear(ACTIVATIONS[self.activation](h), self.fc2_weight)

    def extra_repr(self) -> str:
        hidden, ffn = self.fc2_weight.shape
        return f"hidden={hidden}, ffn={ffn}, activation={self.activation}"


class MoE(nn.Module):
    """A mixture of experts, spread over the ranks of a group.

    Each rank gives its own tokens, as many as it has and none at times: its rows of a sequence-parallel activation,
    for instance, or its part of a data-parallel batch. Expert e lives on rank ``e // (num_experts / W)``. Every rank
    calls forward and backward in the same order. Layers of a group with the same sizes share one expert buffer, which
    the constructor registers; neither counts nor routings allocate or compile anything afterwards.

    After a forward ``balance_loss`` is this rank's share of the auxiliary loss, or None without one. Add it to the
    rank's loss: over all ranks the shares sum to the loss of all tokens. In a checkpointed forward it has a gradient
    with ``use_reentrant=False`` alone: reentrant checkpoints give gradients to what they return, not to attributes.

    ``state_dict``: ``router.weight``, ``experts.fc1_weight`` and ``experts.fc2_weight`` of this rank's experts, and
    ``shared.fc1_weight`` and ``shared.fc2_weight`` where there is a shared expert. ``shard_state_dict`` makes it from
    the full one, which has all experts. Weights of the router and of the shared expert are whole on every rank and
    their gradients are sums over a rank's tokens: ``all_reduce_replicated_gradients`` completes them. Those of the
    experts are complete. Where an expert weight has a ``main_grad``, float32 of its shape, backward adds the gradient
    to that.

    Args:
        hidden_size: of input and output; rows are a multiple of 32 bytes.
        ffn_hidden_size: F of each expert.
        num_experts: of all ranks, divisible by the group size.
        top_k: experts of a token.
        group: the ranks; every one of them builds the layer. Collective.
        num_max_tokens_per_rank: the most tokens that a rank has in a call.
        router: how tokens choose.
        activation: of the experts, a name that ``LayerNormMLP`` takes.
        shared_ffn_hidden_size: F of a shared expert; 0 for none.
        cpu_sync: wait for the counts of received rows and allocate what they need. Otherwise room for the most there
            can be, W * num_max_tokens_per_rank * top_k rows; then nothing waits for the device, and the layer can be
            captured in a CUDA graph.
        buffer: an expert buffer of these sizes and the parameters' dtype, for another topology or network than the
            default one.
        params_dtype: of the parameters; bfloat16, float16 or float32. Torch's default dtype by default.
        device: the group's device, or ``"meta"`` to fill the parameters later. By default the group's device, but
            ``"meta"`` under ``torch.device("meta")``.

    Raises:
        TypeError: a setting is of another type. On every rank, as the others.
        ValueError: a setting does not fit, or the ranks' differ; the message says what would.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        group: Group,
        num_max_tokens_per_rank: int,
        router: RouterSettings | None = None,
        activation: str = "swiglu",
        shared_ffn_hidden_size: int = 0,
        cpu_sync: bool = True,
        buffer: ExpertBuffer | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        check_group(kind, group)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        chosen = RouterSettings() if router is None else router
        self.group = group
        self.hidden_size = hidden_size
        self.cpu_sync = cpu_sync
        self._sizes = (num_max_tokens_per_rank, hidden_size, top_k, num_experts)
        self.balance_loss: Tensor | None = None
        self._given_buffer = buffer
        self._buffers_by_dtype: dict[torch.dtype, ExpertBuffer] = {}

        def judge() -> dict[str, Any]:
            sizes = {
                "num_max_tokens_per_rank": num_max_tokens_per_rank,
                "hidden_size": hidden_size,
                "top_k": top_k,
                "num_experts": num_experts,
                "ffn_hidden_size": ffn_hidden_size,
            }
            for name, size in sizes.items():
                check_size(kind, name, size)
            check_size(kind, "shared_ffn_hidden_size", shared_ffn_hidden_size, 0)
            check_activation(kind, activation)
            check_switches(kind, cpu_sync=cpu_sync)
            if not isinstance(chosen, RouterSettings):
                raise TypeError(f"{kind}: router must be a RouterSettings or None, got {chosen!r}")
            check_parameters_dtype(kind, dtype)
            where = device_of(kind, device, group)
            multiplied = multiplied_dtype(dtype, group)
            if buffer is not None:
                self._check_given(kind, buffer, multiplied)
            return {
                **sizes,
                "shared_ffn_hidden_size": shared_ffn_hidden_size,
                "activation": activation,
                "cpu_sync": cpu_sync,
                "router": chosen,
                "dtype": dtype,
                "multiplied in": multiplied,
                "on the meta device": where.type == "meta",
                "a buffer is given": buffer is not None,
            }

        agree(kind, group, judge)
        where = device_of(kind, device, group)
        # Registered here, in the order in which all ranks build their model, and not at the first forward, which may
        # already be inside a graph capture. It also checks how the sizes fit each other.
        self._expert_buffer(multiplied_dtype(dtype, group))

        factory = {"device": where, "dtype": dtype}
        self.router = _Router(hidden_size, num_experts, top_k, chosen, group, **factory)
        self.experts = _Experts(hidden_size, ffn_hidden_size, num_experts // group.world_size, activation, **factory)
        self.shared = (
            _SharedExpert(hidden_size, shared_ffn_hidden_size, activation, **factory)
            if shared_ffn_hidden_size
            else None
        )
        if where.type != "meta":
            self.reset_parameters()

    def _check_given(self, kind: str, buffer: object, dtype: torch.dtype) -> None:
        """TypeError or ValueError unless ``buffer`` is one of the layer's group and sizes, for rows of ``dtype``."""
        if not isinstance(buffer, ExpertBuffer):
            raise TypeError(f"{kind}: buffer must be an ExpertBuffer or None, got {type(buffer).__name__}")
        if buffer.closed or buffer.group is not self.group:
            state = "closed" if buffer.closed else f"of {buffer.group}"
            raise ValueError(f"{kind}: the buffer must be an open one of {self.group}, got one that is {state}")
        found = (buffer.capacity_shape[0], buffer.hidden, buffer.num_topk, buffer.num_experts)
        if found != self._sizes or buffer.dtype != dtype:
            raise ValueError(
                f"{kind}: the buffer must have num_max_tokens_per_rank, hidden, num_topk and num_experts "
                f"{self._sizes} and {dtype}, got {found} and {buffer.dtype}"
            )

    def _expert_buffer(self, dtype: torch.dtype) -> ExpertBuffer:
        """The buffer for rows of ``dtype``; collective the first time."""
        found = self._buffers_by_dtype.get(dtype)
        if found is None:
            found = self._buffers_by_dtype[dtype] = self._find_buffer(dtype)
        return found

    def _find_buffer(self, dtype: torch.dtype) -> ExpertBuffer:
        """The one that was given, or one that all layers of these sizes share: what a call received is copied out
        before the next one begins."""
        if self._given_buffer is not None:
            self._check_given(type(self).__name__, self._given_buffer, dtype)
            return self._given_buffer
        tokens, hidden, top_k, experts = self._sizes
        known: dict[tuple[Any, ...], ExpertBuffer] = self.group.kept.setdefault(_KEPT, {})
        key = (*self._sizes, dtype)
        if key not in known or known[key].closed:
            known[key] = ExpertBuffer(
                self.group,
                num_max_tokens_per_rank=tokens,
                hidden=hidden,
                num_topk=top_k,
                num_experts=experts,
                dtype=dtype,
            )
        return known[key]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight as ``nn.Linear`` does, all experts from rank 0's generator, and keep this rank's.
        Collective."""
        with common_generator(self.group, self.router.weight.device) as generator:
            self.router.reset_parameters(generator)
            self.experts.reset_parameters(generator, self.group.rank, self.group.world_size)
            if self.shared is not None:
                self.shared.reset_parameters(generator)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [.., hidden], this rank's tokens -> the same shape."""
        weight, kind = self.router.weight, type(self).__name__
        check_input_of(kind, x, self.hidden_size, weight)
        if x.is_meta:
            raise ValueError(f"{kind}: the parameters are on the meta device; call to_empty(device=group.device) first")
        if x.dim() < 2:
            raise ValueError(f"{kind}: the input must have at least 2 dimensions, tokens first, got {list(x.shape)}")
        rows = x if x.dim() == 2 else x.flatten(0, -2)
        buffer = self._expert_buffer(multiplied_dtype(weight.dtype, self.group))
        rows = rows.to(buffer.dtype)
        topk_idx, topk_weights, self.balance_loss = self.router(rows)
        recv_x, _, weights, handle = ep_dispatch(
            rows, topk_idx, topk_weights, buffer=buffer, expand=True, cpu_sync=self.cpu_sync
        )
        counts = handle.view("expert_counts")
        active = None if self.cpu_sync else counts.sum(dtype=torch.int32)
        y = self.experts(recv_x, counts, active)
        out, _ = ep_combine(y, handle, weights, bias=None if self.shared is None else self.shared(rows))
        return out.view(x.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "balance_loss": None}  # of the last forward's graph, which is not the module's

    def extra_repr(self) -> str:
        return (
            f"rank={self.group.rank}, world_size={self.group.world_size}, num_max_tokens_per_rank={self._sizes[0]}, "
            f"cpu_sync={self.cpu_sync}"
        )


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each group of rows times its expert's ``weight[e]^T``."""
    return grouped_matmul(x, weight.transpose(1, 2), counts, main_grad=main_grad_of("MoE", weight))


def _draw(weight: Tensor, in_features: int, generator: torch.Generator) -> None:
    """Uniform in +-1/sqrt(in_features), as the weight of an ``nn.Linear``."""
    bound = 1 / math.sqrt(in_features)
    nn.init.uniform_(weight, -bound, bound, generator=generator)
