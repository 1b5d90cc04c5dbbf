"""Activations and residuals inside the operations."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import Ranks
from tests.ops import epilogue_bodies
from tests.ops.cases import FULL_GPU, Body, Sizes, in_simulator, on_ranks

CPU = Sizes(hidden=32, features=24, rows=(5, 1, 8), max_rows=8)
TINY = Sizes(hidden=16, features=8, rows=(3,), max_rows=4)
BODIES = (epilogue_bodies.activations, epilogue_bodies.residuals, epilogue_bodies.saved, epilogue_bodies.counted)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_values(body: Body) -> None:
    on_ranks(2, body, CPU, torch.float32)


def test_two_byte_dtype() -> None:
    on_ranks(2, epilogue_bodies.activations, CPU, torch.bfloat16)


@pytest.mark.parametrize("body", BODIES[:2], ids=lambda body: body.__name__)
def test_other_methods(body: Body) -> None:
    on_ranks(2, body, TINY, torch.float32, "ring_exchange")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_in_simulator(body: Body) -> None:
    """Under random schedules."""
    in_simulator(2, 1, body, TINY, torch.float32)


def test_residuals_by_other_methods() -> None:
    for method in ("pipeline", "nccl", "auto"):
        on_ranks(2, epilogue_bodies.residuals, TINY, torch.float32, method)


def test_every_activation() -> None:
    in_simulator(2, 4, epilogue_bodies.names)


def test_errors() -> None:
    on_ranks(2, epilogue_bodies.errors)


@pytest.mark.gpu
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_values_on_gpus(gpu_ranks: Ranks, body: Body) -> None:
    on_ranks(gpu_ranks, body, FULL_GPU, torch.bfloat16)
