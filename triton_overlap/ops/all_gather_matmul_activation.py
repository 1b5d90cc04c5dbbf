"""``all_gather_matmul`` with an activation of the product, inside the fused kernel.

Shape ledger (W ranks, K the buffer's hidden size; N = F, or 2 F where the activation is gated)
    a_shard    [T/W, K]
    b          [K, N]    of a gated activation the gate's columns first
    product    [T, N]    gathered @ b + bias, in the buffer's dtype
    forward    f(product), or f(gate) * up                -> out      [T, F]
    backward   dProduct = dOut * f'(product), then as all_gather_matmul
    saved      as all_gather_matmul, and product
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.user_buffers import user_buffer_by_handle
from ..kernels import by_method
from ..kernels.epilogue import Epilogue
from .activation import activation_named
from .gather_gradients import gather_gradients, save_gathered_product
from .operator import COMMUNICATES, operator
from .validation import check_activation, check_methods, check_right_operand, world_size_of

__all__ = ["all_gather_matmul_activation_op"]

_NAME = "all_gather_matmul"


@operator("all_gather_matmul_activation", tags=COMMUNICATES)
def all_gather_matmul_activation_op(
    a_shard: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    buffer: str,
    gather: bool,
    method: str,
    activation: str,
    keep_product: bool,
    active_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.triton_overlap.all_gather_matmul_activation``: arguments as of ``all_gather_matmul``, and

    Args:
        activation: name of one in ``ops.activation``, gated or not.
        keep_product: also return the product that the activation was taken of; backward needs it.

    Returns:
        [T, N], or [T, N/2] where the activation is gated; the product [T, N] where ``keep_product``, else [0, N]; the
        gathered rows [T, K] where ``gather``, else [0, K]. All fresh.
    """
    user_buffer = user_buffer_by_handle(buffer)
    by = check_methods(_NAME, user_buffer, method, active_tokens)
    check_activation(_NAME, user_buffer, "a_shard", a_shard, is_shard=True, is_hidden=True)
    check_right_operand(_NAME, user_buffer, b, bias, main_grad, a_shard.shape[1])
    function, gated = activation_named(_NAME, activation)
    if gated and b.shape[1] % 2:
        raise ValueError(
            f"{_NAME}: b must have an even number of columns with activation {activation!r}, half of them the gate, "
            f"got {list(b.shape)}"
        )
    tokens = a_shard.shape[0] * user_buffer.group.world_size
    product = a_shard.new_empty((tokens if keep_product else 0, b.shape[1]))
    outs = by_method.all_gather_matmul(
        user_buffer,
        a_shard,
        [b],
        [bias],
        gather=gather,
        method=by,
        epilogue=Epilogue(function, gated, product if keep_product else None),
        active_tokens=active_tokens,
    )
    return outs[0], product, outs[1] if gather else a_shard.new_empty((0, a_shard.shape[1]))


@all_gather_matmul_activation_op.register_fake
def _activation_fake(
    a_shard: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    buffer: str,
    gather: bool,
    method: str,
    activation: str,
    keep_product: bool,
    active_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n = a_shard.shape[0] * world_size_of(buffer), b.shape[1]
    _, gated = activation_named(_NAME, activation)
    return (
        a_shard.new_empty((tokens, n // 2 if gated else n)),
        a_shard.new_empty((tokens if keep_product else 0, n)),
        a_shard.new_empty((tokens if gather else 0, a_shard.shape[1])),
    )


def _activation_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    a_shard, b, _, main_grad, buffer, gather, method, ctx.activation, _, active_tokens = inputs
    product, rows = output[1], output[2] if gather else a_shard
    if product.shape[0] != output[0].shape[0]:
        raise ValueError(f"{_NAME}: with gradients the product is needed again; give keep_product=True")
    ctx.mark_non_differentiable(product)
    needed = rows if ctx.needs_input_grad[1] else None
    save_gathered_product(ctx, [b], [main_grad], needed, buffer, gather, method, active_tokens, more=[product])


def _activation_backward(
    ctx: Any, out_grad: Tensor | None, product_grad: Tensor | None, gathered_grad: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
    *saved, product = ctx.saved_tensors
    if out_grad is not None:
        _, gated = activation_named(_NAME, ctx.activation)
        out_grad = torch.ops.triton_overlap.activation_backward(out_grad, product, ctx.activation, gated, saved[0], 1)
    a_grad, (b_grad,), (bias_grad,) = gather_gradients(
        ctx, saved, needs_a, [needs_b], [needs_bias], [out_grad], gathered_grad if ctx.gather else None
    )
    return a_grad, b_grad, bias_grad, None, None, None, None, None, None, None


all_gather_matmul_activation_op.register_autograd(_activation_backward, setup_context=_activation_setup_context)
