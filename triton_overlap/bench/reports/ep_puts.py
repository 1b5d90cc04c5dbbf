"""Puts of a dispatch and what they cost a simulated network: one row a size and variant."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_overlap.bench import figures
from triton_overlap.bench.results import Results, number


@dataclass(frozen=True)
class Row:
    """One way to cut channels into puts, at one size.

    Attributes:
        tokens, hidden, topk, experts, world_size: the problem's; tokens of a rank.
        min_tokens_per_part, num_sub_parts: what was asked for.
        sub_parts: tokens of each put of a full channel, part by part.
        puts, num_bytes: of a dispatch, by rank.
        times_us: that the interface of each rank was busy.
    """

    tokens: int
    hidden: int
    topk: int
    experts: int
    world_size: int
    min_tokens_per_part: int
    num_sub_parts: int
    sub_parts: list[list[int]]
    puts: list[int]
    num_bytes: list[int]
    times_us: list[float]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        return cls(**data)

    @property
    def size(self) -> tuple[int, int, int, int]:
        return self.tokens, self.hidden, self.topk, self.experts

    @property
    def mean_us(self) -> float:
        """Over the ranks."""
        return statistics.fmean(self.times_us)

    @property
    def variant(self) -> str:
        return f"min_tokens_per_part {self.min_tokens_per_part}, num_sub_parts {self.num_sub_parts}"


def by_size(results: Results) -> list[list[Row]]:
    """The variants of each size; the first one is the control."""
    sizes = dict.fromkeys(row.size for row in results.rows)
    return [[row for row in results.rows if row.size == size] for size in sizes]


def print_tables(results: Results, console: Console) -> None:
    """A table a size, means over ranks."""
    method = results.method
    for rows in by_size(results):
        tokens, hidden, topk, experts = rows[0].size
        table = Table(
            title=f"dispatch, {tokens} x {hidden}, top-{topk} of {experts}, {rows[0].world_size} x 1, "
            f"{method['channels']} channels, simulated network",
            caption=f"{method['per_put_ns']:g} ns a put, {method['per_byte_ns']:g} ns a byte; mean over ranks",
        )
        for title in ("min_tokens_per_part", "num_sub_parts", "puts of a channel", "puts", "MB", "us", "/ control"):
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(
                str(row.min_tokens_per_part),
                str(row.num_sub_parts),
                " | ".join("+".join(map(str, sizes)) for sizes in row.sub_parts),
                number(statistics.fmean(row.puts), 0),
                number(statistics.fmean(row.num_bytes) / 1e6, 2),
                number(row.mean_us, 1),
                number(row.mean_us / rows[0].mean_us, 3),
            )
        console.print(table)


def draw(results: Results, path: Path) -> None:
    """The interface's time as bars, a panel a size."""
    sizes = by_size(results)
    figure, panels = figures.grid(len(sizes), results)
    for axes, rows in zip(panels, sizes, strict=True):
        figures.bars(axes, [(row.variant, row.mean_us) for row in rows], digits=1)
        axes.set_title(f"{rows[0].tokens} tokens of a rank", fontsize="medium")
        axes.set_xlabel("us of a network interface, simulated")
    figures.save(figure, path)
