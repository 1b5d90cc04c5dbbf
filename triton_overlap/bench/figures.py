"""How figures are made, whatever they show: a grid of panels, saved as an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton_overlap.bench.results import Kept

#: Panels side by side.
COLUMNS = 4


def grid(count: int, results: Kept) -> tuple[Any, list[Any]]:
    """A matplotlib figure with ``count`` axes, headed by what was measured, where and when."""
    from matplotlib.figure import Figure  # the extra bench has it; tables do without

    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(4.5 * columns, 7), 3.6 * rows + 0.4), layout="constrained")
    axes = [axes for line in figure.subplots(rows, columns, squeeze=False) for axes in line]
    for spare in axes[count:]:
        spare.set_visible(False)
    ranks = results.world_size
    figure.suptitle(
        f"{results.name}: {ranks} {'rank' if ranks == 1 else 'ranks'} on {results.hardware['device']}, "
        f"{results.created[:10]}, commit {(results.commit or 'unknown')[:10]}"
    )
    return figure, axes[:count]


def lines(axes: Any, series: dict[str, list[tuple[float, float]]], *, log: bool = False) -> None:
    """Points over token counts, joined, a line for each name that has any; values from 0 on, or ``log``arithmic."""
    for name, points in series.items():
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3.5, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}")
    axes.tick_params(axis="x", labelrotation=45)
    if log:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("T, tokens of all ranks")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def bars(axes: Any, values: Sequence[tuple[str, float]], digits: int) -> None:
    """A horizontal bar for each (name, value), the first on top, with the value beside it."""
    names, lengths = zip(*values, strict=True)
    drawn = axes.barh(names, lengths, color=[f"C{index % 10}" for index in range(len(names))])
    axes.bar_label(drawn, fmt=f"%.{digits}f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(alpha=0.3, axis="x")


def save(figure: Any, path: Path) -> None:
    """Write the image, in the format that ``path`` ends in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
