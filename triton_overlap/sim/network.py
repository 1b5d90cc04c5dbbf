"""A network interface of a simulated rank: takes puts from a hand-off ring and lands them as weakly as is allowed.

* The words of a put land in any order, whole; its source is read when a word lands, as late as may be.
* The signal is added after the last word, and stands for this put's bytes alone.
* Puts are tasks of their own, so nothing orders two of them, unless the ring asks for strong signals: then a put adds
  to its signal after all earlier puts of this rank to the same peer have landed, and stands for them too.

Faults hit the first word of a put, which is a header where there are any, and its signal.

With the checker each put has clock slots of its own. A slot is used again only by a put whose sender already knows that
the earlier one had ended: otherwise a signal would seem to stand for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from triton_overlap.errors import MemoryFaultError
from triton_overlap.sim.costs import NetworkUse
from triton_overlap.sim.faults import DoubleSignal, LoseSignal, TearHeader
from triton_overlap.sim.happens_before import Actor, Clock
from triton_overlap.sim.memory import Region, read_words
from triton_overlap.sim.scheduler import Poll, Task, Wait

if TYPE_CHECKING:
    from triton_overlap.sim.machine import Machine

_INT64 = np.dtype(np.int64)
#: Pieces in which a put may land.
_PIECES = (1, 2, 3, 6)
#: The first word of a put, by itself, and what is left of it where it was torn.
_FIRST_WORD, _OTHER_HALF = np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64)


@dataclass(frozen=True)
class PutOrder:
    """What a rank asks for: ``num_bytes`` from its offset ``source`` to offset ``target`` of ``peer``, then 1 on the
    signal at offset ``signal``."""

    peer: int
    source: int
    target: int
    num_bytes: int
    signal: int


class _Lane:
    """Clock slots that one put at a time uses, and what somebody must know who may use them next."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.ended: list[tuple[int, int]] | None = []  # slot and moment; None while a put is under way

    def free_for(self, clock: Clock) -> bool:
        if self.ended is None:
            return False
        return all(slot < len(clock.known) and clock.known[slot] >= moment for slot, moment in self.ended)


class NetworkInterface(Task):
    """Takes puts from the ring of one rank and one symmetric allocation, one a turn.

    Args:
        machine: the world's.
        rank: whose kernels fill the ring.
        copies: each rank's copy of the allocation.
        ring: the ring (comm/networks/ring.py).
        entry_words: int64 words of an entry; word 1 of the ring is its depth in entries, word 2 whether signals are
            strong.
    """

    def __init__(self, machine: Machine, rank: int, copies: list[Region], ring: Region, entry_words: int) -> None:
        super().__init__(f"rank{rank} network interface of {copies[rank].name}", rank)
        self._machine = machine
        self.copies = copies
        self._ring = ring
        self._entry_words = entry_words
        depth, strong = read_words(np.array([ring.start + 8, ring.start + 16], dtype=np.uint64), _INT64)
        self._depth = int(depth)
        #: By peer, the last put to it, where signals are strong.
        self._last: dict[int, Flight] | None = {} if strong else None
        self._taken = 0
        self._lanes: list[_Lane] = []
        self.actor: Actor | None = None
        if machine.slots is not None:
            self.actor = Actor(machine.slots, rank, ("network", ring.name), self.name, Clock())

    def pause(self) -> None:
        """It has no turns within a turn."""

    def turn(self) -> None:
        machine = self._machine
        entry = self._ring.start + 8 * self._entry_words * (1 + self._taken % self._depth)
        seen = machine.accesses.acquire(self, self._ring, entry, "hand-off ring")
        if seen != self._taken + 1:
            self.polled(Poll((entry,), (seen,), "poll", self._ring.place(entry), "hand-off ring"))
            self.spinning = True
            return
        self.moved()
        order = PutOrder(*machine.accesses.read_words(self, self._ring, entry + 8, 5, "hand-off ring"))
        self._check(order)
        self._taken += 1
        use = NetworkUse(1, order.num_bytes, machine.network_cost.of(order.num_bytes))
        machine.put_by(self.rank, order.peer, use)
        flight = Flight(machine, self, order, self._taken)
        if self._last is not None:
            flight.follows = self._last.get(order.peer)
            self._last[order.peer] = flight
        machine.scheduler.spawn(flight)

    def _check(self, order: PutOrder) -> None:
        own, peer = self.copies[self.rank], self.copies[order.peer]
        size = own.end - own.start
        ends = (order.source + order.num_bytes, order.target + order.num_bytes, order.signal + 8)
        starts = (order.source, order.target, order.signal)
        if order.num_bytes <= 0 or any(word % 8 for word in (*starts, order.num_bytes)) or min(starts) < 0:
            raise MemoryFaultError(f"{self.name}: {order} is not made of whole words")
        if max(ends) > size or peer.freed:
            raise MemoryFaultError(
                f"{self.name}: {order} lies outside the {size} bytes of {peer.name}, or it was freed"
            )

    def lane(self, clock: Clock) -> _Lane:
        """Clock slots for a put whose sender knows ``clock``."""
        lane = next((lane for lane in self._lanes if lane.free_for(clock)), None)
        if lane is None:
            lane = _Lane(len(self._lanes))
            self._lanes.append(lane)
        return lane


class Flight(Task):
    """One put under way."""

    def __init__(self, machine: Machine, interface: NetworkInterface, order: PutOrder, number: int) -> None:
        name = f"rank{interface.rank} put {number} to rank{order.peer}"
        super().__init__(name, interface.rank)
        self._machine = machine
        self._order = order
        self._source = interface.copies[interface.rank]
        self._target = interface.copies[order.peer]
        words = list(range(order.num_bytes // 8))
        machine.rng.shuffle(words)
        count = min(len(words), machine.rng.choice(_PIECES))
        self._pieces = [np.array(words[index::count], dtype=np.uint64) for index in range(count)]
        late_body = machine.plan.late_body(interface.rank, order.peer)
        if late_body:
            self._pieces = [np.array([word for word in words if word], dtype=np.uint64), _FIRST_WORD]
        #: Once its first word has landed, the rest waits for everybody else.
        self._late_rest = late_body
        self._late = False
        self.signalled = False
        #: The put whose signal comes before this one's.
        self.follows: Flight | None = None
        self.actor: Actor | None = None
        self._lane: _Lane | None = None
        if interface.actor is not None:
            assert machine.slots is not None
            clock = interface.actor.clock.copy()
            self._lane = interface.lane(clock)
            self._lane.ended = None
            key = (interface.copies[interface.rank].name, "put", self._lane.key)
            self.actor = Actor(machine.slots, interface.rank, key, name, clock)

    def pause(self) -> None:
        """A signal takes no turns of its own."""

    def held_back(self) -> bool:
        """True where a fault makes it wait for everybody else."""
        return self._late or self._machine.plan.stalls(self.rank, self._order.peer)

    def turn(self) -> None:
        self.moved()
        if self._pieces:
            self._land(self._pieces.pop())
        elif self._comes_first():
            self._signal()

    def _land(self, words: np.ndarray) -> None:
        order, machine = self._order, self._machine
        source = (self._source, self._source.start + order.source)
        target = (self._target, self._target.start + order.target)
        fault = None
        if words is not _OTHER_HALF and 0 in words:
            value = int(read_words(np.array([source[1]], dtype=np.uint64), _INT64)[0])
            fault = machine.plan.signal(self.rank, order.peer, order.target, 8, value)
            self._late = self._late_rest
        machine.accesses.land_words(self, source, target, words, fault, "put")
        if isinstance(fault, TearHeader) and not fault.lost:
            self._pieces.insert(0, _OTHER_HALF)
        if len(self._pieces) == 1 and self._pieces[0] is _OTHER_HALF:
            self._late = True

    def _comes_first(self) -> bool:
        """True once no earlier signal is to come before this put's."""
        if self.follows is not None:
            earlier = self.follows
            if not earlier.signalled:
                self.wait = Wait(lambda: earlier.signalled, f"{earlier.name}, whose signal comes first")
                return False
            if self.actor is not None and earlier.actor is not None:
                self.actor.clock.join(earlier.actor.clock)
            self.follows = None
        return True

    def _signal(self) -> None:
        order, machine = self._order, self._machine
        fault = None if self.signalled else machine.plan.signal(self.rank, order.peer, order.signal, 8, 1)
        if self.actor is not None and self._lane is not None:
            moments = (self.actor.plain(), self.actor.atomic(False))
            self._lane.ended = [(slot, moment) for moment, slot in moments]
        if not isinstance(fault, LoseSignal):
            machine.accesses.add_signal(self, self._target, self._target.start + order.signal, "signal of a put")
            machine.event(self, "signal of a put", self._target.place(self._target.start + order.signal))
        if isinstance(fault, DoubleSignal):
            self._late = machine.rng.random() < 0.5
            machine.scheduler.happened()
        else:
            self.done = True
        self.signalled = True

    def where(self) -> str:
        return ""
