"""The benchmark of host time, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import triton_overlap as to
from tests.bench.running import smoke_run
from triton_overlap.bench import host
from triton_overlap.bench.reports.host import Row


def test_parts_add_up_to_the_whole() -> None:
    times = {"function": 100.0, "operator": 90.0, "method": 60.0, "launcher": 35.0}
    found = Row("all_gather_matmul", 8, 4, 4, 1, "bfloat16", True, times, [], 0.0).parts()
    assert list(found.values()) == [10.0, 30.0, 25.0, 35.0]
    assert sum(found.values()) == times["function"]


def test_nothing_is_launched_and_launches_return() -> None:
    group = to.init_group()
    buffer = group.user_buffer(8, 4, torch.float32)
    x, w = torch.ones(8, 4), torch.ones(4, 2)
    with host.without_launches():
        out = to.all_gather_matmul(x, w, buffer=buffer)
        out.zero_()
    assert out.abs().max() == 0
    assert torch.equal(to.all_gather_matmul(x, w, buffer=buffer), x @ w)
    group.close()


def test_profile_names_functions_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    lines = host.profile(lambda: torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)), torch.device("cpu"), 3)
    assert sum(share for _, _, share in lines) == pytest.approx(1.0)
    named = {function: calls for function, calls, _ in lines}
    assert named["<built-in method torch._C._nn.linear>"] == 1.0
    assert not any(function.startswith("/") for function in named)


def test_smoke_run_keeps_checked_data(tmp_path: Path) -> None:
    kept, printed = smoke_run("host", tmp_path)
    assert [row.operation for row in kept.rows] == ["all_gather_matmul", "matmul_reduce_scatter"]
    for row in kept.rows:
        assert not row.launches
        assert set(row.times_us) >= {"function", "operator", "method", "launcher", "forward and backward"}
        assert all(time_us > 0 for time_us in row.times_us.values())
        assert 0 < row.relative_error < 1e-2
        assert any("launch" in function for function, _, _ in row.profile)
    assert "no kernel launched" in printed
