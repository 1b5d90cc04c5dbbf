"""One graph of a layer for every token count, beside calls that take the count from the host: one row a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_overlap.bench import figures
from triton_overlap.bench.results import Measurement, Results, measurements_of, number

#: The captured graph; the same call with its count on the device, not captured; and the call with the host's count.
GRAPH, UNCAPTURED, EAGER = "graph", "device count", "host count"


@dataclass(frozen=True)
class Row:
    """One layer at one count.

    Attributes:
        model, document, world_size, dtype: the problem's.
        tokens: active ones, of all ranks.
        capacity: the tokens that the graph was captured with room for.
        measurements: by GRAPH (on GPUs), UNCAPTURED and EAGER.
    """

    model: str
    tokens: int
    capacity: int
    document: int
    world_size: int
    dtype: str
    measurements: dict[str, Measurement]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        return cls(**{**data, "measurements": measurements_of(data["measurements"])})

    def time_ms(self, name: str) -> float | None:
        """The median, or None where it did not run."""
        found = self.measurements.get(name)
        return None if found is None else found.timing.median_ms

    def per_token_us(self, name: str) -> float | None:
        time_ms = self.time_ms(name)
        return None if time_ms is None else 1e3 * time_ms / self.tokens

    def over_eager(self, name: str) -> float | None:
        """Time over that of the call with the host's count."""
        time_ms, eager_ms = self.time_ms(name), self.time_ms(EAGER)
        return None if time_ms is None or eager_ms is None else time_ms / eager_ms


def by_layer(results: Results) -> list[list[Row]]:
    """Rows of one model together, by count."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in results.rows:
        found.setdefault((row.model, row.capacity), []).append(row)
    return [sorted(rows, key=lambda row: row.tokens) for rows in found.values()]


def print_tables(results: Results, console: Console) -> None:
    """A table a layer: times at every count, over those of the host's count, and for each token."""
    for rows in by_layer(results):
        first = rows[0]
        table = Table(
            title=f"{first.model} layer, one graph for up to {first.capacity} tokens, {first.dtype}, "
            f"{first.world_size} ranks, {results.hardware['device']}: forward and backward, ms"
        )
        for title in ("T", GRAPH, UNCAPTURED, EAGER, f"{GRAPH} / {EAGER}", f"us a token, {GRAPH}", f"us, {EAGER}"):
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(
                str(row.tokens),
                *(number(row.time_ms(name), 3) for name in (GRAPH, UNCAPTURED, EAGER)),
                number(row.over_eager(GRAPH), 2),
                *(number(row.per_token_us(name), 3) for name in (GRAPH, EAGER)),
            )
        console.print(table)


def draw(results: Results, path: Path) -> None:
    """Times against T, a panel a layer."""
    layers = by_layer(results)
    figure, panels = figures.grid(len(layers), results)
    for axes, rows in zip(panels, layers, strict=True):
        names = (GRAPH, UNCAPTURED, EAGER)
        figures.lines(
            axes,
            {name: [(row.tokens, time) for row in rows if (time := row.time_ms(name)) is not None] for name in names},
            log=True,
        )
        axes.set_title(f"{rows[0].model}, capacity {rows[0].capacity}", fontsize="medium")
        axes.set_ylabel("ms, forward and backward")
    figures.save(figure, path)
