"""The operations on rank processes over shared memory."""

from __future__ import annotations

import pytest
import torch

from tests.ops import compiler_bodies, error_bodies, use_bodies, value_bodies
from tests.ops.cases import FULL_CPU, SMALL_CPU, Body, Sizes, on_ranks

#: Interpreted kernels cost about a tenth of a second of one core a call and rank, so only one case has all row counts.
TAILS = Sizes(hidden=48, features=40, rows=(129, 1), max_rows=129)
FEW = Sizes(hidden=32, features=40, rows=(2, 8), max_rows=8)


@pytest.mark.parametrize(
    "world_size, sizes, dtype",
    (
        (2, FULL_CPU, torch.float32),
        (2, TAILS, torch.bfloat16),
        (2, TAILS, torch.float16),
        (4, TAILS, torch.float32),
        (4, FEW, torch.bfloat16),
        pytest.param(4, FEW, torch.float16, marks=pytest.mark.long),
    ),
    ids=lambda value: None if isinstance(value, Sizes) else str(value),
)
def test_values(world_size: int, sizes: Sizes, dtype: torch.dtype) -> None:
    on_ranks(world_size, value_bodies.values, sizes, dtype)


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_without_sequence_parallelism(world_size: int) -> None:
    on_ranks(world_size, value_bodies.replicated, SMALL_CPU, torch.float32)


@pytest.mark.parametrize("body", use_bodies.USES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_uses(body: Body, dtype: torch.dtype) -> None:
    on_ranks(2, body, SMALL_CPU, dtype)


def test_autocast() -> None:
    on_ranks(2, use_bodies.autocast, SMALL_CPU)


@pytest.mark.parametrize("world_size", (1, 2))
def test_errors(world_size: int) -> None:
    on_ranks(world_size, error_bodies.errors, SMALL_CPU)


@pytest.mark.parametrize("world_size", (pytest.param(1, marks=pytest.mark.long), 2))
def test_opcheck(world_size: int) -> None:
    on_ranks(world_size, compiler_bodies.opcheck, SMALL_CPU)


def test_opcheck_of_counts_and_epilogues() -> None:
    on_ranks(2, compiler_bodies.opcheck_of_counts_and_epilogues, SMALL_CPU)


def test_compiled_for_every_token_count() -> None:
    on_ranks(2, compiler_bodies.compiled, SMALL_CPU, torch.float32)
