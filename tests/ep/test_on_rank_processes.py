"""Expert buffers on rank processes over shared memory: the matrix of settings that users of such buffers have."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.ep import bodies
from tests.ep.worlds import Case
from triton_overlap.comm.group import init_group

SMALL = {"min_tokens_per_part": 1, "channels_per_sm": 1}


def _in_group(name: str, *args: object) -> None:
    group = init_group(backend="shm", timeout_s=60.0)
    try:
        getattr(bodies, name)(group, *args)
    finally:
        group.close()


def on_ranks(case: Case, name: str, *args: object) -> None:
    run_ranks(case.world_size, _in_group, name, case, *args)


@pytest.mark.parametrize("scale_out, scale_up", [(1, 2), (2, 1)])
@pytest.mark.parametrize("alignment, fp8, num_biases", [(4, False, 0), (1, True, 1), (1, False, 2)])
def test_matrix(scale_out: int, scale_up: int, alignment: int, fp8: bool, num_biases: int) -> None:
    case = Case(scale_out, scale_up, hidden=32, settings=SMALL)
    on_ranks(case, "matrix", "direct", alignment, fp8, num_biases)


@pytest.mark.parametrize("scale_out, scale_up", [(2, 2), (4, 1), (1, 4)])
def test_four_ranks(scale_out: int, scale_up: int) -> None:
    on_ranks(Case(scale_out, scale_up, tokens=(6, 5, 4, 3)), "round_trips", "direct", (0, 1))


def test_counts_on_the_device() -> None:
    on_ranks(Case(2, 1), "without_cpu_sync", "direct")


@pytest.mark.parametrize("scale_out, scale_up", [(1, 2), (2, 1)])
def test_sizes_and_separate_partial_results(scale_out: int, scale_up: int) -> None:
    on_ranks(Case(scale_out, scale_up, hidden=32), "sizes")
    on_ranks(Case(scale_out, scale_up, topk=3), "separate", "direct")


def test_ordered_kernels() -> None:
    case = Case(2, 1, settings={**SMALL, "kernel": "ordered"})
    on_ranks(case, "round_trips", "direct", (0, 1))


@pytest.mark.parametrize("world_size", [1, 2])
def test_errors(world_size: int) -> None:
    on_ranks(Case(world_size, 1), "errors")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scale_out, scale_up", [(1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("alignment", [128, 1])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("num_biases", [0, 1, 2])
def test_whole_matrix(scale_out: int, scale_up: int, alignment: int, fp8: bool, num_biases: int) -> None:
    world_size = scale_out * scale_up
    case = Case(
        scale_out, scale_up, max_tokens=24, hidden=256, topk=6, experts_per_rank=4,
        tokens=tuple(24 - rank for rank in range(world_size)),
    )  # fmt: skip
    run_ranks(world_size, _in_group, "matrix", case, "direct", alignment, fp8, num_biases, timeout_s=900.0)
