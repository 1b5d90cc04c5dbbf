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
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.user_buffers import UserBuffer, user_buffer_by_handle
from ..kernels import bulk
from ..kernels.methods import Method
from .validation import check_activation, check_method, refuse_double_backward, world_size_of
from .weight_gradient import bias_gradient, local_matmul

__all__ = ["all_gather_beside_matmul", "reduce_scatter_beside_matmul"]

_GATHER = "all_gather_beside_matmul"
_REDUCE = "reduce_scatter_beside_matmul"


@torch.library.custom_op("triton_overlap::all_gather_beside_matmul", mutates_args=())
def all_gather_beside_matmul_op(
    x_shard: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, buffer: str, method: str
) -> tuple[Tensor, Tensor]:
    """``torch.ops.triton_overlap.all_gather_beside_matmul``: see the function; ``buffer`` is a handle."""
    user_buffer = user_buffer_by_handle(buffer)
    by = check_method(_GATHER, user_buffer, method)
    check_activation(_GATHER, user_buffer, "x_shard", x_shard, is_shard=True, is_hidden=True)
    _check_product(_GATHER, x_shard, a, b, bias)
    return bulk.all_gather(user_buffer, x_shard, a, b, bias, method=by)


@all_gather_beside_matmul_op.register_fake
def _gather_fake(
    x_shard: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, buffer: str, method: str
) -> tuple[Tensor, Tensor]:
    gathered = x_shard.new_empty((x_shard.shape[0] * world_size_of(buffer), x_shard.shape[1]))
    return gathered, a.new_empty((a.shape[0], b.shape[1]))


@torch.library.custom_op("triton_overlap::reduce_scatter_beside_matmul", mutates_args=())
def reduce_scatter_beside_matmul_op(
    x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, buffer: str, method: str
) -> tuple[Tensor, Tensor]:
    """``torch.ops.triton_overlap.reduce_scatter_beside_matmul``: see the function; ``buffer`` is a handle."""
    user_buffer = user_buffer_by_handle(buffer)
    by = check_method(_REDUCE, user_buffer, method)
    check_activation(_REDUCE, user_buffer, "x", x, is_shard=False, is_hidden=True)
    _check_product(_REDUCE, x, a, b, bias)
    return bulk.reduce_scatter(user_buffer, x, a, b, bias, method=by)


@reduce_scatter_beside_matmul_op.register_fake
def _reduce_fake(
    x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, buffer: str, method: str
) -> tuple[Tensor, Tensor]:
    part = x.new_empty((x.shape[0] // world_size_of(buffer), x.shape[1]))
    return part, a.new_empty((a.shape[0], b.shape[1]))


def _check_product(operation: str, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{operation}: a [M, K] and b [K, N] expected, got {list(a.shape)} and {list(b.shape)}")
    if bias is not None and list(bias.shape) != [b.shape[1]]:
        raise ValueError(f"{operation}: bias must have shape [{b.shape[1]}], got {list(bias.shape)}")
    for name, tensor in (("b", b), ("bias", bias)):
        if tensor is not None and tensor.dtype != a.dtype:
            raise ValueError(f"{operation}: a is {a.dtype}, {name} is {tensor.dtype}; they must agree")
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{operation}: {name} is on {tensor.device}, the tensor to move is on {x.device}")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, a, b, _, ctx.buffer, ctx.method = inputs
    _, needs_a, needs_b, *_ = ctx.needs_input_grad
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _backward(ctx: Any, moved_grad: Tensor | None, product_grad: Tensor | None, back: Any, back_beside: Any) -> Any:
    needs_x, needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
    a, b = ctx.saved_tensors
    x_grad = a_grad = b_grad = bias_grad = None
    moves = needs_x and moved_grad is not None
    if moves and needs_a and product_grad is not None:
        x_grad, a_grad = back_beside(moved_grad, product_grad, b.transpose(0, 1), None, ctx.buffer, ctx.method)
    elif moves:
        x_grad = back(moved_grad, ctx.buffer)
    elif needs_a and product_grad is not None:
        a_grad = local_matmul(product_grad, b.transpose(0, 1))
    if product_grad is not None:
        b_grad = local_matmul(a.transpose(0, 1), product_grad) if needs_b else None
        bias_grad = bias_gradient(product_grad) if needs_bias else None
    return x_grad, a_grad, b_grad, bias_grad, None, None


def _gather_backward(ctx: Any, gathered_grad: Tensor | None, product_grad: Tensor | None) -> Any:
    refuse_double_backward(_GATHER)
    ops = torch.ops.triton_overlap
    return _backward(ctx, gathered_grad, product_grad, ops.reduce_scatter, ops.reduce_scatter_beside_matmul)


def _reduce_backward(ctx: Any, part_grad: Tensor | None, product_grad: Tensor | None) -> Any:
    refuse_double_backward(_REDUCE)
    ops = torch.ops.triton_overlap
    return _backward(ctx, part_grad, product_grad, ops.all_gather, ops.all_gather_beside_matmul)


all_gather_beside_matmul_op.register_autograd(_gather_backward, setup_context=_setup_context)
reduce_scatter_beside_matmul_op.register_autograd(_reduce_backward, setup_context=_setup_context)


def all_gather_beside_matmul(
    x_shard: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer,
    bias: Tensor | None = None,
    method: str | Method = "bulk",
) -> tuple[Tensor, Tensor]:
    """Gather every rank's rows of ``x_shard``, and compute ``a @ b + bias`` meanwhile.

    Collective: every rank of the buffer's group calls it with the same T and dtype; the product is each rank's own.
    Differentiable once; backward is collective as well, a reduce-scatter beside the product for ``a``.

    Args:
        x_shard: [T/W, hidden], this rank's rows; the buffer's dtype.
        a: [M, K], independent of ``x_shard``.
        b: [K, N].
        buffer: a user buffer with room for T tokens.
        bias: [N] or None.
        method: ``"bulk"``, or a ``Method`` of that name with ``use_ce`` or ``num_sm``.

    Returns:
        The gathered rows [T, hidden], rank 0's first, and the product [M, N]; both fresh.

    Raises:
        ActiveShapeError: the shape of ``x_shard`` breaks a rule of the active shape.
        ClosedError: the buffer was closed.
        ValueError: dtype, device, shapes or method do not fit.
        CommError: the ranks disagree, or one did not arrive in time. The product is right all the same.
    """
    gathered, product = torch.ops.triton_overlap.all_gather_beside_matmul(
        x_shard, a, b, bias, buffer.handle, str(method)
    )
    return gathered, product


def reduce_scatter_beside_matmul(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer,
    bias: Tensor | None = None,
    method: str | Method = "bulk",
) -> tuple[Tensor, Tensor]:
    """Sum ``x`` over the ranks and keep this rank's rows, and compute ``a @ b + bias`` meanwhile.

    As ``all_gather_beside_matmul``, with ``x`` [T, hidden]; backward is an all-gather beside the product for ``a``.

    Returns:
        The sum's rows ``[r*T/W, (r+1)*T/W)`` on rank r, [T/W, hidden], and the product [M, N]; both fresh.
    """
    part, product = torch.ops.triton_overlap.reduce_scatter_beside_matmul(x, a, b, bias, buffer.handle, str(method))
    return part, product
