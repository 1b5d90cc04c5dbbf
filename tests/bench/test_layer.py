"""The benchmarks of a transformer layer, on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.bench.running import smoke_run
from tests.distributed import run_ranks
from triton_overlap.bench import layer
from triton_overlap.bench.reports.layer import Row
from triton_overlap.bench.results import Measurement
from triton_overlap.bench.session import Session, Settings
from triton_overlap.problems import WrongResult
from triton_overlap.timing import Timing

SETTINGS = Settings(dtype=torch.float32, rounds=1, warmup=0, seed=0, command=["layer"], commit=None)
PROBLEM = layer.Problem("tiny", tokens=8, document=5, max_tokens=8)


def row(**times_ms: float) -> Row:
    measurements = {name: Measurement(name, Timing(time, time, time, 0.1), 1e-3) for name, time in times_ms.items()}
    return Row("tiny", 8, 5, 2, "bfloat16", 3.0, measurements, {})


def test_speed_and_hidden_communication_are_against_nccl() -> None:
    found = row(nccl=10.0, fused=8.0, te=11.5)
    assert found.speedup("fused") == pytest.approx(1.25)
    assert found.hidden("fused") == pytest.approx(2 / 3)
    assert found.hidden("te") == pytest.approx(-0.5)
    assert found.speedup("async_tp") is None
    assert found.hidden("async_tp") is None
    assert row(fused=8.0).hidden("fused") is None


def test_documents_end_where_the_tokens_do() -> None:
    bounds = [layer.document_bounds(tokens, 4, torch.device("cpu")).tolist() for tokens in (3, 8, 10)]
    assert bounds == [[0, 3], [0, 4, 8], [0, 4, 8, 10]]


def test_smoke_run_keeps_checked_data(tmp_path: Path) -> None:
    kept, printed = smoke_run("layer", tmp_path)
    (found,) = kept.rows
    assert (found.model, found.tokens, found.world_size) == ("tiny", 48, 1)
    assert set(found.measurements) == set(layer.RIVALS) - {"async_tp"}
    assert found.communication_ms is None
    assert "async_tp did not run: PyTorch's async-TP needs a GPU for each rank" in printed


def test_smoke_run_of_counts_on_the_device(tmp_path: Path) -> None:
    kept, printed = smoke_run("layer", tmp_path, "--device-count", "--tokens", "8", "24")
    assert [(found.tokens, found.capacity) for found in kept.rows] == [(8, 24), (24, 24)]
    for found in kept.rows:
        assert set(found.measurements) == {"device count", "host count"}
        assert all(0 < measured.relative_error < 5e-2 for measured in found.measurements.values())
    assert "one graph for up to 24 tokens" in printed


def measure_two_ranks() -> tuple[Row, str]:
    import triton_overlap as to

    group = to.init_group()
    session = Session(group, SETTINGS, Console())
    right = layer.measure(PROBLEM, session, ["nccl", "fused", "bulk"])

    def wrong(module: torch.nn.Module) -> torch.nn.Module:
        module = layer.by_methods(module, "nccl", "nccl")
        with torch.no_grad():
            layer.linears(module)[-1].weight[group.rank, 0] += 1.0
        return module

    layer.RIVALS["wrong"] = wrong
    with pytest.raises(WrongResult) as error:
        layer.measure(PROBLEM, session, ["nccl", "wrong"])
    group.close()
    return right, str(error.value)


def test_every_rank_measures_right_layers_and_stops_at_a_wrong_one() -> None:
    for right, message in run_ranks(2, measure_two_ranks):
        assert set(right.measurements) == {"nccl", "fused", "bulk"}
        assert right.communication_ms > 0
        assert all(measured.relative_error < 5e-5 for measured in right.measurements.values())
        assert "relative error over 5e-05: wrong " in message


def test_unknown_rivals_are_named() -> None:
    with pytest.raises(ValueError, match="unknown rivals teapot; known: nccl, fused"):
        layer.run(None, [PROBLEM], ["nccl", "teapot"])  # type: ignore[arg-type]
