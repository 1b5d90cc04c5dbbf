"""Naive torch twins of every operation, for tests and benchmarks only.

A twin sees the whole group at once: where an operation runs on every rank with that rank's tensor, its twin takes the
list of all ranks' tensors, in rank order, and returns the list of all ranks' results. Nothing here is fast, overlapped
or distributed. Everything is differentiable by plain autograd, so float64 inputs give reference gradients:
``torch.autograd.grad(outs, inputs, grad_outs)`` over all ranks at once is what the ranks' backward passes compute
together.

Letters: W ranks, T tokens, K the contracted dimension, N output features of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "relative_error",
    "replicated_matmul",
    "weight_gradient",
]


def all_gather(x_shards: Sequence[Tensor]) -> list[Tensor]:
    """``x_shards[r]`` [T/W, hidden] of rank r -> a [T, hidden] for every rank, rank 0's rows first."""
    gathered = torch.cat(list(x_shards), dim=0)
    return [gathered.clone() for _ in x_shards]


def reduce_scatter(xs: Sequence[Tensor]) -> list[Tensor]:
    """``xs[r]`` [T, hidden] of rank r -> the sum's rows ``[r*T/W, (r+1)*T/W)`` for rank r."""
    return list(torch.stack(list(xs)).sum(dim=0).chunk(len(xs), dim=0))


def all_gather_matmul(
    a_shards: Sequence[Tensor], bs: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Rank r's result is ``gather(a_shards) @ bs[r] + biases[r]``: [T/W, K] and [K, N] -> [T, N].

    ``bs`` and ``biases`` hold one entry a rank; call it once for each of several b.
    """
    gathered = torch.cat(list(a_shards), dim=0)
    return [_add_bias(gathered @ b, bias) for b, bias in zip(bs, _or_none(biases, len(bs)), strict=True)]


def matmul_reduce_scatter(as_: Sequence[Tensor], bs: Sequence[Tensor], bias: Tensor | None = None) -> list[Tensor]:
    """Rank r's result is its T/W rows of ``sum over q of as_[q] @ bs[q]``, plus ``bias`` once.

    ``as_[q]`` [T, K], ``bs[q]`` [K, N], ``bias`` [N], the same for all ranks -> [T/W, N]. The sum over ranks runs in
    rank order and in the inputs' dtype, so give float32 or float64.
    """
    return list(_add_bias(_sum_of_products(as_, bs), bias).chunk(len(as_), dim=0))


def matmul_all_reduce(as_: Sequence[Tensor], bs: Sequence[Tensor], bias: Tensor | None = None) -> list[Tensor]:
    """Every rank's result is ``sum over q of as_[q] @ bs[q]``, plus ``bias`` once: [T, N].

    All results are one tensor: a gradient given for each would count W times, so differentiate one of them.
    """
    return [_add_bias(_sum_of_products(as_, bs), bias)] * len(as_)


def replicated_matmul(x: Tensor, bs: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> list[Tensor]:
    """Rank r's result is ``x @ bs[r] + biases[r]``, with ``x`` [T, K] the same on all ranks -> [T, N]."""
    return [_add_bias(x @ b, bias) for b, bias in zip(bs, _or_none(biases, len(bs)), strict=True)]


def weight_gradient(a: Tensor, g: Tensor, accumulate_into: Tensor | None = None) -> Tensor:
    """``a`` [T, K], ``g`` [T, N] -> ``a^T g`` [K, N], added to ``accumulate_into`` where given."""
    product = a.transpose(0, 1) @ g
    return product if accumulate_into is None else accumulate_into + product


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``, in float64 on the device of ``expected``.

    NaN or inf in either gives inf.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    expected64 = expected.detach().double()
    actual64 = actual.detach().to(device=expected.device, dtype=torch.float64)
    scale = expected64.norm().clamp(min=torch.finfo(torch.float64).tiny)
    error = float((actual64 - expected64).norm() / scale)
    return error if math.isfinite(error) else math.inf


def _or_none(values: Sequence[Tensor | None] | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if values is None else values


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _sum_of_products(as_: Sequence[Tensor], bs: Sequence[Tensor]) -> Tensor:
    total = as_[0] @ bs[0]
    for a, b in zip(as_[1:], bs[1:], strict=True):
        total = total + a @ b
    return total
