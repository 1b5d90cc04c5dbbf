"""The kernels between ordinary GEMMs compile for a GPU, on a machine without one, once for all token counts."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.compiling import VECTOR_LOAD, OneRankOfMany, compiled
from triton_overlap.comm.group import Group
from triton_overlap.kernels import bulk, pipeline, ring_exchange
from triton_overlap.kernels.methods import Method

ROWS = (1, 2, 15, 16, 127, 128, 129, 512)  # of a chunk: 1, multiples of 16, and neither
#: Rows on 16 bytes, and not.
HIDDEN = {"aligned": 256, "unaligned": 251}
EXPECTED = {  # none for a token count
    "open_kernel": 1,
    "arrival_kernel": 1,
    "push_kernel": 2,  # one chunk for all, or one for each owner
    "reduce_kernel": 2,  # with a bias and without
    "close_kernel": 1,
    "fill_kernel": 1,
}


def drive(dtype_name: str, sizes: str) -> None:
    dtype, hidden = getattr(torch, dtype_name), HIDDEN[sizes]
    for world_size in (2, 3):
        buffer = Group(OneRankOfMany(world_size)).user_buffer(512 * world_size, hidden, dtype)
        b, c = torch.zeros(hidden, 64, dtype=dtype), torch.zeros(64, hidden, dtype=dtype)
        bias = torch.zeros(hidden, dtype=dtype)
        for rows in ROWS:
            x, a = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(rows * world_size, 64, dtype=dtype)
            for aggregate in (None, True):
                method = Method("ring_exchange", aggregate=aggregate)
                ring_exchange.all_gather_matmul(buffer, x, [b], [None], gather=rows % 2 == 0, method=method)
            ring_exchange.matmul_reduce_scatter(buffer, a, c, bias, method=Method("ring_exchange"))
            ring_exchange.matmul_reduce_scatter(buffer, a, c, method=Method("ring_exchange"))
            pipeline.matmul_reduce_scatter(buffer, a, c, bias, method=Method("pipeline"))
            bulk.all_gather(buffer, x, b, c, method=Method("bulk"))
            bulk.reduce_scatter(buffer, x.new_zeros(rows * world_size, hidden), b, c, method=Method("bulk"))


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", "aligned"),
        pytest.param("bfloat16", "unaligned", marks=pytest.mark.long),
        pytest.param("float32", "aligned", marks=pytest.mark.long),
    ],
)
def test_one_compilation_serves_every_token_count(dtype: str, sizes: str) -> None:
    found = compiled(drive, dtype, sizes)
    found.check(EXPECTED)
    if sizes == "aligned":
        assert {"push_kernel", "reduce_kernel"} <= found.having(VECTOR_LOAD), "16 bytes a load"
