"""The whole benchmark on two CPU ranks, and its check of results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.bench.running import run_bench
from tests.distributed import run_ranks
from triton_overlap.bench.__main__ import METHODS, main, without_paths
from triton_overlap.bench.ranks import Link
from triton_overlap.bench.reports import load
from triton_overlap.bench.results import Results
from triton_overlap.bench.rivals import Run
from triton_overlap.bench.session import Session, Settings
from triton_overlap.bench.tp import Bench
from triton_overlap.kernels.tables import Table
from triton_overlap.problems import Inputs, OverlappedOperation, Problem, WrongResult
from triton_overlap.tuning import default_candidates

SETTINGS = Settings(dtype=torch.float32, rounds=1, warmup=0, seed=0, command=["tp"], commit=None)


def test_smoke_run_keeps_checked_data(tmp_path: Path) -> None:
    found = run_bench("tp", "--smoke", "--out", str(tmp_path), "--plot", str(tmp_path / "figure.svg"))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "auto / collective" in found.stdout
    assert "auto / best single" in found.stdout
    assert "auto over the best single method: at most" in found.stdout
    (path,) = tmp_path.glob("tp_*.json")
    kept = load(path)
    assert isinstance(kept, Results)
    assert [row.tokens for row in kept.rows] == [48] * 2
    assert kept.method["backend"] == "shm"
    for row in kept.rows:
        applicable = set(METHODS) - {"auto", "bulk"} - ({"pipeline"} if row.operation == "all_gather_matmul" else set())
        assert set(row.measurements) == {*applicable, "auto", "bulk", "gemm", "collective"}
        assert set(row.methods()) == applicable
        assert row.auto_over_best() is not None
        assert "CUDA" in row.unavailable["async_tp"]
        for measurement in row.measurements.values():
            assert 0 < measurement.relative_error < 1e-2
            assert measurement.timing.median_ms > 0
    assert (tmp_path / "figure.svg").exists()


def test_a_machine_with_too_few_gpus_is_told_so() -> None:
    found = run_bench("tp", CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 2
    assert "2 ranks need as many GPUs, found 0" in found.stdout


@pytest.mark.long
def test_smoke_run_of_tune_makes_a_table_that_the_benchmark_takes(tmp_path: Path) -> None:
    found = run_bench("tune", "--smoke", "--dtype", "float32", "--out", str(tmp_path))
    assert found.returncode == 0, found.stdout + found.stderr
    path = tmp_path / "shm_2_float32.json"
    assert f"2 rows, 2 of 2 problems; table: {path}" in found.stdout.replace("\n", "")
    table = Table.load(path)
    assert {(row.operation, row.tokens) for row in table.rows} == {
        (name, 8) for name in ("all_gather_matmul", "matmul_reduce_scatter")
    }
    for row in table.rows:
        assert list(row.times_ms) == default_candidates(row.operation, torch.float32)
    assert table.about["command"][:2] == ["tune", "--smoke"]
    assert str(tmp_path) not in path.read_text()
    again = run_bench("tp", "--smoke", "--dtype", "float32", "--tokens", "8", "--rounds", "1", "--table", str(path))
    assert again.returncode == 0, again.stdout + again.stderr


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
    bench = Bench(Session(group, SETTINGS, Console()), [SlightlyWrong(group.rank)], Link("memory", None))
    with pytest.raises(WrongResult) as error:
        bench.measure(Problem(OverlappedOperation.ALL_GATHER_MATMUL, 8, 16, 32, group.world_size, torch.float32))
    group.close()
    return str(error.value)


def test_a_wrong_result_stops_every_rank_before_it_is_timed() -> None:
    for message in run_ranks(2, measure_a_wrong_rival):
        assert "relative error over 1e-05: fused 1.0e-03" in message


def test_kept_results_do_not_name_places() -> None:
    assert without_paths(["tp", "--out", "/a/b", "--seed", "8", "--plot=/c", "--commit", "d", "--table", "e"]) == [
        "tp", "--seed", "8", "--commit", "d",
    ]  # fmt: skip


def test_a_layer_has_a_size_or_is_a_model_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tp", "--size", "8", "8", "--models", "llama3-8b"])
    assert "--size is one layer, --models are those of models" in capsys.readouterr().err
