"""Method ``auto``: which method an operation takes, by measured tables.

A choice is a pure function of what all ranks of a group share: the operation, the group's size, its device's name and
what its backend offers, the dtype, N and K of a rank's GEMM, the token count T, and the tables. It measures nothing and
communicates nothing. Should ranks hold different tables after all, the headers of the first call for which these differ
in method, sender or tiles name both (comm/signals.py).

From a token count to a method
    1. The first table, of those loaded into the group, those in the variable ``TRITON_OVERLAP_TABLES`` and the shipped
       ones, that is for the group's device and size and has rows for the operation and the dtype. A matmul_all_reduce
       without rows takes those of the matmul_reduce_scatter that it starts with; bfloat16 and float16 stand in for each
       other. Without such a table the method is ``fused``.
    2. Of its (N, K), the nearest: the smallest max(n, N)/min(n, N) * max(k, K)/min(k, K), then the smallest N, then K.
    3. Of the counts measured there, the nearest by ratio: row T_i serves counts up to the root of T_i * T_{i+1}.
    4. The row's method; where this backend cannot run it (no copy engine, no process group), the fastest it can.

All comparisons are of whole numbers, so every machine comes to the same result. Steps 1 and 2 are done once for each
operation, dtype, N and K; a call costs a dictionary's lookup and a bisection.

A row may name tiles for the fused kernel. So after all rows for a product were used once (``warm_up``), no token count
compiles anything: at most one kernel for each row of its (N, K).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from ..comm.backend import Backend
from .methods import APPLICABLE, Method, missing_part
from .tables import Table, TableRow

#: What is done without a table.
DEFAULT = Method("fused")
#: Files of tables, separated as in PATH. They must be the same on every rank.
TABLES_VARIABLE = "TRITON_OVERLAP_TABLES"
_SHIPPED = Path(__file__).resolve().parent.parent / "tables"
_KEPT = "choices"
#: Operations whose rows serve one that has none.
_STAND_IN = {"matmul_all_reduce": "matmul_reduce_scatter"}
_SIBLING = {"bfloat16": "float16", "float16": "bfloat16"}

_logger = logging.getLogger("triton_overlap.choose")


class HasBackend(Protocol):
    """What is needed of a ``Group``."""

    name: str
    backend: Backend
    device_name: str
    kept: dict[str, Any]


@dataclass(frozen=True)
class Members:
    """What all ranks of a group know of it.

    Attributes:
        device: name of the devices.
        world_size: ranks.
        copies, collectives: whether the backend has them.
    """

    device: str
    world_size: int
    copies: bool
    collectives: bool

    @classmethod
    def of(cls, group: HasBackend) -> Members:
        backend = group.backend
        return cls(group.device_name, backend.world_size, backend.copies is not None, backend.collectives is not None)

    def can_run(self, method: Method) -> bool:
        return missing_part(method, self.world_size, copies=self.copies, collectives=self.collectives) is None

    def __str__(self) -> str:
        return f"{self.world_size} rank{'s' * (self.world_size > 1)} of {self.device}"


@dataclass(frozen=True)
class Product:
    """What a choice is for, whatever its token count: an operation, its dtype, and N and K of a rank's GEMM."""

    operation: str
    dtype: str
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.operation}, N {self.n}, K {self.k}, {self.dtype}"


@dataclass(frozen=True)
class ProductChoices:
    """The choices for one product.

    Attributes:
        methods: one a class of token counts.
        bounds: the largest count of each class but the last, ascending.
        rows: of the table, one a class; empty where no table matches.
        table: or None.
    """

    methods: tuple[Method, ...]
    bounds: tuple[int, ...] = ()
    rows: tuple[TableRow, ...] = ()
    table: Table | None = None

    def method(self, tokens: int) -> Method:
        return self.methods[bisect_left(self.bounds, tokens)]

    def counts(self, max_tokens: int, world_size: int) -> list[int]:
        """The smallest token count of each class within a capacity that the group size divides."""
        lows = [bound // world_size * world_size + world_size for bound in (0, *self.bounds)]
        highs = [*self.bounds, max_tokens]
        return [low for low, high in zip(lows, highs, strict=True) if low <= min(high, max_tokens)]


def product_choices(product: Product, members: Members, tables: Sequence[Table]) -> ProductChoices:
    """Steps 1 and 2 of the module's page, and what 3 and 4 need."""
    table, rows = _matching_rows(product, members, tables)
    if table is None or members.world_size == 1:
        return ProductChoices((DEFAULT,))
    shape = min({(row.n, row.k) for row in rows}, key=lambda shape: (_distance(product, *shape), *shape))
    rows = sorted((row for row in rows if (row.n, row.k) == shape), key=lambda row: row.tokens)
    return ProductChoices(
        methods=tuple(_possible_method(row, members) for row in rows),
        bounds=tuple(math.isqrt(row.tokens * after.tokens) for row, after in itertools.pairwise(rows)),
        rows=tuple(rows),
        table=table,
    )


def _matching_rows(product: Product, members: Members, tables: Sequence[Table]) -> tuple[Table | None, list[TableRow]]:
    for table in tables:
        if (table.device, table.world_size) != (members.device, members.world_size):
            continue
        for operation in (product.operation, _STAND_IN.get(product.operation)):
            for dtype in (product.dtype, _SIBLING.get(product.dtype)):
                rows = [row for row in table.rows if (row.operation, row.dtype) == (operation, dtype)]
                if rows:
                    return table, rows
    return None, []


def _distance(product: Product, n: int, k: int) -> Fraction:
    return Fraction(max(n, product.n) * max(k, product.k), min(n, product.n) * min(k, product.k))


def _possible_method(row: TableRow, members: Members) -> Method:
    chosen = Method.parse(row.method)
    if members.can_run(chosen):
        return chosen
    others = [(time_ms, text) for text, time_ms in row.times_ms.items() if members.can_run(Method.parse(text))]
    return Method.parse(min(others)[1]) if others else DEFAULT


class Choices:
    """What ``auto`` chooses in one group. ``choices_of(group)`` keeps one for each.

    Args:
        members: what all ranks know of the group.
        name: of the group, for messages.
        speaks: whether this rank says what was chosen; one is enough.
    """

    def __init__(self, members: Members, name: str, speaks: bool) -> None:
        self.members = members
        self._name = name
        self._speaks = speaks
        self._said: set[str] = set()
        self._loaded: list[Table] = []
        self._products: dict[tuple[str, torch.dtype, int, int], ProductChoices] = {}

    def load(self, table: Table) -> None:
        """Put ``table`` before those there are. Every rank loads the same one between the same calls.

        Raises:
            ValueError: it is for other devices or another group size.
        """
        if (table.device, table.world_size) != (self.members.device, self.members.world_size):
            raise ValueError(
                f"{table.source}: a table for {table.world_size} ranks of {table.device}, but {self._name} has "
                f"{self.members}; measure one with tune()"
            )
        self._loaded.insert(0, table)
        self._products.clear()

    def tables(self) -> list[Table]:
        """In the order in which they are asked."""
        return [*self._loaded, *_tables_of_variable(os.environ.get(TABLES_VARIABLE, "")), *_shipped_tables()]

    def method(self, operation: str, dtype: torch.dtype, n: int, k: int, tokens: int) -> Method:
        """The method for a call."""
        found = self._products.get((operation, dtype, n, k)) or self.product(operation, dtype, n, k)
        if operation not in self._said:
            self._say(operation, dtype, n, k, tokens)
        return found.method(tokens)

    def product(self, operation: str, dtype: torch.dtype, n: int, k: int) -> ProductChoices:
        """The choices for one product at every token count."""
        key = operation, dtype, n, k
        if key not in self._products:
            self._products[key] = product_choices(_product(*key), self.members, self.tables())
        return self._products[key]

    def explain(self, operation: str, dtype: torch.dtype, n: int, k: int, tokens: int) -> Explanation:
        """What is chosen for a call, and why."""
        if operation not in APPLICABLE or "auto" not in APPLICABLE[operation]:
            known = ", ".join(name for name, methods in APPLICABLE.items() if "auto" in methods)
            raise ValueError(f"unknown operation {operation!r}; method auto chooses for {known}")
        if min(n, k, tokens) < 1:
            raise ValueError(f"n, k and tokens must be at least 1, got {n}, {k} and {tokens}")
        if operation == "replicated_matmul":
            # Its forward pass does not communicate; this is its backward pass.
            operation, n, k = "matmul_all_reduce", k, n
        choices = self.product(operation, dtype, n, k)
        return Explanation(_product(operation, dtype, n, k), tokens, self.members, choices)

    def _say(self, operation: str, dtype: torch.dtype, n: int, k: int, tokens: int) -> None:
        """Once for each operation: loudly where there is no table, since one could be measured."""
        self._said.add(operation)
        if not self._speaks or self.members.world_size == 1:
            return
        explanation = self.explain(operation, dtype, n, k, tokens)
        level = logging.WARNING if explanation.row is None else logging.INFO
        _logger.log(level, "%s, method auto: %s", self._name, explanation.summary())


@dataclass(frozen=True)
class Explanation:
    """Why ``auto`` takes a method; ``str()`` is a text for people.

    Attributes:
        product: what was asked for; the backward product of a ``replicated_matmul``.
        tokens: T.
        members: of the group.
        choices: at every token count.
    """

    product: Product
    tokens: int
    members: Members
    choices: ProductChoices

    @property
    def method(self) -> Method:
        """The one that is taken."""
        return self.choices.method(self.tokens)

    @property
    def row(self) -> TableRow | None:
        """The table's row behind it, or None without a table."""
        if not self.choices.rows:
            return None
        return self.choices.rows[bisect_left(self.choices.bounds, self.tokens)]

    def summary(self) -> str:
        """What is chosen and why, on one line."""
        what = f"{self.product}, T {self.tokens}, {self.members}: {self.method}"
        row, table = self.row, self.choices.table
        if row is not None and table is not None:
            return f"{what}, by {table.source}, measured at N {row.n}, K {row.k}, T {row.tokens}"
        if self.members.world_size == 1:
            return f"{what}, since one rank has nobody to send to"
        return (
            f"{what}, the default, since no table has this operation for {self.members} in {self.product.dtype}; "
            f"tune() measures one, load_table() and the variable {TABLES_VARIABLE} load one"
        )

    def __str__(self) -> str:
        row, table = self.row, self.choices.table
        lines = [self.summary()]
        if row is None or table is None:
            return lines[0]
        index = bisect_left(self.choices.bounds, self.tokens)
        low = self.choices.bounds[index - 1] + 1 if index else 1
        high = self.choices.bounds[index] if index < len(self.choices.bounds) else None
        counts = f"T {low} to {high}" if high is not None else f"T {low} and more"
        lines.append(f"  the row serves {counts}, and N and K that are nearer to its own than to any other's")
        if (row.operation, row.dtype) != (self.product.operation, self.product.dtype):
            lines.append(f"  measured for {row.operation} in {row.dtype}, which stand in")
        if row.method != str(self.method):
            lines.append(f"  the row's own choice, {row.method}, cannot run here")
        lines += [f"  {name}: {value}" for name, value in table.about.items() if isinstance(value, str)]
        width = max(map(len, row.times_ms))
        fastest = min(row.times_ms.values())
        for text, time_ms in sorted(row.times_ms.items(), key=lambda item: item[1]):
            mark = "  <- taken" if text == str(self.method) else ""
            lines.append(f"  {text:{width}}  {time_ms:9.4f} ms  {time_ms / fastest:5.2f}{mark}")
        return "\n".join(lines)


def choices_of(group: HasBackend) -> Choices:
    """What ``auto`` chooses in ``group``."""
    found = group.kept.get(_KEPT)
    if found is None:
        found = group.kept[_KEPT] = Choices(Members.of(group), group.name, speaks=group.backend.rank == 0)
    choices: Choices = found
    return choices


def _product(operation: str, dtype: torch.dtype, n: int, k: int) -> Product:
    return Product(operation, str(dtype).removeprefix("torch."), n, k)


@cache
def _tables_of_variable(value: str) -> tuple[Table, ...]:
    paths = [Path(part) for part in value.split(os.pathsep) if part]
    try:
        return tuple(Table.load(path) for path in paths)
    except ValueError as error:
        raise ValueError(f"{TABLES_VARIABLE}: {error}") from error


@cache
def _shipped_tables() -> tuple[Table, ...]:
    return tuple(Table.load(path) for path in sorted(_SHIPPED.glob("*.json")))
