"""Tokens a second of microbatches whose token counts change, beside those of one fixed count: one row a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_overlap.bench import figures
from triton_overlap.bench.results import Results, number

#: The three ways (bench/train.py).
FIXED, RANDOM, PADDED = "fixed", "random", "padded"


@dataclass(frozen=True)
class Counters:
    """What a process has used so far.

    Attributes:
        specializations: compiled kernels of this library.
        symmetric_allocations: of registered memory.
        device_allocations: requests of torch's allocator to the driver; 0 on CPUs.
        peak_bytes: the most that torch's allocator has handed out; 0 on CPUs.
    """

    specializations: int
    symmetric_allocations: int
    device_allocations: int
    peak_bytes: int


@dataclass(frozen=True)
class Row:
    """One stack of layers.

    Attributes:
        model, layers, document, world_size, dtype: what was run.
        method: of all products.
        capacity: tokens that were registered.
        microbatches: timed ones of each way.
        random_tokens: their random counts, sorted.
        fixed_tokens: the fixed one, the mean of those.
        tokens_per_second: of all ranks, without padding, by way.
        before, after: counters after the warm-up, and at the end.
        relative_error: of outputs and gradients.
    """

    model: str
    layers: int
    method: str
    capacity: int
    document: int
    world_size: int
    dtype: str
    microbatches: int
    random_tokens: list[int]
    fixed_tokens: int
    tokens_per_second: dict[str, float]
    before: Counters
    after: Counters
    relative_error: float

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        return cls(**{**data, "before": Counters(**data["before"]), "after": Counters(**data["after"])})

    def over_fixed(self, way: str) -> float:
        """Tokens a second over those of the fixed count."""
        return self.tokens_per_second[way] / self.tokens_per_second[FIXED]


def print_tables(results: Results, console: Console) -> None:
    """A table for each row, and what happened after the warm-up."""
    for row in results.rows:
        table = Table(
            title=f"{row.layers} layers of {row.model}, {row.method}, up to {row.capacity} tokens in documents of "
            f"{row.document}, {row.dtype}, {row.world_size} ranks, {results.hardware['device']}"
        )
        for title in ("token counts", "tokens a second", f"over {FIXED}"):
            table.add_column(title, justify="left" if title == "token counts" else "right")
        for way, what in (
            (FIXED, f"{row.fixed_tokens} each"),
            (RANDOM, f"{row.random_tokens[0]} to {row.random_tokens[-1]}"),
            (PADDED, f"the same, padded to {row.capacity}"),
        ):
            table.add_row(
                f"{way}: {what}",
                f"{row.tokens_per_second[way]:,.0f}",
                number(row.over_fixed(way), 3),
            )
        console.print(table)
        before, after = row.before, row.after
        console.print(
            f"after the warm-up: {after.specializations - before.specializations} kernels compiled, "
            f"{after.symmetric_allocations - before.symmetric_allocations} symmetric allocations, "
            f"{after.device_allocations - before.device_allocations} requests to the driver for memory; "
            f"peak memory {after.peak_bytes / 1e9:.2f} GB, {before.peak_bytes / 1e9:.2f} GB of it in the warm-up; "
            f"largest relative error {row.relative_error:.1e}"
        )


def draw(results: Results, path: Path) -> None:
    """Tokens a second as bars, a panel a row."""
    figure, panels = figures.grid(len(results.rows), results)
    for axes, row in zip(panels, results.rows, strict=True):
        figures.bars(axes, [(way, row.tokens_per_second[way]) for way in (FIXED, RANDOM, PADDED)], digits=0)
        axes.set_title(f"{row.layers} layers of {row.model}, up to {row.capacity} tokens", fontsize="medium")
        axes.set_xlabel("tokens a second, without padding")
    figures.save(figure, path)
