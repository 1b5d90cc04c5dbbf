"""A problem's inputs and reference, against the naive twins."""

from __future__ import annotations

import pytest
import torch

from triton_overlap import reference
from triton_overlap.problems import OverlappedOperation, Problem

CPU = torch.device("cpu")


def problem(operation: OverlappedOperation, world_size: int = 2) -> Problem:
    return Problem(operation, tokens=12, n=10, k=24, world_size=world_size, dtype=torch.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("operation", OverlappedOperation)
def test_the_reference_is_the_naive_twin(operation: OverlappedOperation, world_size: int) -> None:
    given = problem(operation, world_size)
    operands = [given.operands(rank, 5, CPU) for rank in range(world_size)]
    a, b = ([pair[i].double() for pair in operands] for i in range(2))
    expected = getattr(reference, operation.value)(a, b)
    for rank in range(world_size):
        found = given.reference(rank, 5, CPU)
        assert tuple(found.shape) == given.out_shape
        torch.testing.assert_close(found, expected[rank])


@pytest.mark.parametrize("operation", OverlappedOperation)
def test_a_gemm_without_communication_has_its_own_reference(operation: OverlappedOperation) -> None:
    given = problem(operation)
    inputs = given.inputs(1, 5, CPU)
    found = given.reference(1, 5, CPU, communicates=False)
    torch.testing.assert_close(found, inputs.gathered.double() @ inputs.b.double())
    assert given.tokens * given.k * given.n == inputs.gathered.numel() * inputs.b.shape[1]


@pytest.mark.parametrize("operation", OverlappedOperation)
def test_ranks_and_sets_differ_and_the_weight_is_transposed(operation: OverlappedOperation) -> None:
    given = problem(operation)
    first = given.inputs(0, 0, CPU)
    assert not torch.equal(first.a, given.inputs(1, 0, CPU).a)
    assert not torch.equal(first.a, given.inputs(0, 1, CPU).a)
    assert first.b.t().is_contiguous()
    assert tuple(first.a.shape) == given.a_shape
    assert tuple(first.b.shape) == given.b_shape


def test_link_bytes_are_what_a_rank_sends() -> None:
    # 3 ranks, chunks of 4 rows to 2 peers, 4 bytes an element; K 24 or N 10 columns travel.
    assert problem(OverlappedOperation.ALL_GATHER_MATMUL, 3).link_bytes == 2 * 4 * 24 * 4
    assert problem(OverlappedOperation.MATMUL_REDUCE_SCATTER, 3).link_bytes == 2 * 4 * 10 * 4
    assert problem(OverlappedOperation.MATMUL_ALL_REDUCE, 3).link_bytes == 2 * 2 * 4 * 10 * 4


def test_input_sets_do_not_fit_into_the_cache() -> None:
    given = problem(OverlappedOperation.ALL_GATHER_MATMUL)
    for cache_bytes in (0, 1000, 10_000):
        sets = given.num_input_sets(cache_bytes)
        assert sets >= 2
        assert (sets - 1) * given.input_bytes >= 2 * cache_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 7}, "multiple of the 2 ranks, got 7"),
        ({"operation": "matmul"}, "one of all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, got 'matmul'"),
        ({"n": 0}, "at least 1, got tokens 12, n 0"),
        ({"dtype": torch.float64}, "got torch.float64"),
    ],
)
def test_what_no_problem_can_be(changes: dict[str, object], words: str) -> None:
    arguments = {"operation": "all_gather_matmul", "tokens": 12, "n": 8, "k": 8, "world_size": 2, **changes}
    with pytest.raises(ValueError, match=words):
        Problem(**arguments)  # type: ignore[arg-type]


def test_an_operation_may_be_given_by_name() -> None:
    assert Problem("matmul_all_reduce", 12, 8, 8, 2) == Problem(OverlappedOperation.MATMUL_ALL_REDUCE, 12, 8, 8, 2)
