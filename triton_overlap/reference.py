"""Naive torch twins of every operation, for tests and benchmarks only.

A twin sees the whole group at once: where an operation runs on every rank with that rank's tensor, its twin takes the
list of all ranks' tensors, in rank order, and returns the list of all ranks' results. Nothing here is fast, overlapped
or distributed. Everything is differentiable by plain autograd, so float64 inputs give reference gradients:
``torch.autograd.grad(outs, inputs, grad_outs)`` over all ranks at once is what the ranks' backward passes compute
together.

The token-wise operations see one rank's tensors, of active rows only: what stands past them has no effect to imitate.

Letters: W ranks, T tokens, K the contracted dimension, N output features of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .activations import ACTIVATIONS, GATED_ACTIVATIONS

__all__ = [
    "activation",
    "add",
    "all_gather",
    "all_gather_matmul",
    "column_sum",
    "cross_entropy",
    "ep_combine",
    "ep_dispatch",
    "gated_activation",
    "grouped_matmul",
    "layer_norm",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "relative_error",
    "replicated_matmul",
    "rms_norm",
    "rotary",
    "rotary_qkv",
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


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias``."""
    return _add_bias(a @ b, bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """``x`` [rows, hidden] less its row's mean, over its standard deviation, times ``weight`` plus ``bias``."""
    centred = x - x.mean(dim=1, keepdim=True)
    return _add_bias(centred * (centred.square().mean(dim=1, keepdim=True) + eps).rsqrt() * weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """``x`` [rows, hidden] over the root of its row's mean square, times ``weight`` [hidden]."""
    return x * (x.square().mean(dim=1, keepdim=True) + eps).rsqrt() * weight


def activation(x: Tensor, name: str) -> Tensor:
    """``f(x)`` for the activation ``name``."""
    return ACTIVATIONS[name](x)


def gated_activation(gate_up: Tensor, name: str) -> Tensor:
    """``f(gate) * up`` of ``gate_up`` [rows, 2 F], the gate first, for the gated activation ``name``."""
    gate, up = gate_up.chunk(2, dim=1)
    return GATED_ACTIVATIONS[name](gate) * up


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``."""
    return x + y


def rotary(x: Tensor, angles: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Feature pairs (i, i + R/2) of ``x`` [T, heads, D] as complex numbers, turned by the angles of their position.

    ``angles`` [positions, R]; ``cu_seqlens`` [documents + 1], where documents, and with them positions, start.
    """
    half = angles.shape[1] // 2
    lengths = cu_seqlens.diff().tolist()
    turns = torch.cat([angles[:length, :half] for length in lengths])[:, None, :].to(x.dtype)
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)


def rotary_qkv(qkv: Tensor, angles: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``qkv`` [T, G, H/G + 2, D] -> query [T, H, D] and key [T, G, D], turned if angles are given, value [T, G, D]."""
    query, key, value = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
    if angles is None:
        return query, key, value
    return rotary(query, angles, cu_seqlens), rotary(key, angles, cu_seqlens), value


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """Sum over rows of ``-log softmax(logits)[label]``, or its mean over the labels that count; 0 where none does."""
    counted = labels != ignore_index
    losses = -logits[counted].log_softmax(dim=1).gather(1, labels[counted, None])
    return losses.sum() / (max(1, int(counted.sum())) if reduction == "mean" else 1)


def ep_dispatch(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    num_experts: int,
    topk_weights: Sequence[Tensor] | None = None,
    expand: bool = False,
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """What every rank receives: rows, local experts [R, K] with -1 elsewhere, and their weights with 0 elsewhere.

    ``xs[r]`` [T_r, H], ``topk_idxs[r]`` [T_r, K], ``topk_weights[r]`` [T_r, K]. Rows are [R, H] in the order of source
    rank and token, or with ``expand`` one for each of their local experts, grouped by expert, without padding.
    """
    x, idx = torch.cat(list(xs)), torch.cat(list(topk_idxs))
    weights = None if topk_weights is None else torch.cat(list(topk_weights))
    results = []
    for rank in range(len(xs)):
        local, rows = _received(idx, num_experts // len(xs), rank)
        own = None if weights is None else torch.where(local[rows] >= 0, weights[rows], 0)
        order = _grouped(local[rows])[:, 0] if expand else slice(None)
        results.append((x[rows][order], local[rows], own))
    return results


def ep_combine(
    ys: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    num_experts: int,
    topk_weights: Sequence[Tensor] | None = None,
    biases: Sequence[Sequence[Tensor]] = (),
    expand: bool = False,
) -> list[Tensor]:
    """The sum, at each token's rank, of what the ranks made of it.

    ``ys[r]`` are rows as ``ep_dispatch`` gave them to rank r, ``topk_weights[r]`` [R, K] the weights that expanded rows
    are multiplied by, ``biases[i][r]`` [T_r, H].
    """
    idx = torch.cat(list(topk_idxs))
    total = ys[0].new_zeros(idx.shape[0], ys[0].shape[1])
    for bias in biases:
        total = total + torch.cat(list(bias))
    for rank, y in enumerate(ys):
        local, rows = _received(idx, num_experts // len(ys), rank)
        if expand:
            row, k = _grouped(local[rows]).unbind(1)
            y = y if topk_weights is None else y * topk_weights[rank][row, k, None].to(y.dtype)
            rows = rows[row]
        total = total.index_add(0, rows, y)
    return list(total.split([part.shape[0] for part in topk_idxs]))


def _received(idx: Tensor, experts: int, rank: int) -> tuple[Tensor, Tensor]:
    """Local experts of all tokens at ``rank``, -1 elsewhere, and the tokens that have any."""
    local = torch.where((idx >= rank * experts) & (idx < (rank + 1) * experts), idx - rank * experts, -1)
    return local, (local >= 0).any(dim=1).nonzero().flatten()


def _grouped(local: Tensor) -> Tensor:
    """[G, 2]: received row and k of each expanded row."""
    pairs = (local >= 0).nonzero()
    return pairs[local[pairs[:, 0], pairs[:, 1]].argsort(stable=True)]


def grouped_matmul(a: Tensor, b: Tensor, counts: Sequence[int], alignment: int = 1) -> Tensor:
    """``a`` [R, K] in groups, ``b`` [E, K, N]: group e times ``b[e]``, zeros in every row that is of no group."""
    out, start = a.new_zeros(a.shape[0], b.shape[2]), 0
    for count, right in zip(counts, b, strict=True):
        out = out.index_add(0, torch.arange(start, start + count, device=a.device), a[start : start + count] @ right)
        start += -(-count // alignment) * alignment
    return out


def column_sum(x: Tensor) -> Tensor:
    """``x`` [rows, N] -> [N]."""
    return x.sum(dim=0)


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
