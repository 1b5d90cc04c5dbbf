"""Ring exchange: chunk by chunk, the GEMM of one beside the transfer of the next.

Shapes, T tokens over W ranks, chunk r being rows ``[r*T/W, (r+1)*T/W)``::

    all-gather       x [T/W, K]   b [K, N]   ->   out [T, N]     W GEMMs [T/W, K] @ [K, N]
    reduce-scatter   a [T, K]     b [K, N]   ->   out [T/W, N]   W GEMMs [T/W, K] @ [K, N], then a sum over W chunks

In step s of the all-gather a rank multiplies the chunk of the rank s steps after it, while its own chunk travels to the
rank s+1 steps before it, which multiplies it in its step s+1. Each step shifts the chunks by one more place of the
ring; nobody forwards what it received. On a switch that is the same traffic on the same links as passing chunks along
the ring, no transfer waits for another rank's, and a rank that failed cannot pass on what it never got.

With ``aggregate`` the chunks of a pair of ranks are multiplied together: half as many GEMMs of twice the rows, of which
the first waits for the partner's chunk.

Example, W 4, steps of rank 1::

    step              0      1        2        3
    multiplies chunk  1      2        3        0
    sends chunk 1 to  0      3        2        -
    aggregate         0, 1   2, 3                       sends to 0 (its partner), then 3, 2

The reduce-scatter runs the other way: in step s a rank computes its part of the chunk of the rank s+1 steps before it,
which goes straight to its owner; the own chunk comes last, then the sum.

Lower bound: the larger of the GEMM alone and of (W-1)/W * T * K (or N) elements over the link, plus one step's
transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.signals import HeaderOperation
from ..comm.user_buffers import UserBuffer
from .methods import Method, chunk_groups
from .operands import contiguous_rows
from .steps import multiply_into, staging, stepped_call


def all_gather_matmul(
    buffer: UserBuffer,
    x: torch.Tensor,
    bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    gather: bool = False,
    method: Method,
) -> list[torch.Tensor]:
    """``concat(x of every rank) @ b + bias`` for each b, fresh [T, N_i], then with ``gather`` the gathered rows [T, K].

    Args:
        buffer: symmetric memory with hidden size K and the dtype of ``x``.
        x: [T/W, K].
        bs: at least one [K, N_i]; each step multiplies by all of them.
        biases: [N_i] or None for each b.
        gather: return the gathered rows too.
        method: ring exchange with its options.
    """
    rank, world_size = buffer.group.rank, buffer.group.world_size
    x = contiguous_rows(x)
    rows, k = x.shape
    tokens = rows * world_size
    outs = [x.new_empty((tokens, n)) for n in (*(b.shape[1] for b in bs), *([k] if gather else []))]
    aggregate = bool(method.aggregate) and world_size > 1
    opening = (HeaderOperation.ALL_GATHER_MATMUL, bs[0].shape[1], k)
    with stepped_call(buffer, rows, opening, method, outs) as steps:
        gathered = buffer.gathered(tokens)
        # All transfers before all waits: where streams share a hardware queue, one behind a wait would never start.
        for first_step, count in _sending_order(rank, world_size, aggregate):
            steps.send(x, first_step, count, chunked=False)
        if gather or aggregate:
            gathered[rank * rows : (rank + 1) * rows].copy_(x)
        for first, last in chunk_groups(rank, world_size, aggregate):
            own = (first, last) == (rank, rank + 1)
            steps.wait_for(first, last)
            chunks = slice(first * rows, last * rows)
            for out, b, bias in zip(outs, bs, biases, strict=False):
                multiply_into(out[chunks], x if own else gathered[chunks], b, bias)
        if gather:
            outs[-1].copy_(gathered)
    return outs


def _sending_order(rank: int, world_size: int, aggregate: bool) -> list[tuple[int, int]]:
    """``(first_step, count)``: runs of ranks before this one that are sent to in turn. A partner that stands after this
    rank is W-1 steps before it, and comes first all the same."""
    if aggregate and rank % 2 == 0 and rank + 1 < world_size:
        return [(world_size - 1, 1), (1, world_size - 2)]
    return [(1, world_size - 1)]


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
        method: ring exchange with its options.
    """
    rank, world_size = buffer.group.rank, buffer.group.world_size
    tokens, k = a.shape
    n = b.shape[1]
    rows = tokens // world_size
    out = torch.empty(rows, n, dtype=a.dtype, device=a.device)
    opening = (HeaderOperation.MATMUL_REDUCE_SCATTER, n, k)
    with stepped_call(buffer, rows, opening, method, [out]) as steps:
        if world_size == 1:
            multiply_into(out, a, b, bias)
            return out
        partial = staging(buffer, tokens)
        for step in range(1, world_size + 1):
            owner = (rank - step) % world_size
            chunk = slice(owner * rows, (owner + 1) * rows)
            multiply_into(partial[chunk], a[chunk], b)
            if step < world_size:
                steps.send(partial, step, 1, chunked=True)
        # A grid that fills the GPU and waits must not stand in the way of pushes that peers wait for.
        steps.join()
        steps.reduce(partial, out, bias)
    return out
