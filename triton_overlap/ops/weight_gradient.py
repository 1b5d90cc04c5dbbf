"""Gradients of the local operands, ``b`` and the bias, and what forward keeps for them.

Shape ledger
    a          [T, K]   left operand of the forward product
    g          [T, N]   gradient of the product
    a^T g      [K, N]   gradient of b, T contracted; no communication
    sum of g   [N]      gradient of the bias, summed over T in float32

Where T is a scalar on the device, both are sums over the first T rows, by kernels that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import column_sum
from ..kernels import weight_gradient as weight_gradient_kernel
from .autocast import without_autocast
from .operator import operator
from .rows import check_active_tokens, check_matrix

__all__ = [
    "bias_gradient",
    "check_weight_gradient",
    "is_transposed",
    "local_gradients",
    "local_matmul",
    "row_bias_gradient",
    "row_weight_gradient",
    "save_product",
    "weight_gradient",
    "weight_gradient_",
]


@operator("weight_gradient_", mutates_args=("main_grad",))
def weight_gradient_(
    a: Tensor, g: Tensor, main_grad: Tensor, active_tokens: Tensor | None = None, shards: int = 1
) -> None:
    """Add ``a^T g`` to ``main_grad`` in place, with float32 accumulation.

    Args:
        a: [T, K], bfloat16, float16 or float32.
        g: [T, N], the dtype of ``a``.
        main_grad: [K, N], float32, any strides.
        active_tokens: int32 scalar on the device: T times ``shards``, T up to the rows of ``a`` and ``g``; None for all
            of them.
        shards: ranks that the tokens are split over.

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    check_weight_gradient("weight_gradient_", a, g, main_grad)
    weight_gradient_kernel.launch(a, g, accumulate_into=main_grad, active_tokens=active_tokens, shards=shards)


@weight_gradient_.register_fake
def _weight_gradient_fake(
    a: Tensor, g: Tensor, main_grad: Tensor, active_tokens: Tensor | None = None, shards: int = 1
) -> None:
    return None


@operator("row_weight_gradient")
def row_weight_gradient(a: Tensor, g: Tensor, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``torch.ops.triton_overlap.row_weight_gradient``: ``a^T g`` over the active rows -> [K, N], fresh."""
    if a.dim() != 2 or g.dim() != 2 or a.shape[0] != g.shape[0] or a.dtype != g.dtype or a.device != g.device:
        raise ValueError(
            f"row_weight_gradient: a [C, K] and g [C, N] of one dtype and device expected, got {a.dtype} "
            f"{list(a.shape)} on {a.device} and {g.dtype} {list(g.shape)} on {g.device}"
        )
    check_active_tokens("row_weight_gradient", a, active_tokens, shards)
    return weight_gradient_kernel.launch(a, g, active_tokens=active_tokens, shards=shards)


@row_weight_gradient.register_fake
def _row_weight_gradient_fake(a: Tensor, g: Tensor, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    return a.new_empty((a.shape[1], g.shape[1]))


@operator("row_bias_gradient")
def row_bias_gradient(g: Tensor, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``torch.ops.triton_overlap.row_bias_gradient``: the sum of the active rows of ``g`` -> [N], fresh."""
    check_matrix("row_bias_gradient", "g", g)
    check_active_tokens("row_bias_gradient", g, active_tokens, shards)
    return column_sum.launch(g, active_tokens, shards).to(g.dtype)


@row_bias_gradient.register_fake
def _row_bias_gradient_fake(g: Tensor, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    return g.new_empty((g.shape[1],))


def check_weight_gradient(operation: str, a: Tensor, g: Tensor, main_grad: Tensor) -> None:
    """ValueError unless ``a^T g`` can be added to ``main_grad``."""
    if a.dim() != 2 or g.dim() != 2 or a.shape[0] != g.shape[0]:
        raise ValueError(f"{operation}: a [T, K] and g [T, N] expected, got {list(a.shape)} and {list(g.shape)}")
    if a.dtype != g.dtype:
        raise ValueError(f"{operation}: a is {a.dtype} but g is {g.dtype}")
    if main_grad.dtype != torch.float32 or list(main_grad.shape) != [a.shape[1], g.shape[1]]:
        raise ValueError(
            f"{operation}: main_grad must be torch.float32 [{a.shape[1]}, {g.shape[1]}], "
            f"got {main_grad.dtype} {list(main_grad.shape)}"
        )


def is_transposed(b: Tensor) -> bool:
    """Whether ``b`` [K, N] is the transposed view of a weight [N, K], whose gradient had better lie as it does."""
    return b.stride(0) == 1 and b.stride(1) != 1


def weight_gradient(
    a: Tensor,
    g: Tensor,
    b: Tensor,
    main_grad: Tensor | None,
    active_tokens: Tensor | None = None,
    shards: int = 1,
    *,
    own_kernel: bool = False,
) -> Tensor | None:
    """The gradient of ``b`` in ``a @ b``, or None after adding it to ``main_grad``.

    Args:
        a: [T, K].
        g: [T, N].
        b: [K, N]; only its strides are read.
        main_grad: float32 [K, N] or None.
        active_tokens: T times ``shards``, on the device, or None where T is the rows of ``a`` and ``g``.
        shards: ranks that the tokens are split over.
        own_kernel: do without torch's product where there is no count too, for the bits of a call with one.

    Returns:
        [K, N] in ``a``'s dtype, laid out as ``b`` is: where ``b`` is the transposed view of a weight, the weight's own
        gradient comes out contiguous and autograd need not copy it.
    """
    if main_grad is not None:
        weight_gradient_(a, g, main_grad, active_tokens, shards)
        return None
    left, right = (g, a) if is_transposed(b) else (a, g)
    if own_kernel or active_tokens is not None:
        product = row_weight_gradient(left, right, active_tokens, shards)
    else:
        product = local_matmul(left.transpose(0, 1), right)
    return product.transpose(0, 1) if is_transposed(b) else product


def save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """``setup_context`` of an operator ``(a, b, bias, main_grad, buffer, method[, .., active_tokens])``: saves b,
    the count, and a where b wants a gradient; keeps the rest on ``ctx``."""
    a, b, _, main_grad, ctx.buffer, ctx.method, *more = inputs
    _, needs_b, *_ = ctx.needs_input_grad
    # Not through save_for_backward: other microbatches add to it between this forward and its backward.
    ctx.main_grad = main_grad
    # The count is: should somebody write another to it before this forward's backward, autograd says so.
    ctx.save_for_backward(b, more[-1] if more else None, *([a] if needs_b else []))


def local_gradients(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of b and of the bias, where they are wanted.

    Args:
        ctx: after ``save_product``.
        saved: its tensors. Each access to ``ctx.saved_tensors`` unpacks, which under checkpointing may happen only
            once.
        grad: [T, N], of the product ``a @ b``.
    """
    _, needs_b, needs_bias, *_ = ctx.needs_input_grad
    return (
        weight_gradient(saved[2], grad, saved[0], ctx.main_grad, saved[1]) if needs_b else None,
        bias_gradient(grad, saved[1]) if needs_bias else None,
    )


def bias_gradient(
    g: Tensor, active_tokens: Tensor | None = None, shards: int = 1, *, own_kernel: bool = False
) -> Tensor:
    """``g`` [T, N] -> [N] in ``g``'s dtype, summed in float32; arguments as in ``weight_gradient``."""
    if own_kernel or active_tokens is not None:
        return row_bias_gradient(g, active_tokens, shards)
    return g.sum(dim=0, dtype=torch.float32).to(g.dtype)


def local_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias`` on this rank alone, in the operands' dtype also under autocast."""
    with without_autocast(a.device):
        return torch.matmul(a, b) if bias is None else torch.addmm(bias, a, b)
