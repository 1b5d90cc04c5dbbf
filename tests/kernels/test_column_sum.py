"""Sums over the active rows: right, in float32, in an order that the capacity does not change."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import TOLERANCE
from triton_overlap import reference
from triton_overlap.kernels import column_sum


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("rows", (1, 64, 333))
def test_active_rows_only(rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(400, 70).to(dtype)
    x[rows:] = float("nan")
    out = column_sum.launch(x, torch.tensor(3 * rows, dtype=torch.int32), 3)
    assert out.dtype == torch.float32
    assert reference.relative_error(out, reference.column_sum(x[:rows].double())) < TOLERANCE[torch.float32]
    assert torch.equal(out, column_sum.launch(x[:rows]))


def test_wide_and_strided() -> None:
    x = torch.randn(3, 5000)
    for view in (x, x[:, 7:40], x[:, ::2], x.t(), x[:1].expand(9, -1)):
        out = column_sum.launch(view)
        assert reference.relative_error(out, reference.column_sum(view.double())) < TOLERANCE[torch.float32]


def test_counts_beyond_the_capacity_are_cut_to_it() -> None:
    x = torch.ones(6, 4)
    sums = {n: float(column_sum.launch(x, torch.tensor(n, dtype=torch.int32))[0]) for n in (-3, 0, 5, 6, 7, 2**31 - 1)}
    assert sums == {-3: 0, 0: 0, 5: 5, 6: 6, 7: 6, 2**31 - 1: 6}
