"""The expert-parallel benchmark: on two CPU ranks, its check of results, what it counts and what it keeps."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.bench.running import run_bench
from tests.distributed import run_ranks
from triton_overlap.bench.__main__ import main
from triton_overlap.bench.ep import Bench, Plan, Prepared, error_of
from triton_overlap.bench.ep_problems import EpOperation, EpProblem, Expected, Received
from triton_overlap.bench.ep_results import Comparison, EpResults, EpRow, Variant, print_tables
from triton_overlap.bench.ep_rivals import AllToAll
from triton_overlap.bench.ranks import Link
from triton_overlap.bench.results import Measurement
from triton_overlap.bench.session import Session, Settings
from triton_overlap.problems import WrongResult
from triton_overlap.timing import Timing

CPU = torch.device("cpu")
PROBLEM = EpProblem(tokens=5, hidden=128, topk=2, experts=4, world_size=2)
SETTINGS = Settings(dtype=torch.bfloat16, rounds=1, warmup=0, seed=0, command=["ep"], commit=None)
PLAN = Plan(problems=["5x128x2x4"], parts=["calls"], network="direct", num_sms=1, channels_per_sm=1, repetitions=1)


def test_smoke_run_keeps_checked_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_bench("ep", "--smoke", "--out", str(tmp_path))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "CPU ranks: times mean nothing." in found.stdout
    (path,) = tmp_path.glob("ep_*_2_*.json")
    kept = EpResults.load(path)
    assert [row.operation for row in kept.rows] == ["dispatch", "dispatch_fp8", "combine"]
    for row in kept.rows:
        calls = {"eager", "all_to_all"}
        if row.operation != "combine":
            calls |= {"device_counts", "cached", "all_to_all_cached"}
        assert set(row.measurements) == calls
        assert "GPU" in row.unavailable["graph"]
        for measurement in row.measurements.values():
            assert measurement.timing.median_ms > 0
            assert measurement.relative_error < (1e-2 if row.operation == "combine" else 1e-30)
    assert [comparison.operation for comparison in kept.comparisons] == ["dispatch", "combine"]
    for comparison in kept.comparisons:
        assert (comparison.topology, comparison.network) == ("2x1", "direct")
        assert [(each.min_tokens_per_part, each.num_sub_parts) for each in comparison.variants] == [
            (1, 1), (1, 2), (15, 1), (15, 2),
        ]  # fmt: skip
        assert comparison.variants[0].sub_parts == [[1]] * 4
        assert comparison.variants[3].sub_parts == [[2, 2]]
        assert all(len(each.means_ms) == 1 for each in comparison.variants)
    assert main(["show", str(path), "--plot", str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").exists()
    assert "all_to_all_cached" in capsys.readouterr().out


def test_a_machine_without_gpus_is_told_so() -> None:
    found = run_bench("ep", CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 2
    assert "2 ranks need as many GPUs, found 0" in found.stdout


@pytest.mark.parametrize(
    "text, message", [("4096", "is written"), ("4x128x2", "is written"), ("4x100x2x4", "a multiple of 128, got 100")]
)
def test_problems_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpProblem.parse(text, 2)


def test_hosts_of_tokens() -> None:
    assert EpProblem.parse("5x128x2x4", 2) == PROBLEM
    idx = torch.tensor([[0, 1], [1, 2], [3, 2]])
    assert PROBLEM.host_of(idx).tolist() == [[True, False], [True, True], [False, True]]


def test_moved_rows_are_those_of_other_ranks() -> None:
    hosts = [PROBLEM.host_of(PROBLEM.topk_idx(rank, 0, CPU)) for rank in range(2)]
    crossing = [int(hosts[0][:, 1].sum()), int(hosts[1][:, 0].sum())]
    assert crossing[0] != crossing[1], "another seed: these would not tell one direction from the other"
    moved = [[PROBLEM.rows_moved(rank, 0, operation, CPU) for rank in range(2)] for operation in EpOperation]
    assert moved == [crossing, crossing, crossing[::-1]]
    alone = replace(PROBLEM, world_size=1)
    assert alone.rows_moved(0, 0, EpOperation.COMBINE, CPU) == 5
    assert [PROBLEM.row_bytes(operation) for operation in EpOperation] == [256, 132, 256]


def test_inputs_outgrow_a_cache() -> None:
    assert PROBLEM.num_input_sets(cache_bytes=0) == 2
    assert (PROBLEM.num_input_sets(10_000) - 1) * PROBLEM.input_bytes >= 20_000


def test_errors_of_a_dispatch_are_bits() -> None:
    expected = Expected.of(PROBLEM, 0, 0, CPU)
    right = expected.dispatch
    most = torch.zeros(10, 128, dtype=torch.bfloat16)
    most[: len(right.x)] = right.x
    wrong = right.x.clone()
    wrong[-1, -1] += 1

    def error(found: Received) -> float:
        return error_of(EpOperation.DISPATCH, found, expected, PROBLEM)

    assert error(right) == error(replace(right, topk_weights=None)) == error(replace(right, x=most)) == 0
    assert right.topk_weights is not None
    for found in (
        replace(right, x=wrong),
        replace(right, x=right.x[:-1]),
        replace(right, x=right.x.float()),
        replace(right, topk_idx=right.topk_idx + 1),
        replace(right, topk_weights=right.topk_weights.flip(0)),
        replace(right, scales=torch.ones(len(right.x), 1)),
    ):
        assert error(found) == float("inf")
    assert error_of(EpOperation.DISPATCH_FP8, right, expected, PROBLEM) == float("inf")
    assert error_of(EpOperation.COMBINE, expected.combine.bfloat16(), expected, PROBLEM) < 1e-2


def check_the_all_to_all() -> str:
    import triton_overlap as to

    group = to.init_group()
    bench = Bench(Session(group, SETTINGS, Console()), PLAN, Link("memory", None))
    prepared = Prepared.of(PROBLEM, group, 0)
    calls = AllToAll().calls(EpOperation.COMBINE, prepared.work)
    bench.check(EpOperation.COMBINE, calls, prepared)
    calls["off by 2 %"] = lambda index: calls["all_to_all"](index) * (1 + 0.02 * group.rank)
    with pytest.raises(WrongResult) as error:
        bench.check(EpOperation.COMBINE, calls, prepared)
    group.close()
    return str(error.value)


def test_a_wrong_result_stops_every_rank_before_it_is_timed() -> None:
    for message in run_ranks(2, check_the_all_to_all):
        assert "error over 1e-02: off by 2 % 2.0e-02" in message


def kept(**method: object) -> EpResults:
    def measured(name: str, median: float) -> Measurement:
        return Measurement(name, Timing(median, median, median, 0.01), 0.0)

    times = {"eager": 0.3, "cached": 0.2, "all_to_all": 0.6, "all_to_all_cached": 0.5}
    row = EpRow(
        operation="dispatch",
        tokens=4096,
        hidden=7168,
        topk=8,
        experts=256,
        world_size=2,
        moved_bytes=58e6,
        bound_ms=0.16,
        measurements={name: measured(name, median) for name, median in times.items()},
        unavailable={"graph": "not on this machine"},
    )
    variants = [Variant(1, 1, [[2], [1]], [0.04, 0.05]), Variant(15, 1, [[3]], [0.02, 0.025])]
    return EpResults(
        created="2026-01-31T12:00:00Z",
        command=["ep"],
        commit="abc",
        hardware={"device": "NVIDIA H200"},
        versions={"torch": "2.11.0"},
        method={"ranks": 2, "gpus_are_shared": False, "over": "link", "gbps": 380.0} | method,
        rows=[row],
        comparisons=[Comparison("dispatch", 128, 7168, 8, 256, "2x1", "direct", 48, variants)],
    )


def test_data_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / kept().file_name()
    assert path.name == "ep_nvidia-h200_2_20260131T120000Z.json"
    kept().save(path)
    assert EpResults.load(path) == kept()


def test_ratios() -> None:
    (row,), (comparison,) = kept().rows, kept().comparisons
    assert row.over_bound("eager") == pytest.approx(0.3 / 0.16)
    assert row.over_rival("eager") == pytest.approx(0.5)
    assert row.over_rival("cached") == pytest.approx(0.4)
    assert row.over_rival("all_to_all") is None
    assert replace(row, bound_ms=0.0).over_bound("eager") is None
    assert comparison.variants[0].mean_ms == pytest.approx(0.045)
    assert comparison.variants[0].spread_ms == pytest.approx(0.01)


def printed(results: EpResults) -> str:
    text = io.StringIO()
    print_tables(results, Console(file=text, width=200))
    return text.getvalue()


def test_tables() -> None:
    text = printed(kept())
    assert "2 ranks, NVIDIA H200, link 380 GB/s" in text
    assert "graph did not run: not on this machine" in text
    assert "mean nothing" not in text
    assert "2 | 1" in text
    assert "0.500" in text  # 15 tokens a part over the control
    assert "Ranks share a GPU" in printed(kept(gpus_are_shared=True))
