"""``cross_entropy`` over the active rows.

Shape ledger (C rows of room, of which T / shards are active; V classes)
    logits     [C, V]
    labels     [C]
    forward    scale * sum of -log softmax(logits)[label] -> loss      []
    backward   dLoss * scale * (softmax - one-hot)        -> dLogits   [C, V]
    saved      logits, labels, normalizers float32 [2, C] (of the softmax), scale float32 [], the count
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_choice, check_int
from ..kernels import cross_entropy as cross_entropy_kernel
from .operator import operator
from .rows import check_active_tokens, check_integers, check_matrix
from .validation import check_count_types, check_tensors, refuse_double_backward

__all__ = ["cross_entropy", "cross_entropy_op"]

_NAME = "cross_entropy"
_REDUCTIONS = ("mean", "sum")


@operator("cross_entropy")
def cross_entropy_op(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    reduction: str,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.triton_overlap.cross_entropy``: the loss, normalizers [2, C] and scale []."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    check_matrix(_NAME, "logits", logits, ("rows", "classes"))
    check_integers(_NAME, "labels", labels, logits, (torch.int64,), shape=logits.shape[:1])
    check_active_tokens(_NAME, logits, active_tokens, shards)
    return cross_entropy_kernel.launch(
        logits, labels, ignore_index, mean=reduction == "mean", active_tokens=active_tokens, shards=shards
    )


@cross_entropy_op.register_fake
def _fake(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    reduction: str,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    normalizers = logits.new_empty((2, logits.shape[0]), dtype=torch.float32)
    return normalizers.new_empty(()), normalizers, normalizers.new_empty(())


@operator("cross_entropy_backward")
def cross_entropy_backward_op(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    normalizers: Tensor,
    scale: Tensor,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> Tensor:
    """``torch.ops.triton_overlap.cross_entropy_backward``: the gradient of ``logits``, fresh."""
    return cross_entropy_kernel.launch_gradient(
        grad, logits, labels, ignore_index, normalizers, scale, active_tokens, shards
    )


@cross_entropy_backward_op.register_fake
def _backward_fake(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    normalizers: Tensor,
    scale: Tensor,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, ctx.ignore_index, _, active_tokens, ctx.shards = inputs
    _, normalizers, scale = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(normalizers, scale)
    ctx.save_for_backward(logits, labels, normalizers, scale, active_tokens)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_NAME)
    logits, labels, normalizers, scale, active_tokens = ctx.saved_tensors
    logits_grad: Tensor | None = None
    if grad is not None:
        logits_grad = torch.ops.triton_overlap.cross_entropy_backward(
            grad, logits, labels, ctx.ignore_index, normalizers, scale, active_tokens, ctx.shards
        )
    return logits_grad, None, None, None, None, None


cross_entropy_op.register_autograd(_backward, setup_context=_setup_context)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> Tensor:
    """Cross entropy of the active rows, as ``torch.nn.functional.cross_entropy``, computed in float32.

    Differentiable once. The sum over rows has a fixed order, so the loss is bitwise reproducible, and the same for
    every capacity. Where no label counts the loss and its gradient are 0, not NaN as in torch. A label that is neither
    a class nor ``ignore_index`` makes the loss NaN: nothing is read back to the host to raise an error from.

    Args:
        logits: [C, V], bfloat16, float16 or float32; any V.
        labels: int64 [C], from 0 to V - 1 or ``ignore_index``.
        ignore_index: label of rows that do not count.
        reduction: "mean" over the active labels that count, or "sum". Where the rows are split over ranks the mean is
            that of this rank's rows; for the mean of all, divide the sum of the ranks' sums by the labels of all.
        active_tokens: int32, one element on the device of ``logits``: the count of tokens. All rows are active without
            it.
        shards: ranks that the tokens are split over, so that ``active_tokens // shards`` rows are active.

    Returns:
        float32, no dimensions. Rows of the gradient past the active ones are uninitialised memory.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes, dtypes, devices or ``reduction`` do not fit.
    """
    check_tensors(_NAME, logits=logits, labels=labels)
    check_int(_NAME, "ignore_index", ignore_index)
    check_choice(_NAME, "reduction", reduction, _REDUCTIONS)
    check_count_types(_NAME, active_tokens, shards)
    loss: Tensor = torch.ops.triton_overlap.cross_entropy(
        logits, labels, ignore_index, reduction, active_tokens, shards
    )[0]
    return loss
