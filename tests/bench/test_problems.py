"""A problem's inputs and reference, against the naive twins."""

from __future__ import annotations

import pytest
import torch

from triton_overlap import reference
from triton_overlap.bench.problems import Operation, Problem, tensor_parallel_problems

CPU = torch.device("cpu")


def problem(operation: Operation, world_size: int = 2) -> Problem:
    return Problem(operation, tokens=12, k=24, n=10, world_size=world_size, dtype=torch.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("operation", Operation)
def test_the_reference_is_the_naive_twin(operation: Operation, world_size: int) -> None:
    given = problem(operation, world_size)
    operands = [given.operands(rank, 5, CPU) for rank in range(world_size)]
    a, b = ([pair[i].double() for pair in operands] for i in range(2))
    expected = getattr(reference, operation.value)(a, b)
    for rank in range(world_size):
        found = given.reference(rank, 5, CPU)
        assert tuple(found.shape) == given.out_shape
        torch.testing.assert_close(found, expected[rank])


@pytest.mark.parametrize("operation", Operation)
def test_a_gemm_without_communication_has_its_own_reference(operation: Operation) -> None:
    given = problem(operation)
    inputs = given.inputs(1, 5, CPU)
    found = given.reference(1, 5, CPU, communicates=False)
    torch.testing.assert_close(found, inputs.gathered.double() @ inputs.b.double())
    assert 2 * given.tokens * given.k * given.n == 2 * inputs.gathered.numel() * inputs.b.shape[1]


@pytest.mark.parametrize("operation", Operation)
def test_ranks_and_sets_differ_and_the_weight_is_transposed(operation: Operation) -> None:
    given = problem(operation)
    first = given.inputs(0, 0, CPU)
    assert not torch.equal(first.a, given.inputs(1, 0, CPU).a)
    assert not torch.equal(first.a, given.inputs(0, 1, CPU).a)
    assert first.b.t().is_contiguous()
    assert tuple(first.a.shape) == given.a_shape
    assert tuple(first.b.shape) == given.b_shape


def test_link_bytes_are_what_a_rank_sends() -> None:
    # 3 ranks, chunks of 4 rows to 2 peers, 4 bytes an element; K 24 columns travel, or N * W = 30.
    assert problem(Operation.ALL_GATHER_MATMUL, 3).link_bytes == 2 * 4 * 24 * 4
    assert problem(Operation.MATMUL_REDUCE_SCATTER, 3).link_bytes == 2 * 4 * 30 * 4


def test_input_sets_do_not_fit_into_the_cache() -> None:
    given = problem(Operation.ALL_GATHER_MATMUL)
    for cache_bytes in (0, 1000, 10_000):
        sets = given.num_input_sets(cache_bytes)
        assert sets >= 2
        assert (sets - 1) * given.input_bytes >= 2 * cache_bytes


def test_sizes_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of the 2 ranks, got 7 and 8"):
        Problem(Operation.ALL_GATHER_MATMUL, 7, 8, 8, 2, torch.float32)


def test_both_operations_at_every_count() -> None:
    found = tensor_parallel_problems([4, 8], 16, 8, 2, torch.bfloat16)
    assert {(p.operation, p.tokens) for p in found} == {(operation, t) for operation in Operation for t in (4, 8)}
