"""The operations under random schedules and late landing stores."""

from __future__ import annotations

import pytest
import torch

from tests.ops import bodies
from tests.ops.cases import Sizes, in_simulator

TINY = Sizes(hidden=32, features=16, rows=(3, 1), max_rows=4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world_size", (2, 3))
def test_values(world_size: int, seed: int) -> None:
    in_simulator(world_size, seed, bodies.values, TINY, (torch.float32, torch.bfloat16, torch.float16)[seed % 3])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("body", (bodies.microbatches, bodies.replicated), ids=lambda body: body.__name__)
def test_uses(body: bodies.Body, seed: int) -> None:
    in_simulator(2, seed, body, TINY, torch.float32)


def test_errors() -> None:
    in_simulator(2, 0, bodies.errors, TINY)
