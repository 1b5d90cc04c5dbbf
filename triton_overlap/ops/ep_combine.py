"""``ep_combine``: bring back, and sum, what the experts made of each token.

Shape ledger (T tokens of a rank, K experts a token, R received rows, G rows grouped by expert)
    y             [R, H], or, expanded, [G, H]   what the experts made of the received rows
    topk_weights  float32 [R, K]                 as they were received
    bias_i        [T, H]                         up to two, added at the source
    forward       out[t] = sum of bias_i[t] + sum over ranks of y[row of t]                        -> out [T, H]
                  expanded: .. + sum over ranks and k of topk_weights[row of t, k] * y[row of (t, k)]
    backward      cached dispatch of d out                  -> dy, expanded times the weight of its row
                  expanded: <d out[t], y[row of (t, k)]>    -> d topk_weights [R, K]
                  d out                                     -> d bias_i
    saved         routing, topk_idx; expanded with weights: y, topk_weights
    weights       out_weights[t, k] = sum over ranks of topk_weights[row of t, k]  -> [T, K], an operator of its own

A handle is spelled out in tensors as ``ep_dispatch`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..expert_buffer import EpHandle, expert_buffer_by_handle
from ..kernels import ep_weights
from .ep_dispatch import check_handle, handle_of_tensors
from .operator import COMMUNICATES, operator
from .validation import check_optional_tensors, check_tensors, refuse_double_backward

__all__ = ["ep_combine", "ep_combine_op", "ep_combine_weights_op", "ep_weights_gradient_op"]

_NAME = "ep_combine"


@operator("ep_combine", tags=COMMUNICATES)
def ep_combine_op(
    y: Tensor,
    topk_weights: Tensor | None,
    bias_0: Tensor | None,
    bias_1: Tensor | None,
    topk_idx: Tensor,
    routing: Tensor,
    buffer: str,
    expand: bool,
    expert_alignment: int,
) -> Tensor:
    """``torch.ops.triton_overlap.ep_combine``.

    Args:
        y: [R, H], or [G, H] with ``expand``.
        topk_weights: float32 [R, K] or None; only with ``expand``.
        bias_0: [T, H] or None.
        bias_1: [T, H] or None.
        topk_idx: int64 [T, K], of the dispatch.
        routing: of the dispatch.
        buffer: ``ExpertBuffer.handle``.
        expand: of the dispatch.
        expert_alignment: of the dispatch.

    Returns:
        [T, H], fresh.
    """
    if topk_weights is not None and not expand:
        raise ValueError(f"{_NAME}: topk_weights multiply expanded rows; ep_combine_weights sums them over the ranks")
    handle = handle_of_tensors(buffer, topk_idx, routing, expand, expert_alignment, None)
    biases = [bias for bias in (bias_0, bias_1) if bias is not None]
    out, _, _ = handle.buffer.combine(y, handle, topk_weights, biases)
    return out


@ep_combine_op.register_fake
def _fake(
    y: Tensor,
    topk_weights: Tensor | None,
    bias_0: Tensor | None,
    bias_1: Tensor | None,
    topk_idx: Tensor,
    routing: Tensor,
    buffer: str,
    expand: bool,
    expert_alignment: int,
) -> Tensor:
    return y.new_empty((topk_idx.shape[0], y.shape[1]))


@operator("ep_combine_weights", tags=COMMUNICATES)
def ep_combine_weights_op(topk_weights: Tensor, topk_idx: Tensor, routing: Tensor, buffer: str) -> Tensor:
    """``torch.ops.triton_overlap.ep_combine_weights``: float32 [R, K] -> [T, K], summed over the ranks of a token."""
    handle = handle_of_tensors(buffer, topk_idx, routing, False, 1, None)
    return handle.buffer.combine_weights(topk_weights, handle)


@ep_combine_weights_op.register_fake
def _weights_fake(topk_weights: Tensor, topk_idx: Tensor, routing: Tensor, buffer: str) -> Tensor:
    return topk_weights.new_empty(topk_idx.shape)


@operator("ep_weights_gradient_", mutates_args=("grad",))
def ep_weights_gradient_op(grad: Tensor, y: Tensor, topk_weights: Tensor, routing: Tensor, buffer: str) -> Tensor:
    """``torch.ops.triton_overlap.ep_weights_gradient_``: the local part of the backward of an expanded combine.

    Args:
        grad: [G, H], contiguous, the output's gradient, dispatched to the rows of ``y``; becomes the gradient of y.
        y: [G, H].
        topk_weights: float32 [R, K].
        routing: of the dispatch.
        buffer: ``ExpertBuffer.handle``.

    Returns:
        The gradient of topk_weights, 0 where the expert is elsewhere.
    """
    return ep_weights.launch_gradient(expert_buffer_by_handle(buffer), routing, grad, y, topk_weights)


@ep_weights_gradient_op.register_fake
def _weights_gradient_fake(grad: Tensor, y: Tensor, topk_weights: Tensor, routing: Tensor, buffer: str) -> Tensor:
    return topk_weights.new_empty(topk_weights.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, topk_weights, _, _, topk_idx, routing, ctx.buffer, ctx.expand, ctx.alignment = inputs
    ctx.num_rows = y.shape[0]
    weighted = topk_weights is not None
    ctx.save_for_backward(topk_idx, routing, y if weighted else None, topk_weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_NAME)
    needs_y, needs_weights, needs_bias_0, needs_bias_1, *_ = ctx.needs_input_grad
    topk_idx, routing, y, weights = ctx.saved_tensors
    y_grad = weights_grad = None
    if needs_y or needs_weights:
        # How many tokens came in matters to weights alone; without them R may be anything that has room.
        received = expert_buffer_by_handle(ctx.buffer).most_rows(expand=False) if weights is None else weights.shape[0]
        y_grad, _, _, _ = torch.ops.triton_overlap.ep_cached_dispatch(
            grad,
            None,
            topk_idx,
            routing,
            received if ctx.expand else ctx.num_rows,
            ctx.num_rows,
            ctx.buffer,
            ctx.expand,
            ctx.alignment,
            ctx.alignment > 1,  # what is contracted over these rows must not find NaN in their padding
            False,
        )
        if weights is not None:
            weights_grad = torch.ops.triton_overlap.ep_weights_gradient_(y_grad, y, weights, routing, ctx.buffer)
    return (
        y_grad if needs_y else None,
        weights_grad if needs_weights else None,
        grad if needs_bias_0 else None,
        grad if needs_bias_1 else None,
        *(None,) * 5,
    )


def _weights_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    topk_weights, topk_idx, routing, ctx.buffer = inputs
    ctx.received = topk_weights.shape[0]
    ctx.save_for_backward(topk_idx, routing)


def _weights_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward("ep_combine_weights")
    topk_idx, routing = ctx.saved_tensors
    owner = expert_buffer_by_handle(ctx.buffer)
    # Weights travel beside rows, here of zeros.
    rows = torch.zeros((topk_idx.shape[0], owner.hidden), dtype=owner.dtype, device=grad.device)
    _, _, weights_grad, _ = torch.ops.triton_overlap.ep_cached_dispatch(
        rows, grad, topk_idx, routing, ctx.received, ctx.received, ctx.buffer, False, 1, False, False
    )
    return weights_grad, None, None, None


ep_combine_op.register_autograd(_backward, setup_context=_setup_context)
ep_combine_weights_op.register_autograd(_weights_backward, setup_context=_weights_setup_context)


def ep_combine(
    y: Tensor,
    handle: EpHandle,
    topk_weights: Tensor | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``ExpertBuffer.combine``, differentiable and clean under ``torch.compile``.

    Collective. Differentiable once with respect to ``y``, ``topk_weights`` and the biases; backward is a cached
    dispatch, so it is collective as well.

    Args:
        y: [R, H], or [G, H] where the dispatch had ``expand``: what was made of the rows that it returned.
        handle: of the dispatch.
        topk_weights: float32 [R, K], as the dispatch returned them. Expanded: each row is multiplied by its weight.
            Otherwise: they are summed over the ranks of each token into ``out_weights``; a weight of an expert
            elsewhere counts as the 0 that it was received as, and gets no gradient.
        bias: one tensor [T, H], or two, that are added.

    Returns:
        out [T, H], and out_weights float32 [T, K] or None. A token without any expert has zeros, or its biases. Sums
        are taken in float32 in a fixed order.

    Raises:
        ClosedError: the buffer was closed.
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes or dtypes do not fit; nothing was sent.
        CommError: the ranks disagree, or one did not arrive in time.
    """
    check_tensors(_NAME, y=y)
    check_handle(_NAME, handle)
    check_optional_tensors(_NAME, topk_weights=topk_weights)
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    if len(biases) > 2:
        raise ValueError(f"{_NAME}: adds at most two biases, got {len(biases)}; add them to each other first")
    check_tensors(_NAME, **{f"bias[{index}]": value for index, value in enumerate(biases)})
    biases += [None] * (2 - len(biases))  # type: ignore[list-item]
    _check_rows(y, topk_weights, handle)
    operators = torch.ops.triton_overlap
    where = (handle.topk_idx, handle.routing, handle.buffer.handle)
    weights = topk_weights if handle.expand else None
    out = operators.ep_combine(y, weights, *biases, *where, handle.expand, handle.expert_alignment)
    out_weights = None
    if topk_weights is not None and not handle.expand:
        out_weights = operators.ep_combine_weights(topk_weights, *where)
    return out, out_weights


def _check_rows(y: Tensor, topk_weights: Tensor | None, handle: EpHandle) -> None:
    """ValueError unless ``y`` and the weights have the rows that were received; a compiler takes it on trust, since a
    comparison of sizes would be a guard."""
    if torch.compiler.is_compiling():
        return
    if handle.num_rows is not None and y.dim() > 0 and y.shape[0] != handle.num_rows:
        raise ValueError(f"{_NAME}: y must have the {handle.num_rows} rows that were received, got {list(y.shape)}")
    received = handle.num_recv_tokens
    if topk_weights is not None and received is not None and topk_weights.shape[0] != received:
        raise ValueError(
            f"{_NAME}: topk_weights must have the {received} rows that were received, got {list(topk_weights.shape)}"
        )
