"""Parallel linear layers on rank processes, in the simulator and on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import Ranks
from tests.nn import linear_bodies
from tests.ops.cases import FULL_GPU, SMALL_CPU, Body, Sizes, in_simulator, on_ranks

TINY = Sizes(hidden=16, features=8, rows=(3, 1), max_rows=4)
MEDIUM_CPU = Sizes(hidden=48, features=24, rows=(5, 33, 1, 64), max_rows=64)
#: Bodies, and what they take beside group and sizes.
CASES: list[tuple[Body, tuple[Any, ...]]] = [
    (linear_bodies.initialisation, (torch.float32,)),
    (linear_bodies.initialisation, (torch.bfloat16,)),
    (linear_bodies.shapes, ()),
    (linear_bodies.main_grad, (torch.float32,)),
    (linear_bodies.main_grad, (torch.bfloat16, False)),
    (linear_bodies.autocast, ()),
    (linear_bodies.autocast_on_meta, ()),
    (linear_bodies.module_protocol, ()),
]
BLOCKS: list[tuple[Any, ...]] = [
    (torch.float32, True, True),
    (torch.float32, False, True),
    (torch.bfloat16, True, True),
    (torch.float16, False, False),
]


def _name(value: Any) -> str | None:
    if callable(value) and not isinstance(value, torch.dtype):
        return str(value.__name__)
    return "-".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize("args", BLOCKS, ids=_name)
def test_block_of_2_ranks(args: tuple[Any, ...]) -> None:
    on_ranks(2, linear_bodies.block, MEDIUM_CPU, *args)


@pytest.mark.parametrize("world_size", (1, 4))
@pytest.mark.parametrize("sequence_parallel", (True, False))
def test_block(world_size: int, sequence_parallel: bool) -> None:
    on_ranks(world_size, linear_bodies.block, SMALL_CPU, torch.float32, sequence_parallel)


@pytest.mark.parametrize("body, args", CASES, ids=_name)
def test_on_rank_processes(body: Body, args: tuple[Any, ...]) -> None:
    on_ranks(2, body, SMALL_CPU, *args)


@pytest.mark.parametrize("sequence_parallel", (True, False))
def test_compiled(sequence_parallel: bool) -> None:
    on_ranks(2, linear_bodies.compiled, SMALL_CPU, sequence_parallel)


@pytest.mark.parametrize("seed", range(2))
def test_in_simulator(seed: int) -> None:
    in_simulator(2, seed, linear_bodies.block, TINY, torch.float32, bool(seed % 2))
    in_simulator(2, seed, linear_bodies.initialisation, TINY, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("args", BLOCKS, ids=_name)
def test_block_on_gpus(gpu_ranks: Ranks, args: tuple[Any, ...]) -> None:
    on_ranks(gpu_ranks, linear_bodies.block, FULL_GPU, *args)


@pytest.mark.gpu
@pytest.mark.parametrize("body, args", CASES, ids=_name)
def test_on_gpus(gpu_ranks: Ranks, body: Body, args: tuple[Any, ...]) -> None:
    on_ranks(gpu_ranks, body, FULL_GPU, *args)


@pytest.mark.gpu
@pytest.mark.parametrize("sequence_parallel", (True, False))
def test_compiled_on_gpus(sequence_parallel: bool) -> None:
    on_ranks(Ranks(2, "cuda"), linear_bodies.compiled, FULL_GPU, sequence_parallel)
