"""``matmul_all_reduce`` and ``replicated_matmul``: tensor parallelism without sequence parallelism.

Between a column-parallel and a row-parallel layer activations are replicated, so one sum over the ranks is needed in
the forward pass of the second and one in the backward pass of the first.

Shape ledger of matmul_all_reduce (W ranks, N the buffer's hidden size)
    a          [T, K]     this rank's columns of the left operand
    b          [K, N]     this rank's rows of the right operand
    forward    all_gather(reduce_scatter(a @ b) + bias)   -> out       [T, N], the same on every rank
    dgrad      dOut @ b^T                                 -> dA        [T, K], local: dOut is the same on every rank
    wgrad      a^T @ dOut                                 -> dB        [K, N], local
    bias       sum over rows of dOut, in float32          -> dBias     [N], local and the same on every rank
    saved      a where b wants a gradient, b

Shape ledger of replicated_matmul (W ranks, K the buffer's hidden size)
    x          [T, K]     the same on every rank
    b          [K, N]     this rank's columns
    forward    x @ b + bias                               -> out       [T, N], local
    dgrad      matmul_all_reduce(dOut, b^T)               -> dX        [T, K], the same on every rank
    wgrad      x^T @ dOut                                 -> dB        [K, N], local
    bias       sum over rows of dOut, in float32          -> dBias     [N], local
    saved      x where b wants a gradient, b
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.user_buffers import Communicator, UserBuffer, user_buffer_by_handle
from ..kernels import all_gather as all_gather_kernel
from ..kernels import by_method, gathered
from ..kernels.methods import Method
from .autocast import autocast_operands
from .operator import COMMUNICATES, operator
from .validation import (
    check_activation,
    check_method,
    check_optional_tensors,
    check_reduced_product,
    check_right_operand,
    check_tensors,
    handle_of,
    refuse_double_backward,
    text_of,
)
from .weight_gradient import local_gradients, local_matmul, save_product

__all__ = ["matmul_all_reduce", "matmul_all_reduce_op", "replicated_matmul", "replicated_matmul_op"]

_ALL_REDUCE = "matmul_all_reduce"
_REPLICATED = "replicated_matmul"


@operator("matmul_all_reduce", tags=COMMUNICATES)
def matmul_all_reduce_op(
    a: Tensor, b: Tensor, bias: Tensor | None, main_grad: Tensor | None, buffer: str, method: str
) -> Tensor:
    """``torch.ops.triton_overlap.matmul_all_reduce``: arguments as in ``matmul_reduce_scatter`` -> [T, N], fresh."""
    user_buffer = user_buffer_by_handle(buffer)
    tokens, by = check_reduced_product(_ALL_REDUCE, user_buffer, a, b, bias, main_grad, method)
    shard = by_method.matmul_reduce_scatter(user_buffer, a, b, bias, method=by, operation=_ALL_REDUCE)
    all_gather_kernel.launch(user_buffer, shard)
    return gathered.launch(user_buffer, tokens)


@matmul_all_reduce_op.register_fake
def _all_reduce_fake(
    a: Tensor, b: Tensor, bias: Tensor | None, main_grad: Tensor | None, buffer: str, method: str
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_ALL_REDUCE)
    saved = ctx.saved_tensors
    a_grad = local_matmul(grad, saved[0].transpose(0, 1)) if ctx.needs_input_grad[0] else None
    return a_grad, *local_gradients(ctx, saved, grad), None, None, None


matmul_all_reduce_op.register_autograd(_all_reduce_backward, setup_context=save_product)


@operator("replicated_matmul")
def replicated_matmul_op(
    x: Tensor, b: Tensor, bias: Tensor | None, main_grad: Tensor | None, buffer: str, method: str
) -> Tensor:
    """``torch.ops.triton_overlap.replicated_matmul``: x [T, K], b [K, N] -> [T, N], fresh."""
    user_buffer = user_buffer_by_handle(buffer)
    check_method(_REPLICATED, user_buffer, method)
    # Checked here and not first in backward, where a peer might already be waiting.
    check_activation(_REPLICATED, user_buffer, "x", x, is_shard=False, is_hidden=True)
    check_right_operand(_REPLICATED, user_buffer, b, bias, main_grad, x.shape[1])
    return local_matmul(x, b, bias)


@replicated_matmul_op.register_fake
def _replicated_fake(
    x: Tensor, b: Tensor, bias: Tensor | None, main_grad: Tensor | None, buffer: str, method: str
) -> Tensor:
    return x.new_empty((x.shape[0], b.shape[1]))


def _replicated_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_REPLICATED)
    saved = ctx.saved_tensors
    x_grad: Tensor | None = None
    if ctx.needs_input_grad[0]:
        transposed = saved[0].transpose(0, 1)
        x_grad = torch.ops.triton_overlap.matmul_all_reduce(grad, transposed, None, None, ctx.buffer, ctx.method)
    return x_grad, *local_gradients(ctx, saved, grad), None, None, None


replicated_matmul_op.register_autograd(_replicated_backward, setup_context=save_product)


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | None = None,
    method: str | Method = "fused",
    main_grad: Tensor | None = None,
) -> Tensor:
    """Multiply and sum over the ranks: ``sum over ranks of a @ b``, plus ``bias``, on every rank.

    A ``matmul_reduce_scatter`` followed by an all-gather on the same buffer, so T must be divisible by W here too.
    The gradient of the result is taken to be the same on every rank, as it is where everything behind it is replicated;
    backward then needs no communication. Arguments, autocast and errors are those of ``matmul_reduce_scatter``.

    Returns:
        [T, N], in a fresh tensor.
    """
    handle, text = handle_of(_ALL_REDUCE, buffer), text_of(_ALL_REDUCE, method)
    check_tensors(_ALL_REDUCE, a=a, b=b)
    check_optional_tensors(_ALL_REDUCE, bias=bias, main_grad=main_grad)
    a_cast, b_cast, bias_cast = autocast_operands(a, b, bias)
    out: Tensor = torch.ops.triton_overlap.matmul_all_reduce(a_cast, b_cast, bias_cast, main_grad, handle, text)
    return out


def replicated_matmul(
    x: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | None = None,
    method: str | Method = "fused",
    main_grad: Tensor | None = None,
) -> Tensor:
    """``x @ b + bias`` on this rank, where ``x`` is the same on every rank and its gradient is summed over the ranks.

    The forward pass does not communicate; backward is a ``matmul_all_reduce`` and collective. Autocast and errors are
    those of ``matmul_reduce_scatter``.

    Args:
        x: [T, K], the buffer's dtype. T is divisible by W.
        b: [K, N], this rank's columns, any strides ``torch.matmul`` takes without a copy.
        buffer: a user buffer with hidden size K and room for T tokens.
        bias: [N] or None.
        method: of the backward product, as for ``matmul_reduce_scatter``.
        main_grad: float32 [K, N], any strides. Backward adds the weight gradient to it, and ``b`` gets no gradient of
            its own.

    Returns:
        [T, N], in a fresh tensor.
    """
    handle, text = handle_of(_REPLICATED, buffer), text_of(_REPLICATED, method)
    check_tensors(_REPLICATED, x=x, b=b)
    check_optional_tensors(_REPLICATED, bias=bias, main_grad=main_grad)
    x_cast, b_cast, bias_cast = autocast_operands(x, b, bias)
    out: Tensor = torch.ops.triton_overlap.replicated_matmul(x_cast, b_cast, bias_cast, main_grad, handle, text)
    return out
