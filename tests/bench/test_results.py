"""Kept data: written, read again, printed and drawn."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from triton_overlap.bench.__main__ import main
from triton_overlap.bench.reports import load
from triton_overlap.bench.reports.tp import Row, Summary, draw, print_tables
from triton_overlap.bench.results import Measurement, Results
from triton_overlap.timing import Timing

ROOT = Path(__file__).resolve().parent.parent.parent


def results() -> Results:
    def measured(rival: str, median: float) -> Measurement:
        return Measurement(rival, Timing(median, median, median, 0.01), 2e-3)

    rows = [
        Row(
            operation=operation,
            tokens=tokens,
            k=64,
            n=32,
            world_size=2,
            dtype="bfloat16",
            bound_ms=1.0,
            measurements={
                "fused": measured("fused", 1.1),
                "pipeline": measured("pipeline", 1.25),
                "auto": measured("auto", 1.111),
                "bulk": measured("bulk", 1.05),
                "gemm": measured("gemm", 1.0),
            },
            unavailable={"async_tp": "not on this machine"},
        )
        for operation in ("all_gather_matmul", "matmul_reduce_scatter")
        for tokens in (1024, 512)
    ]
    return Results(
        kind="tp",
        created="2026-01-31T12:00:00Z",
        command=["tp"],
        commit="abc",
        hardware={"device": "NVIDIA H200"},
        versions={"torch": "2.11.0"},
        method={"rounds": 3},
        rows=rows,
    )


def test_data_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / results().file_name()
    assert path.name == "tp_nvidia-h200_2_20260131T120000Z.json"
    results().save(path)
    assert load(path) == results()


def test_files_from_before_there_were_kinds_are_of_products(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    results().save(path)
    data = json.loads(path.read_text())
    del data["kind"]
    path.write_text(json.dumps(data))
    assert load(path) == results()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("[]", '{"rows": []}', '{"rows": [], "command": ["teapot"]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="no results of a known kind"):
            load(path)


def test_kept_results_can_be_read_and_are_on_the_page_with_their_figures() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert load(path).world_size > 0
        figure = f"figures/{path.stem}.png"
        assert f"({figure})" in page
        assert f"(../benchmarks/results/{path.name})" in page
        assert (ROOT / "docs" / figure).exists()


def test_ratios() -> None:
    row = results().rows[0]
    assert row.ratio("fused", "gemm") == pytest.approx(1.1)
    assert row.ratio("fused", "async_tp") is None


def test_auto_is_compared_with_the_best_single_method() -> None:
    row = results().rows[0]
    assert row.methods() == ["fused", "pipeline"]
    assert row.best_method() == "fused"
    assert row.auto_over_best() == pytest.approx(1.01)


def test_summaries_are_geometric_means() -> None:
    first, second = results().rows[:2]
    first = dataclasses.replace(first, bound_ms=0.5)
    found = Summary.of([first, second], "fused")
    assert found is not None
    assert found.problems == 2
    assert found.over_bound == pytest.approx(1.1 * 2**0.5)
    assert found.worst_over_bound == pytest.approx(2.2)
    assert found.worst_excess_us == pytest.approx(600.0)
    assert found.own_over == pytest.approx(1.01)
    assert Summary.of([first], "async_tp") is None


def test_tflops_of_a_rank() -> None:
    # 2 * 1024 * 64 * 32 operations in 1.1 ms
    assert results().rows[0].tflops("fused") == pytest.approx(4194304 / 1.1e-3 / 1e12)


def test_tables_show_ratios_and_reasons() -> None:
    text = io.StringIO()
    print_tables(results(), Console(file=text, width=200))
    assert "all_gather_matmul, K 64, N 32, bfloat16, 2 ranks, NVIDIA H200" in text.getvalue()
    printed = text.getvalue()
    # Two operations, two counts, among the methods over the GEMM alone.
    assert len(re.findall(r"\b1\.10\b", printed)) == 4 + 2  # and the worst of each operation over the bound
    assert "matmul_reduce_scatter, T < 2048: geometric means" in printed
    assert "auto over the best single method: at most 1.010; 4 of 4 within 1.03" in printed
    assert printed.count("async-TP did not run: not on this machine") == 1


def test_figure(tmp_path: Path) -> None:
    draw(results(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_show_prints_a_kept_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kept.json"
    results().save(path)
    assert main(["show", str(path), "--plot", str(tmp_path / "figure.png")]) == 0
    assert "matmul_reduce_scatter, K 64" in capsys.readouterr().out
    assert (tmp_path / "figure.png").exists()
