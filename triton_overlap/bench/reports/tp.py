"""Tensor-parallel operations by every method, and their rivals: one row a problem."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_overlap.bench import figures
from triton_overlap.bench.results import Measurement, Results, measurements_of, number

#: Rivals that are no method of this library, and how tables name them.
OTHERS = {"gemm": "GEMM alone", "collective": "collective + GEMM", "async_tp": "async-TP"}
#: Token counts from here on are many: the GEMM hides the link. Means are taken of either side by itself.
MANY_TOKENS = 2048
#: How much slower than the best single method ``auto`` may be.
AUTO_LIMIT = 1.03


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

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        return cls(**{**data, "measurements": measurements_of(data["measurements"])})

    def time_ms(self, rival: str) -> float | None:
        """The median of ``rival``, or None where it did not run."""
        found = self.measurements.get(rival)
        return None if found is None else found.timing.median_ms

    def ratio(self, rival: str, to: str) -> float | None:
        """Time of ``rival`` over time of ``to``, or None where one did not run."""
        if rival not in self.measurements or to not in self.measurements:
            return None
        return self.measurements[rival].timing.median_ms / self.measurements[to].timing.median_ms

    def over_bound(self, rival: str) -> float | None:
        """Time of ``rival`` over the lower bound, or None where it did not run."""
        time_ms = self.time_ms(rival)
        return None if time_ms is None else time_ms / self.bound_ms

    def own(self) -> str:
        """What stands for the library: ``auto`` where it ran, else its default."""
        return "auto" if "auto" in self.measurements else "fused"

    def methods(self) -> list[str]:
        """The library's methods that ran on the problem itself, ``auto`` not among them."""
        return [name for name in self.measurements if name not in (*OTHERS, "auto", "bulk")]

    def best_method(self) -> str | None:
        """The fastest of ``methods``."""
        return min(self.methods(), key=lambda name: self.measurements[name].timing.median_ms, default=None)

    def auto_over_best(self) -> float | None:
        """Time of ``auto`` over that of the best single method, or None where ``auto`` or all of those did not run."""
        best = self.best_method()
        return None if best is None else self.ratio("auto", best)

    def tflops(self, rival: str) -> float:
        """10^12 operations a second of one rank's GEMM, 2 T K N of them, in the time of ``rival``."""
        return 2 * self.tokens * self.k * self.n / self.measurements[rival].timing.median_ms / 1e9


@dataclass(frozen=True)
class Summary:
    """One rival over several problems; "own" is the library's time.

    Attributes:
        problems: how many it ran on.
        over_bound: geometric mean of its time over the lower bound.
        worst_over_bound: the largest.
        worst_excess_us: of its time beyond the lower bound.
        own_over: geometric mean of the library's time over its.
        worst_own_over: the largest.
    """

    problems: int
    over_bound: float
    worst_over_bound: float
    worst_excess_us: float
    own_over: float
    worst_own_over: float

    @classmethod
    def of(cls, rows: Sequence[Row], rival: str) -> Summary | None:
        """None where the rival ran on none of ``rows``."""
        rows = [row for row in rows if row.own() in row.measurements and rival in row.measurements]
        if not rows:
            return None
        bounds = [row.over_bound(rival) or 0.0 for row in rows]
        ratios = [row.ratio(row.own(), rival) or 0.0 for row in rows]
        return cls(
            problems=len(rows),
            over_bound=statistics.geometric_mean(bounds),
            worst_over_bound=max(bounds),
            worst_excess_us=max(1e3 * (row.measurements[rival].timing.median_ms - row.bound_ms) for row in rows),
            own_over=statistics.geometric_mean(ratios),
            worst_own_over=max(ratios),
        )


def by_product(rows: Sequence[Row]) -> list[list[Row]]:
    """``rows`` of one operation and layer together, by token count."""
    found: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.operation, row.k, row.n), []).append(row)
    return [sorted(group, key=lambda row: row.tokens) for group in found.values()]


def rivals_of(rows: Sequence[Row]) -> list[str]:
    """Whatever ran on any of ``rows``, in the order of the rivals."""
    return list(dict.fromkeys(name for row in rows for name in row.measurements))


def summaries(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Summary]]:
    """Of each operation, for many tokens and for few, a summary of each rival."""
    found: dict[tuple[str, str], dict[str, Summary]] = {}
    for operation in dict.fromkeys(row.operation for row in rows):
        for many in (True, False):
            some = [row for row in rows if row.operation == operation and (row.tokens >= MANY_TOKENS) == many]
            each = {name: summary for name in rivals_of(some) if (summary := Summary.of(some, name)) is not None}
            if each:
                found[operation, f"T {'>=' if many else '<'} {MANY_TOKENS}"] = each
    return found


def print_tables(results: Results, console: Console) -> None:
    """Two tables an operation and layer: the library and its rivals, and the library's methods among each other; then
    the means over all problems.

    In the first, ratios are times of the library over times of the other: below 1 means the library is faster. TFLOP/s
    are those of the library, of one rank.
    """
    rows: list[Row] = results.rows
    for product in by_product(rows):
        _print_rivals(product, results.hardware["device"], console)
        if "auto" in product[0].measurements and product[0].methods():
            _print_methods(product, console)
    for name, reason in sorted({pair for row in rows for pair in row.unavailable.items()}):
        console.print(f"{OTHERS.get(name, name)} did not run: {reason}")
    for (operation, size), each in summaries(rows).items():
        _print_summaries(f"{operation}, {size}", each, console)
    checked = [ratio for row in rows if (ratio := row.auto_over_best()) is not None]
    if checked:
        within = sum(ratio <= AUTO_LIMIT for ratio in checked)
        console.print(
            f"auto over the best single method: at most {max(checked):.3f}; "
            f"{within} of {len(checked)} within {AUTO_LIMIT}"
        )


def _print_rivals(rows: Sequence[Row], device: str, console: Console) -> None:
    first, own = rows[0], rows[0].own()
    table = Table(
        title=f"{first.operation}, K {first.k}, N {first.n}, {first.dtype}, {first.world_size} ranks, {device}: "
        f"medians in ms, and time of {own} over time of the others"
    )
    ratios = [f"{own} / {other}" for other in ("collective", "async-TP", "bound")]
    for title in ("T", own, *OTHERS.values(), "bound", *ratios, "TFLOP/s", "error"):
        table.add_column(title, justify="right")
    for row in rows:
        if own not in row.measurements:
            continue
        table.add_row(
            str(row.tokens),
            *(number(row.time_ms(name), 3) for name in (own, *OTHERS)),
            number(row.bound_ms, 3),
            *(number(row.ratio(own, other), 2) for other in ("collective", "async_tp")),
            number(row.over_bound(own), 2),
            number(row.tflops(own), 1),
            f"{row.measurements[own].relative_error:.1e}",
        )
    console.print(table)


def _print_methods(rows: Sequence[Row], console: Console) -> None:
    """Each method's time over that of the GEMM alone, a column for each token count; then how auto did."""
    table = Table(title=f"{rows[0].operation}: time over that of the GEMM alone, by T")
    table.add_column("method")
    for row in rows:
        table.add_column(str(row.tokens), justify="right")
    for name in rivals_of(rows):
        if name not in OTHERS:
            table.add_row(name, *(number(row.ratio(name, "gemm"), 2) for row in rows))
    table.add_section()
    table.add_row("best single method", *(row.best_method() for row in rows))
    table.add_row("auto / best single", *(number(row.auto_over_best(), 3) for row in rows))
    console.print(table)


def _print_summaries(title: str, each: Mapping[str, Summary], console: Console) -> None:
    table = Table(title=f"{title}: geometric means over all layers and counts")
    for column in (
        "",
        "problems",
        "over the bound",
        "worst",
        "worst excess, us",
        "library's time over its",
        "worst ",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, found in each.items():
        table.add_row(
            OTHERS.get(name, name),
            str(found.problems),
            number(found.over_bound, 3),
            number(found.worst_over_bound, 2),
            number(found.worst_excess_us, 1),
            number(found.own_over, 3),
            number(found.worst_own_over, 2),
        )
    console.print(table)


def draw(results: Results, path: Path) -> None:
    """Times over the lower bound against T: a panel an operation and layer."""
    products = by_product(results.rows)
    figure, panels = figures.grid(len(products), results)
    for axes, rows in zip(panels, products, strict=True):
        own = rows[0].own()
        shown = {own: own, **({} if own == "fused" else {"fused": "fused"}), **OTHERS}
        figures.lines(
            axes,
            {
                title: [(row.tokens, ratio) for row in rows if (ratio := row.over_bound(name)) is not None]
                for name, title in shown.items()
            },
        )
        axes.set_title(f"{rows[0].operation}\nK {rows[0].k}, N {rows[0].n}", fontsize="medium")
        axes.set_ylabel("time over the lower bound")
    figures.save(figure, path)
