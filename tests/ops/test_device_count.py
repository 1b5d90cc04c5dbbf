"""Token counts on the device, through the operations and their gradients."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import Ranks
from tests.ops import count_bodies
from tests.ops.cases import DTYPES, FULL_GPU, ODD_GPU, Sizes, in_simulator, on_ranks

CPU = Sizes(hidden=48, features=40, rows=(33, 1, 5, 40), max_rows=40)
TINY = Sizes(hidden=16, features=24, rows=(3, 1), max_rows=4)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_values(dtype: torch.dtype) -> None:
    on_ranks(2, count_bodies.values, CPU, dtype)


@pytest.mark.parametrize("world_size", (2, pytest.param(3, marks=pytest.mark.long)))
def test_values_in_simulator(world_size: int) -> None:
    in_simulator(world_size, world_size, count_bodies.values, TINY, torch.float32)


def test_errors() -> None:
    on_ranks(2, count_bodies.errors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_on_gpus(gpu_ranks: Ranks, dtype: torch.dtype) -> None:
    on_ranks(gpu_ranks, count_bodies.values, FULL_GPU, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", (FULL_GPU, ODD_GPU), ids=("aligned", "unaligned"))
def test_graph(gpu_ranks: Ranks, sizes: Sizes) -> None:
    on_ranks(gpu_ranks, count_bodies.graph, sizes, torch.bfloat16, 50 if gpu_ranks.world_size == 2 else 5)


@pytest.mark.gpu
def test_errors_on_gpus(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, count_bodies.errors)
