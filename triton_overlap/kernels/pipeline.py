"""Pipelined reduce-scatter: the rows of every chunk in parts; a part's reduce-scatter beside the next one's GEMM.

Shapes, T tokens over W ranks, chunk r being rows ``[r*T/W, (r+1)*T/W)``::

    a [T, K]   b [K, N]   ->   out [T/W, N]    one batched GEMM [W, part, K] @ [K, N] a part

A part is the same range of rows in every chunk, so each part is a reduce-scatter of its own, and the parts of the
output follow each other. Parts are made of whole pieces, the rows that share a flag, so that ranks need not agree on
their number; where a chunk has fewer pieces than parts were asked for, there are fewer parts. No rows are left over.

Example, two parts; the side stream runs beside the other::

    calling stream   GEMM 0    GEMM 1              close
    side stream                push 0     push 1   add 0    add 1

A part is pushed before the part before it is added: peers wait for a push, nobody for a sum.

Progress: ``add i`` waits for the peers' ``push i``, which on their streams stands behind their GEMM i and their
``add i-2``. By induction over i all of them end, also where both streams share one hardware queue, since the host
enqueues GEMM i, ``push i`` and ``add i-1`` in that order.

Lower bound: the larger of the GEMM alone and of (W-1)/W * T * N elements over the link, plus one part's transfer.
"""

from __future__ import annotations

import torch

from ..comm.signals import HeaderOperation
from ..comm.user_buffers import UserBuffer
from .methods import Method, part_of_pieces
from .operands import contiguous_rows
from .steps import multiply_into, staging, stepped_call

#: Parts where the caller does not say.
NUM_SPLITS = 4


def matmul_reduce_scatter(
    buffer: UserBuffer,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    method: Method,
) -> torch.Tensor:
    """This rank's chunk of ``sum over ranks of a @ b``, plus ``bias``, as a fresh [T/W, N] tensor.

    Partial sums are rounded to the buffer's dtype, and added in fp32 in a fixed order.

    Args:
        buffer: symmetric memory with hidden size N and the dtype of ``a``.
        a: [T, K].
        b: [K, N].
        bias: [N] or None; added once, after the reduction.
        method: pipeline with its options.
    """
    world_size = buffer.group.world_size
    a = contiguous_rows(a)
    tokens, k = a.shape
    n = b.shape[1]
    rows = tokens // world_size
    out = torch.empty(rows, n, dtype=a.dtype, device=a.device)
    with stepped_call(buffer, rows, (HeaderOperation.MATMUL_REDUCE_SCATTER, n, k), method, [out]) as steps:
        if world_size == 1:
            multiply_into(out, a, b, bias)
            return out
        partial = staging(buffer, tokens)
        factors = b.expand(world_size, k, n)
        before: tuple[int, int] | None = None
        for part in part_of_pieces(steps.pieces, method.num_splits or NUM_SPLITS):
            within = slice(part[0] * steps.rows_per_flag, part[1] * steps.rows_per_flag)
            _multiply_part(
                partial.view(world_size, rows, n)[:, within], a.view(world_size, rows, k)[:, within], factors
            )
            with steps.aside():
                steps.push(partial, 1, world_size - 1, chunked=True, part=part)
                if before is not None:
                    steps.reduce(partial, out, bias, part=before, num_programs=steps.num_sm)
            before = part
        with steps.aside():
            steps.reduce(partial, out, bias, part=before, num_programs=steps.num_sm)
    return out


def _multiply_part(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out[r] = a[r] @ b[r]`` for the rows of one part of every chunk."""
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        torch.bmm(a, b, out=out)
