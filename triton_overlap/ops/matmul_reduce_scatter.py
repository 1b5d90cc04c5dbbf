"""``matmul_reduce_scatter``: multiply, sum over ranks and keep this rank's rows, in one overlapped operation.

Shape ledger (W ranks, N the buffer's hidden size)
    a          [T, K]     this rank's columns of the left operand
    b          [K, N]     this rank's rows of the right operand, any strides torch.matmul takes without a copy
    residual   [T/W, N]
    forward    reduce_scatter(a @ b) + bias + residual    -> out       [T/W, N], both added once, after the sum
    dgrad      gather(dOut) @ b^T                         -> dA        [T, K], on the same buffer, which leaves
    gathered   gather(dOut)                                            [T, N] for the two below
    wgrad      a^T @ gathered                             -> dB        [K, N], local
    bias       sum over rows of gathered, in float32      -> dBias     [N], the full gradient on every rank
    saved      a where b wants a gradient, b, and the count where it is on the device: T then, of the rows that a and
               out have room for
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.user_buffers import Communicator, UserBuffer, user_buffer_by_handle
from ..kernels import by_method
from ..kernels.methods import Method, gather_method
from .autocast import autocast_operands
from .gemm_methods import GemmMethods
from .operator import COMMUNICATES, operator
from .validation import (
    check_optional_tensors,
    check_reduced_product,
    check_residual,
    check_tensors,
    handle_of,
    refuse_double_backward,
    text_of,
    world_size_of,
)
from .weight_gradient import local_gradients, save_product

__all__ = ["matmul_reduce_scatter", "matmul_reduce_scatter_op"]

_NAME = "matmul_reduce_scatter"


@operator("matmul_reduce_scatter", tags=COMMUNICATES)
def matmul_reduce_scatter_op(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    buffer: str,
    method: str,
    residual: Tensor | None = None,
    active_tokens: Tensor | None = None,
) -> Tensor:
    """``torch.ops.triton_overlap.matmul_reduce_scatter``: the operation without conveniences.

    Args:
        a: [T, K].
        b: [K, N].
        bias: [N] or None.
        main_grad: float32 [K, N] or None. Backward adds the weight gradient to it and returns none for b.
        buffer: handle of a user buffer with hidden size N.
        method: see ``matmul_reduce_scatter``.
        residual: [T/W, N] or None.
        active_tokens: int32 scalar on the device, or None.

    Returns:
        [T/W, N], fresh.
    """
    user_buffer = user_buffer_by_handle(buffer)
    _, by = check_reduced_product(_NAME, user_buffer, a, b, bias, main_grad, method, active_tokens)
    if residual is not None:
        check_residual(_NAME, user_buffer, residual, (a.shape[0] // user_buffer.group.world_size, b.shape[1]))
    return by_method.matmul_reduce_scatter(
        user_buffer, a, b, bias, method=by, active_tokens=active_tokens, residual=residual
    )


@matmul_reduce_scatter_op.register_fake
def _fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    buffer: str,
    method: str,
    residual: Tensor | None = None,
    active_tokens: Tensor | None = None,
) -> Tensor:
    return a.new_empty((a.shape[0] // world_size_of(buffer), b.shape[1]))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_NAME)
    needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
    saved = ctx.saved_tensors
    needs_gathered = needs_b or needs_bias
    methods = GemmMethods.parse(ctx.method)
    a_grad: Tensor | None = None
    gathered: Tensor | None = None
    if needs_a:
        a_grad, gathered = torch.ops.triton_overlap.all_gather_matmul(
            grad,
            saved[0].transpose(0, 1),
            None,
            None,
            ctx.buffer,
            needs_gathered,
            methods.dgrad or gather_method(methods.fprop),
            saved[1],
        )
    elif needs_gathered:
        gathered = torch.ops.triton_overlap.all_gather(grad, ctx.buffer, saved[1])
    b_grad, bias_grad = (None, None) if gathered is None else local_gradients(ctx, saved, gathered)
    needs_residual = ctx.needs_input_grad[6]
    return a_grad, b_grad, bias_grad, None, None, None, grad if needs_residual else None, None


matmul_reduce_scatter_op.register_autograd(_backward, setup_context=save_product)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | None = None,
    method: str | Method | GemmMethods = "fused",
    main_grad: Tensor | None = None,
    residual: Tensor | None = None,
    active_tokens: Tensor | None = None,
) -> Tensor:
    """Multiply, sum over the ranks and keep this rank's rows: rows of ``sum over ranks of a @ b``, plus ``bias`` and
    ``residual``.

    Collective: every rank of the buffer's group calls it with the same T, K, N and dtype. The sum over ranks has a
    fixed order, so results are bitwise reproducible. Differentiable once, with respect to ``a``, ``b``, ``bias`` and
    ``residual``; backward is collective as well. Under autocast the operands are cast as ``torch.matmul`` would, and
    the buffer must have the autocast dtype.

    Args:
        a: [T, K], this rank's columns; bfloat16, float16 or float32, the buffer's dtype. T is divisible by W.
        b: [K, N], this rank's rows, any strides ``torch.matmul`` takes without a copy.
        buffer: a user buffer with hidden size N and room for T tokens.
        bias: [N], the same on every rank; added once, after the sum. Every rank gets its full gradient.
        method: ``"fused"`` (one persistent kernel), ``"ring_exchange"``, ``"pipeline"`` or ``"nccl"``, a ``Method``
            with options, or ``"auto"``, which chooses by a measured table; see docs/methods.md. Backward takes the same
            one, and ring exchange after ``"pipeline"``, or what a ``GemmMethods`` gives as ``dgrad``.
        main_grad: float32 [K, N], any strides. Backward adds the weight gradient to it, and ``b`` gets no gradient of
            its own.
        residual: [T/W, N], this rank's rows of what the product is added to, in the buffer's dtype; autocast casts it
            too. By the fused method inside the kernel, in float32 before the one rounding; by others after it.
        active_tokens: T on the device, for a buffer with ``device_count``; see docs/device_count.md. By the fused
            method.

    Returns:
        [T/W, N]: rank r gets rows ``[r*T/W, (r+1)*T/W)``, in a fresh tensor.

    Raises:
        ActiveShapeError: the shape of ``a`` breaks a rule of the active shape.
        ClosedError: the buffer was closed.
        TypeError: an argument is of another type than its annotation says.
        ValueError: dtype, layout, device, shapes or method do not fit.
        CommError: the ranks disagree, or one did not arrive in time.
    """
    handle, text = handle_of(_NAME, buffer), text_of(_NAME, method)
    check_tensors(_NAME, a=a, b=b)
    check_optional_tensors(_NAME, bias=bias, main_grad=main_grad, residual=residual, active_tokens=active_tokens)
    a_cast, b_cast, bias_cast, residual_cast = autocast_operands(a, b, bias, residual)
    out: Tensor = torch.ops.triton_overlap.matmul_reduce_scatter(
        a_cast, b_cast, bias_cast, main_grad, handle, text, residual_cast, active_tokens
    )
    return out
