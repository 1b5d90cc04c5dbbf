"""Which access happens before which: vector clocks, and a shadow of memory that remembers the last accesses.

A *slot* is a sequence of events in program order; a vector clock holds one number a slot: how much of that slot's past
is known. Two accesses to the same bytes, at least one of them a write, must be ordered: the later one's clock must know
the earlier one's moment in its slot. Otherwise they race, whatever this schedule made of them.

A program of a launch has up to three slots, since it is many threads and more:

    threads      plain loads and stores, by all its threads. A release covers them only up to the last
                 ``tl.debug_barrier``: the releasing atomic is one thread's.
    leader       scalar atomics, which one thread performs; a later scalar release is the same thread's.
    descriptors  descriptor stores. They are asynchronous: no release covers them before they were waited for or the
                 program ended.

Accesses are remembered by granules of a region, the smallest element size seen there, in arrays of 64-bit *stamps*:
moment << 32 | slot << 18 | site. Most checks end earlier: an array with the newest moment of each slot in the region
tells that everything there is known already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_SITE_BITS = 18
_SLOT_BITS = 14
_SITE_MASK = (1 << _SITE_BITS) - 1
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_MOMENT_SHIFT = _SITE_BITS + _SLOT_BITS
#: Vector clocks grow by this many entries at a time.
_GROWTH = 64

Granules = slice | np.ndarray


@dataclass(frozen=True)
class Site:
    """A kind of access in the source: ``op`` at ``where`` (file:line)."""

    op: str
    where: str


class Clock:
    """A vector clock: what is known of every slot's past."""

    __slots__ = ("known",)

    def __init__(self, known: np.ndarray | None = None) -> None:
        self.known: np.ndarray = np.zeros(_GROWTH, dtype=np.int64) if known is None else known

    def copy(self) -> Clock:
        return Clock(self.known.copy())

    def join(self, other: Clock) -> None:
        """Know all that ``other`` knows too."""
        mine, theirs = self.known, other.known
        if len(mine) < len(theirs):
            mine = self.known = np.pad(mine, (0, len(theirs) - len(mine)))
        head = mine[: len(theirs)]
        np.maximum(head, theirs, out=head)

    def joined(self, other: Clock) -> Clock:
        """What both know, as a new clock."""
        clock = self.copy()
        clock.join(other)
        return clock

    def reach(self, num_slots: int) -> None:
        """Make room for slots up to ``num_slots - 1``."""
        if len(self.known) < num_slots:
            size = -(-num_slots // _GROWTH) * _GROWTH
            self.known = np.pad(self.known, (0, size - len(self.known)))


@dataclass
class SyncWord:
    """What a release to an atomic word published.

    Attributes:
        system: what an acquire at system scope on any rank learns.
        device: by rank, what an acquire at device or system scope on that rank learns.
    """

    system: Clock | None = None
    device: dict[int, Clock] = field(default_factory=dict)

    def publish(self, clock: Clock, rank: int, scope: str) -> None:
        """Add a release; ``clock`` must not change afterwards, since several words share it. A read-modify-write
        continues the releases before it, as PTX's release sequences do."""
        if scope == "cta":
            return
        if scope == "sys":
            self.system = clock if self.system is None else self.system.joined(clock)
        known = self.device.get(rank)
        self.device[rank] = clock if known is None else known.joined(clock)

    def acquire(self, into: Clock, rank: int, scope: str) -> None:
        """Learn what releases of sufficient scope published."""
        if scope == "cta":
            return
        if scope == "sys" and self.system is not None:
            into.join(self.system)
        if rank in self.device:
            into.join(self.device[rank])


@dataclass(frozen=True)
class Conflict:
    """An earlier access that nothing orders before the present one."""

    slot: int
    moment: int
    site: Site
    granule: int
    kind: str


class Slots:
    """All slots of a world, who used them when, and the sites of their accesses."""

    def __init__(self) -> None:
        self._index: dict[tuple[object, ...], int] = {}
        self._moments: list[int] = []
        self._users: list[list[tuple[int, str]]] = []
        self.ranks: list[int] = []  # of each slot
        self._sites: list[Site] = []
        self._site_index: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._moments)

    def claim(self, rank: int, key: tuple[object, ...], user: str) -> tuple[int, int]:
        """The slot ``key`` of ``rank`` for a new user, and its first moment. Everything its earlier users did must
        happen before the new one starts: a stream's later launch takes over the slots of an earlier one."""
        index = (rank, *key)
        slot = self._index.get(index)
        if slot is None:
            slot = self._index[index] = len(self._moments)
            if slot > _SLOT_MASK:
                raise OverflowError(f"a world can tell {_SLOT_MASK + 1} slots apart; use smaller grids")
            self._moments.append(0)
            self._users.append([])
            self.ranks.append(rank)
        self._moments[slot] += 1
        self._users[slot].append((self._moments[slot], user))
        return slot, self._moments[slot]

    def tick(self, slot: int) -> int:
        """The next moment of ``slot``."""
        self._moments[slot] += 1
        return self._moments[slot]

    def site(self, op: str, where: str) -> int:
        """The number of a site, at most 2^18 - 1 of them."""
        number = self._site_index.get((op, where))
        if number is None:
            number = self._site_index[op, where] = len(self._sites)
            if number > _SITE_MASK:
                raise OverflowError(f"a world can tell {_SITE_MASK + 1} source lines apart")
            self._sites.append(Site(op, where))
        return number

    def user(self, slot: int, moment: int) -> str:
        """Who used ``slot`` at ``moment``."""
        name = self._users[slot][0][1]
        for since, user in self._users[slot]:
            if since > moment:
                break
            name = user
        return name

    def conflict(self, stamp: int, granule: int, kind: str) -> Conflict:
        """Read a stamp back."""
        slot = stamp >> _SITE_BITS & _SLOT_MASK
        return Conflict(slot, stamp >> _MOMENT_SHIFT, self._sites[stamp & _SITE_MASK], granule, kind)


def stamp_of(moment: int, slot: int, site: int) -> int:
    """Pack the moment of an access, its slot and its site."""
    return moment << _MOMENT_SHIFT | slot << _SITE_BITS | site


def _first_unknown(stamps: np.ndarray, known: np.ndarray) -> int | None:
    """Index of the first stamp that ``known`` does not cover. Zero stands for no access."""
    unknown = known[stamps >> _SITE_BITS & _SLOT_MASK] < stamps >> _MOMENT_SHIFT
    return int(unknown.argmax()) if unknown.any() else None


@dataclass
class AtomicWord:
    """Accesses by atomics to one word: newest stamp of each slot, and what releases published."""

    num_bytes: int
    writes: dict[int, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    sync: SyncWord = field(default_factory=SyncWord)


class Shadow:
    """What accesses a region has seen.

    Args:
        num_bytes: of the region.
        slots: of the world.
    """

    def __init__(self, num_bytes: int, slots: Slots) -> None:
        self._num_bytes = num_bytes
        self._slots = slots
        self.granule = 0  # bytes; 0 until the first access
        self._writes: np.ndarray | None = None
        self._newest_write = np.zeros(_GROWTH, dtype=np.int64)
        self._reads: dict[int, np.ndarray] = {}
        self._newest_read = np.zeros(_GROWTH, dtype=np.int64)
        self._words: dict[int, AtomicWord] = {}
        self._has_words: np.ndarray | None = None  # bool [num_bytes / 4 rounded up]

    # ---- plain accesses

    def granules(self, offsets: np.ndarray, itemsize: int) -> Granules:
        """The granules of elements of ``itemsize`` bytes at ``offsets`` (int64), refining the granule if needed."""
        if offsets.size == 1:
            start = int(offsets[0])
            self._refine(itemsize | start)
            return slice(start // self.granule, (start + itemsize) // self.granule)
        self._refine(itemsize | int(np.bitwise_or.reduce(offsets)))
        granule = self.granule
        first, last = int(offsets[0]), int(offsets[-1])
        if last - first == (offsets.size - 1) * itemsize and (np.diff(offsets) == itemsize).all():
            return slice(first // granule, (last + itemsize) // granule)
        index = offsets // granule if granule & (granule - 1) else offsets >> (granule.bit_length() - 1)
        if itemsize > granule:
            index = (index[:, None] + np.arange(itemsize // granule)).ravel()
        return index

    def byte_range(self, start: int, stop: int) -> slice:
        """The granules of the bytes ``[start, stop)``."""
        self._refine((stop - start) | start)
        return slice(start // self.granule, stop // self.granule)

    def _refine(self, bits: int) -> None:
        """Make the granule divide everything that has the lowest set bit of ``bits``."""
        wanted = min(bits & -bits, 16)
        if self.granule == 0:
            self.granule = wanted
        elif wanted < self.granule:
            factor = self.granule // wanted
            self.granule = wanted
            if self._writes is not None:
                self._writes = np.repeat(self._writes, factor)
            self._reads = {slot: np.repeat(stamps, factor) for slot, stamps in self._reads.items()}

    def _blank(self) -> np.ndarray:
        return np.zeros(-(-self._num_bytes // self.granule) + 1, dtype=np.int64)

    def check_load(self, granules: Granules, clock: Clock) -> Conflict | None:
        """A write that nothing orders before a load of ``granules`` by someone who knows ``clock``."""
        conflict = self._check_writes(granules, clock)
        if conflict is None and self._words:
            conflict = self._check_words(granules, clock, reads_too=False)
        return conflict

    def check_store(self, granules: Granules, clock: Clock) -> Conflict | None:
        """An access that nothing orders before a store."""
        conflict = self._check_writes(granules, clock) or self._check_reads(granules, clock)
        if conflict is None and self._words:
            conflict = self._check_words(granules, clock, reads_too=True)
        return conflict

    def _check_writes(self, granules: Granules, clock: Clock) -> Conflict | None:
        if self._writes is None:
            return None
        clock.reach(len(self._slots))
        newest = self._newest_write
        if (newest <= clock.known[: len(newest)]).all():
            return None
        stamps = self._writes[granules]
        index = _first_unknown(stamps, clock.known)
        if index is None:
            return None
        return self._slots.conflict(int(stamps[index]), _granule_at(granules, index), "store")

    def _check_reads(self, granules: Granules, clock: Clock) -> Conflict | None:
        if not self._reads:
            return None
        clock.reach(len(self._slots))
        newest = self._newest_read
        for slot in np.flatnonzero(newest > clock.known[: len(newest)]).tolist():
            stamps = self._reads[slot][granules]
            unknown = stamps >> _MOMENT_SHIFT > clock.known[slot]
            if unknown.any():
                index = int(unknown.argmax())
                return self._slots.conflict(int(stamps[index]), _granule_at(granules, index), "load")
        return None

    def _check_words(self, granules: Granules, clock: Clock, *, reads_too: bool) -> Conflict | None:
        for offset in self._words_in(granules):
            word = self._words[offset]
            conflict = self._unknown_of(word.writes, offset, clock, "atomic write")
            if conflict is None and reads_too:
                conflict = self._unknown_of(word.reads, offset, clock, "atomic read")
            if conflict is not None:
                return conflict
        return None

    def _unknown_of(self, stamps: dict[int, int], offset: int, clock: Clock, kind: str) -> Conflict | None:
        clock.reach(len(self._slots))
        for slot, stamp in stamps.items():
            if stamp >> _MOMENT_SHIFT > clock.known[slot]:
                return self._slots.conflict(stamp, offset // self.granule, kind)
        return None

    def _words_in(self, granules: Granules) -> list[int]:
        """Offsets of the atomic words that meet ``granules``."""
        if self._has_words is None:
            return []
        if isinstance(granules, slice):
            low, high = granules.start * self.granule, granules.stop * self.granule
        else:
            low, high = int(granules.min()) * self.granule, (int(granules.max()) + 1) * self.granule
        first_quad = max(low - 4, 0) // 4  # an 8-byte word may start before the range and reach into it
        quads = np.flatnonzero(self._has_words[first_quad : -(-high // 4)])
        if not quads.size:
            return []
        if isinstance(granules, slice):
            touched: range | set[int] = range(granules.start, granules.stop)
        else:
            touched = set(granules.tolist())
        found = []
        for offset in ((quads + first_quad) * 4).tolist():
            word = self._words[offset]
            first, last = offset // self.granule, (offset + word.num_bytes - 1) // self.granule
            if any(granule in touched for granule in range(first, last + 1)):
                found.append(offset)
        return found

    def record_load(self, granules: Granules, moment: int, slot: int, site: int) -> None:
        stamps = self._reads.get(slot)
        if stamps is None:
            stamps = self._reads[slot] = self._blank()
        stamps[granules] = stamp_of(moment, slot, site)
        self._newest_read = _note(self._newest_read, slot, moment)

    def record_store(self, granules: Granules, moment: int, slot: int, site: int) -> None:
        if self._writes is None:
            self._writes = self._blank()
        self._writes[granules] = stamp_of(moment, slot, site)
        self._newest_write = _note(self._newest_write, slot, moment)
        for offset in self._words_in(granules):
            # A plain store begins a word's history anew: what earlier releases published no longer follows from it.
            self._words[offset].sync = SyncWord()

    # ---- atomics

    def word(self, offset: int, num_bytes: int) -> AtomicWord:
        """The atomic word at ``offset``."""
        word = self._words.get(offset)
        if word is None:
            word = self._words[offset] = AtomicWord(num_bytes)
            if self._has_words is None:
                self._has_words = np.zeros(-(-self._num_bytes // 4) + 1, dtype=bool)
            self._has_words[offset // 4] = True
            if self.granule == 0:
                self._refine(num_bytes)
        word.num_bytes = max(word.num_bytes, num_bytes)
        return word

    def check_atomic(self, offset: int, num_bytes: int, clock: Clock, *, writes: bool) -> Conflict | None:
        """A plain access that nothing orders before an atomic. Atomics never race with each other."""
        if self._writes is None and not self._reads:
            return None
        granules = self.byte_range(offset, offset + num_bytes)
        conflict = self._check_writes(granules, clock)
        return self._check_reads(granules, clock) if conflict is None and writes else conflict

    # ---- forgetting

    def known_to(self, clock: Clock) -> bool:
        """True if everything here happens before whoever knows ``clock``."""
        clock.reach(len(self._slots))
        known = clock.known
        if (self._newest_write > known[: len(self._newest_write)]).any():
            return False
        if (self._newest_read > known[: len(self._newest_read)]).any():
            return False
        return not any(
            stamp >> _MOMENT_SHIFT > known[slot]
            for word in self._words.values()
            for stamps in (word.writes, word.reads)
            for slot, stamp in stamps.items()
        )


class Actor:
    """The slots and the knowledge of one program, or of one copy.

    Args:
        slots: of the world.
        rank: whose it is.
        key: who it follows: an earlier actor with the same key has ended, and its end is part of ``clock``.
        name: for reports.
        clock: what it knows at its start; the actor owns it.
    """

    def __init__(self, slots: Slots, rank: int, key: tuple[object, ...], name: str, clock: Clock) -> None:
        self._slots = slots
        self._rank = rank
        self._key = key
        self._name = name
        self.clock = clock
        self._threads, self._threads_moment = slots.claim(rank, (*key, "threads"), name)
        self._leader, self._leader_moment = slots.claim(rank, (*key, "leader"), name)
        self._descriptors: int | None = None
        self._descriptors_moment = 0
        self._fenced = 0
        self._fenced_leader = 0
        self._learned: Clock | None = None
        clock.reach(len(slots))
        clock.known[self._threads] = self._threads_moment
        clock.known[self._leader] = self._leader_moment

    def plain(self) -> tuple[int, int]:
        """Moment and slot of a plain access now."""
        return self._threads_moment, self._threads

    def atomic(self, block: bool) -> tuple[int, int]:
        """Moment and slot of an atomic now."""
        return (self._threads_moment, self._threads) if block else (self._leader_moment, self._leader)

    def descriptor_store(self) -> tuple[int, int]:
        """Moment and slot of a descriptor store now."""
        if self._descriptors is None:
            key = (*self._key, "descriptors")
            self._descriptors, self._descriptors_moment = self._slots.claim(self._rank, key, self._name)
            self.clock.reach(len(self._slots))
        return self._descriptors_moment, self._descriptors

    def descriptor_clock(self) -> Clock:
        """What a descriptor store comes after: all that the program knows, and earlier descriptor stores."""
        clock = self.clock.copy()
        moment, slot = self.descriptor_store()
        clock.reach(slot + 1)
        clock.known[slot] = moment
        return clock

    def barrier(self) -> None:
        """``tl.debug_barrier``: every thread's past and every lane's acquires are everybody's."""
        self._fenced, self._fenced_leader = self._threads_moment, self._leader_moment
        self._threads_moment = self._slots.tick(self._threads)
        self._leader_moment = self._slots.tick(self._leader)
        self.clock.known[self._threads] = self._threads_moment
        self.clock.known[self._leader] = self._leader_moment
        if self._learned is not None:
            self.clock.join(self._learned)
            self._learned = None

    def acquire(self, words: list[SyncWord], scope: str, block: bool) -> None:
        """An acquire of ``words``. A block's lanes learn for themselves until the next barrier; a scalar's result
        reaches the whole program through a barrier of the compiler's."""
        into = self.clock
        if block:
            if self._learned is None:
                self._learned = Clock()
            into = self._learned
        for word in words:
            word.acquire(into, self._rank, scope)

    def release(self, words: list[SyncWord], scope: str, block: bool) -> None:
        """A release to ``words``, by one thread or by each lane's own."""
        published = self.clock.copy()
        published.reach(len(self._slots))
        published.known[self._threads] = self._fenced
        if block:
            published.known[self._leader] = self._fenced_leader
        for word in words:
            word.publish(published, self._rank, scope)
        self._leader_moment = self._slots.tick(self._leader)
        self.clock.known[self._leader] = self._leader_moment

    def wait_descriptors(self) -> None:
        """The program waited until its descriptor stores were complete."""
        if self._descriptors is not None:
            self.clock.reach(len(self._slots))
            self.clock.known[self._descriptors] = self._descriptors_moment
            self._descriptors_moment = self._slots.tick(self._descriptors)

    def end(self) -> Clock:
        """All that whoever comes after the end knows."""
        self.barrier()
        self.wait_descriptors()
        return self.clock


def _granule_at(granules: Granules, index: int) -> int:
    return granules.start + index if isinstance(granules, slice) else int(granules[index])


def _note(newest: np.ndarray, slot: int, moment: int) -> np.ndarray:
    if slot >= len(newest):
        newest = np.pad(newest, (0, -(-(slot + 1) // _GROWTH) * _GROWTH - len(newest)))
    newest[slot] = moment
    return newest
