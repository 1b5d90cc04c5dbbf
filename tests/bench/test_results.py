"""Kept data: written, read again, printed and drawn."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from triton_overlap.bench.__main__ import main
from triton_overlap.bench.results import Measurement, Results, Row, draw, print_tables
from triton_overlap.timing import Timing


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
    assert Results.load(path) == results()


def test_ratios() -> None:
    row = results().rows[0]
    assert row.ratio("fused", "gemm") == pytest.approx(1.1)
    assert row.ratio("fused", "async_tp") is None


def test_auto_is_compared_with_the_best_single_method() -> None:
    row = results().rows[0]
    assert row.methods() == ["fused", "pipeline"]
    assert row.best_method() == "fused"
    assert row.auto_over_best() == pytest.approx(1.01)


def test_tflops_of_a_rank() -> None:
    # 2 * 1024 * 64 * 32 operations in 1.1 ms
    assert results().rows[0].tflops("fused") == pytest.approx(4194304 / 1.1e-3 / 1e12)


def test_tables_show_ratios_and_reasons() -> None:
    text = io.StringIO()
    print_tables(results(), Console(file=text, width=200))
    assert "all_gather_matmul, K 64, N 32, bfloat16, 2 ranks, NVIDIA H200" in text.getvalue()
    printed = text.getvalue()
    # Two operations, two counts: over the GEMM and over the bound, and again among the methods.
    assert len(re.findall(r"\b1\.10\b", printed)) == 8 + 4
    assert len(re.findall(r"\b1\.010\b", printed)) == 4 + 1  # and in the last line
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
