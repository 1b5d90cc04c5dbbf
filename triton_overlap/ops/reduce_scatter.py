"""``reduce_scatter``: sum over the ranks and keep this rank's rows.

Shape ledger (W ranks, H the buffer's hidden size)
    x          [T, H]
    forward    reduce_scatter(x)                          -> out       [T/W, H]
    dgrad      gather(dOut)                               -> dX        [T, H], on the same buffer
    saved      the count where it is on the device: T then, of the rows that x and out have room for
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.user_buffers import Communicator, UserBuffer, user_buffer_by_handle
from ..kernels import reduce_scatter as reduce_scatter_kernel
from .operator import COMMUNICATES, operator
from .validation import (
    check_activation,
    check_count,
    check_optional_tensors,
    check_tensors,
    handle_of,
    refuse_double_backward,
    world_size_of,
)

__all__ = ["reduce_scatter", "reduce_scatter_op"]

_NAME = "reduce_scatter"


@operator("reduce_scatter", tags=COMMUNICATES)
def reduce_scatter_op(x: Tensor, buffer: str, active_tokens: Tensor | None = None) -> Tensor:
    """``torch.ops.triton_overlap.reduce_scatter``: ``x`` [T, H] -> [T/W, H], fresh, through the buffer with the handle
    ``buffer``."""
    user_buffer = user_buffer_by_handle(buffer)
    check_count(_NAME, user_buffer, active_tokens)
    check_activation(_NAME, user_buffer, "x", x, is_shard=False, is_hidden=True)
    return reduce_scatter_kernel.launch(user_buffer, x, active_tokens=active_tokens)


@reduce_scatter_op.register_fake
def _fake(x: Tensor, buffer: str, active_tokens: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0] // world_size_of(buffer), x.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.buffer, active_tokens = inputs
    ctx.save_for_backward(active_tokens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    refuse_double_backward(_NAME)
    return torch.ops.triton_overlap.all_gather(grad, ctx.buffer, *ctx.saved_tensors), None, None


reduce_scatter_op.register_autograd(_backward, setup_context=_setup_context)


def reduce_scatter(x: Tensor, *, buffer: UserBuffer | Communicator, active_tokens: Tensor | None = None) -> Tensor:
    """Sum over the ranks and keep this rank's rows: ``x`` [T, hidden] -> [T/W, hidden], in a fresh tensor.

    Collective: every rank of the buffer's group calls it with the same T and dtype. The sum is taken in float32 in a
    fixed order, so results are bitwise reproducible. Differentiable once: the gradient is every rank's rows, gathered.

    Args:
        x: [T, hidden], the buffer's dtype; T is divisible by W.
        buffer: a user buffer with room for T tokens.
        active_tokens: T on the device, for a buffer with ``device_count``; see docs/device_count.md.

    Raises:
        ActiveShapeError: the shape of ``x`` breaks a rule of the active shape.
        ClosedError: the buffer was closed.
        TypeError: an argument is of another type than its annotation says.
        ValueError: dtype, layout or device do not fit.
        CommError: the ranks disagree, or one did not arrive in time.
    """
    handle = handle_of(_NAME, buffer)
    check_tensors(_NAME, x=x)
    check_optional_tensors(_NAME, active_tokens=active_tokens)
    out: Tensor = torch.ops.triton_overlap.reduce_scatter(x, handle, active_tokens)
    return out
