"""Collectives of the process group and torch's GEMM, one after the other: what the other methods are measured against.

Shapes, T tokens over W ranks::

    all-gather       x [T/W, K]   b [K, N]   ->   slot [T, K]   ->   out [T, N]
    reduce-scatter   a [T, K]     b [K, N]   ->   partial [T, N]   ->   out [T/W, N]

Each call still has its epoch and exchanges its header, so that ranks which disagree on the operation, the method or the
shapes learn of it from each other, and so that calls of other methods may precede and follow it on the buffer. Where
failures are raised at once (``check="sync"``), that is before the collective, which would hang; else the collective of
such a call ends only with the process group's own timeout, while the host reads the reason at its next call into the
library.

The sum over ranks is the communication library's: its order is fixed for a given group and size, its precision may be
the buffer's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.signals import HeaderOperation
from ..comm.user_buffers import UserBuffer
from .methods import Method
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

    Arguments as in ``ring_exchange.all_gather_matmul``.
    """
    x = contiguous_rows(x)
    rows, k = x.shape
    tokens = rows * buffer.group.world_size
    outs = [x.new_empty((tokens, n)) for n in (*(b.shape[1] for b in bs), *([k] if gather else []))]
    opening = (HeaderOperation.ALL_GATHER_MATMUL, bs[0].shape[1], k)
    with stepped_call(buffer, rows, opening, method, outs) as steps:
        steps.agree()
        # The slot is this rank's until its call two calls on, and peers write to it in calls of their own alone.
        gathered = outs[-1] if gather else buffer.gathered(tokens)
        collectives = buffer.group.backend.collectives
        if buffer.group.world_size == 1 or collectives is None:
            gathered.copy_(x)
        else:
            collectives.all_gather(gathered, x)
        for out, b, bias in zip(outs, bs, biases, strict=False):
            multiply_into(out, gathered, b, bias)
    return outs


def matmul_reduce_scatter(
    buffer: UserBuffer,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    method: Method,
) -> torch.Tensor:
    """This rank's chunk of ``sum over ranks of a @ b``, plus ``bias``, as a fresh [T/W, N] tensor.

    Arguments as in ``ring_exchange.matmul_reduce_scatter``.
    """
    world_size = buffer.group.world_size
    tokens, k = a.shape
    n = b.shape[1]
    rows = tokens // world_size
    out = a.new_empty((rows, n))
    with stepped_call(buffer, rows, (HeaderOperation.MATMUL_REDUCE_SCATTER, n, k), method, [out]) as steps:
        collectives = buffer.group.backend.collectives
        if world_size == 1 or collectives is None:
            multiply_into(out, a, b, bias)
            return out
        steps.agree()
        partial = staging(buffer, tokens)
        multiply_into(partial, a, b)
        collectives.reduce_scatter(out, partial)
        if bias is not None:
            out += bias
    return out
