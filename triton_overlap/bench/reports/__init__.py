"""What each kind of results consists of, its tables and its figure: a module a kind, named as the command.

A module has ``print_tables(results, console)``, and ``draw(results, path)``, which writes an image of the type that
``path`` ends in. For a kind of :class:`Results` it has ``Row``, with a class method ``of`` that reads JSON's
dictionaries.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

from triton_overlap.bench import ep_results
from triton_overlap.bench.results import Kept, Results

from . import counts, ep_puts, host, layer, tp, train

#: By kind, the name of what is kept.
REPORTS: dict[str, ModuleType] = {
    "counts": counts,
    "ep": ep_results,
    "ep_puts": ep_puts,
    "host": host,
    "layer": layer,
    "tp": tp,
    "train": train,
}


def load(path: Path) -> Kept:
    """The results in a kept file.

    Raises:
        ValueError: the file holds no results of a known kind.
    """
    data = json.loads(path.read_text())
    known = isinstance(data, dict) and "rows" in data and data.get("command")
    kind = data.pop("kind", data["command"][0]) if known else None  # there were no kinds at first
    if kind not in REPORTS:
        raise ValueError(f"{path} has no results of a known kind ({', '.join(REPORTS)}), got {kind!r}")
    if kind == "ep":
        return ep_results.EpResults.load(path)
    rows = [REPORTS[kind].Row.of(row) for row in data.pop("rows")]
    return Results(kind=kind, rows=rows, **data)
