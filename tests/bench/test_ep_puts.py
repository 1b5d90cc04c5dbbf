"""The benchmark of puts: counts and costs of a simulated network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.running import run_bench
from triton_overlap.bench import reports
from triton_overlap.bench.reports.ep_puts import Row
from triton_overlap.bench.results import Results


def test_a_small_run_counts_puts_and_what_they_cost(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    found = run_bench(
        "ep_puts", "--smoke", "--processes", "1", "--out", str(tmp_path), "--plot", str(figure), "--per-put-ns", "300"
    )
    assert found.returncode == 0, found.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")
    (path,) = tmp_path.glob("ep_puts_simulated-network_2_*.json")
    kept = reports.load(path)
    assert isinstance(kept, Results)
    rows: list[Row] = kept.rows
    assert [(row.min_tokens_per_part, row.num_sub_parts) for row in rows] == [(1, 1), (1, 2), (15, 1), (15, 2)]
    for row in rows:
        for puts, num_bytes, time_us in zip(row.puts, row.num_bytes, row.times_us, strict=True):
            assert time_us == pytest.approx((300 * puts + 0.02 * num_bytes) / 1e3)
        # Every token goes to the other rank but those that have both experts here, in one put at least; one of the
        # puts of a channel says that there are no more, and one is the hello.
        assert all(2 + 1 <= puts <= 2 * sum(map(len, row.sub_parts)) + 1 for puts in row.puts)
    # 12 tokens a channel: one part of 15 or fewer where the least is 15, four where it is 1.
    assert [len(row.sub_parts) for row in rows] == [4, 4, 1, 1]
    assert rows[2].mean_us < rows[0].mean_us
