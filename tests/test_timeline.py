"""Timelines of kernels' tasks and of simulated runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import triton_overlap as to
from tests.bench.running import one_rank
from triton_overlap import timeline
from triton_overlap.bench.__main__ import main

KINDS = ("peer tile", "push", "own tile")


def test_tasks_become_spans_with_their_waits() -> None:
    rows = [[5000, 5000, 5000, 7000, 1, 0], [0, 0, 0, 0, 0, 0], [6000, 6500, 8000, 9000, 0, 12]]
    push, tile, wait = timeline.of_tasks(1, "all_gather_matmul", rows, KINDS)
    assert (push.rank, push.lane, push.name, push.start, push.end) == (1, "program   0", "push", 0.0, 2.0)
    assert (tile.name, tile.start, tile.end, tile.details["task"]) == ("peer tile", 1.0, 4.0, 2)
    assert (wait.lane, wait.name, wait.start, wait.end) == ("program  12", "wait", 1.5, 3.0)


def test_a_chrome_trace_has_a_process_a_rank_and_a_thread_a_lane() -> None:
    spans = [
        timeline.Span(0, "a", "x", 1.0, 2.5),
        timeline.Span(1, "a", "y", 0.0, 1.0),
        timeline.Span(1, "b", "z", 0, 1),
    ]
    found = timeline.chrome_trace(spans)["traceEvents"]
    assert {event["args"]["name"] for event in found if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    complete = [event for event in found if event["ph"] == "X"]
    assert [(event["name"], event["pid"], event["ts"], event["dur"]) for event in complete] == [
        ("x", 0, 1.0, 1.5), ("y", 1, 0.0, 1.0), ("z", 1, 0, 1),
    ]  # fmt: skip
    assert len({(event["pid"], event["tid"]) for event in complete}) == 3


def test_nothing_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no spans"):
        timeline.draw([], tmp_path / "figure.png")


def gather(group: to.Group) -> torch.Tensor:
    buffer = group.user_buffer(8, 4, torch.float32)
    return to.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 2), buffer=buffer)


def test_the_log_of_a_simulated_run_is_a_timeline(tmp_path: Path) -> None:
    world = to.sim.World(2, seed=3, log=True)
    world.run(gather)
    assert world.log is not None
    spans = timeline.of_log(world.log)
    assert {span.rank for span in spans} == {0, 1}
    assert all("all_gather_matmul_kernel" in span.lane for span in spans)
    assert 0 < spans[-1].end <= world.steps + 1
    timeline.save(spans, tmp_path / "schedule.json")
    timeline.draw(spans, tmp_path / "schedule.png", unit="turns")
    assert len(json.loads((tmp_path / "schedule.json").read_text())["traceEvents"]) > len(spans)
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_the_benchmark_records_a_call_of_each_product(tmp_path: Path) -> None:
    with one_rank():
        assert main(["tp", "--smoke", "--timeline", str(tmp_path)]) == 0
    for name in ("all_gather_matmul_48_32_16", "matmul_reduce_scatter_48_32_16"):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        assert {event["name"] for event in events if event["ph"] == "X"} == {"own tile"}, "a group of one has no peers"
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
