"""``add`` and ``fork``: the two ends of a residual connection, over the active rows.

Shape ledger (C rows of room, of which T / shards are active)
    add        x, y [C, hidden]     forward  x + y           -> out [C, hidden]
                                    backward the gradient itself, for both
    fork       x [C, hidden]        forward  x itself, twice
                                    backward sum of the two gradients, an ``add``
    saved      the count
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import add as add_kernel
from .operator import operator
from .rows import check_active_tokens, check_matrix, check_same
from .validation import check_count_types, check_tensors

__all__ = ["add", "add_op", "fork"]

_NAME = "add"


@operator("add")
def add_op(x: Tensor, y: Tensor, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``torch.ops.triton_overlap.add``: the active rows of ``x`` + ``y``, fresh."""
    check_matrix(_NAME, "x", x)
    check_same(_NAME, "y", y, x)
    check_active_tokens(_NAME, x, active_tokens, shards)
    return add_kernel.launch(x, y, active_tokens, shards)


@add_op.register_fake
def _fake(x: Tensor, y: Tensor, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    return x.new_empty(x.shape)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return grad, grad, None, None


add_op.register_autograd(_backward)


class _Fork(torch.autograd.Function):
    """The same rows for two readers. An operator could not return its input without a copy; a Function can."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, active_tokens: Tensor | None, shards: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*([] if active_tokens is None else [active_tokens]))
        ctx.shards = shards
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        given = [grad for grad in grads if grad is not None]
        if len(given) < 2:
            return (given[0] if given else None), None, None
        active_tokens = ctx.saved_tensors[0] if ctx.saved_tensors else None
        return torch.ops.triton_overlap.add(*given, active_tokens, ctx.shards), None, None


def add(x: Tensor, y: Tensor, *, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``x + y`` over the active rows, as a residual connection adds.

    Args:
        x: [C, hidden], bfloat16, float16 or float32.
        y: of the shape and dtype of ``x``.
        active_tokens: int32, one element on the device of ``x``: the count of tokens. All rows are active without it.
        shards: ranks that the tokens are split over, so that ``active_tokens // shards`` rows are active.

    Returns:
        [C, hidden] in the dtype of ``x``, fresh; rows past the active ones are uninitialised memory.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tensors(_NAME, x=x, y=y)
    check_count_types(_NAME, active_tokens, shards)
    out: Tensor = torch.ops.triton_overlap.add(x, y, active_tokens, shards)
    return out


def fork(x: Tensor, *, active_tokens: Tensor | None = None, shards: int = 1) -> tuple[Tensor, Tensor]:
    """``x`` for two readers, whose gradients are added over the active rows alone.

    Without it autograd adds the gradients of two uses over all rows, active or not.

    Args:
        x: [C, hidden], bfloat16, float16 or float32.
        active_tokens: see ``add``.
        shards: see ``add``.

    Returns:
        Two views of ``x``.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tensors("fork", x=x)
    check_count_types("fork", active_tokens, shards)
    if not torch.compiler.is_compiling():  # no symbolic size gets a guard from checks; ``add`` checks in backward
        check_matrix("fork", "x", x)
        check_active_tokens("fork", x, active_tokens, shards)
    first, second = _Fork.apply(x, active_tokens, shards)
    return first, second
