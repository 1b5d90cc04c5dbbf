"""The whole benchmark on two CPU ranks, and its check of results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import run_ranks
from triton_overlap.bench.problems import Inputs, Operation, Problem
from triton_overlap.bench.results import Results
from triton_overlap.bench.rivals import Run
from triton_overlap.bench.tp import Bench, Settings, WrongResult

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = Settings(
    tokens=[8], k=32, n=16, dtype=torch.float32, rounds=1, warmup=0, seed=0, command=["tp"], commit=None
)


def run_bench(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "triton_overlap.bench", "tp", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_smoke_run_keeps_checked_data(tmp_path: Path) -> None:
    found = run_bench(["--smoke", "--out", str(tmp_path), "--plot", str(tmp_path / "figure.svg")])
    assert found.returncode == 0, found.stdout + found.stderr
    assert "fused / collective" in found.stdout
    (path,) = tmp_path.glob("tp_*.json")
    kept = Results.load(path)
    assert [row.tokens for row in kept.rows] == [8, 64, 48] * 2
    assert kept.method["backend"] == "shm"
    for row in kept.rows:
        assert set(row.measurements) == {"fused", "gemm", "collective"}
        assert "CUDA" in row.unavailable["async_tp"]
        for measurement in row.measurements.values():
            assert 0 < measurement.relative_error < 1e-2
            assert measurement.timing.median_ms > 0
    assert (tmp_path / "figure.svg").exists()


def test_a_machine_with_too_few_gpus_is_told_so() -> None:
    found = run_bench([], CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 2
    assert "2 ranks need as many GPUs, found 0" in found.stdout


class SlightlyWrong:
    """The right product, wrong on rank 1 by a thousandth."""

    name = "fused"
    communicates = False

    def __init__(self, rank: int) -> None:
        self._factor = 1.0 + 1e-3 * rank

    def prepare(self, problem: Problem) -> Run:
        def run(inputs: Inputs) -> torch.Tensor:
            return inputs.gathered @ inputs.b * self._factor

        return run


def measure_a_wrong_rival() -> str:
    import triton_overlap as to

    group = to.init_group()
    bench = Bench(group, [SlightlyWrong(group.rank)], SETTINGS, link_gbps=None)
    with pytest.raises(WrongResult) as error:
        bench.measure(Problem(Operation.ALL_GATHER_MATMUL, 8, 32, 16, group.world_size, torch.float32))
    group.close()
    return str(error.value)


def test_a_wrong_result_stops_every_rank_before_it_is_timed() -> None:
    for message in run_ranks(2, measure_a_wrong_rival):
        assert "relative error over 1e-05: fused 1.0e-03" in message


def test_kept_results_do_not_name_places() -> None:
    from triton_overlap.bench.__main__ import without_paths

    assert without_paths(["tp", "--out", "/a/b", "--k", "8", "--plot=/c", "--commit", "d"]) == [
        "tp", "--k", "8", "--commit", "d",
    ]  # fmt: skip
