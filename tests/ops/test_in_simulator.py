"""The operations under random schedules and late landing stores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops import error_bodies, use_bodies, value_bodies
from tests.ops.cases import DTYPES, Body, Sizes, in_simulator

TINY = Sizes(hidden=32, features=16, rows=(3, 1), max_rows=4)
ONE_COUNT = Sizes(hidden=16, features=16, rows=(2,), max_rows=3)


@pytest.mark.parametrize(
    "world_size, seed, sizes, dtype",
    (
        (2, 0, TINY, torch.float32),
        (2, 1, ONE_COUNT, torch.bfloat16),
        (2, 2, ONE_COUNT, torch.float16),
        pytest.param(3, 3, ONE_COUNT, torch.float32, marks=pytest.mark.long),
    ),
    ids=lambda value: None if isinstance(value, Sizes) else str(value),
)
def test_values(world_size: int, seed: int, sizes: Sizes, dtype: torch.dtype) -> None:
    in_simulator(world_size, seed, value_bodies.values, sizes, dtype)


@pytest.mark.parametrize("seed", (0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))))
@pytest.mark.parametrize("body", (use_bodies.microbatches, value_bodies.replicated), ids=lambda body: body.__name__)
def test_uses(body: Body, seed: int) -> None:
    in_simulator(2, seed, body, TINY, torch.float32)


def test_errors() -> None:
    in_simulator(2, 0, error_bodies.errors, TINY)


def _sizes() -> st.SearchStrategy[Sizes]:
    """Small, up and down within one capacity, aligned to 16 bytes or not."""
    return st.builds(
        Sizes,
        hidden=st.integers(8, 40),  # with fewer numbers, cancellation in one decides a relative error
        features=st.integers(8, 40),
        rows=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
        max_rows=st.integers(6, 8),
    )


@settings(max_examples=3)
@given(world_size=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), sizes=_sizes(), dtype=st.sampled_from(DTYPES))
def test_any_shape_and_schedule(world_size: int, seed: int, sizes: Sizes, dtype: torch.dtype) -> None:
    in_simulator(world_size, seed, value_bodies.products, sizes, dtype)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=200)
@given(
    world_size=st.sampled_from((1, 2, 3, 4, 8)),
    seed=st.integers(0, 2**32 - 1),
    sizes=_sizes(),
    dtype=st.sampled_from(DTYPES),
)
def test_campaign(world_size: int, seed: int, sizes: Sizes, dtype: torch.dtype) -> None:
    in_simulator(world_size, seed, value_bodies.products, sizes, dtype)
