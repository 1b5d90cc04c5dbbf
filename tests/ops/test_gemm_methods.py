"""Methods by direction: their text, what configurations say in these terms, and backward passes by each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triton_overlap as to
from tests.distributed import Ranks
from tests.ops import backward_bodies
from tests.ops.backward_bodies import METHODS
from tests.ops.cases import FULL_GPU, SMALL_CPU, Sizes, in_simulator, on_ranks
from triton_overlap.comm.gemm_configs import APPLICABLE, gemm_configs
from triton_overlap.kernels.methods import Method, parse_for
from triton_overlap.ops.gemm_methods import GemmMethods, backward_operations, configured_method

ONE_COUNT = Sizes(hidden=32, features=24, rows=(5,), max_rows=8)
TINY = Sizes(hidden=16, features=16, rows=(3,), max_rows=4)


@pytest.mark.parametrize("methods", [GemmMethods("fused"), GemmMethods("nccl", "fused"), *METHODS], ids=str)
def test_text_is_read_back(methods: GemmMethods) -> None:
    assert GemmMethods.parse(str(methods)) == methods


def test_text_of_one_method_leaves_backward_to_follow_it() -> None:
    assert GemmMethods.parse("ring_exchange(aggregate=True)") == GemmMethods("ring_exchange(aggregate=True)")


@pytest.mark.parametrize(
    "text, words",
    [
        ("ring_exchange; bgrad=bulk", "got 'bgrad=bulk'"),
        ("fused; dgrad=bulk; dgrad=bulk", "got 'dgrad=bulk'"),
        ("fused; dgrad", "got 'dgrad'|unknown method ''"),
        ("fused; dgrad=telepathy", "unknown method 'telepathy'"),
        ("fused; dgrad=fused; wgrad=bulk", "nothing to reduce-scatter where dgrad 'fused' does it"),
    ],
)
def test_wrong_text(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GemmMethods.parse(text)


def test_methods_that_are_no_text() -> None:
    wrong: Any = 3
    for make, words in (
        (lambda: GemmMethods("fused", dgrad=wrong), "GemmMethods: dgrad must be a str or None, got 3; give the name"),
        (lambda: GemmMethods("fused", wgrad=wrong), "GemmMethods: wgrad must be a str or None, got 3"),
        (lambda: GemmMethods(wrong), "GemmMethods: fprop must be a str, got 3; .*known methods: fused, ring_exchange"),
        (lambda: Method(wrong), "a method's name must be a str, got 3; known methods: 'fused'"),
        (lambda: Method.parse(wrong), "a method must be text, got 3; give a name"),
    ):
        with pytest.raises(TypeError, match=words):
            make()


def test_products_that_know_one_method_alone() -> None:
    with pytest.raises(ValueError, match="communicates nothing, got wgrad 'bulk'"):
        list(backward_operations("matmul_reduce_scatter", GemmMethods("pipeline", wgrad="bulk")))
    with pytest.raises(ValueError, match="backward follows the one method"):
        list(backward_operations("matmul_all_reduce", GemmMethods("pipeline", dgrad="fused")))


def test_configured_methods_apply_to_what_the_gemm_does() -> None:
    """Every method that ``ub_cfgs`` allows, with every option, is one that the operation takes."""
    options = {"aggregate": True, "use_ce": False, "num_sm": 4, "num_splits": 3}
    for name, applicable in APPLICABLE.items():
        is_column, step = name.startswith(("qkv", "fc1")), name.split("_")[1]
        for method in applicable:
            text = configured_method(gemm_configs({name: {"method": method, **options}})[name])
            if step == "fprop":
                parse_for("all_gather_matmul" if is_column else "matmul_reduce_scatter", text)
            else:
                product = "all_gather_matmul" if is_column else "matmul_reduce_scatter"
                operations = list(backward_operations(product, GemmMethods("fused", **{step: text})))
                assert operations
                for operation, by in operations:
                    parse_for(operation, by)
    assert configured_method(gemm_configs({"fc1_fprop": {**options}})["fc1_fprop"]) == (
        "ring_exchange(aggregate=True,use_ce=False,num_sm=4)"
    )
    assert configured_method(gemm_configs({"fc2_fprop": {**options}})["fc2_fprop"]) == "pipeline(num_sm=4,num_splits=3)"


def test_column_backward() -> None:
    on_ranks(2, backward_bodies.column, ONE_COUNT, torch.float32, METHODS)


@pytest.mark.long
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_column_backward_at_every_count(dtype: torch.dtype) -> None:
    on_ranks(2, backward_bodies.column, SMALL_CPU, dtype, METHODS)


@pytest.mark.parametrize("world_size, dtype", ((3, torch.float16), (4, torch.bfloat16)), ids=str)
def test_column_backward_of_more_ranks(world_size: int, dtype: torch.dtype) -> None:
    on_ranks(world_size, backward_bodies.column, TINY, dtype, METHODS[:1])


def test_row_backward() -> None:
    on_ranks(2, backward_bodies.row, ONE_COUNT, torch.float32)


def test_wrong_methods_are_refused_before_anything_is_sent() -> None:
    on_ranks(2, backward_bodies.refusals, TINY)


def test_backward_compiled() -> None:
    on_ranks(2, backward_bodies.compiled, SMALL_CPU)


@pytest.mark.parametrize("world_size, seed", ((2, 0), (3, 1)))
def test_any_schedule(world_size: int, seed: int) -> None:
    in_simulator(world_size, seed, backward_bodies.column, TINY, torch.float32, METHODS[:1])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_campaign(seed: int) -> None:
    methods = METHODS[seed % len(METHODS) :][:1]
    in_simulator(2 + seed % 2, seed, backward_bodies.column, TINY, torch.float32, methods)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_column_backward_on_gpus(gpu_ranks: Ranks, dtype: torch.dtype) -> None:
    on_ranks(gpu_ranks, backward_bodies.column, FULL_GPU, dtype, METHODS)


@pytest.mark.gpu
def test_row_backward_on_gpus(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, backward_bodies.row, FULL_GPU, torch.float32)


def test_methods_are_public() -> None:
    assert to.GemmMethods is GemmMethods
