"""The fused kernels compile for a GPU, on a machine without one, once for all token counts."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.compiling import DESCRIPTORS, PROXY_FENCE, TENSOR_CORES, OneRankOfMany, compiled
from triton_overlap.comm.group import Group
from triton_overlap.kernels import (
    all_gather,
    all_gather_matmul,
    gathered,
    matmul,
    matmul_reduce_scatter,
    reduce_scatter,
    weight_gradient,
)

ROWS = (1, 2, 15, 16, 127, 128, 129, 512, 1000, 1024)  # of a chunk: 1, multiples of 16, and neither
#: (hidden, other) sizes: rows on 16 bytes, which go through descriptors, and not
SIZES = {"descriptors": (512, 256), "pointers": (509, 251)}
GEMMS = {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel", "matmul_kernel", "weight_gradient_kernel"}
#: One for each way B may be stored, with a bias and without one; none for a token count. One of each with one layout.
EXPECTED = {
    "all_gather_matmul_kernel": 2,
    "copy_gathered_kernel": 1,
    "matmul_reduce_scatter_kernel": 2,
    "all_gather_kernel": 1,
    "reduce_scatter_kernel": 1,
    "matmul_kernel": 1,
    "weight_gradient_kernel": 2,
}


def drive(dtype_name: str, sizes: str, device_count: bool, layouts: list[bool]) -> None:
    """Every launcher, at many counts; GEMMs with B as a transposed weight without bias (``False`` in ``layouts``), and
    as a matrix with one (``True``)."""
    dtype = getattr(torch, dtype_name)
    hidden, other = SIZES[sizes]
    count = torch.zeros((), dtype=torch.int32) if device_count else None
    for world_size in (2, 8):
        group = Group(OneRankOfMany(world_size))
        buffer = group.user_buffer(1024 * world_size, hidden, dtype, device_count=device_count)
        for rows in ROWS:
            tokens = rows * world_size
            x, a = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(tokens, other, dtype=dtype)
            weight, gradient = torch.zeros(other, hidden, dtype=dtype), torch.zeros(tokens, hidden, dtype=dtype)
            bias, own_bias = torch.zeros(other, dtype=dtype), torch.zeros(hidden, dtype=dtype)
            k_major = weight.t().contiguous()
            if False in layouts:
                all_gather_matmul.launch(buffer, x, weight.t(), gather=rows % 2 == 0, active_tokens=count)
                matmul_reduce_scatter.launch(buffer, a, k_major.t(), active_tokens=count)
                weight_gradient.launch(a, gradient, active_tokens=count)
            if True in layouts:
                all_gather_matmul.launch(buffer, x, k_major, bias, active_tokens=count)
                matmul_reduce_scatter.launch(buffer, a, weight, own_bias, active_tokens=count)
                weight_gradient.launch(a, gradient, torch.zeros(other, hidden), active_tokens=count)
            all_gather.launch(buffer, x, active_tokens=count)
            gathered.launch(buffer, tokens, count)
            reduce_scatter.launch(buffer, gradient, active_tokens=count)
            matmul.launch(a, weight, own_bias, active_tokens=count)


@pytest.mark.parametrize(
    ("dtype", "sizes", "count", "layouts"),
    [
        ("bfloat16", "descriptors", "host", [False]),
        ("bfloat16", "descriptors", "device", [True]),
        *(
            pytest.param(*case, [False, True], marks=pytest.mark.long)
            for case in itertools.product(("bfloat16", "float16", "float32"), SIZES, ("host", "device"))
        ),
    ],
)
def test_one_compilation_serves_every_token_count(dtype: str, sizes: str, count: str, layouts: list[bool]) -> None:
    found = compiled(drive, dtype, sizes, count == "device", layouts)
    found.check(EXPECTED if len(layouts) == 2 else dict.fromkeys(EXPECTED, 1))
    if sizes == "descriptors":
        assert found.having(DESCRIPTORS) == GEMMS
        # Both read through descriptors what a peer stored.
        assert {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel"} <= found.having(PROXY_FENCE)
        assert found.having(TENSOR_CORES) == (set() if dtype == "float32" else GEMMS)
