"""Differentiable dispatch and combine on rank processes, in the simulator and on GPUs."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.distributed import Ranks
from tests.ops import ep_bodies
from tests.ops.cases import in_simulator, on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("ranks", "dtype", "expand", "routing"),
    [
        (2, FP32, True, "usual"),
        (2, FP32, False, "masked"),
        (2, BF16, True, "nobody on rank 0"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in product((1, 2, 4), (BF16, FP16, FP32), (False, True), ep_bodies.ROUTINGS)
        ),
    ],
)
def test_values(ranks: int, dtype: torch.dtype, expand: bool, routing: str) -> None:
    on_ranks(ranks, ep_bodies.values, dtype, expand, routing)


def test_cached() -> None:
    on_ranks(2, ep_bodies.cached, FP32)


def test_errors() -> None:
    on_ranks(2, ep_bodies.errors)


@pytest.mark.long
def test_opcheck() -> None:
    on_ranks(2, ep_bodies.opcheck)


@pytest.mark.parametrize("cpu_sync", (True, pytest.param(False, marks=pytest.mark.long)))
def test_compiled_for_every_count(cpu_sync: bool) -> None:
    on_ranks(2, ep_bodies.compiled, cpu_sync)


def test_no_specialisation_for_a_count() -> None:
    on_ranks(2, ep_bodies.specialisations)


@pytest.mark.parametrize("seed", (0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))))
def test_in_the_simulator(seed: int) -> None:
    in_simulator(2, seed, ep_bodies.values, FP32, True, "usual")


@pytest.mark.gpu
@pytest.mark.parametrize("expand", (False, True))
@pytest.mark.parametrize("routing", ep_bodies.ROUTINGS)
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_values_on_gpus(gpu_ranks: Ranks, dtype: torch.dtype, expand: bool, routing: str) -> None:
    on_ranks(gpu_ranks, ep_bodies.values, dtype, expand, routing)


@pytest.mark.gpu
def test_uses_on_gpus(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, ep_bodies.cached, FP32)
    on_ranks(gpu_ranks, ep_bodies.specialisations)
    on_ranks(gpu_ranks, ep_bodies.graph)
    for cpu_sync in (True, False):
        on_ranks(gpu_ranks, ep_bodies.compiled, cpu_sync)
