"""Activations and residuals inside the fused kernels, against the same steps one after another."""

from __future__ import annotations

import pytest
import torch

import triton_overlap as to
from tests.distributed import Ranks
from tests.kernels import epilogue_bodies
from tests.kernels.compiling import DESCRIPTORS, TENSOR_CORES, OneRankOfMany, compiled
from tests.ops.cases import on_ranks
from triton_overlap.comm.group import Group
from triton_overlap.kernels import all_gather_matmul, matmul_reduce_scatter
from triton_overlap.kernels.epilogue import Epilogue


@pytest.mark.parametrize("device_count", (False, True), ids=("host", "device"))
@pytest.mark.parametrize(
    "k, features, dtype", ((32, 48, torch.float32), (48, 264, torch.bfloat16), (13, 7, torch.float16)), ids=str
)
def test_activations(k: int, features: int, dtype: torch.dtype, device_count: bool) -> None:
    """Also where the gate's last tile reaches into the columns of what it lets through."""
    world = to.sim.World(2, seed=k)
    world.run(lambda group: epilogue_bodies.activations(group, 5, k, features, dtype, device_count))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_residuals(dtype: torch.dtype) -> None:
    to.sim.World(2, seed=3).run(lambda group: epilogue_bodies.residuals(group, 6, 32, 24, dtype))
    to.sim.World(3, seed=4).run(lambda group: epilogue_bodies.residuals(group, 2, 9, 7, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("device_count", (False, True), ids=("host", "device"))
@pytest.mark.parametrize("k, features", ((1024, 1536), (333, 251)), ids=("aligned", "unaligned"))
def test_activations_on_gpus(gpu_ranks: Ranks, k: int, features: int, device_count: bool) -> None:
    on_ranks(gpu_ranks, epilogue_bodies.activations, 300, k, features, torch.bfloat16, device_count)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_residuals_on_gpus(gpu_ranks: Ranks, dtype: torch.dtype) -> None:
    on_ranks(gpu_ranks, epilogue_bodies.residuals, 300, 512, 768, dtype)


def drive(dtype_name: str, gated: bool) -> None:
    dtype = getattr(torch, dtype_name)
    group = Group(OneRankOfMany(2))
    buffer = group.user_buffer(2048, 512, dtype)
    weight = torch.zeros(768, 512, dtype=dtype)
    for rows in (1, 129, 1024):
        x, a = torch.zeros(rows, 512, dtype=dtype), torch.zeros(2 * rows, 768, dtype=dtype)
        product = torch.zeros(2 * rows, 768, dtype=dtype)
        epilogue = Epilogue("silu" if gated else "gelu_tanh", gated, product)
        all_gather_matmul.launch(buffer, x, weight.t(), weight[:, 0].contiguous(), epilogue=epilogue)
        matmul_reduce_scatter.launch(buffer, a, weight, residual=x)


@pytest.mark.parametrize(
    "dtype, gated",
    (
        ("bfloat16", True),
        pytest.param("bfloat16", False, marks=pytest.mark.long),
        pytest.param("float32", True, marks=pytest.mark.long),
    ),
)
def test_one_compilation_serves_every_token_count(dtype: str, gated: bool) -> None:
    found = compiled(drive, dtype, gated)
    found.check({"all_gather_matmul_kernel": 1, "matmul_reduce_scatter_kernel": 1})
    assert found.having(DESCRIPTORS) == {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel"}
    if dtype == "bfloat16":
        assert found.having(TENSOR_CORES) == {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel"}
