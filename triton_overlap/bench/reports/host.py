"""Host time of a call, whole and in parts: one row an operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_overlap.bench import figures
from triton_overlap.bench.results import Results, number

#: The way that launches nothing.
LAUNCHER = "launcher"
#: Whole calls, and what each is.
WAYS = {
    "function": "the public function, no gradient",
    "forward for a gradient": "the same, recorded by autograd",
    "forward and backward": "and its backward pass: three products",
    "compiled": "under torch.compile(fullgraph=True, dynamic=True)",
    "count on the device": "with active_tokens",
    "graph": "a replay of a graph with one such call",
    "torch.matmul": "a product alone, for comparison",
}
#: Parts of a call of the public function: each is the time of one step of the way down less that of the next.
PARTS = {
    "arguments": ("function", "operator"),
    "PyTorch's dispatch, validation": ("operator", "method"),
    "launch of the kernel": ("method", LAUNCHER),
    "launcher: buffer, output, descriptors": (LAUNCHER, None),
}


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    Attributes:
        operation, tokens, k, n, world_size, dtype: the problem's.
        launches: whether kernels were launched; without, only the library's own part is there.
        times_us: microseconds of a call, by way (bench/host.py).
        profile: (function, its calls a call, its own share of the time) of calls of the public function.
        relative_error: of the result.
    """

    operation: str
    tokens: int
    k: int
    n: int
    world_size: int
    dtype: str
    launches: bool
    times_us: dict[str, float]
    profile: list[list[Any]]
    relative_error: float

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        return cls(**data)

    def parts(self) -> dict[str, float]:
        """Microseconds of each of PARTS; their sum is that of the public function."""
        times = self.times_us
        return {name: times[outer] - (times[inner] if inner else 0.0) for name, (outer, inner) in PARTS.items()}


def print_tables(results: Results, console: Console) -> None:
    """Of each operation: whole calls, the parts of one, and the functions that take most of it."""
    for row in results.rows:
        launches = "" if row.launches else ", no kernel launched"
        table = Table(title=f"{row.operation}, T {row.tokens}, K {row.k}, N {row.n}: us of host time a call{launches}")
        table.add_column("")
        table.add_column("us", justify="right")
        table.add_column("what it is")
        for name, what in WAYS.items():
            if name in row.times_us:
                table.add_row(name, number(row.times_us[name], 1), what)
        table.add_section()
        for name, time_us in row.parts().items():
            table.add_row(name, number(time_us, 1), "part of a call of the public function")
        console.print(table)
        table = Table(title="own time by cProfile, of calls of the public function")
        for title in ("share", "calls", "function"):
            table.add_column(title, justify="left" if title == "function" else "right")
        for function, calls, share in row.profile:
            table.add_row(f"{share:.1%}", f"{calls:.1f}", function)
        console.print(table)


def draw(results: Results, path: Path) -> None:
    """Parts of a call and whole calls as bars, two panels an operation."""
    figure, panels = figures.grid(2 * len(results.rows), results)
    for index, row in enumerate(results.rows):
        whole, parts = panels[2 * index : 2 * index + 2]
        figures.bars(whole, [(name, row.times_us[name]) for name in WAYS if name in row.times_us], digits=1)
        figures.bars(parts, list(row.parts().items()), digits=1)
        whole.set_title(f"{row.operation}: whole calls", fontsize="medium")
        parts.set_title(f"{row.operation}: parts of one", fontsize="medium")
        whole.set_xlabel("us of host time")
        parts.set_xlabel("us of host time")
    figures.save(figure, path)
