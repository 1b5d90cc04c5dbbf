"""A transformer layer, forward and backward, by several ways to do its products: one row a model and token count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_overlap.bench import figures
from triton_overlap.bench.results import Measurement, Results, measurements_of, number

#: The rival that others are compared with: the same modules over NCCL and cuBLAS, nothing overlapped.
BASELINE = "nccl"


@dataclass(frozen=True)
class Row:
    """One layer on one batch.

    Attributes:
        model, tokens, document, world_size, dtype: the problem's.
        communication_ms: time in collectives of the baseline, all of it exposed; None without peers.
        measurements: by rival.
        unavailable: rivals that could not run, and why.
    """

    model: str
    tokens: int
    document: int
    world_size: int
    dtype: str
    communication_ms: float | None
    measurements: dict[str, Measurement]
    unavailable: dict[str, str]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        return cls(**{**data, "measurements": measurements_of(data["measurements"])})

    def speedup(self, rival: str) -> float | None:
        """Time of the baseline over time of ``rival``, or None where one did not run."""
        if BASELINE not in self.measurements or rival not in self.measurements:
            return None
        return self.measurements[BASELINE].timing.median_ms / self.measurements[rival].timing.median_ms

    def hidden(self, rival: str) -> float | None:
        """Time saved against the baseline, as a share of its time in collectives; None where that is not known."""
        if not self.communication_ms or self.speedup(rival) is None:
            return None
        saved = self.measurements[BASELINE].timing.median_ms - self.measurements[rival].timing.median_ms
        return saved / self.communication_ms


def print_tables(results: Results, console: Console) -> None:
    """A table for each row: times, speed over that of the baseline, and what share of its communication is hidden."""
    for row in results.rows:
        communication = ""
        if row.communication_ms is not None:
            communication = f", of which {row.communication_ms:.3f} ms in collectives with {BASELINE}"
        table = Table(
            title=f"{row.model} layer, T {row.tokens} in documents of {row.document}, {row.dtype}, {row.world_size} "
            f"ranks, {results.hardware['device']}: forward and backward{communication}"
        )
        for title in ("", "ms", "host, ms", f"speed over {BASELINE}", "communication hidden", "error"):
            table.add_column(title, justify="right" if title else "left")
        for name, found in row.measurements.items():
            hidden = row.hidden(name)
            table.add_row(
                name,
                number(found.timing.median_ms, 3),
                number(found.timing.host_median_ms, 2),
                number(row.speedup(name), 3),
                "-" if hidden is None else f"{hidden:.0%}",
                f"{found.relative_error:.1e}",
            )
        console.print(table)
    for name, reason in sorted({pair for row in results.rows for pair in row.unavailable.items()}):
        console.print(f"{name} did not run: {reason}")


def draw(results: Results, path: Path) -> None:
    """Times as bars, a panel a row; the part of the baseline's that is communication is marked."""
    figure, panels = figures.grid(len(results.rows), results)
    for axes, row in zip(panels, results.rows, strict=True):
        figures.bars(axes, [(name, found.timing.median_ms) for name, found in row.measurements.items()], digits=2)
        if row.communication_ms is not None and BASELINE in row.measurements:
            axes.axvline(
                row.measurements[BASELINE].timing.median_ms - row.communication_ms,
                color="black",
                linestyle="--",
                label=f"{BASELINE} without its collectives",
            )
            axes.legend(fontsize="small", loc="lower right")
        axes.set_title(f"{row.model}, T {row.tokens}", fontsize="medium")
        axes.set_xlabel("ms, forward and backward")
    figures.save(figure, path)
