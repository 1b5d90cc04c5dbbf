"""``ep_dispatch``: send each token to the ranks of its experts.

Shape ledger (T tokens of a rank, K experts a token, E experts a rank, R received rows, G rows grouped by expert)
    x             [T, H]              this rank's tokens
    topk_idx      int64 [T, K]        experts of each token, -1 for none
    topk_weights  float32 [T, K]
    forward       x, by rank          -> recv_x [R, H], or, expanded, [G, H]
                  topk_idx, _weights  -> recv_topk_idx [R, K], recv_topk_weights [R, K]
    backward      combine(d recv_x)   -> dx [T, H], the sum over the ranks, and expanded over the experts, of a token
                  combine(d recv_topk_weights, where the expert is this rank's) -> d topk_weights [T, K]
    saved         what the handle has: topk_idx [T, K] and routing, int32

How a handle travels. An operator takes and returns tensors, ints and strings, so it is spelled out in them: the buffer
by its name ``ExpertBuffer.handle``; ``routing`` and the copy of ``topk_idx``, which the call makes, as outputs of the
dispatch and inputs of whatever follows; the layout of rows (``expand``, ``expert_alignment``) as plain arguments. R and
G are known to the device alone until the call has been made. So ``ep_dispatch`` is an operator whose output sizes
follow its data: in a compiler's eyes they are unbacked sizes, and one graph serves all of them. ``ep_cached_dispatch``,
whose sizes the caller knows, takes them as arguments: the backward of a combine has exactly as many rows as its input.
With ``cpu_sync=False`` R and G are the largest there can be, and every shape is static.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_switch
from ..expert_buffer import EpHandle, ExpertBuffer, expert_buffer_by_handle
from .operator import COMMUNICATES, operator
from .validation import check_optional_tensors, check_tensors, refuse_double_backward

__all__ = ["ep_cached_dispatch_op", "ep_dispatch", "ep_dispatch_op"]

_NAME = "ep_dispatch"


def handle_of_tensors(
    buffer: str, topk_idx: Tensor, routing: Tensor, expand: bool, expert_alignment: int, rows: tuple[int, int] | None
) -> EpHandle:
    """The handle that an operator's arguments spell out; ``rows`` are R and the rows of what was received."""
    num_recv_tokens, num_rows = (None, None) if rows is None else rows
    owner = expert_buffer_by_handle(buffer)
    return EpHandle(owner, topk_idx, routing, num_recv_tokens, None, expand, expert_alignment, num_rows)


def _weights_or_empty(weights: Tensor | None, x: Tensor, topk: int) -> Tensor:
    return x.new_empty((0, topk), dtype=torch.float32) if weights is None else weights


@operator("ep_dispatch", tags=COMMUNICATES)
def ep_dispatch_op(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    buffer: str,
    expand: bool,
    expert_alignment: int,
    zero_fill: bool,
    cpu_sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``torch.ops.triton_overlap.ep_dispatch``: a dispatch that counts. Arguments as those of ``ep_dispatch``.

    Returns:
        recv_x [R or G, H], recv_topk_idx [R, K], recv_topk_weights [R, K] ([0, K] without weights), then what a handle
        is made of: the copy of topk_idx [T, K], the routing, int32, and num_recv_per_expert, int64 [E] on the CPU ([0]
        without ``cpu_sync``). All are fresh.
    """
    owner = expert_buffer_by_handle(buffer)
    recv_x, idx, weights, handle, _ = owner.dispatch(
        x,
        topk_idx,
        topk_weights,
        expand=expand,
        expert_alignment=expert_alignment,
        zero_fill=zero_fill,
        cpu_sync=cpu_sync,
    )
    assert isinstance(recv_x, Tensor)
    counts = torch.tensor(handle.num_recv_per_expert or [], dtype=torch.int64)
    return recv_x, idx, _weights_or_empty(weights, x, idx.shape[1]), handle.topk_idx, handle.routing, counts


@ep_dispatch_op.register_fake
def _fake(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    buffer: str,
    expand: bool,
    expert_alignment: int,
    zero_fill: bool,
    cpu_sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    owner = expert_buffer_by_handle(buffer)
    received: Any = owner.most_rows(expand=False)
    rows: Any = owner.most_rows(expand=expand, expert_alignment=expert_alignment)
    if cpu_sync:
        context = torch.library.get_ctx()
        received = context.new_dynamic_size()
        rows = context.new_dynamic_size() if expand else received
    topk = topk_idx.shape[1]
    weights = None if topk_weights is None else topk_weights.new_empty((received, topk))
    experts = owner.layout.experts_per_rank if cpu_sync else 0
    return (
        x.new_empty((rows, x.shape[1])),
        topk_idx.new_empty((received, topk)),
        _weights_or_empty(weights, x, topk),
        topk_idx.new_empty(topk_idx.shape),
        x.new_empty((owner.layout.routing_words,), dtype=torch.int32),
        torch.empty((experts,), dtype=torch.int64, device="cpu"),
    )


@operator("ep_cached_dispatch", tags=COMMUNICATES)
def ep_cached_dispatch_op(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    routing: Tensor,
    num_recv_tokens: int,
    num_rows: int,
    buffer: str,
    expand: bool,
    expert_alignment: int,
    zero_fill: bool,
    new_layout: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``torch.ops.triton_overlap.ep_cached_dispatch``: a dispatch with the routing of an earlier one.

    Args:
        x: [T, H].
        topk_weights: float32 [T, K] or None.
        topk_idx: int64 [T, K], of the earlier dispatch.
        routing: of the earlier dispatch.
        num_recv_tokens: R.
        num_rows: R, or G with ``expand``.
        buffer: ``ExpertBuffer.handle``.
        expand: as in ``ep_dispatch``, like the two that follow.
        new_layout: the earlier dispatch had another ``expand`` or ``expert_alignment``, so that rows need a map of
            their own.

    Returns:
        recv_x [num_rows, H], recv_topk_idx [R, K], recv_topk_weights [R, K] ([0, K] without weights), and a routing
        with the map, or no element where ``routing`` has it already. All are fresh.
    """
    if new_layout:
        routing = routing.clone()
    handle = handle_of_tensors(
        buffer, topk_idx, routing, expand, expert_alignment, (num_recv_tokens, num_rows)
    )  # the layout is what this call asks for, so that it keeps the routing and writes the map in place
    recv_x, idx, weights, _, _ = handle.buffer.dispatch(
        x,
        topk_weights=topk_weights,
        handle=handle,
        expand=expand,
        expert_alignment=expert_alignment,
        zero_fill=zero_fill,
        cpu_sync=False,
    )
    assert isinstance(recv_x, Tensor)
    kept = routing if new_layout else routing.new_empty((0,))
    return recv_x, idx, _weights_or_empty(weights, x, idx.shape[1]), kept


@ep_cached_dispatch_op.register_fake
def _cached_fake(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    routing: Tensor,
    num_recv_tokens: int,
    num_rows: int,
    buffer: str,
    expand: bool,
    expert_alignment: int,
    zero_fill: bool,
    new_layout: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    topk = topk_idx.shape[1]
    weights = None if topk_weights is None else topk_weights.new_empty((num_recv_tokens, topk))
    return (
        x.new_empty((num_rows, x.shape[1])),
        topk_idx.new_empty((num_recv_tokens, topk)),
        _weights_or_empty(weights, x, topk),
        routing.new_empty(routing.shape if new_layout else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, topk_weights, ctx.buffer, ctx.expand, ctx.alignment, _, _ = inputs
    _, recv_topk_idx, _, topk_idx, routing, _ = output
    _save(ctx, topk_idx, routing, recv_topk_idx if topk_weights is not None else None)


def _cached_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, topk_weights, topk_idx, routing, _, _, ctx.buffer, ctx.expand, ctx.alignment, _, new_layout = inputs
    _, recv_topk_idx, _, new_routing = output
    _save(ctx, topk_idx, new_routing if new_layout else routing, recv_topk_idx if topk_weights is not None else None)


def _save(ctx: Any, topk_idx: Tensor, routing: Tensor, recv_topk_idx: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(topk_idx, routing, recv_topk_idx)


def _gradients(
    ctx: Any, x_grad: Tensor | None, weights_grad: Tensor | None, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of x and of topk_weights. Whether a rank takes part must not depend on what came in here: all of them have lost
    the same outputs, so the same gradients are missing everywhere."""
    refuse_double_backward(_NAME)
    topk_idx, routing, recv_topk_idx = ctx.saved_tensors
    operators = torch.ops.triton_overlap
    x_result = weights_result = None
    if needs[0] and x_grad is not None:
        x_result = operators.ep_combine(
            x_grad, None, None, None, topk_idx, routing, ctx.buffer, ctx.expand, ctx.alignment
        )
    if needs[1] and weights_grad is not None:
        # Weights of experts elsewhere were received as zeros, whatever they are.
        own = torch.where(recv_topk_idx >= 0, weights_grad, 0.0)
        weights_result = operators.ep_combine_weights(own, topk_idx, routing, ctx.buffer)
    return x_result, weights_result


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    x_grad, weights_grad = _gradients(ctx, grads[0], grads[2], (needs[0], needs[2]))
    return x_grad, None, weights_grad, None, None, None, None, None


def _cached_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    x_grad, weights_grad = _gradients(ctx, grads[0], grads[2], (needs[0], needs[1]))
    return x_grad, weights_grad, None, None, None, None, None, None, None, None, None


ep_dispatch_op.register_autograd(_backward, setup_context=_setup_context)
ep_cached_dispatch_op.register_autograd(_cached_backward, setup_context=_cached_setup_context)


def ep_dispatch(
    x: Tensor,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    buffer: ExpertBuffer | None = None,
    handle: EpHandle | None = None,
    expand: bool = False,
    expert_alignment: int = 1,
    zero_fill: bool = False,
    cpu_sync: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, EpHandle]:
    """``ExpertBuffer.dispatch``, differentiable and clean under ``torch.compile``.

    Collective: every rank of the buffer's group calls it, also with no token. Differentiable once with respect to
    ``x`` and ``topk_weights``; backward is a combine, so it is collective as well, and a loss has to reach it on every
    rank or on none.

    The handle is the one that ``ExpertBuffer`` has: it may be given to ``ExpertBuffer.combine``, and one of
    ``ExpertBuffer.dispatch`` to the functions here. Rows in fp8 have no gradient; ``ExpertBuffer.dispatch`` sends them.

    Args:
        x: [T, H], the buffer's dtype.
        topk_idx: int64 [T, K], -1 for no expert; None with a ``handle``, which has its own.
        topk_weights: float32 [T, K].
        buffer: whose; by default that of ``handle``.
        handle: of an earlier dispatch, to send along its routing again without counting.
        expand: one row for each local expert of a token, grouped by expert. Otherwise one row a token.
        expert_alignment: with ``expand``, each group is padded to a multiple of it.
        zero_fill: zeros in that padding, which otherwise is uninitialised memory.
        cpu_sync: wait for the counts and return tensors of the right size. Otherwise they have the largest size there
            can be, rows past the counts in ``handle.view`` are uninitialised memory, nothing waits for the device, and
            the call may be captured in a CUDA graph and replayed with another routing.

    Returns:
        recv_x [R, H], or [G, H] with ``expand``; recv_topk_idx int64 [R, K], local experts or -1; recv_topk_weights
        float32 [R, K], 0 where the expert is elsewhere, or None; the handle. Inside ``torch.compile`` the handle's
        ``num_recv_per_expert`` is None, since it would be read back.

    Raises:
        ClosedError: the buffer was closed.
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes, dtypes or the handle do not fit; nothing was sent.
        CommError: the ranks disagree, or one did not arrive in time.
    """
    check_tensors(_NAME, x=x)
    check_optional_tensors(_NAME, topk_idx=topk_idx, topk_weights=topk_weights)
    for name, switch in (("expand", expand), ("zero_fill", zero_fill), ("cpu_sync", cpu_sync)):
        check_switch(_NAME, name, switch)
    if handle is not None:
        return _again(x, topk_idx, topk_weights, buffer, handle, expand, expert_alignment, zero_fill)
    if topk_idx is None:
        raise ValueError(f"{_NAME}: give topk_idx, or the handle of an earlier dispatch")
    owner = check_expert_buffer(_NAME, buffer)
    recv_x, idx, weights, sent_idx, routing, counts = torch.ops.triton_overlap.ep_dispatch(
        x, topk_idx, topk_weights, owner.handle, expand, expert_alignment, zero_fill, cpu_sync
    )
    known = cpu_sync and not torch.compiler.is_compiling()
    made = EpHandle(
        owner,
        sent_idx,
        routing,
        idx.shape[0] if cpu_sync else None,
        counts.tolist() if known else None,
        expand,
        expert_alignment,
        recv_x.shape[0],
    )
    return recv_x, idx, None if topk_weights is None else weights, made


def _again(
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    buffer: ExpertBuffer | None,
    handle: EpHandle,
    expand: bool,
    expert_alignment: int,
    zero_fill: bool,
) -> tuple[Tensor, Tensor, Tensor | None, EpHandle]:
    """``ep_dispatch`` with a handle."""
    check_handle(_NAME, handle)
    if topk_idx is not None:
        raise ValueError(f"{_NAME}: topk_idx must be None with a handle, which has its own")
    if buffer is not None and buffer is not handle.buffer:
        raise ValueError(f"{_NAME}: the handle is of {handle.buffer.handle}, the buffer is {buffer.handle}")
    new_layout = (expand, expert_alignment) != (handle.expand, handle.expert_alignment)
    wanted = replace(
        handle, expand=expand, expert_alignment=expert_alignment, known_rows=None if new_layout else handle.known_rows
    )
    recv_x, idx, weights, routing = torch.ops.triton_overlap.ep_cached_dispatch(
        x,
        topk_weights,
        handle.topk_idx,
        handle.routing,
        *rows_of(wanted),
        handle.buffer.handle,
        expand,
        expert_alignment,
        zero_fill,
        new_layout,
    )
    made = replace(wanted, routing=routing if new_layout else handle.routing, known_rows=recv_x.shape[0])
    return recv_x, idx, None if topk_weights is None else weights, made


def rows_of(handle: EpHandle) -> tuple[int, int]:
    """R and the rows of what was received, or the largest there can be where the host does not know."""
    received, rows = handle.num_recv_tokens, handle.num_rows
    most = handle.buffer.most_rows(expand=handle.expand, expert_alignment=handle.expert_alignment)
    return (
        handle.buffer.most_rows(expand=False) if received is None else received,
        most if rows is None else rows,
    )


def check_expert_buffer(operation: str, buffer: ExpertBuffer | None) -> ExpertBuffer:
    """``buffer``; TypeError unless it is an expert buffer, NotImplementedError unless calls on it have gradients."""
    if not isinstance(buffer, ExpertBuffer):
        raise TypeError(f"{operation}: buffer must be an ExpertBuffer, got an object of type {type(buffer).__name__}")
    if not buffer.settings.allow_multiple_reduction:
        raise NotImplementedError(
            f"{operation}: gradients need a buffer with allow_multiple_reduction=True; without them call the buffer's "
            "methods"
        )
    return buffer


def check_handle(operation: str, handle: EpHandle) -> None:
    """TypeError unless ``handle`` is one of a dispatch."""
    if not isinstance(handle, EpHandle):
        raise TypeError(
            f"{operation}: handle must be what a dispatch returned, got an object of type {type(handle).__name__}"
        )
    check_expert_buffer(operation, handle.buffer)
