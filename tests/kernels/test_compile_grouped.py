"""The kernels of a layer of experts compile for a GPU, on a machine without one, once for all counts and capacities."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.compiling import TENSOR_CORES, OneRankOfMany, compiled
from triton_overlap.comm.group import Group
from triton_overlap.expert_buffer import ExpertBuffer
from triton_overlap.kernels import ep_weights, grouped_matmul
from triton_overlap.kernels.grouped_matmul import Groups

ROWS = (0, 1, 2, 16, 127, 128)


def drive(dtype_name: str) -> None:
    """As a layer of experts does: weights [E, N, K] given transposed, their transposes for the gradient of the rows."""
    dtype = getattr(torch, dtype_name)
    weight = torch.zeros(16, 512, 256, dtype=dtype)
    main_grad = torch.zeros(16, 512, 256)
    for rows in ROWS:
        a, g = torch.zeros(rows, 256, dtype=dtype), torch.zeros(rows, 512, dtype=dtype)
        for alignment in (1, 16):
            groups = Groups(torch.zeros(16, dtype=torch.int32), alignment)
            grouped_matmul.launch(a, weight.transpose(1, 2), groups)
            grouped_matmul.launch(g, weight, groups)
            grouped_matmul.launch_gradient(a, g, groups, by_columns=True)
            grouped_matmul.launch_gradient(a, g, groups, by_columns=False, accumulate_into=main_grad.transpose(1, 2))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(name, marks=pytest.mark.long) for name in ("float16", "float32"))]
)
def test_one_compilation_serves_every_count(dtype: str) -> None:
    found = compiled(drive, dtype)
    found.check({"grouped_matmul_kernel": 2, "grouped_gradient_kernel": 2})
    if dtype != "float32":
        assert found.having(TENSOR_CORES) == {"grouped_matmul_kernel", "grouped_gradient_kernel"}


def drive_weights() -> None:
    buffer = ExpertBuffer(Group(OneRankOfMany(2)), num_max_tokens_per_rank=256, hidden=1024, num_topk=8, num_experts=16)
    routing = torch.zeros(buffer.layout.routing_words, dtype=torch.int32)
    for rows in ROWS:
        y = torch.zeros(rows, 1024, dtype=torch.bfloat16)
        ep_weights.launch_gradient(buffer, routing, y, y, torch.zeros(rows, 8))


def test_one_compilation_of_the_gradient_of_weights() -> None:
    compiled(drive_weights).check({"ep_weights_gradient_kernel": 1})
