"""The data a benchmark keeps: one JSON file a run, its table and its figure."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_overlap.bench.timing import Timing

TITLES = {
    "fused": "fused",
    "gemm": "GEMM alone",
    "collective": "collective + GEMM",
    "async_tp": "async-TP",
}


@dataclass(frozen=True)
class Measurement:
    """One rival on one problem. Times are of the slowest rank."""

    rival: str
    timing: Timing
    relative_error: float


@dataclass(frozen=True)
class Row:
    """One problem with all that ran on it.

    Attributes:
        operation, tokens, k, n, world_size, dtype: the problem's (see problems.py).
        bound_ms: the lower bound of any method, the longer of the GEMM alone and the link's time for the bytes that a
            rank sends.
        measurements: by rival.
        unavailable: rivals that could not run, and why.
    """

    operation: str
    tokens: int
    k: int
    n: int
    world_size: int
    dtype: str
    bound_ms: float
    measurements: dict[str, Measurement]
    unavailable: dict[str, str]

    def ratio(self, rival: str, to: str) -> float | None:
        """Time of ``rival`` over time of ``to``, or None where one did not run."""
        if rival not in self.measurements or to not in self.measurements:
            return None
        return self.measurements[rival].timing.median_ms / self.measurements[to].timing.median_ms

    def tflops(self, rival: str) -> float:
        """10^12 operations a second of one rank's GEMM, 2 T K N of them, in the time of ``rival``."""
        return 2 * self.tokens * self.k * self.n / self.measurements[rival].timing.median_ms / 1e9


@dataclass(frozen=True)
class Results:
    """A run.

    Attributes:
        created: UTC time, ISO 8601.
        command: the arguments.
        commit: git commit, or None.
        hardware, versions: see environment.py.
        method: how it was measured.
        rows: one a problem.
    """

    created: str
    command: list[str]
    commit: str | None
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    method: dict[str, Any]
    rows: list[Row]

    def file_name(self) -> str:
        """Speaks of the hardware and the time: ``tp_nvidia-h200_2_20260131T120000Z.json``."""
        device = re.sub(r"[^a-z0-9]+", "-", str(self.hardware["device"]).lower()).strip("-")
        return f"tp_{device}_{self.rows[0].world_size}_{re.sub(r'[-:]', '', self.created)}.json"

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        data = json.loads(path.read_text())
        rows = []
        for row in data.pop("rows"):
            measurements = {
                name: Measurement(found["rival"], Timing(**found["timing"]), found["relative_error"])
                for name, found in row.pop("measurements").items()
            }
            rows.append(Row(measurements=measurements, **row))
        return cls(rows=rows, **data)


def now() -> str:
    """UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_tables(results: Results, console: Console) -> None:
    """One table an operation. Ratios are times of ``fused`` over times of the other: below 1 means fused is faster.

    TFLOP/s are those of ``fused``, of one rank.
    """
    for operation in dict.fromkeys(row.operation for row in results.rows):
        rows = [row for row in results.rows if row.operation == operation]
        first = rows[0]
        table = Table(
            title=f"{operation}, K {first.k}, N {first.n}, {first.dtype}, {first.world_size} ranks, "
            f"{results.hardware['device']}: medians in ms, and time of fused over time of the others"
        )
        table.add_column("T", justify="right")
        for title in TITLES.values():
            table.add_column(title, justify="right")
        ratios = [f"fused / {other}" for other in ("GEMM", "collective", "async-TP", "bound")]
        for title in ("bound", *ratios, "TFLOP/s", "error"):
            table.add_column(title, justify="right")
        for row in rows:
            times = [row.measurements[name].timing.median_ms if name in row.measurements else None for name in TITLES]
            fused = row.measurements["fused"]
            table.add_row(
                str(row.tokens),
                *(_number(time, 3) for time in times),
                _number(row.bound_ms, 3),
                *(_number(row.ratio("fused", other), 2) for other in ("gemm", "collective", "async_tp")),
                _number(fused.timing.median_ms / row.bound_ms, 2),
                _number(row.tflops("fused"), 1),
                f"{fused.relative_error:.1e}",
            )
        console.print(table)
    for name, reason in {pair for row in results.rows for pair in row.unavailable.items()}:
        console.print(f"{TITLES[name]} did not run: {reason}")


def draw(results: Results, path: Path) -> None:
    """Times over the GEMM alone against T, one panel an operation, as an image of the type ``path`` ends in."""
    from matplotlib.figure import Figure

    operations = list(dict.fromkeys(row.operation for row in results.rows))
    figure = Figure(figsize=(5.5 * len(operations), 4), layout="constrained")
    panels = figure.subplots(1, len(operations), squeeze=False)[0]
    for axes, operation in zip(panels, operations, strict=True):
        rows = sorted((row for row in results.rows if row.operation == operation), key=lambda row: row.tokens)
        for name, title in TITLES.items():
            points = [(row.tokens, ratio) for row in rows if (ratio := row.ratio(name, "gemm")) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=title)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(operation)
        axes.set_xlabel("T, tokens of all ranks")
        axes.set_ylabel("time over the GEMM alone")
        axes.grid(alpha=0.3)
        axes.legend()
    first = results.rows[0]
    figure.suptitle(
        f"{results.hardware['device']}, {first.world_size} ranks, K {first.k}, N {first.n}, {first.dtype}, "
        f"{results.created[:10]}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
