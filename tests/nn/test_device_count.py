"""Whole modules with a token count on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed import Ranks
from tests.nn import count_bodies
from tests.nn.cases import Case
from tests.nn.plain import Shape
from tests.ops.cases import in_simulator, on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
CPU = Case(Shape(hidden=32, heads=8, kv_heads=4, head_dim=8, ffn=48), tokens=(11, 1, 16), capacity=16)
TINY = Case(Shape(hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16), tokens=(5, 1), capacity=8)
GPU = Case(
    Shape(hidden=1536, heads=32, kv_heads=32, head_dim=48, ffn=6144), tokens=(2048, 1, 1000, 1929), capacity=2048
)
LLAMA: dict[str, Any] = {"rms": True, "activation": "swiglu", "bias": False, "rotary": True}


def _with(case: Case, **shape: Any) -> Case:
    return replace(case, shape=replace(case.shape, **shape))


@pytest.mark.parametrize(
    "part, shape", (("mlp", {}), ("attention", {"rotary": True}), ("stack", LLAMA)), ids=("mlp", "attention", "llama")
)
def test_values(part: str, shape: dict[str, Any]) -> None:
    on_ranks(2, count_bodies.values, _with(CPU, **shape), FP32, part)


def test_two_byte_dtype() -> None:
    on_ranks(2, count_bodies.values, CPU, torch.float16, "layer")


@pytest.mark.parametrize("part", ("mlp", pytest.param("layer", marks=pytest.mark.long)))
def test_in_simulator(part: str) -> None:
    in_simulator(2, 5, count_bodies.values, _with(TINY, **LLAMA), FP32, part)


@pytest.mark.parametrize("normalized", (False, True), ids=("linear", "layernorm_linear"))
def test_whole_layer(normalized: bool) -> None:
    on_ranks(2, count_bodies.whole_layer, normalized)


def test_autocast() -> None:
    on_ranks(2, count_bodies.autocast)


def test_registered_when_built() -> None:
    on_ranks(2, count_bodies.registered_when_built)


def test_refusals() -> None:
    on_ranks(2, count_bodies.refusals)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "part, shape, dtype",
    (("mlp", {}, BF16), ("layer", {**LLAMA, "kv_heads": 8}, BF16), ("stack", {}, BF16)),
    ids=("mlp", "llama", "stack"),
)
def test_graph(gpu_ranks: Ranks, part: str, shape: dict[str, Any], dtype: torch.dtype) -> None:
    replays = 50 if gpu_ranks.world_size == 2 and part == "mlp" else 8
    on_ranks(gpu_ranks, count_bodies.graph, _with(GPU, **shape), dtype, part, replays)
