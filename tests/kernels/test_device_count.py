"""Token counts on the device: the same kernels, told T by a scalar that only they read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_overlap as to
from tests.distributed import Ranks
from tests.kernels import count_bodies
from tests.kernels.count_bodies import Problem
from tests.ops.cases import on_ranks

ALIGNED = Problem(rows=32, k=48, n=40, dtype=torch.bfloat16)
ODD = Problem(rows=5, k=13, n=7, dtype=torch.float32)
FULL_GPU = Problem(rows=1024, k=2048, n=1536, dtype=torch.bfloat16)
ODD_GPU = Problem(rows=300, k=333, n=251, dtype=torch.float32)


@pytest.mark.parametrize("world_size", (1, 2, pytest.param(3, marks=pytest.mark.long)))
def test_values_in_simulator(world_size: int) -> None:
    to.sim.World(world_size, seed=world_size).run(lambda group: count_bodies.values(group, ALIGNED, [32, 1, 7]))


@settings(deadline=None, max_examples=3)
@given(
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=2),
)
def test_any_counts_and_schedule(world_size: int, seed: int, rows: list[int]) -> None:
    to.sim.World(world_size, seed=seed).run(lambda group: count_bodies.values(group, ODD, rows))


@pytest.mark.parametrize(
    "ranks, body",
    (
        (1, count_bodies.broken_rules),
        (1, count_bodies.modes),
        (2, count_bodies.broken_rules),
        (2, count_bodies.disagreement),
        (2, count_bodies.modes),
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_errors(ranks: int, body: Callable[..., None]) -> None:
    on_ranks(ranks, body)


def test_errors_in_simulator() -> None:
    to.sim.World(2, seed=1).run(lambda group: count_bodies.broken_rules(group, 2))


def test_epochs_wrap() -> None:
    to.sim.World(2, seed=2).run(count_bodies.wrapped_epochs)


def test_failed_outputs_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what tests make NaN is as zero here
    to.sim.World(2, seed=3).run(count_bodies.failed_outputs)


@pytest.mark.parametrize("problem", (ALIGNED, ODD), ids=("aligned", "unaligned"))
def test_values_on_rank_processes(problem: Problem) -> None:
    on_ranks(Ranks(2), count_bodies.values, problem, [problem.rows, 1, 3])


def _counts(problem: Problem, number: int) -> list[int]:
    rows = torch.randint(1, problem.rows + 1, (number,), generator=torch.Generator().manual_seed(number)).tolist()
    return [problem.rows, 1, 127, *rows]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", (FULL_GPU, ODD_GPU), ids=("aligned", "unaligned"))
def test_graph(gpu_ranks: Ranks, problem: Problem) -> None:
    on_ranks(gpu_ranks, count_bodies.graph, problem, _counts(problem, 50 if gpu_ranks.world_size == 2 else 10))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "body",
    (
        count_bodies.broken_rules,
        count_bodies.disagreement,
        count_bodies.modes,
        count_bodies.graph_survives_recovery,
    ),
    ids=lambda body: body.__name__,
)
def test_errors_on_gpus(gpu_ranks: Ranks, body: Callable[..., None]) -> None:
    on_ranks(gpu_ranks, body)
