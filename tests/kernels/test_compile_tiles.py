"""Every tile configuration that ``tune`` tries compiles for a GPU, without one, once for all token counts."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.compiling import OneRankOfMany, compiled
from triton_overlap.comm.group import Group
from triton_overlap.kernels import by_method
from triton_overlap.kernels.methods import Method
from triton_overlap.tuning import default_candidates

ROWS = (1, 127, 128, 512)
#: Its candidates have the same tiles as those of the all-gather.
REDUCE = "matmul_reduce_scatter"


def fused_methods(dtype: torch.dtype) -> list[Method]:
    return [method for method in map(Method.parse, default_candidates(REDUCE, dtype)) if method.name == "fused"]


def drive(dtype_name: str) -> None:
    """Runs in the child process."""
    dtype = getattr(torch, dtype_name)
    buffer = Group(OneRankOfMany(2)).user_buffer(1024, 512, dtype)
    weight = torch.zeros(256, 512, dtype=dtype)
    for method in fused_methods(dtype):
        for rows in ROWS:
            x, a = torch.zeros(rows, 512, dtype=dtype), torch.zeros(2 * rows, 256, dtype=dtype)
            by_method.all_gather_matmul(buffer, x, [weight.t()], [None], method=method)
            by_method.matmul_reduce_scatter(buffer, a, weight.t().contiguous().t(), method=method)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_fit_and_are_compiled_once(dtype: str) -> None:
    configurations = len(fused_methods(getattr(torch, dtype)))
    assert configurations > 1
    compiled(drive, dtype).check(
        {"all_gather_matmul_kernel": configurations, "matmul_reduce_scatter_kernel": configurations}
    )
