"""Which layers are measured."""

from __future__ import annotations

import pytest
import torch

from triton_overlap.bench.problems import MODELS, layer_problems, layer_sizes, model_problems, random_problems
from triton_overlap.problems import OverlappedOperation

GATHER, REDUCE = OverlappedOperation.ALL_GATHER_MATMUL, OverlappedOperation.MATMUL_REDUCE_SCATTER


def test_both_operations_of_a_layer_at_every_count() -> None:
    found = layer_problems([4, 8], 16, 8, 2, torch.bfloat16)
    assert {(p.operation, p.tokens) for p in found} == {
        (operation, t) for operation in (GATHER, REDUCE) for t in (4, 8)
    }
    assert {(p.operation, p.n, p.k) for p in found} == {(GATHER, 8, 16), (REDUCE, 16, 8)}
    for problem in found:
        assert layer_sizes(problem) == (16, 8)
    with pytest.raises(ValueError, match="multiple of the 2 ranks, got 7"):
        layer_problems([4], 7, 8, 2, torch.bfloat16)


def test_the_layers_of_a_model() -> None:
    sizes = MODELS["llama3-8b"].sizes(2)
    # qkv, fc1, proj, fc2 of two ranks: 32 query and 8 key heads of 128, feed-forward part 14336.
    assert sizes[:4] == [(GATHER, 3072, 4096), (GATHER, 14336, 4096), (REDUCE, 4096, 2048), (REDUCE, 4096, 7168)]
    # Backward, the same weights from the other side.
    assert sizes[4:] == [(REDUCE, 4096, 3072), (REDUCE, 4096, 14336), (GATHER, 2048, 4096), (GATHER, 7168, 4096)]


def test_counts_of_models_begin_with_powers_of_two() -> None:
    problems = model_problems(["llama3-8b", "llama3-70b"], [96, 64, 128], 2, torch.bfloat16, backward=False)
    assert list(dict.fromkeys(problem.tokens for problem in problems)) == [64, 128, 96]
    assert len(problems) == len(set(problems)) == 3 * 8


def test_random_counts_go_from_model_to_model() -> None:
    problems = random_problems(["llama3-8b", "llama3-70b"], 5, 64, 2, torch.bfloat16, seed=0)
    assert len(problems) == 5 * 4
    assert all(problem.tokens % 2 == 0 and 2 <= problem.tokens <= 64 for problem in problems)
    assert [problem.k for problem in problems[::4]] == [4096, 8192, 4096, 8192, 4096]  # of qkv
    assert problems == random_problems(["llama3-8b", "llama3-70b"], 5, 64, 2, torch.bfloat16, seed=0)
    assert problems != random_problems(["llama3-8b", "llama3-70b"], 5, 64, 2, torch.bfloat16, seed=1)
