"""The data that the expert-parallel benchmark keeps, and its tables."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from triton_overlap.bench import figures
from triton_overlap.bench.ep_rivals import RIVAL_OF
from triton_overlap.bench.results import Kept, Measurement, measurements_of, number


@dataclass(frozen=True)
class EpRow:
    """One operation at one size, with every call that was made.

    Attributes:
        operation, tokens, hidden, topk, experts, world_size: the problem's.
        moved_bytes: of rows and scales, that a rank sends to others; in a group of one, that it receives from itself.
            The mean over input sets on the rank with most.
        bound_ms: what ``moved_bytes`` need at the rate measured in this run; 0 where there is none.
        measurements: by name of the call (ep_rivals.py).
        unavailable: calls that could not be made, and why.
    """

    operation: str
    tokens: int
    hidden: int
    topk: int
    experts: int
    world_size: int
    moved_bytes: float
    bound_ms: float
    measurements: dict[str, Measurement]
    unavailable: dict[str, str]

    @property
    def size(self) -> str:
        return f"{self.tokens} x {self.hidden}, top-{self.topk} of {self.experts}"

    def over_bound(self, name: str) -> float | None:
        """Time of a call over the bound."""
        return self.measurements[name].timing.median_ms / self.bound_ms if self.bound_ms else None

    def over_rival(self, name: str) -> float | None:
        """Time of a call over that of the all-to-all it stands for (``RIVAL_OF``); None where there is none."""
        rival = RIVAL_OF.get(name)
        if rival not in self.measurements:
            return None
        return self.measurements[name].timing.median_ms / self.measurements[rival].timing.median_ms


@dataclass(frozen=True)
class Variant:
    """One way to cut a channel into parts and puts.

    Attributes:
        min_tokens_per_part, num_sub_parts: what was asked for.
        sub_parts: tokens of each put of a full channel, part by part.
        means_ms: for each repetition, the mean over ranks of their medians.
    """

    min_tokens_per_part: int
    num_sub_parts: int
    sub_parts: list[list[int]]
    means_ms: list[float]

    @property
    def mean_ms(self) -> float:
        """Over the repetitions."""
        return statistics.fmean(self.means_ms)

    @property
    def spread_ms(self) -> float:
        """Between the slowest and the fastest repetition."""
        return max(self.means_ms) - min(self.means_ms)


@dataclass(frozen=True)
class Comparison:
    """The variants side by side on one operation and size; the first one is the control.

    Attributes:
        operation, tokens, hidden, topk, experts: the problem's.
        topology: scale-out x scale-up.
        network: that carried the puts.
        channels: of a rank.
        variants: what was compared.
    """

    operation: str
    tokens: int
    hidden: int
    topk: int
    experts: int
    topology: str
    network: str
    channels: int
    variants: list[Variant]

    @property
    def size(self) -> str:
        return f"{self.tokens} x {self.hidden}, top-{self.topk} of {self.experts}"


@dataclass(frozen=True)
class EpResults(Kept):
    """A run of the expert-parallel benchmark.

    Attributes:
        rows: of calls.
        comparisons: of variants.
    """

    rows: list[EpRow]
    comparisons: list[Comparison]

    @property
    def world_size(self) -> int:
        return int(self.method["ranks"])

    @classmethod
    def load(cls, path: Path) -> EpResults:
        data = json.loads(path.read_text())
        rows = [EpRow(measurements=measurements_of(row.pop("measurements")), **row) for row in data.pop("rows")]
        comparisons = [
            Comparison(variants=[Variant(**variant) for variant in found.pop("variants")], **found)
            for found in data.pop("comparisons")
        ]
        return cls(rows=rows, comparisons=comparisons, **data)


def print_tables(results: EpResults, console: Console) -> None:
    """A table of calls and one of variants. Ratios below 1 mean that the library is faster."""
    rate = results.method["gbps"]
    if results.method["gpus_are_shared"]:
        console.print(
            "Ranks share a GPU: their kernels run by turns, so these times mean nothing and the data is no result.",
            style="bold red",
        )
    elif rate is None:
        console.print("CPU ranks: times mean nothing.", style="bold red")
    if results.rows:
        at = "" if rate is None else f", {results.method['over']} {rate:.0f} GB/s"
        _print_calls(results.rows, f"{results.world_size} ranks, {results.hardware['device']}{at}", console)
    for comparison in results.comparisons:
        _print_variants(comparison, console)


def _print_calls(rows: list[EpRow], where: str, console: Console) -> None:
    table = Table(title=f"dispatch and combine, {where}: medians in us on the slowest rank")
    table.add_column("size")
    table.add_column("operation")
    table.add_column("call")
    for title in ("us", "least", "host us", "MB moved", "bound us", "/ bound", "/ all-to-all", "error"):
        table.add_column(title, justify="right")
    for row in rows:
        for index, (name, found) in enumerate(row.measurements.items()):
            timing = found.timing
            head = (row.size, row.operation) if index == 0 else ("", "")
            moved = (number(row.moved_bytes / 1e6, 2), number(1e3 * row.bound_ms, 1)) if index == 0 else ("", "")
            table.add_row(
                *head,
                name,
                number(1e3 * timing.median_ms, 1),
                number(1e3 * timing.min_ms, 1),
                number(1e3 * timing.host_median_ms, 1),
                *moved,
                number(row.over_bound(name), 2),
                number(row.over_rival(name), 2),
                f"{found.relative_error:.0e}",
            )
        table.add_section()
    console.print(table)
    for name, reason in sorted({pair for row in rows for pair in row.unavailable.items()}):
        console.print(f"{name} did not run: {reason}")


def _print_variants(comparison: Comparison, console: Console) -> None:
    control = comparison.variants[0]
    table = Table(
        title=f"{comparison.operation}, {comparison.size}, {comparison.topology}, {comparison.network} network, "
        f"{comparison.channels} channels, us",
        caption=f"mean over ranks and {len(control.means_ms)} repetitions",
    )
    for title in ("min_tokens_per_part", "num_sub_parts", "puts of a channel", "mean", "spread", "/ control"):
        table.add_column(title, justify="right")
    for variant in comparison.variants:
        table.add_row(
            str(variant.min_tokens_per_part),
            str(variant.num_sub_parts),
            " | ".join("+".join(map(str, sizes)) for sizes in variant.sub_parts),
            number(1e3 * variant.mean_ms, 1),
            number(1e3 * variant.spread_ms, 1),
            number(variant.mean_ms / control.mean_ms, 3),
        )
    console.print(table)


def draw(results: EpResults, path: Path) -> None:
    """Times of the calls as bars, a panel a row, with the bound."""
    figure, panels = figures.grid(len(results.rows), results)
    for axes, row in zip(panels, results.rows, strict=True):
        figures.bars(axes, [(name, 1e3 * found.timing.median_ms) for name, found in row.measurements.items()], digits=1)
        if row.bound_ms:
            axes.axvline(1e3 * row.bound_ms, color="black", linestyle="--", label="bound")
            axes.legend(fontsize="small", loc="lower right")
        axes.set_title(f"{row.operation}\n{row.size}", fontsize="medium")
        axes.set_xlabel("us")
    figures.save(figure, path)
