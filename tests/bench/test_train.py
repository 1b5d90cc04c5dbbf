"""The benchmark of changing token counts, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.running import smoke_run
from triton_overlap.bench.reports.train import Counters, Row
from triton_overlap.bench.train import draw_counts, mean_count


def test_counts_are_the_same_on_every_rank_and_within_the_capacity() -> None:
    counts = draw_counts(200, 24, 4, seed=3)
    assert counts == draw_counts(200, 24, 4, seed=3)
    assert counts != draw_counts(200, 24, 4, seed=4)
    assert set(counts) == {4, 8, 12, 16, 20, 24}
    assert mean_count([4, 8, 24], 4) == 12
    assert mean_count([4, 4, 8], 4) == 4


def test_rates_are_compared_with_the_fixed_count() -> None:
    used = Counters(3, 2, 1, 10)
    rates = {"fixed": 100.0, "random": 98.0, "padded": 50.0}
    found = Row("tiny", 1, "fused", 24, 10, 2, "bfloat16", 3, [2, 4, 6], 4, rates, used, used, 1e-3)
    assert found.over_fixed("random") == pytest.approx(0.98)
    assert found.over_fixed("fixed") == 1.0


def test_smoke_run_keeps_checked_data(tmp_path: Path) -> None:
    kept, printed = smoke_run("train", tmp_path)
    (row,) = kept.rows
    assert set(row.tokens_per_second) == {"fixed", "random", "padded"}
    assert row.after.specializations == row.before.specializations > 0
    assert row.after.symmetric_allocations == row.before.symmetric_allocations > 0
    assert len(row.random_tokens) == row.microbatches == 3
    assert 0 < row.relative_error < 5e-2
    assert "after the warm-up: 0 kernels compiled, 0 symmetric allocations" in printed
