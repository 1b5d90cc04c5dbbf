"""``matmul_reduce_scatter``: multiply, sum over ranks and keep this rank's rows, in one overlapped operation.

Shape ledger (W ranks, N the buffer's hidden size)
    a          [T, K]     this rank's columns of the left operand
    b          [K, N]     this rank's rows of the right operand, any strides torch.matmul takes without a copy
    forward    reduce_scatter(a @ b) + bias               -> out       [T/W, N], the bias added once, after the sum
    dgrad      gather(dOut) @ b^T                         -> dA        [T, K], on the same buffer, which leaves
    gathered   gather(dOut)                                            [T, N] for the two below
    wgrad      a^T @ gathered                             -> dB        [K, N], local
    bias       sum over rows of gathered, in float32      -> dBias     [N], the full gradient on every rank
    saved      a where b wants a gradient, b
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.user_buffers import Communicator, UserBuffer, user_buffer_by_handle
from ..kernels import by_method
from ..kernels.methods import Method, gather_method
from .autocast import autocast_operands
from .validation import (
    check_activation,
    check_bias,
    check_main_grad,
    check_method,
    check_weight,
    refuse_double_backward,
    world_size_of,
)
from .weight_gradient import bias_gradient, weight_gradient

__all__ = ["check_operands", "matmul_reduce_scatter", "matmul_reduce_scatter_op"]

_NAME = "matmul_reduce_scatter"


def check_operands(
    operation: str,
    user_buffer: UserBuffer,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    method: str,
) -> tuple[int, Method]:
    """Check the operands of a product whose result goes through the buffer; the token count T and the method."""
    by = check_method(operation, user_buffer, method)
    tokens = check_activation(operation, user_buffer, "a", a, is_shard=False, is_hidden=False)
    check_weight(operation, user_buffer, b, a.shape[1], user_buffer.capacity_shape[1])
    if bias is not None:
        check_bias(operation, user_buffer, bias, b)
    if main_grad is not None:
        check_main_grad(operation, main_grad, b)
    return tokens, by


@torch.library.custom_op("triton_overlap::matmul_reduce_scatter", mutates_args=())
def matmul_reduce_scatter_op(
    a: Tensor, b: Tensor, bias: Tensor | None, main_grad: Tensor | None, buffer: str, method: str
) -> Tensor:
    """``torch.ops.triton_overlap.matmul_reduce_scatter``: the operation without conveniences.

    Args:
        a: [T, K].
        b: [K, N].
        bias: [N] or None.
        main_grad: float32 [K, N] or None. Backward adds the weight gradient to it and returns none for b.
        buffer: handle of a user buffer with hidden size N.
        method: see ``matmul_reduce_scatter``.

    Returns:
        [T/W, N], fresh.
    """
    user_buffer = user_buffer_by_handle(buffer)
    _, by = check_operands(_NAME, user_buffer, a, b, bias, main_grad, method)
    return by_method.matmul_reduce_scatter(user_buffer, a, b, bias, method=by)


@matmul_reduce_scatter_op.register_fake
def _fake(a: Tensor, b: Tensor, bias: Tensor | None, main_grad: Tensor | None, buffer: str, method: str) -> Tensor:
    return a.new_empty((a.shape[0] // world_size_of(buffer), b.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, main_grad, buffer, method = inputs
    _, needs_b, *_ = ctx.needs_input_grad
    ctx.buffer, ctx.method = buffer, method
    # Not through save_for_backward: other microbatches add to it between this forward and its backward.
    ctx.main_grad = main_grad
    ctx.save_for_backward(b, *([a] if needs_b else []))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_NAME)
    needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
    b, *rest = ctx.saved_tensors
    needs_gathered = needs_b or needs_bias
    a_grad: Tensor | None = None
    gathered: Tensor | None = None
    if needs_a:
        a_grad, gathered = torch.ops.triton_overlap.all_gather_matmul(
            grad,
            b.transpose(0, 1),
            None,
            None,
            ctx.buffer,
            needs_gathered,
            gather_method(ctx.method),
        )
    elif needs_gathered:
        gathered = torch.ops.triton_overlap.all_gather(grad, ctx.buffer)
    b_grad = weight_gradient(rest[0], gathered, b, ctx.main_grad) if needs_b and gathered is not None else None
    bias_grad = bias_gradient(gathered) if needs_bias and gathered is not None else None
    return a_grad, b_grad, bias_grad, None, None, None


matmul_reduce_scatter_op.register_autograd(_backward, setup_context=_setup_context)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | None = None,
    method: str | Method = "fused",
    main_grad: Tensor | None = None,
) -> Tensor:
    """Multiply, sum over the ranks and keep this rank's rows: rows of ``sum over ranks of a @ b``, plus ``bias``.

    Collective: every rank of the buffer's group calls it with the same T, K, N and dtype. The sum over ranks has a
    fixed order, so results are bitwise reproducible. Differentiable once, with respect to ``a``, ``b`` and ``bias``;
    backward is collective as well. Under autocast the operands are cast as ``torch.matmul`` would, and the buffer must
    have the autocast dtype.

    Args:
        a: [T, K], this rank's columns; bfloat16, float16 or float32, the buffer's dtype. T is divisible by W.
        b: [K, N], this rank's rows, any strides ``torch.matmul`` takes without a copy.
        buffer: a user buffer with hidden size N and room for T tokens.
        bias: [N], the same on every rank; added once, after the sum. Every rank gets its full gradient.
        method: ``"fused"`` (one persistent kernel), ``"ring_exchange"``, ``"pipeline"`` or ``"nccl"``, or a ``Method``
            with options; see docs/methods.md. Backward takes the same one, and ring exchange after ``"pipeline"``.
        main_grad: float32 [K, N], any strides. Backward adds the weight gradient to it, and ``b`` gets no gradient of
            its own.

    Returns:
        [T/W, N]: rank r gets rows ``[r*T/W, (r+1)*T/W)``, in a fresh tensor.

    Raises:
        ActiveShapeError: the shape of ``a`` breaks a rule of the active shape.
        ClosedError: the buffer was closed.
        ValueError: dtype, device, shapes or method do not fit.
        CommError: the ranks disagree, or one did not arrive in time.
    """
    a_cast, b_cast, bias_cast = autocast_operands(a, b, bias)
    out: Tensor = torch.ops.triton_overlap.matmul_reduce_scatter(
        a_cast, b_cast, bias_cast, main_grad, buffer.handle, str(method)
    )
    return out
