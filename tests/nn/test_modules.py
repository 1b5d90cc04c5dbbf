"""Transformer modules on rank processes, in the simulator and on GPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Ranks, run_ranks
from tests.nn import state_bodies, use_bodies, value_bodies, wrapper_bodies
from tests.nn.cases import BULK, ROW, RS_DGRAD, Case
from tests.nn.plain import Shape
from tests.ops.cases import Body, in_simulator, on_ranks
from triton_overlap.nn import attention
from triton_overlap.nn.rotary import RotaryPositionEmbedding, apply_rotary

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = Case(Shape(hidden=32, heads=8, kv_heads=4, head_dim=8, ffn=48), tokens=(11, 1, 16), capacity=16)
TINY = Case(Shape(hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16), tokens=(5,), capacity=8)
GPU = Case(
    Shape(hidden=1536, heads=32, kv_heads=32, head_dim=48, ffn=6144), tokens=(2048, 1, 1000, 1929), capacity=2048
)

#: Linear layers: dtype, parallel mode, flags, normalisation.
LINEAR: list[tuple[Any, ...]] = [
    (BF16, "row", ROW),
    (BF16, "column", BULK),
    (BF16, "column", RS_DGRAD),
    (BF16, "column", BULK, "LayerNorm"),
    (BF16, "column", RS_DGRAD, "RMSNorm"),
    (FP32, None, {}, "LayerNorm"),
]
#: Blocks: dtype, part, changes to the shape, changes to the case.
LLAMA: dict[str, Any] = {"rms": True, "activation": "swiglu", "bias": False, "rotary": True}
RS_DGRAD_FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad")
BLOCKS: list[tuple[Any, ...]] = [
    (BF16, "mlp", {}, {}),
    (FP16, "mlp", {"rms": True, "activation": "swiglu"}, {"flags": RS_DGRAD_FLAGS}),
    (BF16, "attention", {"rotary": True}, {}),
    (FP32, "attention", {"causal": False}, {"flags": RS_DGRAD_FLAGS}),
    (BF16, "layer", {}, {}),
    (BF16, "layer", LLAMA, {"flags": RS_DGRAD_FLAGS}),
    (FP32, "layer", LLAMA, {}),
    (FP32, "layer", LLAMA, {"sequence_parallel": False}),
    (FP32, "layer", {"rotary": True}, {"batch": 2}),
    (BF16, "stack", LLAMA, {}),
    (FP32, "stack", {}, {"sequence_parallel": False, "flags": ()}),
]
#: Bodies that take ``(group, case, dtype)``.
MODES: tuple[Body, ...] = (use_bodies.microbatches, use_bodies.recomputation)
#: Bodies that take ``(group, case)``.
STATE: tuple[Body, ...] = (
    use_bodies.autocast,
    state_bodies.conversion,
    state_bodies.marks,
    state_bodies.replicated_gradients,
    state_bodies.settings,
)
#: Bodies that take a group.
WRAPPERS: tuple[Body, ...] = (wrapper_bodies.marked_whole, wrapper_bodies.replaced, wrapper_bodies.parametrized)
PACKED_LLAMA = replace(CPU, shape=replace(CPU.shape, **LLAMA))


def _name(value: Any) -> str:
    return "-".join(_part(part) for part in value if part not in ({}, None))


def _part(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(
            key.removeprefix("ub_") if item is True else f"{key}={_part(item)}" for key, item in value.items()
        )
    if isinstance(value, tuple):
        return ",".join(flag.removeprefix("ub_") for flag in value)
    return str(value).removeprefix("torch.")


def _run_block(ranks: Ranks | int, case: Case, args: tuple[Any, ...]) -> None:
    dtype, part, shape, changes = args
    on_ranks(ranks, value_bodies.blocks, replace(case, shape=replace(case.shape, **shape), **changes), dtype, part)


def test_rotation_of_part_of_a_head() -> None:
    """The first half of the features turns by its position; at position 0 and in the other half nothing changes."""
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    angles = RotaryPositionEmbedding(8, rotary_percent=0.5, rotary_base=100.0)(3).flatten(1, 2).double()
    out = apply_rotary(x, angles)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[..., 4:], x[..., 4:])
    for position in range(3):
        for i, angle in enumerate((position, position / 10)):
            a, b = x[position, :, i], x[position, :, i + 2]
            torch.testing.assert_close(
                out[position, :, i], a * math.cos(angle) - b * math.sin(angle), atol=1e-6, rtol=0
            )
            torch.testing.assert_close(
                out[position, :, i + 2], b * math.cos(angle) + a * math.sin(angle), atol=1e-6, rtol=0
            )
    assert torch.equal(RotaryPositionEmbedding(8)(2, offset=3), RotaryPositionEmbedding(8)(5)[3:])


@pytest.mark.parametrize("takes_groups", (True, False))
@pytest.mark.parametrize("causal", (True, False))
def test_variable_length_kernel_is_called_right(
    monkeypatch: pytest.MonkeyPatch, causal: bool, takes_groups: bool
) -> None:
    """With a stand-in for the GPU kernel, of newer releases of PyTorch and of those that know no grouped heads."""
    from torch.nn.attention import varlen

    calls = []

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        **grouped: bool,
    ) -> Tensor:
        assert grouped == ({"enable_gqa": True} if takes_groups else {})
        assert key.shape[1] == value.shape[1] == (2 if takes_groups else 4)
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        calls.append((max_q, max_k))
        return attention.packed_attention(
            query, key, value, cu_seq_q, max_seqlen=max_q, causal=window_size == (-1, 0), scale=scale
        )

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_kernel_takes_grouped_heads", lambda: takes_groups)
    query, key, value = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    cu_seqlens = torch.tensor([0, 4, 4, 9])
    expected = attention.packed_attention(query, key, value, cu_seqlens, max_seqlen=None, causal=causal, scale=0.3)
    for longest in (5, None):
        out = attention._variable_length_kernel(query, key, value, cu_seqlens, longest, causal, 0.3)
        torch.testing.assert_close(out, expected)
    assert calls == [(5, 5), (9, 9)]


@pytest.mark.parametrize("args", LINEAR, ids=_name)
def test_linear(args: tuple[Any, ...]) -> None:
    on_ranks(2, value_bodies.linear, CPU, *args)


@pytest.mark.parametrize("mode", ("column", "row"))
def test_linear_without_sequence_parallelism(mode: str) -> None:
    on_ranks(2, value_bodies.linear, replace(CPU, sequence_parallel=False), FP32, mode, {})


@pytest.mark.parametrize("args", BLOCKS, ids=_name)
def test_block(args: tuple[Any, ...]) -> None:
    _run_block(2, CPU, args)


@pytest.mark.parametrize(
    "world_size, case",
    (
        (1, CPU),
        (3, replace(CPU, tokens=(11, 1), shape=replace(CPU.shape, heads=6, kv_heads=3))),
        pytest.param(4, replace(CPU, tokens=(11, 16)), marks=pytest.mark.long),
    ),
    ids=("1", "3", "4"),
)
def test_layer_of_other_group_sizes(world_size: int, case: Case) -> None:
    _run_block(world_size, case, (FP32, "layer", LLAMA, {}))


@pytest.mark.parametrize("sequence_parallel", (True, False))
@pytest.mark.parametrize("body", MODES, ids=lambda body: body.__name__)
def test_modes(body: Body, sequence_parallel: bool) -> None:
    on_ranks(2, body, replace(PACKED_LLAMA, sequence_parallel=sequence_parallel), FP32)


@pytest.mark.parametrize("body", STATE, ids=lambda body: body.__name__)
def test_state(body: Body) -> None:
    on_ranks(2, body, CPU)


@pytest.mark.parametrize("body", WRAPPERS, ids=lambda body: body.__name__)
def test_replaced_parameters(body: Body) -> None:
    on_ranks(2, body)


@pytest.mark.long
@pytest.mark.parametrize("ranks", (2, 4))
def test_fully_sharded(ranks: int) -> None:
    run_ranks(ranks, wrapper_bodies.fully_sharded, 2)


def test_compiled() -> None:
    on_ranks(2, use_bodies.compiled, replace(PACKED_LLAMA, tokens=(12, 16, 7)), FP32)


@pytest.mark.long
def test_compiled_for_counts_that_stay_unknown() -> None:
    on_ranks(2, use_bodies.compiled, replace(PACKED_LLAMA, tokens=(12, 2, 16, 7)), FP32, True)


@pytest.mark.long
def test_compiled_at_50_counts() -> None:
    on_ranks(2, use_bodies.compiled, replace(PACKED_LLAMA, tokens=tuple(range(103, 3, -2)), capacity=104), FP32)


@pytest.mark.parametrize("seed", range(2))
def test_in_simulator(seed: int) -> None:
    in_simulator(2, seed, value_bodies.blocks, replace(TINY, shape=replace(TINY.shape, **LLAMA)), FP32, "layer")


@pytest.mark.gpu
@pytest.mark.parametrize("args", LINEAR, ids=_name)
def test_linear_on_gpus(gpu_ranks: Ranks, args: tuple[Any, ...]) -> None:
    on_ranks(gpu_ranks, value_bodies.linear, GPU, *args)


@pytest.mark.gpu
@pytest.mark.parametrize("args", [*BLOCKS, (BF16, "layer", {**LLAMA, "kv_heads": 8}, {})], ids=_name)
def test_block_on_gpus(gpu_ranks: Ranks, args: tuple[Any, ...]) -> None:
    _run_block(gpu_ranks, GPU, args)


@pytest.mark.gpu
@pytest.mark.parametrize("body", MODES, ids=lambda body: body.__name__)
def test_modes_on_gpus(gpu_ranks: Ranks, body: Body) -> None:
    on_ranks(gpu_ranks, body, replace(GPU, shape=replace(GPU.shape, **LLAMA)), FP32)


@pytest.mark.gpu
@pytest.mark.parametrize("body", STATE, ids=lambda body: body.__name__)
def test_state_on_gpus(body: Body) -> None:
    on_ranks(Ranks(2, "cuda"), body, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("body", WRAPPERS, ids=lambda body: body.__name__)
def test_replaced_parameters_on_gpus(body: Body, gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, body)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
def test_compiled_on_gpus(dtype: torch.dtype) -> None:
    on_ranks(Ranks(2, "cuda"), use_bodies.compiled, replace(GPU, shape=replace(GPU.shape, **LLAMA)), dtype)
