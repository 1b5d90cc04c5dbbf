"""Method ``auto``, ``tune`` and ``warm_up`` on rank processes and in the simulator."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import tuning_bodies
from tests.distributed import Ranks
from tests.ops import method_bodies
from tests.ops.cases import DTYPES, FULL_GPU, ODD_GPU, Sizes, in_simulator, on_ranks
from triton_overlap.kernels.choose import choices_of
from triton_overlap.tuning import default_candidates

#: Rows of both classes of the bodies' table, whose border is 8 rows a rank.
SIZES = Sizes(hidden=24, features=40, rows=(9, 2, 11), max_rows=11)
TINY = Sizes(hidden=16, features=24, rows=(9, 2), max_rows=11)


#: Tiles that end inside a chunk, and both senders.
GATHER = ["fused(use_ce=True,tiles=16x32x32x4x2)", "fused(use_ce=False,tiles=32x16x16x8x3)"]
REDUCE = ["fused(tiles=16x16x32x4x2)"]
GPU_GATHER = ["fused(use_ce=True,tiles=128x128x64x4x4)", "fused(use_ce=False,tiles=64x128x64x4x4)"]
GPU_REDUCE = ["fused(tiles=128x128x64x4x4)", "fused(tiles=256x128x64x8x3)"]
PIECES = Sizes(hidden=24, features=40, rows=(19, 1), max_rows=20)


def test_values_by_other_tiles_and_senders() -> None:
    on_ranks(2, method_bodies.values, PIECES, torch.bfloat16, GATHER, REDUCE)
    in_simulator(2, 0, method_bodies.once, TINY, torch.float32, GATHER, REDUCE)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", (FULL_GPU, ODD_GPU), ids=("aligned", "unaligned"))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_values_by_other_tiles_and_senders_on_gpus(gpu_ranks: Ranks, dtype: torch.dtype, sizes: Sizes) -> None:
    on_ranks(gpu_ranks, method_bodies.values, sizes, dtype, GPU_GATHER, GPU_REDUCE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_a_table_is_measured_on_gpus(dtype: torch.dtype) -> None:
    on_ranks(Ranks(2, "cuda"), tuning_bodies.tuned_by_default, FULL_GPU, dtype)


def test_a_table_is_measured_saved_and_followed(tmp_path: Path) -> None:
    tables = on_ranks(2, tuning_bodies.tuned, SIZES, str(tmp_path / "table.json"))
    assert tables[0] == tables[1]


@pytest.mark.parametrize("world_size, seed", ((2, 0), pytest.param(3, 1, marks=pytest.mark.long)))
def test_a_table_is_measured_in_the_simulator(world_size: int, seed: int) -> None:
    in_simulator(world_size, seed, tuning_bodies.tuned, TINY, None)


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_values_by_auto(dtype: torch.dtype) -> None:
    on_ranks(2, tuning_bodies.every_class, SIZES, dtype)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_values_by_auto_in_any_schedule(seed: int) -> None:
    in_simulator(2, seed, tuning_bodies.every_class, TINY, torch.float32)


def test_backward_chooses_for_its_own_product() -> None:
    on_ranks(2, tuning_bodies.backward_chooses, SIZES)
    in_simulator(3, 0, tuning_bodies.backward_chooses, TINY)


def test_warm_up_touches_every_choice() -> None:
    on_ranks(2, tuning_bodies.warmed_up, SIZES)


def test_auto_is_compiled_once_for_every_token_count() -> None:
    on_ranks(2, tuning_bodies.compiled, SIZES)


def test_several_b() -> None:
    on_ranks(2, tuning_bodies.several_b, SIZES)


def test_ranks_with_other_tiles_or_senders() -> None:
    in_simulator(3, 0, tuning_bodies.other_tiles, TINY)
    on_ranks(2, tuning_bodies.other_tiles, TINY)


def test_errors(tmp_path: Path) -> None:
    on_ranks(2, tuning_bodies.errors, SIZES, str(tmp_path))


def test_a_wrong_result_is_not_timed() -> None:
    for message in on_ranks(2, tuning_bodies.a_wrong_candidate, SIZES):
        assert "relative error over 1e-05: ring_exchange" in message
        assert "fused" not in message.partition("error over")[2]


def test_a_time_limit() -> None:
    assert on_ranks(2, tuning_bodies.too_little_time, TINY) == [1, 1]


def test_a_tie_goes_to_the_simpler() -> None:
    tuning_bodies.decision_prefers_the_simpler()


def test_without_a_process_group() -> None:
    in_simulator(2, 0, tuning_bodies.no_collectives, TINY)


def test_simpler_candidates_come_first_and_none_twice() -> None:
    for operation in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for dtype in DTYPES:
            found = default_candidates(operation, dtype)
            assert found[0] == "fused"
            assert found[-1] == "nccl"
            assert len(set(found)) == len(found)


def test_a_lookup_is_cheap() -> None:
    backend = SimpleNamespace(rank=0, world_size=2, copies=None, collectives=None)
    group: Any = SimpleNamespace(backend=backend, device_name="none", name="group", kept={})

    def lookup() -> None:
        choices_of(group).method("all_gather_matmul", torch.bfloat16, 4096, 8192, 1024)

    lookup()
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            lookup()
        best = min(best, time.perf_counter() - began)
    # About 0.5 us a lookup; the bound leaves room for a busy machine, and none for a search or a file.
    assert best / 1000 < 10e-6
