"""Overlap flags, names and configurations of the modules: values, chosen methods, errors, and the faults to avoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed import Ranks, run_ranks
from tests.nn import overlap_bodies, use_bodies, value_bodies
from tests.nn.cases import BULK, ROW, RS_DGRAD, Case
from tests.nn.plain import Shape
from tests.ops.cases import Body, in_simulator, on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = Case(Shape(hidden=24, heads=4, kv_heads=4, head_dim=6, ffn=24), tokens=(7, 1, 12), capacity=12)
TINY = Case(Shape(hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16), tokens=(5, 2), capacity=6)
GPU = Case(
    Shape(hidden=1536, heads=32, kv_heads=32, head_dim=48, ffn=6144), tokens=(2048, 1, 1000, 1929), capacity=2048
)
#: Linear layers have as many features as columns, so that one set of buffers serves rows and columns.
GPU_SQUARE = replace(GPU, shape=replace(GPU.shape, ffn=1536))

RING: dict[str, Any] = {f"{name}_fprop": {"method": "ring_exchange"} for name in ("proj", "fc2")}
AGGREGATE: dict[str, Any] = {
    name: {"method": "ring_exchange", "aggregate": True}
    for name in ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
}
REDUCING: dict[str, Any] = {
    "qkv_dgrad": {"method": "ring_exchange"},
    "fc1_dgrad": {"method": "pipeline", "num_splits": 3},
}
COPIES: dict[str, Any] = {
    name: {"use_ce": True}
    for name in (
        "qkv_fprop",
        "fc1_fprop",
        "proj_dgrad",
        "fc2_dgrad",
        "qkv_dgrad",
        "qkv_wgrad",
        "fc1_dgrad",
        "fc1_wgrad",
    )
}

#: The rows of linear layers: configuration, mode, settings, normalisation.
LINEAR: dict[str, tuple[Any, ...]] = {
    "row": ({}, "row", {**ROW, "ub_name": "proj"}),
    "row-ring": ({**RING, **AGGREGATE}, "row", {**ROW, "ub_name": "fc2"}),
    "column-bulk": ({}, "column", {**BULK, "ub_name": "qkv"}),
    "column-bulk-copies": (COPIES, "column", {**BULK, "ub_name": "fc1"}),
    "column-rs": (REDUCING, "column", {**RS_DGRAD, "ub_name": "qkv"}),
    "column-rs-again": (REDUCING, "column", {**RS_DGRAD, "ub_name": "fc1", "save_gathered_input": False}),
    "norm-bulk": (AGGREGATE, "column", {**BULK, "ub_name": "fc1"}, "LayerNorm"),
    "norm-rs": (REDUCING, "column", {**RS_DGRAD, "ub_name": "fc1"}, "RMSNorm"),
}
ALL = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad")
RS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad")
#: The rows of blocks: configuration, flags.
BLOCKS: dict[str, tuple[Any, ...]] = {"bulk": ({}, ALL), "rs": ({**REDUCING, **RING}, RS)}
PARTS = ("mlp", "attention", "layer", "stack")
#: What runs by default; the long runs have every combination.
SAMPLE = {("norm-bulk", BF16), ("column-rs-again", FP32), ("row", FP16), ("mlp", "bulk"), ("stack", "rs")}


def _long_unless(sample: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=() if sample else pytest.mark.long)


LINEAR_CASES = [_long_unless((name, dtype) in SAMPLE, name, dtype) for name in LINEAR for dtype in (BF16, FP16, FP32)]
BLOCK_CASES = [_long_unless((part, kind) in SAMPLE, part, kind) for part in PARTS for kind in BLOCKS]


def _linear(ranks: Ranks | int, case: Case, name: str, dtype: torch.dtype) -> None:
    ub_cfgs, *args = LINEAR[name]
    on_ranks(ranks, overlap_bodies.configured, case, dtype, ub_cfgs, value_bodies.linear, *args)


def _block(ranks: Ranks | int, case: Case, part: str, kind: str, dtype: torch.dtype) -> None:
    ub_cfgs, flags = BLOCKS[kind]
    flagged = replace(case, flags=flags)
    on_ranks(ranks, overlap_bodies.configured, flagged, dtype, ub_cfgs, value_bodies.blocks, part)


@pytest.mark.parametrize("name, dtype", LINEAR_CASES, ids=str)
def test_linear(name: str, dtype: torch.dtype) -> None:
    _linear(2, CPU, name, dtype)


@pytest.mark.parametrize("part, kind", BLOCK_CASES)
def test_block(part: str, kind: str) -> None:
    _block(2, replace(CPU, shape=replace(CPU.shape, ffn=48)), part, kind, FP32)


@pytest.mark.long
@pytest.mark.parametrize("world_size", (3, 4))
@pytest.mark.parametrize("kind", BLOCKS)
def test_layer_of_other_group_sizes(world_size: int, kind: str) -> None:
    shape = replace(CPU.shape, heads=world_size, kv_heads=world_size, ffn=12 * world_size)
    _block(world_size, replace(CPU, shape=shape), "layer", kind, FP32)


@pytest.mark.parametrize("kind", ("bulk", _long_unless(False, "rs")))
def test_layer_with_and_without_overlap(kind: str) -> None:
    ub_cfgs, flags = BLOCKS[kind]
    case = replace(CPU, flags=flags)
    on_ranks(2, overlap_bodies.configured, case, FP32, ub_cfgs, overlap_bodies.against_no_overlap, "layer")


@pytest.mark.long
@pytest.mark.parametrize("kind", BLOCKS)
def test_modes(kind: str) -> None:
    ub_cfgs, flags = BLOCKS[kind]
    for body in (use_bodies.microbatches, use_bodies.recomputation):
        on_ranks(2, overlap_bodies.configured, replace(CPU, flags=flags), FP32, ub_cfgs, body)


def test_interleaved_microbatches() -> None:
    on_ranks(2, overlap_bodies.configured, CPU, FP32, {}, use_bodies.microbatches)


def test_main_grad() -> None:
    on_ranks(2, overlap_bodies.main_grad, CPU, BF16)


def test_active_shapes() -> None:
    on_ranks(2, overlap_bodies.active_shapes, TINY)


def test_memory_of_the_gathered_input() -> None:
    on_ranks(2, overlap_bodies.saved_memory, TINY)


@pytest.mark.parametrize("seed, name", ((0, "norm-bulk"), (1, "column-rs"), (2, "row")))
def test_linear_in_any_schedule(seed: int, name: str) -> None:
    ub_cfgs, *args = LINEAR[name]
    in_simulator(2, seed, overlap_bodies.configured, TINY, FP32, ub_cfgs, value_bodies.linear, *args)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", BLOCKS)
def test_layer_in_any_schedule(kind: str, seed: int) -> None:
    ub_cfgs, flags = BLOCKS[kind]
    case = replace(TINY, flags=flags)
    in_simulator(2, seed, overlap_bodies.configured, case, FP32, ub_cfgs, value_bodies.blocks, "layer")


# Faults of TransformerEngine's user buffers that these parts must not have. The one of two quantization modes is in
# tests/comm/test_user_buffers.py.


def test_fault_collectives_with_silent_limits() -> None:
    """Three ranks, one row each, fewer than 64 elements, and parts that divide nothing: all is computed."""
    case = Case(Shape(hidden=6, heads=3, kv_heads=3, head_dim=2, ffn=6), tokens=(3, 6), capacity=6)
    for name in ("column-bulk", "row"):
        _linear(3, case, name, FP32)


def test_fault_reductions_that_assume_bfloat16() -> None:
    """Sums over the ranks in float16 and float32, of gradients beside products and of outputs."""
    for dtype in (FP16, FP32):
        _linear(2, replace(CPU, tokens=(12,)), "column-bulk", dtype)


def test_fault_slots_that_rely_on_other_collectives() -> None:
    """Forward and backward of a bulk layer follow each other with nothing in between, in any schedule."""
    case = replace(TINY, shape=replace(TINY.shape, hidden=8, ffn=6))
    in_simulator(2, 3, overlap_bodies.main_grad, case, FP32)


def test_fault_overlap_that_is_off_under_no_grad_and_recompute() -> None:
    on_ranks(2, overlap_bodies.choices, TINY)


def test_fault_groups_of_neighbouring_ranks_alone_and_one_set_of_buffers() -> None:
    run_ranks(3, overlap_bodies.separated_groups, replace(TINY, shape=replace(TINY.shape, ffn=6)), FP32)


def test_fault_wrong_parallel_mode_gives_wrong_results() -> None:
    on_ranks(2, overlap_bodies.refusals, TINY)


# GPUs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_linear_on_gpus(gpu_ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    _linear(gpu_ranks, GPU_SQUARE, name, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("part", PARTS)
def test_block_on_gpus(gpu_ranks: Ranks, part: str, kind: str) -> None:
    _block(gpu_ranks, GPU, part, kind, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BLOCKS)
def test_layer_with_and_without_overlap_on_gpus(kind: str) -> None:
    ub_cfgs, flags = BLOCKS[kind]
    case = replace(GPU, flags=flags)
    ranks = Ranks(2, "cuda")
    on_ranks(ranks, overlap_bodies.configured, case, BF16, ub_cfgs, overlap_bodies.against_no_overlap, "layer")


@pytest.mark.gpu
def test_main_grad_on_gpus(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, overlap_bodies.main_grad, GPU, BF16)


@pytest.mark.gpu
def test_choices_on_gpus() -> None:
    on_ranks(Ranks(2, "cuda"), overlap_bodies.choices, replace(GPU, tokens=(64,), capacity=64))


@pytest.mark.parametrize(
    "body", (overlap_bodies.buffers_made_again, overlap_bodies.wrong_types), ids=lambda body: body.__name__
)
def test_buffers_made_again_and_wrong_types(body: Body) -> None:
    on_ranks(2, body)
