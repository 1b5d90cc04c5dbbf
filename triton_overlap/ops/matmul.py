"""``matmul``: a product of this rank alone over the active rows.

Shape ledger (C rows of room, of which T / shards are active)
    a          [C, K]
    b          [K, N]   any strides torch.matmul takes without a copy
    forward    a @ b + bias                       -> out      [C, N]
    dgrad      dOut @ b^T                         -> dA       [C, K]
    wgrad      a^T @ dOut                         -> dB       [K, N], over the active rows
    bias       sum over the active rows of dOut   -> dBias    [N], in float32
    saved      a where b wants a gradient, b, the count
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import matmul as matmul_kernel
from .autocast import autocast_operands
from .operator import operator
from .rows import check_active_tokens, check_device, check_matrix, check_vector
from .validation import (
    check_count_types,
    check_main_grad,
    check_optional_tensors,
    check_tensors,
    refuse_double_backward,
)
from .weight_gradient import bias_gradient, weight_gradient

__all__ = ["matmul", "matmul_op"]

_NAME = "matmul"


@operator("matmul")
def matmul_op(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> Tensor:
    """``torch.ops.triton_overlap.matmul``: the active rows of ``a @ b + bias``, fresh."""
    check_matrix(_NAME, "a", a)
    check_matrix(_NAME, "b", b)
    if a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise ValueError(
            f"{_NAME}: a [C, K] and b [K, N] of one dtype expected, got {a.dtype} {list(a.shape)} and "
            f"{b.dtype} {list(b.shape)}"
        )
    check_device(_NAME, "b", b, a)
    if bias is not None:
        check_vector(_NAME, "bias", bias, b)
    if main_grad is not None:
        check_main_grad(_NAME, main_grad, b)
    check_active_tokens(_NAME, a, active_tokens, shards)
    return matmul_kernel.launch(a, b, bias, active_tokens=active_tokens, shards=shards)


@matmul_op.register_fake
def _fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, main_grad, active_tokens, ctx.shards = inputs
    # Not through save_for_backward: other microbatches add to it between this forward and its backward.
    ctx.main_grad = main_grad
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b, active_tokens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_NAME)
    needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
    a, b, active_tokens = ctx.saved_tensors
    count = active_tokens, ctx.shards
    a_grad = torch.ops.triton_overlap.matmul(grad, b.transpose(0, 1), None, None, *count) if needs_a else None
    b_grad = weight_gradient(a, grad, b, ctx.main_grad, *count, own_kernel=True) if needs_b else None
    bias_grad = bias_gradient(grad, *count, own_kernel=True) if needs_bias else None
    return a_grad, b_grad, bias_grad, None, None, None


matmul_op.register_autograd(_backward, setup_context=_setup_context)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    main_grad: Tensor | None = None,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> Tensor:
    """``a @ b + bias`` over the active rows, without communication: a model's head, say.

    Differentiable once. Accumulates in float32. Under autocast the operands are cast as ``torch.matmul`` would.

    Args:
        a: [C, K], bfloat16, float16 or float32.
        b: [K, N], any strides ``torch.matmul`` takes without a copy.
        bias: [N].
        main_grad: float32 [K, N], any strides. Backward adds the weight gradient to it, and ``b`` gets no gradient of
            its own.
        active_tokens: int32, one element on the device of ``a``: the count of tokens. All rows are active without it.
        shards: ranks that the tokens are split over, so that ``active_tokens // shards`` rows are active.

    Returns:
        [C, N] in the dtype of ``a``, fresh; rows past the active ones are uninitialised memory.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tensors(_NAME, a=a, b=b)
    check_optional_tensors(_NAME, bias=bias, main_grad=main_grad)
    check_count_types(_NAME, active_tokens, shards)
    a_cast, b_cast, bias_cast = autocast_operands(a, b, bias)
    out: Tensor = torch.ops.triton_overlap.matmul(a_cast, b_cast, bias_cast, main_grad, active_tokens, shards)
    return out
