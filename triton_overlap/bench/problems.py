"""Which problems are measured: one layer's, or those of the layers of models that people train.

``k`` and ``n`` of a layer are those of the all-gather GEMM; its reduce-scatter is the same work the other way round:

    all_gather_matmul      [T, k] @ [k, n]             a column-parallel layer
    matmul_reduce_scatter  [T, k/W] @ [k/W, n * W]     a row-parallel layer
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triton_overlap.problems import OverlappedOperation, Problem

_GATHER, _REDUCE = OverlappedOperation.ALL_GATHER_MATMUL, OverlappedOperation.MATMUL_REDUCE_SCATTER


def layer_problems(tokens: Sequence[int], k: int, n: int, world_size: int, dtype: torch.dtype) -> list[Problem]:
    """Both operations of a layer at every token count.

    Raises:
        ValueError: a size that the ranks do not divide.
    """
    if k % world_size:
        raise ValueError(f"k must be a multiple of the {world_size} ranks, got {k}")
    sizes = {_GATHER: (n, k), _REDUCE: (n * world_size, k // world_size)}
    return [Problem(operation, t, *size, world_size, dtype) for operation, size in sizes.items() for t in tokens]


def layer_sizes(problem: Problem) -> tuple[int, int]:
    """k and n of the layer that ``problem`` is of."""
    if problem.gathers:
        return problem.k, problem.n
    return problem.k * problem.world_size, problem.n // problem.world_size


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer with grouped queries and a gated feed-forward part.

    Attributes:
        hidden: of the model.
        queries: columns of all query heads.
        keys: columns of all key heads, and of all value heads.
        ffn: of the feed-forward part, without its gate.
        head: columns of a head.
    """

    hidden: int
    queries: int
    keys: int
    ffn: int
    head: int = 128

    def sizes(self, world_size: int) -> list[tuple[OverlappedOperation, int, int]]:
        """(operation, N, K) of a rank's GEMMs: those of qkv, fc1, proj and fc2 forward, then of their backward."""
        qkv, fc1 = (self.queries + 2 * self.keys) // world_size, 2 * self.ffn // world_size
        proj, fc2 = self.queries // world_size, self.ffn // world_size
        forward = [(_GATHER, n, self.hidden) for n in (qkv, fc1)] + [(_REDUCE, self.hidden, k) for k in (proj, fc2)]
        backward = [(_REDUCE, self.hidden, k) for k in (qkv, fc1)] + [(_GATHER, n, self.hidden) for n in (proj, fc2)]
        return forward + backward


MODELS = {
    "llama3-8b": Model(hidden=4096, queries=4096, keys=1024, ffn=14336),
    "llama3-70b": Model(hidden=8192, queries=8192, keys=1024, ffn=28672),
    "qwen2.5-32b": Model(hidden=5120, queries=5120, keys=1024, ffn=27648),
}
#: For smoke runs.
TINY = Model(hidden=32, queries=32, keys=16, ffn=48, head=8)


def model_problems(
    models: Sequence[str], tokens: Sequence[int], world_size: int, dtype: torch.dtype, *, backward: bool = True
) -> list[Problem]:
    """The GEMMs of ``models`` at every token count, each size once, one count after the other: powers of two first, so
    that a run cut short has an even grid."""
    sizes = [size for name in models for size in MODELS[name].sizes(world_size)[: None if backward else 4]]
    ordered = sorted(set(tokens), key=lambda t: (t & (t - 1) != 0, t))
    problems = [Problem(operation, t, n, k, world_size, dtype) for t in ordered for operation, n, k in sizes]
    return list(dict.fromkeys(problems))


def random_problems(
    models: Sequence[str], count: int, max_tokens: int, world_size: int, dtype: torch.dtype, seed: int
) -> list[Problem]:
    """The forward GEMMs of one model after the other, each at another random token count, ``count`` of these in all."""
    draw = random.Random(seed)
    problems = []
    for index in range(count):
        tokens = world_size * draw.randint(1, max_tokens // world_size)
        problems += model_problems([models[index % len(models)]], [tokens], world_size, dtype, backward=False)
    return list(dict.fromkeys(problems))
