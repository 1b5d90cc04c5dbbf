"""Timelines: spans of time by rank and lane, as a Chrome trace and as a picture.

They come from the tasks that a kernel recorded (``python -m triton_overlap.bench tp --timeline FOLDER``), or from the
log of a simulated run::

    world = to.sim.World(2, seed=7, log=True)
    world.run(program)
    timeline.save(timeline.of_log(world.log), "schedule.json")

Open the file at https://ui.perfetto.dev or in chrome://tracing: a process is a rank, a thread one lane.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Span", "chrome_trace", "draw", "of_log", "of_tasks", "save"]

#: The order of lanes and the colour of spans, for names that kernels' tasks have; others follow.
_COLOURS = {"own tile": "C0", "peer tile": "C2", "push": "C1", "wait": "C3"}


@dataclass(frozen=True)
class Span:
    """Something that took from ``start`` to ``end``.

    Attributes:
        rank: whose.
        lane: of the rank: a program, a stream, its host.
        name: what it was.
        start, end: microseconds, or turns of the simulator's scheduler.
        details: more to show about it.
    """

    rank: int
    lane: str
    name: str
    start: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)


class Event(Protocol):
    """What ``sim.World.log`` holds (``sim.tasks.LogEntry``)."""

    @property
    def turn(self) -> int: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def task(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def what(self) -> str: ...
    @property
    def place(self) -> str: ...


def of_log(log: Iterable[Event]) -> list[Span]:
    """Each event of a simulated run as a span of one turn, in a lane for each task. A gap is where others had turns.

    Args:
        log: of the run, ``World.log``; the world must have been made with ``log=True``.
    """
    return [
        Span(
            event.rank, event.task, event.what, event.turn, event.turn + 1, {"place": event.place, "ns": event.time_ns}
        )
        for event in log
    ]


def of_tasks(rank: int, operation: str, rows: Sequence[Sequence[int]], kinds: Sequence[str]) -> list[Span]:
    """The tasks that one rank's kernel recorded, in a lane for each program, and the waits within them.

    Args:
        rank: whose.
        operation: name of the kernel's operation.
        rows: (began, waited, went on, ended, kind, program) in nanoseconds, by task (``kernels.timeline``). The first
            beginning is time 0: clocks of different GPUs do not agree to the microsecond.
        kinds: names of the kinds.
    """
    zero = min((began for began, *_ in rows if began), default=0)
    found = []
    for task, (began, waited, went_on, ended, kind, program) in enumerate(rows):
        if not began:
            continue
        lane, details = f"program {program:3}", {"operation": operation, "task": task}
        found.append(Span(rank, lane, kinds[kind], (began - zero) / 1e3, (ended - zero) / 1e3, details))
        if went_on > waited:
            found.append(Span(rank, lane, "wait", (waited - zero) / 1e3, (went_on - zero) / 1e3, details))
    return found


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """``spans`` in Chrome's trace event format: complete events, and names of the ranks and lanes."""
    lanes = sorted({(span.rank, span.lane) for span in spans})
    number = {lane: index for index, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number[rank, lane], "args": {"name": lane}}
        for rank, lane in lanes
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": span.rank,
            "tid": number[span.rank, span.lane],
            "ts": span.start,
            "dur": span.end - span.start,
            "args": span.details,
        }
        for span in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def save(spans: Sequence[Span], path: str | Path) -> None:
    """Write ``spans`` as a Chrome trace to the file ``path``; its folder is made where there is none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(spans)) + "\n")


def draw(spans: Sequence[Span], path: str | Path, *, title: str = "", unit: str = "us") -> None:
    """Draw a panel a rank and a row a lane, as an image of the type that ``path`` ends in. Needs the extra ``bench``.

    Args:
        spans: what to draw.
        path: of the image; its folder is made where there is none.
        title: above it.
        unit: of the spans' ends, under it.

    Raises:
        ValueError: there are no spans.
    """
    if not spans:
        raise ValueError("there is nothing to draw: no spans")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    figure = Figure(figsize=(12, 4.5 * len(ranks)), layout="constrained")
    panels = figure.subplots(len(ranks), 1, squeeze=False, sharex=True)[:, 0]
    names = dict.fromkeys([name for name in _COLOURS if any(span.name == name for span in spans)])
    names |= dict.fromkeys(span.name for span in spans)
    colours = {name: _COLOURS.get(name, f"C{index % 10}") for index, name in enumerate(names)}
    for rank, axes in zip(ranks, panels, strict=True):
        own = [span for span in spans if span.rank == rank]
        rows = {lane: row for row, lane in enumerate(sorted({span.lane for span in own}))}
        for name in names:  # waits last, over the tasks that they are a part of
            some = [span for span in own if span.name == name]
            axes.barh(
                [rows[span.lane] for span in some],
                [span.end - span.start for span in some],
                left=[span.start for span in some],
                height=0.9,
                color=colours[name],
            )
        axes.set_title(f"rank {rank}", fontsize="medium", loc="left")
        axes.set_ylabel(f"{len(rows)} lane{'s' * (len(rows) > 1)}")
        axes.set_yticks([])
        axes.invert_yaxis()
    panels[-1].set_xlabel(unit)
    figure.legend(
        handles=[Patch(color=colours[name], label=name) for name in names], loc="outside upper right", ncols=4
    )
    figure.suptitle(title, x=0.01, ha="left")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
