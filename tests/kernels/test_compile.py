"""The fused kernels compile for a GPU, on a machine without one, once for all token counts."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.compiling import DESCRIPTORS, PROXY_FENCE, TENSOR_CORES, OneRankOfMany, compiled
from triton_overlap.comm.group import Group
from triton_overlap.kernels import (
    all_gather,
    all_gather_matmul,
    gathered,
    matmul_reduce_scatter,
    reduce_scatter,
    weight_gradient,
)

ROWS = (1, 2, 15, 16, 127, 128, 129, 512, 1000, 1024)  # of a chunk: 1, multiples of 16, and neither
#: (hidden, other) sizes: rows on 16 bytes, which go through descriptors, and not
SIZES = {"descriptors": (512, 256), "pointers": (509, 251)}
GEMMS = {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel", "weight_gradient_kernel"}
#: One for each way B may be stored, with a bias and without one; none for a token count.
EXPECTED = {
    "all_gather_matmul_kernel": 2,
    "copy_gathered_kernel": 1,
    "matmul_reduce_scatter_kernel": 2,
    "all_gather_kernel": 1,
    "reduce_scatter_kernel": 1,
    "weight_gradient_kernel": 2,
}


def drive(dtype_name: str, sizes: str) -> None:
    dtype = getattr(torch, dtype_name)
    hidden, other = SIZES[sizes]
    for world_size in (2, 8):
        buffer = Group(OneRankOfMany(world_size)).user_buffer(1024 * world_size, hidden, dtype)
        for rows in ROWS:
            tokens = rows * world_size
            x, a = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(tokens, other, dtype=dtype)
            weight = torch.zeros(other, hidden, dtype=dtype)
            all_gather_matmul.launch(buffer, x, weight.t(), gather=rows % 2 == 0)
            all_gather_matmul.launch(buffer, x, weight.t().contiguous(), torch.zeros(other, dtype=dtype))
            matmul_reduce_scatter.launch(buffer, a, weight)
            matmul_reduce_scatter.launch(buffer, a, weight.t().contiguous().t(), torch.zeros(hidden, dtype=dtype))
            all_gather.launch(buffer, x)
            gathered.launch(buffer, tokens)
            gradient = torch.zeros(tokens, hidden, dtype=dtype)
            reduce_scatter.launch(buffer, gradient)
            weight_gradient.launch(a, gradient)
            weight_gradient.launch(a, gradient, torch.zeros(other, hidden))


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", "descriptors"),
        ("float32", "descriptors"),
        ("bfloat16", "pointers"),
        pytest.param("float16", "descriptors", marks=pytest.mark.long),
        pytest.param("float16", "pointers", marks=pytest.mark.long),
        pytest.param("float32", "pointers", marks=pytest.mark.long),
    ],
)
def test_one_compilation_serves_every_token_count(dtype: str, sizes: str) -> None:
    found = compiled(drive, dtype, sizes)
    found.check(EXPECTED)
    if sizes == "descriptors":
        assert found.having(DESCRIPTORS) == GEMMS
        # Both read through descriptors what a peer stored.
        assert {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel"} <= found.having(PROXY_FENCE)
        assert found.having(TENSOR_CORES) == (set() if dtype == "float32" else GEMMS)
