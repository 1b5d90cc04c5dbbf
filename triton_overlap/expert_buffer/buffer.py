"""The buffer of expert parallelism: construction, dispatch and combine.

Shape ledger (T tokens of a rank, K experts a token, R received rows, H hidden)::

    dispatch   x [T, H], topk_idx [T, K]  ->  recv_x [R, H], recv_topk_idx [R, K], recv_topk_weights [R, K]
               expanded                   ->  recv_x [sum over local experts of rows, each group padded, H]
    combine    y like recv_x              ->  out [T, H]

Ranks form scale-out x scale-up; see ``docs/expert_parallel.md`` for the protocol and its argument.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..comm.backend import SymmetricMemory
from ..comm.group import Group
from ..comm.network import Network, check_requirements, create_network
from ..comm.rules import check_timeout
from ..comm.signals import EpForm, HeaderOperation, ep_operation_code
from ..errors import ClosedError
from ..kernels import ep_combine, ep_dispatch, ep_route, ep_unpack
from ..kernels.ep_dispatch import Payload
from ..kernels.ep_layout import EpLayout
from ..kernels.ep_partials import Partials
from .handle import EpHandle
from .memory import EpMemory
from .rules import (
    check_alignment,
    check_combine,
    check_combine_weights,
    check_dispatch,
    check_switches,
    listed_biases,
    rows_and_scales,
)
from .settings import KERNEL_NEEDS, Settings
from .streams import calling_stream

_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[str, ExpertBuffer] = weakref.WeakValueDictionary()


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
        allow_multiple_reduction: False: a combine sums and weights nothing before the source has all of it. Partial
            results of a token then come back one for each of its experts (expanded rows), or one for each rank that
            hosts some (other rows), in the dtype of the rows, and are summed in fp32. Takes K times the symmetric
            memory of a combine.
        num_scale_up: ranks that reach each other by stores; by default all of them. Divides the world size; consecutive
            ranks are scale-up peers.
        network: how scale-out peers are reached: ``"direct"``, ``"nvshmem"``, ``"simulated"`` or
            ``"simulated_strong"``.
        kernel: ``"unordered"``, or ``"ordered"``, which a network must have strong signals for; by default
            ``EP_HYBRID_KERNEL``, else unordered.
        num_allocated_qps: communication contexts, 2 to 17.
        num_sms, channels_per_sm: channels are their product; 0 for a default: 24 and 4 where puts carry them, 66 and 3
            where all ranks are scale-up peers.
        deterministic: accepted: results never depend on the order of arrival.
        timeout_s: seconds after which a wait of a call gives up; None takes the group's.
        min_tokens_per_part, num_sub_parts, min_sub_tokens, arch_min_sub_tokens: see ``ep_geometry.plan``; None takes
            the environment's.

    Raises:
        TypeError, ValueError: an argument breaks a rule, or differs between ranks; on every rank, whichever it is.
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
        allow_multiple_reduction: bool = True,
        num_scale_up: int | None = None,
        network: str = "direct",
        kernel: str | None = None,
        num_allocated_qps: int = 11,
        num_sms: int = 0,
        channels_per_sm: int = 0,
        deterministic: bool = False,
        timeout_s: float | None = None,
        min_tokens_per_part: int | None = None,
        num_sub_parts: int | None = None,
        min_sub_tokens: int | None = None,
        arch_min_sub_tokens: int | None = None,
    ) -> None:
        group.before_call()
        on_gpu = group.device.type == "cuda"

        def judge() -> tuple[Settings, EpLayout, Network, float]:
            check_switches(allow_hybrid_mode=allow_hybrid_mode, deterministic=deterministic)
            wait_s = group.timeout_s if timeout_s is None else timeout_s
            check_timeout(wait_s)
            chosen = Settings.choose(
                world_size=group.world_size,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                hidden=hidden,
                num_topk=num_topk,
                num_experts=num_experts,
                dtype=dtype,
                use_fp8_dispatch=use_fp8_dispatch,
                allow_multiple_reduction=allow_multiple_reduction,
                num_scale_up=num_scale_up,
                kernel=kernel,
                num_allocated_qps=num_allocated_qps,
                num_sms=num_sms,
                channels_per_sm=channels_per_sm,
                capability=torch.cuda.get_device_capability(group.device)[0] if on_gpu else 0,
                interpreted=group.backend.interpreted,
                min_tokens_per_part=min_tokens_per_part,
                num_sub_parts=num_sub_parts,
                min_sub_tokens=min_sub_tokens,
                arch_min_sub_tokens=arch_min_sub_tokens,
            )
            layout = chosen.layout()
            if layout.num_scale_out > 1 and not allow_hybrid_mode:
                raise ValueError(
                    f"{group.world_size} ranks with num_scale_up {num_scale_up} need allow_hybrid_mode, which is False"
                )
            found = create_network(network)
            check_requirements(chosen.kernel, KERNEL_NEEDS[chosen.kernel], found)
            return chosen, layout, found, wait_s

        self.settings, self.layout, self.network, self.timeout_s = group.agree_on(
            "settings of an expert buffer", judge, lambda judged: (repr(judged[0]), network, judged[3])
        )
        self.group = group
        self.hidden, self.num_topk, self.num_experts = hidden, num_topk, num_experts
        self.dtype = dtype
        self.kernel = self.settings.kernel
        self.capacity_shape = (num_max_tokens_per_rank, hidden)
        self.handle = f"expert_buffer_{next(_handles)}"
        self._registered: EpMemory | None = EpMemory(
            group, self.layout, self.network, self.settings.knobs, self.timeout_s
        )
        _by_handle[self.handle] = self
        group.adopt(self)

    @staticmethod
    def size_hint(world_size: int, **settings: Any) -> int:
        """Symmetric bytes that a buffer registers on each rank of a GPU group: all that it holds beside a few tables.
        Every rank could send all its tokens to one, so they grow with the world size.

        Args:
            world_size: ranks of the group.
            settings: arguments of the constructor, but for the group, ``network``, ``allow_hybrid_mode``,
                ``deterministic`` and ``timeout_s``; the same are required.

        Raises:
            ValueError: a rule is broken; the message names it.
        """
        return Settings.choose(world_size=world_size, **settings).layout().num_bytes

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called; every call is a ``ClosedError`` then."""
        return self._registered is None

    @property
    def _memory(self) -> EpMemory:
        self._check_open()
        assert self._registered is not None
        return self._registered

    @property
    def epoch(self) -> int:
        """Of the last call, 0 before the first; waits for the device."""
        return self._memory.epoch

    @property
    def memory(self) -> SymmetricMemory:
        """The symmetric allocation."""
        return self._memory.symmetric

    @property
    def table(self) -> torch.Tensor:
        """int64, ``comm.layout.TableWord``, for kernels."""
        return self._memory.table

    @property
    def ep_tables(self) -> dict[str, torch.Tensor]:
        """int64, ``ep_layout.EpWord``, for kernels, by the format of the rows of a call."""
        return self._memory.ep_tables

    @property
    def bases(self) -> torch.Tensor:
        """int64 [num_signals], what this rank's signals held when the last call ended."""
        return self._memory.bases

    @property
    def num_programs(self) -> int:
        """Of the persistent grids that communicate."""
        return self._memory.num_programs

    def renew(self, epoch: int) -> None:
        """Collective, for ``group.recover``: fresh memory, going on from ``epoch``."""
        self._memory.renew(epoch)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertBuffer:
        # A copied module uses the same buffer: it is memory that ranks share, not the module's state.
        return self

    def close(self) -> None:
        """Release the memory, once no rank uses it any more (``Group.close`` sees to that). Idempotent."""
        if self._registered is not None:
            self._registered.free()
            self._registered = None

    @contextmanager
    def _call(self) -> Iterator[None]:
        """What one collective call launches; it starts after the group's previous call, on whatever stream, and may be
        captured, since epochs live on the device."""
        self.group.before_call(capturable=True)
        with self._memory.network_running():
            yield
        self.group.record_call()
        self.group.after_call()

    def most_rows(self, *, expand: bool, expert_alignment: int = 1) -> int:
        """Rows that a dispatch with these arguments can receive at most: what it returns without ``cpu_sync``."""
        return self.settings.most_rows(expand=expand, expert_alignment=expert_alignment)

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
            async_op: run beside the current stream, on one of the buffer's own, from ``previous_event`` on if that is
                given, and return an event after the call; whoever uses the results waits for it.

        Returns:
            recv_x (with scales where x has them), recv_topk_idx int64 [R, K] of local experts or -1,
            recv_topk_weights float32 [R, K] or None, the handle, and an event or None.

        Raises:
            ValueError: an argument breaks a rule; nothing was sent.
            CommError: the ranks disagree, or one did not arrive in time.
        """
        self._check_open()
        check_switches(expand=expand, zero_fill=zero_fill, cpu_sync=cpu_sync, async_op=async_op)
        rows, scales = rows_and_scales(x)
        if handle is not None:
            if topk_idx is not None:
                raise ValueError("topk_idx must be None with a handle, which has its own")
            self._check_handle(handle)
            topk_idx = handle.topk_idx
        if topk_idx is None:
            raise ValueError("dispatch needs topk_idx or a handle")
        payload = Payload(rows, scales, topk_idx, topk_weights)
        # On a GPU the look would wait for the device; ids out of range then match no rank, and go nowhere.
        check_dispatch(self.settings, payload, self.group.device, look_at_ids=self.group.backend.interpreted)
        check_alignment(self.settings, expert_alignment)
        counts = cpu_sync and (handle is None or handle.num_recv_tokens is None)
        if counts and self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "dispatch: cpu_sync=True reads the counts of a routing from the device, which a captured graph cannot; "
                "give cpu_sync=False, or a handle whose counts are known"
            )
        kind = HeaderOperation.EP_DISPATCH if handle is None else HeaderOperation.EP_CACHED_DISPATCH
        with calling_stream(self.group.backend, previous_event, async_op) as stream:
            stream.share(rows, scales, topk_idx, topk_weights, handle.routing if handle is not None else None)
            with self._call():
                if handle is None:
                    found = self._route(topk_idx, expand, expert_alignment)
                else:
                    # Groups of another alignment need a map of their own.
                    same = (handle.expand, handle.expert_alignment) == (expand, expert_alignment)
                    found = replace(
                        handle,
                        routing=handle.routing if same else handle.routing.clone(),
                        expand=expand,
                        expert_alignment=expert_alignment,
                        known_rows=handle.known_rows if same else None,
                    )
                ep_dispatch.launch(
                    self,
                    found.routing,
                    replace(payload, topk_idx=found.topk_idx),
                    operation=ep_operation_code(kind, rows.dtype, self._agreed_form(expand, topk_weights)),
                    counts=handle is None,
                    partials=Partials.of(separate=self.layout.separate, expand=expand),
                )
            if counts:
                found = self._with_counts(found)
            received = self._unpack(found, payload, zero_fill)
            self.group.record_call()
            event = self.group.backend.record_event() if async_op else None
        stream.give(received.x, received.scales, received.topk_idx, received.topk_weights, found.routing)
        recv_x = received.x if received.scales is None else (received.x, received.scales)
        return recv_x, received.topk_idx, received.topk_weights, found, event

    def _route(self, topk_idx: torch.Tensor, expand: bool, expert_alignment: int) -> EpHandle:
        """A handle with what this rank alone knows of the routing."""
        routing = torch.empty(self.layout.routing_words, dtype=torch.int32, device=self.group.device)
        topk_idx = topk_idx.clone(memory_format=torch.contiguous_format)
        ep_route.launch(self.layout, self.ep_tables["rows"], routing, topk_idx)
        return EpHandle(self, topk_idx, routing, None, None, expand, expert_alignment)

    def _with_counts(self, handle: EpHandle) -> EpHandle:
        counts = torch.cat([handle.view("prefix")[-1:], handle.view("expert_counts")]).tolist()
        self.group.before_call()  # the copy has waited for the call: its failure, if any, is known
        return replace(handle, num_recv_tokens=counts[0], num_recv_per_expert=counts[1:])

    def _unpack(self, handle: EpHandle, payload: Payload, zero_fill: bool) -> ep_unpack.Received:
        device = self.group.device
        most = self.most_rows(expand=False)
        num_rows = most if handle.num_recv_tokens is None else handle.num_recv_tokens
        size = handle.num_rows
        if size is None:
            size = self.most_rows(expand=handle.expand, expert_alignment=handle.expert_alignment)
        new = torch.zeros if zero_fill and handle.expand else torch.empty
        scales = payload.scales
        out = ep_unpack.Received(
            x=new(size, self.hidden, dtype=payload.rows.dtype, device=device),
            scales=None if scales is None else new(size, scales.shape[1], dtype=scales.dtype, device=device),
            topk_idx=torch.empty(num_rows, self.num_topk, dtype=torch.int64, device=device),
            topk_weights=None
            if payload.topk_weights is None
            else torch.empty(num_rows, self.num_topk, dtype=torch.float32, device=device),
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
            topk_weights: expanded rows: float32 [R, K] as they were received, and each row is multiplied by its weight
                before rows are summed; without ``allow_multiple_reduction``, float32 [T, K], the source's own. Other
                rows: float32 [R, K], summed over ranks into ``out_weights``, as the gradient of a dispatch needs.
            bias: up to two tensors [T, hidden] that are added.
            previous_event: the call starts after it.
            async_op: run beside the current stream, on one of the buffer's own, from ``previous_event`` on if that is
                given, and return an event after the call; whoever uses the results waits for it.

        Returns:
            out [T, hidden], out_weights float32 [T, K] or None, and an event or None. A token without any expert has
            zeros, or its biases.

        Raises:
            ValueError: an argument breaks a rule; nothing was sent.
            CommError: the ranks disagree, or one did not arrive in time.
        """
        self._check_handle(handle)
        check_switches(async_op=async_op)
        biases = listed_biases(bias)
        check_combine(self.settings, y, handle, topk_weights, biases)
        with calling_stream(self.group.backend, previous_event, async_op) as stream:
            stream.share(y, topk_weights, *biases, handle.routing)
            out = self._combined("rows", y, handle, topk_weights if handle.expand else None, biases)
            out_weights = None
            if topk_weights is not None and not handle.expand:
                out_weights = self.combine_weights(topk_weights, handle)
            event = self.group.backend.record_event() if async_op else None
        stream.give(out, out_weights)
        return out, out_weights, event

    def combine_weights(self, topk_weights: torch.Tensor, handle: EpHandle) -> torch.Tensor:
        """Sum ``topk_weights`` float32 [R, K], whether ``handle`` is expanded or not, over the ranks of each token:
        [T, K]. Collective.

        Raises:
            ValueError: an argument breaks a rule; without ``allow_multiple_reduction`` the handle must not be expanded.
        """
        self._check_handle(handle)
        check_combine_weights(self.settings, topk_weights, handle)
        # They are rows of K columns: the same kernel sums them.
        return self._combined("weights", topk_weights, replace(handle, expand=False), None, ())

    def _combined(
        self,
        form: str,
        y: torch.Tensor,
        handle: EpHandle,
        weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        out = torch.empty(handle.topk_idx.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
        agreed = self._agreed_form(handle.expand, weights)
        if form == "weights":
            agreed |= EpForm.OF_WEIGHTS
        with self._call():
            ep_combine.launch(
                self,
                handle.routing,
                y,
                weights,
                biases,
                out,
                operation=ep_operation_code(HeaderOperation.EP_COMBINE, y.dtype, agreed),
                expand=handle.expand,
                form=form,
            )
        return out

    def _agreed_form(self, expand: bool, weights: torch.Tensor | None) -> EpForm:
        """What the other ranks must do alike in a call. Where partial results are summed before they are sent, each
        rank may group its rows as it likes."""
        form = EpForm(0) if weights is None else EpForm.WITH_WEIGHTS
        if self.layout.separate:
            form |= EpForm.BY_EXPERT if expand else EpForm.BY_RANK
        return form

    # ---- rules

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.handle} is closed; make a new ExpertBuffer, and build modules that used it anew")

    def _check_handle(self, handle: EpHandle) -> None:
        self._check_open()
        if not isinstance(handle, EpHandle):
            raise TypeError(f"handle must be the EpHandle that a dispatch returned, got {type(handle).__name__}")
        if handle.buffer is not self:
            raise ValueError(f"the handle is of {handle.buffer.handle}, not of this buffer, {self.handle}")


def expert_buffer_by_handle(handle: str) -> ExpertBuffer:
    """The live expert buffer with this handle (``ExpertBuffer.handle``)."""
    try:
        return _by_handle[handle]
    except KeyError:
        raise ClosedError(f"no open expert buffer has the handle {handle!r}") from None
