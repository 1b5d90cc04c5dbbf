"""``all_gather_beside_matmul``, ``reduce_scatter_beside_matmul``: a collective beside a product of something else.

Shape ledger of all_gather_beside_matmul (W ranks, H the buffer's hidden size; M, K, N of each rank's own)
    x_shard    [T/W, H]
    a, b       [M, K], [K, N]
    forward    gather(x_shard)                            -> gathered  [T, H]
               a @ b + bias, meanwhile                    -> product   [M, N]
    backward   reduce_scatter(dGathered)                  -> dX        [T/W, H]
               dProduct @ b^T, meanwhile                  -> dA        [M, K]
               a^T @ dProduct                             -> dB        [K, N], local
               sum over rows of dProduct, in float32      -> dBias     [N], local
    saved      a where b wants a gradient, b where a wants one

reduce_scatter_beside_matmul is the same with the two collectives exchanged: x [T, H] -> part [T/W, H], and back.
reduce_scatter_beside_weight_gradient_ adds the product a^T @ g to a float32 tensor instead, and has no backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.user_buffers import Communicator, UserBuffer, user_buffer_by_handle
from ..kernels import bulk
from ..kernels import weight_gradient as weight_gradient_kernel
from ..kernels.methods import Method
from .autocast import autocast_operands
from .operator import COMMUNICATES, operator
from .validation import (
    check_activation,
    check_local_product,
    check_method,
    check_optional_tensors,
    check_tensors,
    handle_of,
    refuse_double_backward,
    text_of,
    world_size_of,
)
from .weight_gradient import bias_gradient, check_weight_gradient, is_transposed, local_matmul

__all__ = ["all_gather_beside_matmul", "reduce_scatter_beside_matmul", "reduce_scatter_beside_weight_gradient"]

_GATHER = "all_gather_beside_matmul"
_REDUCE = "reduce_scatter_beside_matmul"


@dataclass(frozen=True)
class _Move:
    """A collective beside a product: what its operator computes, in forward and in backward.

    Attributes:
        operation: its name.
        moved: name of the argument that travels.
        is_shard: whether that holds this rank's rows only.
        launch: computes both results.
        back: the operator that takes the gradient of what travelled back.
        back_beside: the same beside a product.
    """

    operation: str
    moved: str
    is_shard: bool
    launch: Callable[..., tuple[Tensor, Tensor]]
    back: str
    back_beside: str

    def forward(
        self, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, buffer: str, method: str
    ) -> tuple[Tensor, Tensor]:
        user_buffer = user_buffer_by_handle(buffer)
        by = check_method(self.operation, user_buffer, method)
        check_activation(self.operation, user_buffer, self.moved, x, is_shard=self.is_shard, is_hidden=True)
        check_local_product(self.operation, x, a, b, bias)
        return self.launch(user_buffer, x, a, b, bias, method=by)

    def fake(
        self, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, buffer: str, method: str
    ) -> tuple[Tensor, Tensor]:
        world_size = world_size_of(buffer)
        rows = x.shape[0] * world_size if self.is_shard else x.shape[0] // world_size
        return x.new_empty((rows, x.shape[1])), a.new_empty((a.shape[0], b.shape[1]))

    def backward(self, ctx: Any, moved_grad: Tensor | None, product_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward(self.operation)
        needs_x, needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        a, b = ctx.saved_tensors
        ops = torch.ops.triton_overlap
        x_grad = a_grad = b_grad = bias_grad = None
        moves = needs_x and moved_grad is not None
        if moves and needs_a and product_grad is not None:
            beside = getattr(ops, self.back_beside)
            x_grad, a_grad = beside(moved_grad, product_grad, b.transpose(0, 1), None, ctx.buffer, ctx.method)
        elif moves:
            x_grad = getattr(ops, self.back)(moved_grad, ctx.buffer)
        elif needs_a and product_grad is not None:
            a_grad = local_matmul(product_grad, b.transpose(0, 1))
        if product_grad is not None:
            b_grad = local_matmul(a.transpose(0, 1), product_grad) if needs_b else None
            bias_grad = bias_gradient(product_grad) if needs_bias else None
        return x_grad, a_grad, b_grad, bias_grad, None, None


_gather = _Move(_GATHER, "x_shard", True, bulk.all_gather, back="reduce_scatter", back_beside=_REDUCE)
_reduce = _Move(_REDUCE, "x", False, bulk.reduce_scatter, back="all_gather", back_beside=_GATHER)


@operator("all_gather_beside_matmul", tags=COMMUNICATES)
def all_gather_beside_matmul_op(
    x_shard: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, buffer: str, method: str
) -> tuple[Tensor, Tensor]:
    """``torch.ops.triton_overlap.all_gather_beside_matmul``: see the function; ``buffer`` is a handle."""
    return _gather.forward(x_shard, a, b, bias, buffer, method)


@operator("reduce_scatter_beside_matmul", tags=COMMUNICATES)
def reduce_scatter_beside_matmul_op(
    x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, buffer: str, method: str
) -> tuple[Tensor, Tensor]:
    """``torch.ops.triton_overlap.reduce_scatter_beside_matmul``: see the function; ``buffer`` is a handle."""
    return _reduce.forward(x, a, b, bias, buffer, method)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, a, b, _, ctx.buffer, ctx.method = inputs
    _, needs_a, needs_b, *_ = ctx.needs_input_grad
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


all_gather_beside_matmul_op.register_fake(_gather.fake)
all_gather_beside_matmul_op.register_autograd(_gather.backward, setup_context=_setup_context)
reduce_scatter_beside_matmul_op.register_fake(_reduce.fake)
reduce_scatter_beside_matmul_op.register_autograd(_reduce.backward, setup_context=_setup_context)


@operator("reduce_scatter_beside_weight_gradient_", mutates_args=("main_grad",), tags=COMMUNICATES)
def reduce_scatter_beside_weight_gradient_op_(
    x: Tensor, a: Tensor, g: Tensor, main_grad: Tensor, buffer: str, method: str
) -> Tensor:
    """``torch.ops.triton_overlap.reduce_scatter_beside_weight_gradient_``: reduce-scatter ``x`` [T, H] and meanwhile
    add ``a^T g`` to ``main_grad``, as ``weight_gradient_`` does; -> [T/W, H], fresh."""
    user_buffer = user_buffer_by_handle(buffer)
    by = check_method(_REDUCE, user_buffer, method)
    check_activation(_REDUCE, user_buffer, "x", x, is_shard=False, is_hidden=True)
    check_weight_gradient(_REDUCE, a, g, main_grad)
    accumulate = partial(weight_gradient_kernel.launch, a, g, accumulate_into=main_grad)
    return bulk.reduce_scatter_beside(user_buffer, x, accumulate, method=by)


@reduce_scatter_beside_weight_gradient_op_.register_fake
def _weight_gradient_fake(x: Tensor, a: Tensor, g: Tensor, main_grad: Tensor, buffer: str, method: str) -> Tensor:
    return x.new_empty((x.shape[0] // world_size_of(buffer), x.shape[1]))


def reduce_scatter_beside_weight_gradient(
    x: Tensor, a: Tensor, g: Tensor, b: Tensor, main_grad: Tensor | None, *, buffer: str, method: str
) -> tuple[Tensor, Tensor | None]:
    """The reduce-scatter of ``x`` [T, H] -> [T/W, H], and what ``weight_gradient(a, g, b, main_grad)`` gives,
    meanwhile. Not differentiable."""
    ops = torch.ops.triton_overlap
    if main_grad is not None:
        return ops.reduce_scatter_beside_weight_gradient_(x, a, g, main_grad, buffer, method), None
    if is_transposed(b):
        part, grad = ops.reduce_scatter_beside_matmul(x, g.transpose(0, 1), a, None, buffer, method)
        return part, grad.transpose(0, 1)
    part, grad = ops.reduce_scatter_beside_matmul(x, a.transpose(0, 1), g, None, buffer, method)
    return part, grad


def all_gather_beside_matmul(
    x_shard: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | None = None,
    method: str | Method = "bulk",
) -> tuple[Tensor, Tensor]:
    """Gather every rank's rows of ``x_shard``, and compute ``a @ b + bias`` meanwhile.

    Collective: every rank of the buffer's group calls it with the same T and dtype; the product is each rank's own.
    Differentiable once; backward is collective as well, a reduce-scatter beside the product for ``a``. Under autocast
    the operands of the product are cast as ``torch.matmul`` would; rows that travel keep their dtype.

    Args:
        x_shard: [T/W, hidden], this rank's rows; the buffer's dtype.
        a: [M, K], independent of ``x_shard``; bfloat16, float16, float32 or float64.
        b: [K, N].
        buffer: a user buffer with room for T tokens.
        bias: [N] or None.
        method: ``"bulk"``, or a ``Method`` of that name with ``use_ce`` or ``num_sm``.

    Returns:
        The gathered rows [T, hidden], rank 0's first, and the product [M, N]; both fresh.

    Raises:
        ActiveShapeError: the shape of ``x_shard`` breaks a rule of the active shape.
        ClosedError: the buffer was closed.
        TypeError: an argument is of another type than its annotation says.
        ValueError: dtype, layout, device, shapes or method do not fit.
        CommError: the ranks disagree, or one did not arrive in time. The product is right all the same.
    """
    handle, text = handle_of(_GATHER, buffer), text_of(_GATHER, method)
    check_tensors(_GATHER, x_shard=x_shard, a=a, b=b)
    check_optional_tensors(_GATHER, bias=bias)
    operands = autocast_operands(a, b, bias)
    gathered, product = torch.ops.triton_overlap.all_gather_beside_matmul(x_shard, *operands, handle, text)
    return gathered, product


def reduce_scatter_beside_matmul(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | None = None,
    method: str | Method = "bulk",
) -> tuple[Tensor, Tensor]:
    """Sum ``x`` over the ranks and keep this rank's rows, and compute ``a @ b + bias`` meanwhile.

    As ``all_gather_beside_matmul``, with ``x`` [T, hidden]; backward is an all-gather beside the product for ``a``.

    Returns:
        The sum's rows ``[r*T/W, (r+1)*T/W)`` on rank r, [T/W, hidden], and the product [M, N]; both fresh.
    """
    handle, text = handle_of(_REDUCE, buffer), text_of(_REDUCE, method)
    check_tensors(_REDUCE, x=x, a=a, b=b)
    check_optional_tensors(_REDUCE, bias=bias)
    operands = autocast_operands(a, b, bias)
    part, product = torch.ops.triton_overlap.reduce_scatter_beside_matmul(x, *operands, handle, text)
    return part, product
