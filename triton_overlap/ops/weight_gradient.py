"""Gradients of the local operands, ``b`` and the bias, and what forward keeps for them.

Shape ledger
    a          [T, K]   left operand of the forward product
    g          [T, N]   gradient of the product
    a^T g      [K, N]   gradient of b, T contracted; no communication
    sum of g   [N]      gradient of the bias, summed over T in float32
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import weight_gradient as weight_gradient_kernel
from .autocast import without_autocast

__all__ = [
    "bias_gradient",
    "local_gradients",
    "local_matmul",
    "save_product",
    "weight_gradient",
    "weight_gradient_",
]


@torch.library.custom_op("triton_overlap::weight_gradient_", mutates_args=("main_grad",))
def weight_gradient_(a: Tensor, g: Tensor, main_grad: Tensor) -> None:
    """Add ``a^T g`` to ``main_grad`` in place, with float32 accumulation.

    Args:
        a: [T, K], bfloat16, float16 or float32.
        g: [T, N], the dtype of ``a``.
        main_grad: [K, N], float32, any strides.

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    if a.dim() != 2 or g.dim() != 2 or a.shape[0] != g.shape[0]:
        raise ValueError(f"weight_gradient_: a [T, K] and g [T, N] expected, got {list(a.shape)} and {list(g.shape)}")
    if a.dtype != g.dtype:
        raise ValueError(f"weight_gradient_: a is {a.dtype} but g is {g.dtype}")
    if main_grad.dtype != torch.float32 or list(main_grad.shape) != [a.shape[1], g.shape[1]]:
        raise ValueError(
            f"weight_gradient_: main_grad must be torch.float32 [{a.shape[1]}, {g.shape[1]}], "
            f"got {main_grad.dtype} {list(main_grad.shape)}"
        )
    weight_gradient_kernel.launch(a, g, accumulate_into=main_grad)


@weight_gradient_.register_fake
def _weight_gradient_fake(a: Tensor, g: Tensor, main_grad: Tensor) -> None:
    return None


def weight_gradient(a: Tensor, g: Tensor, b: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """The gradient of ``b`` in ``a @ b``, or None after adding it to ``main_grad``.

    Args:
        a: [T, K].
        g: [T, N].
        b: [K, N]; only its strides are read.
        main_grad: float32 [K, N] or None.

    Returns:
        [K, N] in ``a``'s dtype, laid out as ``b`` is: where ``b`` is the transposed view of a weight, the weight's own
        gradient comes out contiguous and autograd need not copy it.
    """
    if main_grad is not None:
        weight_gradient_(a, g, main_grad)
        return None
    if b.stride(0) == 1 and b.stride(1) != 1:
        return local_matmul(g.transpose(0, 1), a).transpose(0, 1)
    return local_matmul(a.transpose(0, 1), g)


def save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """``setup_context`` of an operator ``(a, b, bias, main_grad, buffer, method)``: saves b, and a where b wants a
    gradient; keeps the rest on ``ctx``."""
    a, b, _, main_grad, ctx.buffer, ctx.method = inputs
    _, needs_b, *_ = ctx.needs_input_grad
    # Not through save_for_backward: other microbatches add to it between this forward and its backward.
    ctx.main_grad = main_grad
    ctx.save_for_backward(b, *([a] if needs_b else []))


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
        weight_gradient(saved[1], grad, saved[0], ctx.main_grad) if needs_b else None,
        bias_gradient(grad) if needs_bias else None,
    )


def bias_gradient(g: Tensor) -> Tensor:
    """``g`` [T, N] -> [N] in ``g``'s dtype, summed in float32."""
    return g.sum(dim=0, dtype=torch.float32).to(g.dtype)


def local_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias`` on this rank alone, in the operands' dtype also under autocast."""
    with without_autocast(a.device):
        return torch.matmul(a, b) if bias is None else torch.addmm(bias, a, b)
