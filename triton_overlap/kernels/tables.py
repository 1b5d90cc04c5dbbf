"""Tables of measured methods, from which ``auto`` chooses: what a file holds, read and written. Plain Python.

A table belongs to one kind of device and one group size. A row belongs to one product (operation, dtype, and N and K of
a rank's GEMM) at one token count, and holds the time of every candidate and the one that was chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .methods import parse_for

#: Version of the format; a file of another one is refused.
FORMAT = 1
#: Operations that rows may be of. The one that is missing, replicated_matmul, multiplies without communication and goes
#: backward by a matmul_all_reduce.
TABLE_OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
TABLE_DTYPES = ("bfloat16", "float16", "float32")
#: A day. JSON's numbers may be larger than any float.
_LONGEST_MS = 86_400_000


@dataclass(frozen=True)
class TableRow:
    """One product at one token count.

    Attributes:
        operation: one of TABLE_OPERATIONS.
        dtype: one of TABLE_DTYPES.
        n, k: columns and contracted size of a rank's GEMM.
        tokens: T, of all ranks.
        method: the chosen one, as ``str(Method)`` writes it.
        times_ms: milliseconds on the slowest rank, by method; the chosen one among them.

    Raises:
        ValueError: a value that is not one of these.
    """

    operation: str
    dtype: str
    n: int
    k: int
    tokens: int
    method: str
    times_ms: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.operation not in TABLE_OPERATIONS:
            raise ValueError(f"operation must be one of {', '.join(TABLE_OPERATIONS)}, got {self.operation!r}")
        if self.dtype not in TABLE_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(TABLE_DTYPES)}, got {self.dtype!r}")
        for name in ("n", "k", "tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.times_ms, Mapping) or self.method not in self.times_ms:
            raise ValueError(f"times_ms must be times by method, with one of the chosen {self.method!r}")
        for method, time_ms in self.times_ms.items():
            if parse_for(self.operation, method).name == "auto":
                raise ValueError("times_ms must be of methods to choose from, got 'auto'")
            if isinstance(time_ms, bool) or not isinstance(time_ms, (int, float)) or not 0 < time_ms < _LONGEST_MS:
                raise ValueError(f"time of {method!r} must be positive milliseconds, got {time_ms!r}")


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of device in groups of one size.

    Attributes:
        device: ``Group.device_name``.
        world_size: ranks.
        rows: in any order, each product and token count once.
        about: how it came about: time, commit, hardware, versions, measurement.
        source: where it comes from, for explanations; not part of the file.

    Raises:
        ValueError: a device, world size or ``about`` of another type, or two rows for one product and token count.
    """

    device: str
    world_size: int
    rows: tuple[TableRow, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    source: str = field(default="memory", compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(f"world_size must be a whole number of at least 1, got {self.world_size!r}")
        if not isinstance(self.device, str) or not isinstance(self.about, Mapping):
            raise ValueError(f"device must be a name and about a mapping, got {self.device!r} and {self.about!r}")
        keys = [(row.operation, row.dtype, row.n, row.k, row.tokens) for row in self.rows]
        twice = {key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else set()
        if twice:
            raise ValueError(f"more than one row for {sorted(twice)[0]}")

    def to_json(self) -> dict[str, Any]:
        """What a file holds."""
        return {
            "format": FORMAT,
            "device": self.device,
            "world_size": self.world_size,
            "about": dict(self.about),
            "rows": [{**vars(row), "times_ms": dict(row.times_ms)} for row in self.rows],
        }

    @classmethod
    def from_json(cls, data: Any, source: str) -> Table:
        """The inverse of ``to_json``: the table in ``data``, which came from ``source``.

        Raises:
            ValueError: another version, or not a table; names ``source`` and the row.
        """
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError(f"{source}: not a table of methods; `python -m triton_overlap.bench tune` writes one")
        if isinstance(data["format"], bool) or not isinstance(data["format"], int) or data["format"] != FORMAT:
            raise ValueError(
                f"{source}: a table of format {data['format']!r}, this version reads {FORMAT}; measure it again with "
                "`python -m triton_overlap.bench tune`"
            )
        missing = [name for name in ("device", "world_size", "about", "rows") if name not in data]
        if missing or not isinstance(data["rows"], list):
            raise ValueError(f"{source}: a table must have device, world_size, about and a list of rows")
        rows = []
        for number, row in enumerate(data["rows"]):
            try:
                rows.append(TableRow(**row))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{source}: row {number}: {error}") from error
        try:
            return cls(data["device"], data["world_size"], tuple(rows), data["about"], source)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the file ``path``, JSON with one row a line; its folder is made where there is none."""
        data = self.to_json()
        rows = ",\n".join("  " + json.dumps(row) for row in data.pop("rows"))
        head = json.dumps(data, indent=1).removesuffix("\n}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read the file ``path``, as ``save`` writes it.

        Raises:
            ValueError: it cannot be read, is no table, or has another version.
        """
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:  # what is no JSON or no text is a ValueError
            raise ValueError(f"{path}: cannot be read as a table of methods: {error}") from error
        return cls.from_json(data, path.name)
