"""Memory of a simulated world: which addresses exist, and how late and in which pieces stores arrive.

The model, for memory that more than one program can reach:

* A store splits into one to four pieces. Each lands, that is becomes visible to everybody else, at a random later
  moment. Two pieces of one program that meet at an address land in program order, and the program itself sees its own
  stores at once.
* ``tl.debug_barrier`` fences the pieces stored before it; a release at device or system scope lands the fenced ones.
  Descriptor stores are never fenced. The end of a launch lands everything.
* A plain load returns, byte by byte, some state between the program's last acquire and now. What a program saw once it
  does not unsee.
* Atomics act on memory itself, at once.

A program that the happens-before checker finds in order cannot tell this model from plain memory; the model is for runs
without the checker, and for what the checker does not see: a host that looks at memory too early.
"""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from triton_overlap.comm.interpreter import raw
from triton_overlap.sim.happens_before import Shadow

_BYTE = np.dtype(np.uint8)
#: Stores whose overwritten bytes are kept for late loads.
_HISTORY = 256


@dataclass(eq=False)
class Region:
    """A range of addresses that kernels may use.

    Attributes:
        kind: ``"symmetric"`` (any rank), ``"local"`` (its rank only), ``"argument"`` (launches that were given it) or
            ``"clock"`` (any rank, no model of memory).
        start, end: addresses, end excluded.
        name: for messages.
        rank: owner; -1 for none.
        keep: what keeps the memory alive.
        shadow: accesses so far; None without the checker.
        weak: stores land late.
        freed: the owner gave it back; accesses are faults, the memory stays.
        users: launches and copies under way that were given it.
    """

    kind: str
    start: int
    end: int
    name: str
    rank: int
    keep: Any
    shadow: Shadow | None
    weak: bool
    freed: bool = False
    users: int = 0

    def meets(self, other: Region) -> bool:
        """True if they share addresses: two views of memory with storages of their own become one region."""
        return self.start < other.end and other.start < self.end

    def place(self, address: int) -> str:
        """``address`` in words."""
        return f"{self.name}+{address - self.start}"


class AddressSpace:
    """All regions of a world, none overlapping another."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._last: Region | None = None

    def add(self, region: Region) -> None:
        position = bisect.bisect_left(self._starts, region.start)
        self._starts.insert(position, region.start)
        self._regions.insert(position, region)

    def remove(self, region: Region) -> None:
        position = bisect.bisect_left(self._starts, region.start)
        assert self._regions[position] is region
        del self._starts[position], self._regions[position]
        if self._last is region:
            self._last = None

    def at(self, address: int) -> Region | None:
        """The region that holds ``address``."""
        last = self._last
        if last is not None and last.start <= address < last.end:
            return last
        position = bisect.bisect_right(self._starts, address) - 1
        if position < 0:
            return None
        region = self._regions[position]
        if address >= region.end:
            return None
        self._last = region
        return region

    def overlapping(self, start: int, end: int) -> list[Region]:
        """Regions that meet ``[start, end)``, by address."""
        first = max(bisect.bisect_right(self._starts, start) - 1, 0)
        found = []
        for region in self._regions[first:]:
            if region.start >= end:
                break
            if region.end > start:
                found.append(region)
        return found

    def split(self, addresses: np.ndarray, itemsize: int) -> tuple[list[tuple[Region, np.ndarray]], int | None]:
        """Group ``addresses`` by region; the second result is an address whose item lies in none, if there is one."""
        low, high = int(addresses.min()), int(addresses.max()) + itemsize
        region = self.at(low)
        if region is not None and high <= region.end:
            return [(region, addresses)], None
        if region is None:
            return [], low
        groups: list[tuple[Region, np.ndarray]] = []
        rest = addresses
        while rest.size:
            low = int(rest.min())
            region = self.at(low)
            if region is None or low + itemsize > region.end:
                return groups, low
            inside = rest <= np.uint64(region.end - itemsize)
            groups.append((region, rest[inside]))
            rest = rest[~inside]
        return groups, None


def aligned_zeros(num_bytes: int, alignment: int) -> torch.Tensor:
    """uint8 ``[num_bytes]`` zeros whose address is a multiple of ``alignment``."""
    whole = torch.zeros(num_bytes + alignment, dtype=torch.uint8, device="cpu")
    shift = -whole.data_ptr() % alignment
    return whole[shift : shift + num_bytes]


def read_words(addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What memory holds now."""
    return raw.load(addresses, np.ones(addresses.shape, dtype=bool), np.zeros(addresses.shape, dtype), dtype)


def write_words(addresses: np.ndarray, values: np.ndarray) -> None:
    """Change memory now."""
    raw.store(addresses, values, np.ones(addresses.shape, dtype=bool))


class Piece:
    """Elements at addresses: a store that has not landed, or what one that has landed overwrote."""

    __slots__ = ("_bytes", "addresses", "asynchronous", "fenced", "high", "low", "values", "version", "writer")

    def __init__(self, addresses: np.ndarray, values: np.ndarray, writer: object) -> None:
        self.addresses = addresses
        self.values = values
        self.writer = writer
        self.low = int(addresses.min())
        self.high = int(addresses.max()) + values.dtype.itemsize
        self.fenced = False
        self.asynchronous = False
        self.version = 0
        self._bytes: tuple[np.ndarray, np.ndarray] | None = None

    def meets(self, low: int, high: int) -> bool:
        return self.low < high and low < self.high

    def as_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Sorted byte addresses and the byte at each."""
        if self._bytes is None:
            self._bytes = _bytes_of(self.addresses, self.values)
            order = np.argsort(self._bytes[0], kind="stable")
            self._bytes = self._bytes[0][order], self._bytes[1][order]
        return self._bytes

    def find(self, every: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of the byte addresses ``every``: its index in :meth:`as_bytes`, and whether it is there at all."""
        where = self.as_bytes()[0]
        index = np.maximum(np.searchsorted(where, every, side="right") - 1, 0)
        return index, where[index] == every


def _bytes_of(addresses: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    itemsize = values.dtype.itemsize
    every = (addresses[:, None] + np.arange(itemsize, dtype=np.uint64)).ravel()
    return every, np.ascontiguousarray(values).view(_BYTE).ravel()


@dataclass
class StoreBuffer:
    """One program's view of memory.

    Attributes:
        pending: stores that have not landed, in program order.
        view: version of memory that plain loads are at least as new as.
    """

    view: int
    pending: list[Piece] = field(default_factory=list)

    def fence(self) -> None:
        """``tl.debug_barrier``."""
        for piece in self.pending:
            piece.fenced = piece.fenced or not piece.asynchronous


class WeakMemory:
    """Lands stores late and lets loads be late; see the module's page.

    Args:
        rng: decides.
        changed: called with the range of addresses that a landing changed.
    """

    def __init__(self, rng: random.Random, changed: Callable[[int, int], None]) -> None:
        self._rng = rng
        self._changed = changed
        self.version = 0
        self._history: deque[Piece] = deque()
        self._oldest = 0  # versions before it can no longer be told

    # ---- stores

    def split(self, addresses: np.ndarray, values: np.ndarray, writer: object) -> list[Piece]:
        """One store as one to four pieces."""
        size = addresses.size
        count = min(size, self._rng.choice((1, 2, 4)))
        cuts = sorted(self._rng.sample(range(1, size), count - 1)) if count > 1 else []
        return [
            Piece(addresses[start:stop], values[start:stop], writer)
            for start, stop in zip([0, *cuts], [*cuts, size], strict=True)
        ]

    def land(self, buffer: StoreBuffer, index: int) -> None:
        """Make piece ``index`` of ``buffer`` visible, and before it the older pieces that it meets."""
        piece = buffer.pending[index]
        for earlier in [other for other in buffer.pending[:index] if other.meets(piece.low, piece.high)]:
            if earlier in buffer.pending:
                self.land(buffer, buffer.pending.index(earlier))
        buffer.pending.remove(piece)
        self.remember(piece.addresses, read_words(piece.addresses, piece.values.dtype), piece.writer)
        write_words(piece.addresses, piece.values)
        self._changed(piece.low, piece.high)

    def land_any(self, buffer: StoreBuffer) -> None:
        """Land a random piece."""
        self.land(buffer, self._rng.randrange(len(buffer.pending)))

    def land_fenced(self, buffer: StoreBuffer) -> None:
        """A release: land every fenced piece, in random order where addresses differ."""
        while fenced := [index for index, piece in enumerate(buffer.pending) if piece.fenced]:
            self.land(buffer, self._rng.choice(fenced))

    def land_meeting(self, buffer: StoreBuffer, low: int, high: int) -> None:
        """Land the pieces that meet ``[low, high)``: an atomic comes after the program's own stores to its word."""
        while meeting := [index for index, piece in enumerate(buffer.pending) if piece.meets(low, high)]:
            self.land(buffer, meeting[0])

    def land_all(self, buffer: StoreBuffer) -> None:
        """The end of a launch."""
        while buffer.pending:
            self.land_any(buffer)

    def remember(self, addresses: np.ndarray, old_values: np.ndarray, writer: object) -> None:
        """Begin a new version, and keep what ``addresses`` held before it for loads that are late."""
        self.version += 1
        old = Piece(addresses, old_values, writer)
        old.version = self.version
        self._history.append(old)
        if len(self._history) > _HISTORY:
            self._oldest = self._history.popleft().version

    # ---- loads

    def load(self, buffer: StoreBuffer, addresses: np.ndarray, values: np.ndarray, reader: object) -> np.ndarray:
        """What a plain load of ``addresses`` returns where memory holds ``values``."""
        low, high = int(addresses.min()), int(addresses.max()) + values.dtype.itemsize
        undone: list[Piece] = []
        if buffer.view < self.version:
            rng = self._rng
            view = rng.choice((buffer.view, rng.randint(buffer.view, self.version), self.version))
            buffer.view = max(view, self._oldest)
            for old in reversed(self._history):
                if old.version <= buffer.view:
                    break
                if old.meets(low, high):
                    undone.append(old)
        pending = [piece for piece in buffer.pending if piece.meets(low, high)]
        if not pending and all(old.writer is reader for old in undone):
            return values
        every, seen = _bytes_of(addresses, values)
        seen = seen.copy()
        own = np.zeros(seen.shape, dtype=bool)
        # From the newest to the oldest. Bytes that the reader wrote itself stay, and hide whatever is older.
        for old in undone:
            where, match = old.find(every)
            if old.writer is reader:
                own |= match
            else:
                match &= ~own
                seen[match] = old.as_bytes()[1][where[match]]
        for piece in pending:
            where, match = piece.find(every)
            seen[match] = piece.as_bytes()[1][where[match]]
        return seen.view(values.dtype)
