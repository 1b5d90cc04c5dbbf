"""``ExpertBuffer``: dispatch of tokens to the ranks of their experts, and combine of what these made of them.

Shape ledger (T tokens of a rank, K experts a token, R received rows, H hidden)::

    dispatch   x [T, H], topk_idx [T, K]  ->  recv_x [R, H], recv_topk_idx [R, K], recv_topk_weights [R, K]
               expanded                   ->  recv_x [sum over local experts of rows, each group padded, H]
    combine    y like recv_x              ->  out [T, H]

Ranks form scale-out x scale-up; see ``docs/expert_parallel.md`` for the protocol and its argument.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from .comm.group import Group
from .comm.layout import STATE_WORDS, StateWord, TableWord
from .comm.network import NetworkProperties, check_requirements, create_network
from .comm.signals import Operation, operation_code
from .errors import ClosedError
from .kernels import ep_combine, ep_dispatch, ep_route, ep_unpack
from .kernels.ep_geometry import Knobs, check_scale_out, plan
from .kernels.ep_layout import EpLayout
from .kernels.ep_parts import cut_words

__all__ = ["EpHandle", "ExpertBuffer", "expert_buffer_by_handle"]

_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[str, ExpertBuffer] = weakref.WeakValueDictionary()
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = torch.float8_e4m3fn
#: Columns of a row that share a scale factor.
_SCALE_COLUMNS = 128
_MAX_TOPK = 32
_MAX_BIASES = 2

#: What each variant of the kernels needs of a network.
_NEEDS = {
    "unordered": NetworkProperties(),
    "ordered": NetworkProperties(strong_signals=True, signals_anywhere=True),
}


@dataclass(frozen=True, eq=False)
class EpHandle:
    """What a dispatch leaves for its combine, and for later dispatches with the same routing.

    Attributes:
        buffer: the buffer that made it.
        topk_idx: int64 [T, K], a copy of what was dispatched.
        routing: int32, ``ep_layout.EpLayout.routing``.
        num_recv_tokens: R; None where the host did not wait for it.
        num_recv_per_expert: rows for each local expert; None likewise.
        expand: rows are grouped by expert.
        expert_alignment: what each group is padded to.
        known_rows: rows of what was received, where they are known without ``num_recv_per_expert``.
    """

    buffer: ExpertBuffer
    topk_idx: torch.Tensor
    routing: torch.Tensor
    num_recv_tokens: int | None
    num_recv_per_expert: list[int] | None
    expand: bool
    expert_alignment: int
    known_rows: int | None = None

    def view(self, name: str) -> torch.Tensor:
        """One tensor of the routing, on the device; names and shapes are in ``ep_layout.EpLayout.routing``."""
        start, shape = self.buffer.layout.routing[name]
        size = 1
        for extent in shape:
            size *= extent
        return self.routing[start : start + size].view(shape)

    @property
    def expert_starts(self) -> list[int] | None:
        """First row of each expert's group, and the end of the last one."""
        if self.num_recv_per_expert is None:
            return None
        padded = (_round_up(count, self.expert_alignment) for count in self.num_recv_per_expert)
        return list(itertools.accumulate(padded, initial=0))

    @property
    def num_rows(self) -> int | None:
        """Rows of what was received: R, or those of all groups; None where the host does not know."""
        if self.known_rows is not None:
            return self.known_rows
        starts = self.expert_starts
        return self.num_recv_tokens if not self.expand else None if starts is None else starts[-1]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class ExpertBuffer:
    """Symmetric memory and routing for expert parallelism. Construction is collective.

    Args:
        group: the ranks; expert e lives on rank ``e // (num_experts // world_size)``.
        num_max_tokens_per_rank: the most tokens a rank dispatches in a call. Every call may have fewer, also none.
        hidden: columns of a row.
        num_topk: experts of a token.
        num_experts: of all ranks together.
        dtype: of rows, bfloat16, float16 or float32. fp8 rows with scales go through the same buffer.
        use_fp8_dispatch: room for scale factors, one float32 for every 128 columns.
        allow_hybrid_mode: False refuses a topology with more than one scale-out rank.
        num_scale_up: ranks that reach each other by stores; by default all of them. Divides the world size; consecutive
            ranks are scale-up peers.
        network: how scale-out peers are reached: ``"direct"`` or ``"simulated"``.
        kernel: ``"unordered"`` or ``"ordered"``; by default ``EP_HYBRID_KERNEL``, else unordered.
        num_allocated_qps: communication contexts, 2 to 17.
        num_sms, channels_per_sm: channels are their product; 0 for a default.
        deterministic: accepted: results never depend on the order of arrival.
        min_tokens_per_part, num_sub_parts, min_sub_tokens, arch_min_sub_tokens: see ``ep_geometry.plan``; None takes
            the environment's.

    Raises:
        ValueError: a rule is broken; the message names it.
        BackendError: the network cannot run here.
    """

    def __init__(
        self,
        group: Group,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        num_scale_up: int | None = None,
        network: str = "direct",
        kernel: str | None = None,
        num_allocated_qps: int = 11,
        num_sms: int = 0,
        channels_per_sm: int = 0,
        deterministic: bool = False,
        min_tokens_per_part: int | None = None,
        num_sub_parts: int | None = None,
        min_sub_tokens: int | None = None,
        arch_min_sub_tokens: int | None = None,
    ) -> None:
        group.before_call()
        self.group = group
        self.hidden, self.num_topk, self.num_experts = hidden, num_topk, num_experts
        self.dtype = dtype
        self.use_fp8_dispatch = use_fp8_dispatch
        capability = torch.cuda.get_device_capability(group.device)[0] if group.device.type == "cuda" else 0
        self._knobs = Knobs.choose(
            min_tokens_per_part, num_sub_parts, min_sub_tokens, arch_min_sub_tokens, capability=capability
        )
        num_scale_up = group.world_size if num_scale_up is None else num_scale_up
        settings = (
            num_max_tokens_per_rank, hidden, num_topk, num_experts, str(dtype), use_fp8_dispatch, num_scale_up, network,
            kernel, num_allocated_qps, num_sms, channels_per_sm, self._knobs,
        )  # fmt: skip
        group.agree("settings of an expert buffer", settings)
        if num_scale_up < group.world_size and not allow_hybrid_mode:
            raise ValueError(
                f"{group.world_size} ranks with num_scale_up {num_scale_up} need allow_hybrid_mode, which is False"
            )
        interpreted = group.backend.interpreted
        self.layout = make_layout(
            world_size=group.world_size,
            num_scale_up=num_scale_up,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            dtype=dtype,
            use_fp8_dispatch=use_fp8_dispatch,
            num_allocated_qps=num_allocated_qps,
            num_sms=num_sms or (1 if interpreted else 24),
            channels_per_sm=channels_per_sm or (2 if interpreted else 4),
            knobs=self._knobs,
        )
        self.kernel = kernel or os.environ.get("EP_HYBRID_KERNEL", "unordered")
        if self.kernel not in _NEEDS:
            raise ValueError(f'kernel must be "unordered" or "ordered", got {self.kernel!r}')
        self.network = create_network(network)
        check_requirements(self.kernel, _NEEDS[self.kernel], self.network)
        self.capacity_shape = (num_max_tokens_per_rank, hidden)
        self.handle = f"expert_buffer_{next(_handles)}"
        _by_handle[self.handle] = self
        self.closed = False
        self._allocate(epoch=0)
        group.adopt(self)

    @staticmethod
    def size_hint(
        world_size: int,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        use_fp8_dispatch: bool = False,
        num_scale_up: int | None = None,
        num_allocated_qps: int = 11,
        num_sms: int = 24,
        channels_per_sm: int = 4,
    ) -> int:
        """Symmetric bytes that a buffer with these arguments registers on each rank. Every rank could send all its
        tokens to one, so they grow with the world size."""
        return make_layout(
            world_size=world_size,
            num_scale_up=num_scale_up or world_size,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            dtype=dtype,
            use_fp8_dispatch=use_fp8_dispatch,
            num_allocated_qps=num_allocated_qps,
            num_sms=num_sms,
            channels_per_sm=channels_per_sm,
            knobs=Knobs.choose(),
        ).num_bytes

    def _allocate(self, epoch: int) -> None:
        group, layout = self.group, self.layout
        self.memory = group.symmetric_empty(layout.num_bytes)
        channels = layout.geometry.num_channels
        cut = cut_words(layout.geometry, self._knobs)
        signals = [self._signal_index(channel) for channel in range(channels)]
        small = torch.tensor(cut + signals, dtype=torch.int32)
        self._local = group.backend.local_zeros(8 * layout.num_signals + 4 * STATE_WORDS + 4 * small.numel())
        bases = self._local.data_ptr()
        state = bases + 8 * layout.num_signals
        constants = state + 4 * STATE_WORDS
        tail = self._local[8 * layout.num_signals :].view(torch.int32)
        tail[StateWord.EPOCH] = epoch + 1
        tail[STATE_WORDS:].copy_(small)
        self._state = tail[:STATE_WORDS]
        words = [0] * int(TableWord.PEERS)
        words[TableWord.RANK] = group.rank
        words[TableWord.WORLD_SIZE] = group.world_size
        words[TableWord.HEADERS] = layout.offset("headers")
        words[TableWord.STATE] = state
        words[TableWord.RECORD] = group.record_words.data_ptr()
        words[TableWord.CLOCK] = group.backend.clock_address
        words[TableWord.TIMEOUT_NS] = int(group.timeout_s * 1e9)
        words[TableWord.NETWORK] = (
            self.network.attach(group, self.memory, layout.max_puts) if layout.num_scale_out > 1 else 0
        )
        head = torch.tensor(words, dtype=torch.int64, device=group.device)
        self.table = torch.cat([head, self.memory.table, group.control_table])
        ep_words = layout.words(bases, constants, constants + 4 * len(cut))
        self.ep_table = torch.tensor(ep_words, dtype=torch.int64, device=group.device)

    def _signal_index(self, channel: int) -> int:
        context, first = self.layout.geometry.signal(channel, 0)
        return context * self.layout.geometry.signals_per_context + first

    @property
    def bases(self) -> torch.Tensor:
        """int64 [num_signals], what this rank's signals held when the last call ended."""
        return self._local[: 8 * self.layout.num_signals].view(torch.int64)

    @property
    def epoch(self) -> int:
        """Of the last call, 0 before the first. Waits for the device, where a replayed graph advances it too."""
        return int(self._state[StateWord.EPOCH]) - 1

    def renew(self, epoch: int) -> None:
        """Collective, for ``group.recover``: fresh memory, going on from ``epoch``."""
        self.group.backend.free(self.memory)
        self._allocate(epoch)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertBuffer:
        # A copied module uses the same buffer: it is memory that ranks share, not the module's state.
        return self

    def close(self) -> None:
        """Release the memory, once no rank uses it any more (``Group.close`` sees to that). Idempotent."""
        if not self.closed:
            self.closed = True
            self.group.backend.free(self.memory)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """What one collective call launches; it starts after the group's previous call, on whatever stream, and may be
        captured, since epochs live on the device."""
        self.group.before_call(capturable=True)
        yield
        self.group.record_call()
        self.group.after_call()

    def _event(self, wanted: bool) -> Any:
        return self.group.backend.record_event() if wanted else None

    def most_rows(self, *, expand: bool, expert_alignment: int = 1) -> int:
        """Rows that a dispatch can receive at most: what it returns without ``cpu_sync``."""
        layout = self.layout
        tokens = layout.world_size * layout.max_tokens
        if not expand:
            return tokens
        return tokens * layout.topk + layout.experts_per_rank * (expert_alignment - 1)

    # ---- dispatch

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        handle: EpHandle | None = None,
        expert_alignment: int = 1,
        expand: bool = False,
        zero_fill: bool = False,
        cpu_sync: bool = True,
        previous_event: Any = None,
        async_op: bool = False,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor | None, EpHandle, Any]:
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: [T, hidden], the buffer's dtype, 0 <= T <= the maximum, or (float8_e4m3fn [T, hidden], float32 scales
                [T, hidden / 128]).
            topk_idx: int64 [T, K], -1 for no expert. With ``handle`` it is the handle's and must be None.
            topk_weights: float32 [T, K].
            handle: of an earlier dispatch: the same routing again, without counting.
            expert_alignment: with ``expand``, each expert's group of rows is padded to a multiple.
            expand: a row for each local expert of a token, grouped by expert; otherwise one row a token, in the order
                of source rank and token.
            zero_fill: zeros in the padding of ``expand``; otherwise it is left as it was.
            cpu_sync: wait for the counts and return tensors of the right size; otherwise of the largest, with the
                counts in ``handle.view("prefix")`` and ``handle.view("expert_counts")``.
            previous_event: the call starts after it.
            async_op: return an event after the call.

        Returns:
            recv_x (with scales where x has them), recv_topk_idx int64 [R, K] of local experts or -1,
            recv_topk_weights float32 [R, K] or None, the handle, and an event or None.

        Raises:
            ValueError: an argument breaks a rule; nothing was sent.
            CommError: the ranks disagree, or one did not arrive in time.
        """
        rows, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None and topk_idx is not None:
            raise ValueError("topk_idx must be None with a handle, which has its own")
        if handle is not None:
            self._check_handle(handle)
            topk_idx = handle.topk_idx
        if topk_idx is None:
            raise ValueError("dispatch needs topk_idx or a handle")
        self._check_rows(rows, scales, topk_idx, topk_weights, expert_alignment)
        counts = cpu_sync and (handle is None or handle.num_recv_tokens is None)
        if counts and self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "dispatch: cpu_sync=True reads the counts of a routing from the device, which a captured graph cannot; "
                "give cpu_sync=False, or a handle whose counts are known"
            )
        if previous_event is not None:
            self.group.backend.wait_event(previous_event)
        kind = Operation.EP_DISPATCH if handle is None else Operation.EP_CACHED_DISPATCH
        with self._call():
            if handle is None:
                self._check_open()
                routing = torch.empty(self.layout.routing_words, dtype=torch.int32, device=self.group.device)
                topk_idx = topk_idx.clone(memory_format=torch.contiguous_format)
                ep_route.launch(self.layout, self.ep_table, routing, topk_idx)
                handle = EpHandle(self, topk_idx, routing, None, None, expand, expert_alignment)
                counted = True
            else:
                # Groups of another alignment need a map of their own.
                same = (handle.expand, handle.expert_alignment) == (expand, expert_alignment)
                routing = handle.routing if same else handle.routing.clone()
                known_rows = handle.known_rows if same else None
                handle = replace(
                    handle, routing=routing, expand=expand, expert_alignment=expert_alignment, known_rows=known_rows
                )
                counted = False
            ep_dispatch.launch(
                self,
                handle.routing,
                rows.contiguous(),
                None if scales is None else scales.contiguous(),
                topk_idx,
                None if topk_weights is None else topk_weights.contiguous(),
                operation=operation_code(kind, rows.dtype),
                counts=counted,
            )
        if counts:
            handle = self._with_counts(handle)
        received = self._unpack(handle, rows, scales, topk_weights is not None, zero_fill)
        self.group.record_call()
        recv_x = received.x if received.scales is None else (received.x, received.scales)
        return recv_x, received.topk_idx, received.topk_weights, handle, self._event(async_op)

    def _with_counts(self, handle: EpHandle) -> EpHandle:
        counts = torch.cat([handle.view("prefix")[-1:], handle.view("expert_counts")]).tolist()
        self.group.before_call()  # the copy has waited for the call: its failure, if any, is known
        return replace(handle, num_recv_tokens=counts[0], num_recv_per_expert=counts[1:])

    def _unpack(
        self, handle: EpHandle, rows: torch.Tensor, scales: torch.Tensor | None, weights: bool, zero_fill: bool
    ) -> ep_unpack.Received:
        device = self.group.device
        received = handle.num_recv_tokens
        num_rows = self.most_rows(expand=False) if received is None else received
        size = handle.num_rows
        if size is None:
            size = self.most_rows(expand=handle.expand, expert_alignment=handle.expert_alignment)
        new = torch.zeros if zero_fill and handle.expand else torch.empty
        scale_columns = 0 if scales is None else scales.shape[1]
        out = ep_unpack.Received(
            x=new(size, self.hidden, dtype=rows.dtype, device=device),
            scales=None if scales is None else new(size, scale_columns, dtype=scales.dtype, device=device),
            topk_idx=torch.empty(num_rows, self.num_topk, dtype=torch.int64, device=device),
            topk_weights=torch.empty(num_rows, self.num_topk, device=device) if weights else None,
        )
        ep_unpack.launch(self, handle.routing, out, expand=handle.expand, alignment=handle.expert_alignment)
        return out

    # ---- combine

    def combine(
        self,
        y: torch.Tensor,
        handle: EpHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        *,
        previous_event: Any = None,
        async_op: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Bring back and sum what the experts made of each token. Collective.

        Args:
            y: [R, hidden], or the expanded rows, as the dispatch of ``handle`` returned them; the buffer's dtype.
            handle: of the dispatch.
            topk_weights: float32 [R, K]. Expanded: each row is multiplied by its weight. Otherwise: they are summed
                over ranks into ``out_weights``, as the gradient of a dispatch needs.
            bias: up to two tensors [T, hidden] that are added.
            previous_event: the call starts after it.
            async_op: return an event after the call.

        Returns:
            out [T, hidden], out_weights float32 [T, K] or None, and an event or None. A token without any expert has
            zeros, or its biases.

        Raises:
            ValueError: an argument breaks a rule; nothing was sent.
            CommError: the ranks disagree, or one did not arrive in time.
        """
        self._check_handle(handle)
        biases = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
        tokens = handle.topk_idx.shape[0]
        self._check_combine(y, handle, topk_weights, biases, tokens)
        if previous_event is not None:
            self.group.backend.wait_event(previous_event)
        weights = None if topk_weights is None else topk_weights.contiguous()
        out = self._combined(y.contiguous(), handle, weights if handle.expand else None, biases, handle.expand)
        out_weights = self.combine_weights(weights, handle) if weights is not None and not handle.expand else None
        return out, out_weights, self._event(async_op)

    def combine_weights(self, topk_weights: torch.Tensor, handle: EpHandle) -> torch.Tensor:
        """Sum ``topk_weights`` float32 [R, K], whether ``handle`` is expanded or not, over the ranks of each token:
        [T, K]. Collective."""
        self._check_handle(handle)
        self._check_weights(topk_weights, handle)
        # They are rows of K columns: the same kernel sums them.
        return self._combined(topk_weights.contiguous(), handle, None, (), False)

    def _combined(
        self,
        y: torch.Tensor,
        handle: EpHandle,
        weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        expand: bool,
    ) -> torch.Tensor:
        out = torch.empty(handle.topk_idx.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
        with self._call():
            ep_combine.launch(
                self,
                handle.routing,
                y,
                weights,
                tuple(bias.contiguous() for bias in biases),
                out,
                operation=operation_code(Operation.EP_COMBINE, y.dtype),
                expand=expand,
            )
        return out

    # ---- rules

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.handle} is closed; make a new ExpertBuffer")

    def _check_handle(self, handle: EpHandle) -> None:
        self._check_open()
        if handle.buffer is not self:
            raise ValueError(f"the handle is of {handle.buffer.handle}, not of this buffer, {self.handle}")

    def _check_rows(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        alignment: int,
    ) -> None:
        self._check_open()
        dtypes = (_FP8,) if scales is not None else (self.dtype,)
        if x.dtype not in dtypes:
            raise ValueError(f"x must be {dtypes[0]}{' with scales' if scales is not None else ''}, got {x.dtype}")
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(f"x must be [tokens, {self.hidden}], got {list(x.shape)}")
        tokens, most = x.shape[0], self.layout.max_tokens
        if tokens > most:
            raise ValueError(f"a rank dispatches at most num_max_tokens_per_rank = {most} tokens, got {tokens}")
        if scales is not None:
            columns = -(-self.hidden // _SCALE_COLUMNS)
            if not self.use_fp8_dispatch:
                raise ValueError("scales need a buffer with use_fp8_dispatch=True")
            if scales.dtype != torch.float32 or tuple(scales.shape) != (tokens, columns):
                raise ValueError(
                    f"scales must be float32 [{tokens}, {columns}], got {scales.dtype} {list(scales.shape)}"
                )
        if topk_idx.dtype != torch.int64 or tuple(topk_idx.shape) != (tokens, self.num_topk):
            raise ValueError(
                f"topk_idx must be int64 [{tokens}, {self.num_topk}], got {topk_idx.dtype} {list(topk_idx.shape)}"
            )
        if topk_weights is not None and (
            topk_weights.dtype != torch.float32 or topk_weights.shape != (tokens, self.num_topk)
        ):
            raise ValueError(
                f"topk_weights must be float32 [{tokens}, {self.num_topk}], got {topk_weights.dtype} "
                f"{list(topk_weights.shape)}"
            )
        if alignment < 1:
            raise ValueError(f"expert_alignment must be at least 1, got {alignment}")
        # On a GPU the look would wait for the device; ids out of range then match no rank, and go nowhere.
        if self.group.backend.interpreted and tokens and not _in_range(topk_idx, self.num_experts):
            raise ValueError(
                f"expert ids must be -1 to {self.num_experts - 1}, got {int(topk_idx.min())} to {int(topk_idx.max())}"
            )

    def _check_combine(
        self,
        y: torch.Tensor,
        handle: EpHandle,
        topk_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        tokens: int,
    ) -> None:
        if y.dtype != self.dtype:
            raise ValueError(f"y must be {self.dtype}, got {y.dtype}")
        expected = handle.num_rows
        if y.dim() != 2 or y.shape[1] != self.hidden or (expected is not None and y.shape[0] != expected):
            rows = "rows" if expected is None else expected
            raise ValueError(f"y must be [{rows}, {self.hidden}] as it was received, got {list(y.shape)}")
        if len(biases) > _MAX_BIASES:
            raise ValueError(f"combine adds at most {_MAX_BIASES} biases, got {len(biases)}")
        for bias in biases:
            if tuple(bias.shape) != (tokens, self.hidden):
                raise ValueError(f"bias must be [{tokens}, {self.hidden}], got {list(bias.shape)}")
        if topk_weights is not None:
            self._check_weights(topk_weights, handle)

    def _check_weights(self, topk_weights: torch.Tensor, handle: EpHandle) -> None:
        if (
            topk_weights.dtype != torch.float32
            or topk_weights.dim() != 2
            or topk_weights.shape[1] != self.num_topk
            or (handle.num_recv_tokens is not None and topk_weights.shape[0] != handle.num_recv_tokens)
        ):
            raise ValueError(
                f"topk_weights must be float32 [{handle.num_recv_tokens}, {self.num_topk}] as they were received, got "
                f"{topk_weights.dtype} {list(topk_weights.shape)}"
            )


def expert_buffer_by_handle(handle: str) -> ExpertBuffer:
    """The live expert buffer with this handle (``ExpertBuffer.handle``)."""
    try:
        return _by_handle[handle]
    except KeyError:
        raise ClosedError(f"no open expert buffer has the handle {handle!r}") from None


def _in_range(topk_idx: torch.Tensor, num_experts: int) -> bool:
    return bool(((topk_idx >= -1) & (topk_idx < num_experts)).all())


def make_layout(
    *,
    world_size: int,
    num_scale_up: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    num_experts: int,
    dtype: torch.dtype,
    use_fp8_dispatch: bool,
    num_allocated_qps: int,
    num_sms: int,
    channels_per_sm: int,
    knobs: Knobs,
) -> EpLayout:
    """The layout of a buffer with these arguments; ``ValueError`` where they break a rule."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    if num_scale_up < 1 or world_size % num_scale_up:
        raise ValueError(f"num_scale_up must divide the {world_size} ranks, got {num_scale_up}")
    if num_experts < 1 or num_experts % world_size:
        raise ValueError(f"num_experts must be divisible by the {world_size} ranks, got {num_experts}")
    if not 1 <= num_topk <= min(_MAX_TOPK, num_experts):
        raise ValueError(f"num_topk must be 1 to {min(_MAX_TOPK, num_experts)}, got {num_topk}")
    narrowest = 1 if use_fp8_dispatch else dtype.itemsize
    if hidden < 1 or hidden * narrowest % 32:
        raise ValueError(f"a row must be a multiple of 32 bytes, got {hidden} columns of {narrowest} bytes")
    num_scale_out = world_size // num_scale_up
    check_scale_out(num_scale_out, num_allocated_qps)
    geometry = plan(
        num_max_tokens_per_rank,
        num_sms,
        channels_per_sm,
        num_allocated_qps,
        min_tokens_per_part=knobs.min_tokens_per_part,
        num_sub_parts=knobs.num_sub_parts,
        min_sub_tokens=knobs.min_sub_tokens,
        arch_min_sub_tokens=knobs.arch_min_sub_tokens,
    )
    return EpLayout(
        num_scale_out=num_scale_out,
        num_scale_up=num_scale_up,
        max_tokens=num_max_tokens_per_rank,
        topk=num_topk,
        experts_per_rank=num_experts // world_size,
        # Weights go through combine as rows of K float32.
        row_bytes=_round_up(max(hidden * dtype.itemsize, 4 * num_topk), 32),
        scale_bytes=4 * -(-hidden // _SCALE_COLUMNS) if use_fp8_dispatch else 0,
        geometry=geometry,
    )
