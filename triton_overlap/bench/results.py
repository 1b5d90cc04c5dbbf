"""The data a benchmark keeps: one JSON file a run, its table and its figure."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_overlap.timing import Timing

#: Rivals of the first table; the second one has the library's methods.
TITLES = {
    "fused": "fused",
    "gemm": "GEMM alone",
    "collective": "collective + GEMM",
    "async_tp": "async-TP",
}
#: Rivals that are no method of this library.
OTHERS = ("gemm", "collective", "async_tp")
#: How much slower than the best single method ``auto`` may be.
AUTO_LIMIT = 1.03


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
        operation, tokens, world_size, dtype: the problem's.
        k, n: of its layer (bench/problems.py).
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

    def methods(self) -> list[str]:
        """The library's methods that ran on the problem itself, ``auto`` not among them."""
        return [name for name in self.measurements if name not in (*OTHERS, "auto", "bulk")]

    def best_method(self) -> str:
        """The fastest of ``methods``."""
        return min(self.methods(), key=lambda name: self.measurements[name].timing.median_ms)

    def auto_over_best(self) -> float | None:
        """Time of ``auto`` over that of the best single method, or None where ``auto`` did not run."""
        return self.ratio("auto", self.best_method())

    def tflops(self, rival: str) -> float:
        """10^12 operations a second of one rank's GEMM, 2 T K N of them, in the time of ``rival``."""
        return 2 * self.tokens * self.k * self.n / self.measurements[rival].timing.median_ms / 1e9


@dataclass(frozen=True)
class Kept(ABC):
    """What every benchmark keeps of a run.

    Attributes:
        created: UTC time, ISO 8601.
        command: the arguments; the first is the benchmark's name.
        commit: git commit, or None.
        hardware, versions: see environment.py.
        method: how it was measured.
    """

    created: str
    command: list[str]
    commit: str | None
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    method: dict[str, Any]

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Ranks that took part."""

    def file_name(self) -> str:
        """Speaks of the hardware and the time: ``tp_nvidia-h200_2_20260131T120000Z.json``."""
        device = re.sub(r"[^a-z0-9]+", "-", str(self.hardware["device"]).lower()).strip("-")
        return f"{self.command[0]}_{device}_{self.world_size}_{re.sub(r'[-:]', '', self.created)}.json"

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def measurements_of(found: dict[str, dict[str, Any]]) -> dict[str, Measurement]:
    """From what a file holds of them."""
    return {
        name: Measurement(entry["rival"], Timing(**entry["timing"]), entry["relative_error"])
        for name, entry in found.items()
    }


@dataclass(frozen=True)
class Results(Kept):
    """A run of the tensor-parallel benchmark.

    Attributes:
        rows: one a problem.
    """

    rows: list[Row]

    @property
    def world_size(self) -> int:
        return self.rows[0].world_size

    @classmethod
    def load(cls, path: Path) -> Results:
        data = json.loads(path.read_text())
        rows = [Row(measurements=measurements_of(row.pop("measurements")), **row) for row in data.pop("rows")]
        return cls(rows=rows, **data)


def now() -> str:
    """UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _by_product(rows: list[Row]) -> list[list[Row]]:
    """``rows`` of one operation and layer together, by token count."""
    found: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.operation, row.k, row.n), []).append(row)
    return [sorted(group, key=lambda row: row.tokens) for group in found.values()]


def print_tables(results: Results, console: Console) -> None:
    """Two tables an operation and layer: the library and its rivals, and the library's methods among each other.

    In the first, ratios are times of ``fused`` over times of the other: below 1 means fused is faster. TFLOP/s are
    those of ``fused``, of one rank.
    """
    for rows in _by_product(results.rows):
        first = rows[0]
        table = Table(
            title=f"{first.operation}, K {first.k}, N {first.n}, {first.dtype}, {first.world_size} ranks, "
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
                *(number(time, 3) for time in times),
                number(row.bound_ms, 3),
                *(number(row.ratio("fused", other), 2) for other in ("gemm", "collective", "async_tp")),
                number(fused.timing.median_ms / row.bound_ms, 2),
                number(row.tflops("fused"), 1),
                f"{fused.relative_error:.1e}",
            )
        console.print(table)
        if "auto" in first.measurements:
            _print_methods(rows, console)
    for name, reason in sorted({pair for row in results.rows for pair in row.unavailable.items()}):
        console.print(f"{TITLES.get(name, name)} did not run: {reason}")
    checked = [ratio for row in results.rows if (ratio := row.auto_over_best()) is not None]
    if checked:
        within = sum(ratio <= AUTO_LIMIT for ratio in checked)
        console.print(
            f"auto over the best single method: at most {max(checked):.3f}; "
            f"{within} of {len(checked)} within {AUTO_LIMIT}"
        )


def _print_methods(rows: list[Row], console: Console) -> None:
    """Each method's time over that of the GEMM alone, a column for each token count; then how auto did."""
    table = Table(title=f"{rows[0].operation}: time over that of the GEMM alone, by T")
    table.add_column("method")
    for row in rows:
        table.add_column(str(row.tokens), justify="right")
    for name in dict.fromkeys(name for row in rows for name in row.measurements):
        if name not in OTHERS:
            table.add_row(name, *(number(row.ratio(name, "gemm"), 2) for row in rows))
    table.add_section()
    table.add_row("best single method", *(row.best_method() for row in rows))
    table.add_row("auto / best single", *(number(row.auto_over_best(), 3) for row in rows))
    console.print(table)


def draw(results: Results, path: Path) -> None:
    """Times over the GEMM alone against T, a panel an operation and layer, as an image of the type ``path`` ends in."""
    from matplotlib.figure import Figure

    products = _by_product(results.rows)
    figure = Figure(figsize=(5.5 * len(products), 4), layout="constrained")
    panels = figure.subplots(1, len(products), squeeze=False)[0]
    for axes, rows in zip(panels, products, strict=True):
        for name, title in (TITLES | {"auto": "auto"}).items():
            points = [(row.tokens, ratio) for row in rows if (ratio := row.ratio(name, "gemm")) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=title)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{rows[0].operation}, K {rows[0].k}, N {rows[0].n}")
        axes.set_xlabel("T, tokens of all ranks")
        axes.set_ylabel("time over the GEMM alone")
        axes.grid(alpha=0.3)
        axes.legend()
    first = results.rows[0]
    figure.suptitle(f"{results.hardware['device']}, {first.world_size} ranks, {first.dtype}, {results.created[:10]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
