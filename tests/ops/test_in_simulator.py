"""The operations under random schedules and late landing stores."""

from __future__ import annotations

import pytest
import torch

from tests.ops import bodies
from tests.ops.cases import Sizes, in_simulator

TINY = Sizes(hidden=32, features=16, rows=(3, 1), max_rows=4)
ONE_COUNT = Sizes(hidden=16, features=16, rows=(2,), max_rows=3)


@pytest.mark.parametrize(
    "world_size, seed, sizes, dtype",
    (
        (2, 0, TINY, torch.float32),
        (2, 1, ONE_COUNT, torch.bfloat16),
        (2, 2, ONE_COUNT, torch.float16),
        (3, 3, ONE_COUNT, torch.float32),
        (4, 4, ONE_COUNT, torch.float32),
    ),
    ids=lambda value: None if isinstance(value, Sizes) else str(value),
)
def test_values(world_size: int, seed: int, sizes: Sizes, dtype: torch.dtype) -> None:
    in_simulator(world_size, seed, bodies.values, sizes, dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("body", (bodies.microbatches, bodies.replicated), ids=lambda body: body.__name__)
def test_uses(body: bodies.Body, seed: int) -> None:
    in_simulator(2, seed, body, TINY, torch.float32)


def test_errors() -> None:
    in_simulator(2, 0, bodies.errors, TINY)
