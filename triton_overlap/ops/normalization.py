"""``layer_norm`` and ``rms_norm`` over the active rows.

Shape ledger (C rows of room, of which T / shards are active)
    x          [C, hidden]
    weight     [hidden], and for LayerNorm perhaps bias [hidden]
    forward    (x - mean) * rstd * weight + bias          -> out       [C, hidden]; the mean is 0 for RMSNorm
    dgrad      see kernels/layer_norm.py                  -> dX        [C, hidden]
    wgrad      sum over active rows, float32              -> dWeight, dBias [hidden]
    saved      x, weight, rstd and mean float32 [C], the count
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_not_negative, check_real
from ..kernels import layer_norm as layer_norm_kernel
from ..kernels.layer_norm import Statistics
from .operator import operator
from .rows import check_active_tokens, check_matrix, check_same, check_vector
from .validation import check_count_types, check_optional_tensors, check_tensors, refuse_double_backward

__all__ = ["layer_norm", "layer_norm_op", "rms_norm", "rms_norm_op"]


def _check(
    operation: str, x: Tensor, weight: Tensor, bias: Tensor | None, active_tokens: Tensor | None, shards: int
) -> None:
    check_matrix(operation, "x", x)
    check_vector(operation, "weight", weight, x)
    if bias is not None:
        check_same(operation, "bias", bias, weight)
    check_active_tokens(operation, x, active_tokens, shards)


@operator("layer_norm")
def layer_norm_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, active_tokens: Tensor | None = None, shards: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.triton_overlap.layer_norm``: the normalised rows, and float32 [C] rstd and mean of each."""
    check_not_negative("layer_norm", "eps", eps)
    _check("layer_norm", x, weight, bias, active_tokens, shards)
    out, statistics = layer_norm_kernel.launch(
        x, weight, bias, eps, centred=True, active_tokens=active_tokens, shards=shards
    )
    assert statistics.mean is not None
    return out, statistics.rstd, statistics.mean


@layer_norm_op.register_fake
def _layer_norm_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, active_tokens: Tensor | None = None, shards: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty((x.shape[0],), dtype=torch.float32)
    return x.new_empty(x.shape), rstd, torch.empty_like(rstd)


@operator("rms_norm")
def rms_norm_op(
    x: Tensor, weight: Tensor, eps: float, active_tokens: Tensor | None = None, shards: int = 1
) -> tuple[Tensor, Tensor]:
    """``torch.ops.triton_overlap.rms_norm``: the normalised rows, and float32 [C] rstd of each."""
    check_not_negative("rms_norm", "eps", eps)
    _check("rms_norm", x, weight, None, active_tokens, shards)
    out, statistics = layer_norm_kernel.launch(
        x, weight, None, eps, centred=False, active_tokens=active_tokens, shards=shards
    )
    return out, statistics.rstd


@rms_norm_op.register_fake
def _rms_norm_fake(
    x: Tensor, weight: Tensor, eps: float, active_tokens: Tensor | None = None, shards: int = 1
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((x.shape[0],), dtype=torch.float32)


@operator("norm_backward")
def norm_backward_op(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    wanted: list[bool],
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.triton_overlap.norm_backward``: gradients of x, weight and bias, each empty unless ``wanted``.

    ``mean`` is None for RMSNorm.
    """
    check_same("norm_backward", "grad", grad, x)
    statistics = Statistics(rstd, mean)
    wants_x, wants_weight, wants_bias = wanted
    x_grad, weight_grad, bias_grad = x.new_empty(0), weight.new_empty(0), weight.new_empty(0)
    if wants_x:
        x_grad = layer_norm_kernel.launch_input_gradient(grad, x, weight, statistics, active_tokens, shards)
    if wants_weight or wants_bias:
        weight_sum, bias_sum = layer_norm_kernel.launch_parameter_gradient(
            grad, x, statistics, with_bias=wants_bias, active_tokens=active_tokens, shards=shards
        )
        if wants_weight:
            weight_grad = weight_sum.to(weight.dtype)
        if bias_sum is not None:
            bias_grad = bias_sum.to(weight.dtype)
    return x_grad, weight_grad, bias_grad


@norm_backward_op.register_fake
def _norm_backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    wanted: list[bool],
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    wants_x, wants_weight, wants_bias = wanted
    return (
        x.new_empty(x.shape if wants_x else 0),
        weight.new_empty(weight.shape if wants_weight else 0),
        weight.new_empty(weight.shape if wants_bias else 0),
    )


def _gradients(ctx: Any, grad: Tensor | None, wanted: list[bool]) -> list[Tensor | None]:
    if grad is None:
        return [None] * 3
    x, weight, rstd, mean, active_tokens = ctx.saved_tensors
    grads = torch.ops.triton_overlap.norm_backward(grad, x, weight, rstd, mean, wanted, active_tokens, ctx.shards)
    return [value if wants else None for value, wants in zip(grads, wanted, strict=True)]


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, _, active_tokens, ctx.shards = inputs
    _, rstd, mean = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd, mean)
    ctx.save_for_backward(x, weight, rstd, mean, active_tokens)


def _layer_norm_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_double_backward("layer_norm")
    return (*_gradients(ctx, grad, list(ctx.needs_input_grad[:3])), None, None, None)


layer_norm_op.register_autograd(_layer_norm_backward, setup_context=_layer_norm_setup)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, active_tokens, ctx.shards = inputs
    _, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, weight, rstd, None, active_tokens)


def _rms_norm_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_double_backward("rms_norm")
    x_grad, weight_grad, _bias_grad = _gradients(ctx, grad, [*ctx.needs_input_grad[:2], False])
    return x_grad, weight_grad, None, None, None


rms_norm_op.register_autograd(_rms_norm_backward, setup_context=_rms_norm_setup)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> Tensor:
    """LayerNorm over the active rows, as ``torch.nn.functional.layer_norm``, with statistics in float32.

    Differentiable once. The gradients of ``weight`` and ``bias`` are sums over the active rows in a fixed order, in
    float32: bitwise reproducible, and the same for every capacity.

    Args:
        x: [C, hidden], bfloat16, float16 or float32.
        weight: [hidden], in one of these dtypes, not necessarily that of ``x``.
        bias: [hidden] in the dtype of ``weight``, or None.
        eps: added to the variance.
        active_tokens: int32, one element on the device of ``x``: the count of tokens. All rows are active without it.
        shards: ranks that the tokens are split over, so that ``active_tokens // shards`` rows are active.

    Returns:
        [C, hidden] in the dtype of ``x``, fresh; rows past the active ones are uninitialised memory.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tensors("layer_norm", x=x, weight=weight)
    check_optional_tensors("layer_norm", bias=bias)
    check_real("layer_norm", "eps", eps)
    check_count_types("layer_norm", active_tokens, shards)
    out: Tensor = torch.ops.triton_overlap.layer_norm(x, weight, bias, eps, active_tokens, shards)[0]
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, active_tokens: Tensor | None = None, shards: int = 1
) -> Tensor:
    """RMSNorm over the active rows, as ``torch.nn.functional.rms_norm``, with statistics in float32.

    Everything as in ``layer_norm``, but for the bias; ``eps`` is added to the mean square.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tensors("rms_norm", x=x, weight=weight)
    check_real("rms_norm", "eps", eps)
    check_count_types("rms_norm", active_tokens, shards)
    out: Tensor = torch.ops.triton_overlap.rms_norm(x, weight, eps, active_tokens, shards)[0]
    return out
