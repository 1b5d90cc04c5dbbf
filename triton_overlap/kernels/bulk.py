"""Bulk overlap: a collective of one tensor beside a GEMM that does not depend on it.

Shapes, T tokens over W ranks, chunk r being rows ``[r*T/W, (r+1)*T/W)``::

    all-gather       x [T/W, hidden]   ->   gathered [T, hidden]    beside   a [M, K] @ b [K, N] -> [M, N]
    reduce-scatter   x [T, hidden]     ->   part [T/W, hidden]      beside   a [M, K] @ b [K, N] -> [M, N], or others

The GEMM is torch's, on the calling stream. Rows travel by the copy engine, or by a few programs on the side stream,
which add the parts of a reduce-scatter as well. M, K and N are each rank's own business.

Lower bound: the larger of the GEMM alone and of (W-1)/W * T * hidden elements over the link.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..comm.signals import HeaderOperation
from ..comm.user_buffers import UserBuffer
from .methods import Method
from .operands import contiguous_rows
from .steps import multiply_into, stepped_call


def all_gather(
    buffer: UserBuffer,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    method: Method,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gathered rows [T, hidden] and ``a @ b + bias`` [M, N], both fresh.

    Args:
        buffer: symmetric memory with the hidden size and the dtype of ``x``.
        x: [T/W, hidden].
        a: [M, K], of any dtype that torch multiplies.
        b: [K, N].
        bias: [N] or None.
        method: bulk with its options.
    """
    rank, world_size = buffer.group.rank, buffer.group.world_size
    x = contiguous_rows(x)
    rows, hidden = x.shape
    gathered = x.new_empty((rows * world_size, hidden))
    product = a.new_empty((a.shape[0], b.shape[1]))
    with stepped_call(buffer, rows, (HeaderOperation.ALL_GATHER, 0, hidden), method, [gathered]) as steps:
        # Before the GEMM, and before the wait: see steps.py.
        steps.send(x, 1, world_size - 1, chunked=False)
        gathered[rank * rows : (rank + 1) * rows].copy_(x)
        multiply_into(product, a, b, bias)
        steps.wait_for(0, world_size)
        slot = buffer.gathered(rows * world_size)
        for others in (slice(0, rank * rows), slice((rank + 1) * rows, None)):
            gathered[others].copy_(slot[others])
    return gathered, product


def reduce_scatter(
    buffer: UserBuffer,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    method: Method,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's chunk [T/W, hidden] of the sum of ``x`` over the ranks, and ``a @ b + bias`` [M, N], both fresh.

    The sum is taken in fp32 in a fixed order.

    Args:
        buffer: symmetric memory with the hidden size and the dtype of ``x``.
        x: [T, hidden].
        a: [M, K], of any dtype that torch multiplies.
        b: [K, N].
        bias: [N] or None.
        method: bulk with its options.
    """
    product = a.new_empty((a.shape[0], b.shape[1]))
    return reduce_scatter_beside(buffer, x, partial(multiply_into, product, a, b, bias), method=method), product


def reduce_scatter_beside(
    buffer: UserBuffer, x: torch.Tensor, compute: Callable[[], object], *, method: Method
) -> torch.Tensor:
    """This rank's chunk [T/W, hidden] of the sum of ``x`` [T, hidden], beside what ``compute`` launches on the calling
    stream. The sum is taken in fp32 in a fixed order."""
    world_size = buffer.group.world_size
    x = contiguous_rows(x)
    tokens, hidden = x.shape
    rows = tokens // world_size
    out = x.new_empty((rows, hidden))
    with stepped_call(buffer, rows, (HeaderOperation.REDUCE_SCATTER, 0, hidden), method, [out]) as steps:
        steps.send(x, 1, world_size - 1, chunked=True)
        if world_size == 1:
            out.copy_(x)
        else:
            with steps.aside():
                steps.reduce(x, out, num_programs=steps.num_sm)
        compute()
    return out
