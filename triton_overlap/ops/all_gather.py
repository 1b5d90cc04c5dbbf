"""``all_gather``: every rank's rows on every rank.

Shape ledger (W ranks, H the buffer's hidden size)
    x_shard    [T/W, H]
    forward    gather(x_shard)                            -> out       [T, H]
    dgrad      reduce_scatter(dOut)                       -> dX        [T/W, H], on the same buffer
    saved      the count where it is on the device: T then, of the rows that x_shard and out have room for
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.user_buffers import Communicator, UserBuffer, user_buffer_by_handle
from ..kernels import all_gather as all_gather_kernel
from ..kernels import gathered
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

__all__ = ["all_gather", "all_gather_op"]

_NAME = "all_gather"


@operator("all_gather", tags=COMMUNICATES)
def all_gather_op(x_shard: Tensor, buffer: str, active_tokens: Tensor | None = None) -> Tensor:
    """``torch.ops.triton_overlap.all_gather``: ``x_shard`` [T/W, H] -> [T, H], fresh, through the buffer with the
    handle ``buffer``."""
    user_buffer = user_buffer_by_handle(buffer)
    check_count(_NAME, user_buffer, active_tokens)
    tokens = check_activation(_NAME, user_buffer, "x_shard", x_shard, is_shard=True, is_hidden=True)
    all_gather_kernel.launch(user_buffer, x_shard, active_tokens=active_tokens)
    return gathered.launch(user_buffer, tokens, active_tokens)


@all_gather_op.register_fake
def _fake(x_shard: Tensor, buffer: str, active_tokens: Tensor | None = None) -> Tensor:
    return x_shard.new_empty((x_shard.shape[0] * world_size_of(buffer), x_shard.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.buffer, active_tokens = inputs
    ctx.save_for_backward(active_tokens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    refuse_double_backward(_NAME)
    return torch.ops.triton_overlap.reduce_scatter(grad, ctx.buffer, *ctx.saved_tensors), None, None


all_gather_op.register_autograd(_backward, setup_context=_setup_context)


def all_gather(x_shard: Tensor, *, buffer: UserBuffer | Communicator, active_tokens: Tensor | None = None) -> Tensor:
    """Gather every rank's rows: ``x_shard`` [T/W, hidden] -> [T, hidden], rank 0's rows first, in a fresh tensor.

    Collective: every rank of the buffer's group calls it with the same T and dtype. Differentiable once: the gradient
    is the ranks' sum of this rank's rows, a ``reduce_scatter``.

    Args:
        x_shard: [T/W, hidden], this rank's rows; the buffer's dtype.
        buffer: a user buffer with room for T tokens.
        active_tokens: T on the device, for a buffer with ``device_count``; see docs/device_count.md.

    Raises:
        ActiveShapeError: the shape of ``x_shard`` breaks a rule of the active shape.
        ClosedError: the buffer was closed.
        TypeError: an argument is of another type than its annotation says.
        ValueError: dtype, layout or device do not fit.
        CommError: the ranks disagree, or one did not arrive in time.
    """
    handle = handle_of(_NAME, buffer)
    check_tensors(_NAME, x_shard=x_shard)
    check_optional_tensors(_NAME, active_tokens=active_tokens)
    out: Tensor = torch.ops.triton_overlap.all_gather(x_shard, handle, active_tokens)
    return out
