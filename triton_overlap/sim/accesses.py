"""What a load, a store, an atomic or a copy does in a simulated world.

Every access is checked against the regions that exist, then for order with earlier accesses, and then takes effect as
the model of memory says (``memory.py``). An atomic is also where the running program may lose its turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from triton_overlap.comm.interpreter import raw
from triton_overlap.comm.interpreter_hooks import AtomicAccess
from triton_overlap.errors import MemoryFaultError, RaceError
from triton_overlap.sim.faults import DoubleSignal, LoseSignal, SignalFault, TearHeader
from triton_overlap.sim.happens_before import Actor, Clock, Conflict, stamp_of
from triton_overlap.sim.memory import Region, read_words, write_words
from triton_overlap.sim.scheduler import Poll
from triton_overlap.sim.source import source

if TYPE_CHECKING:
    from triton_overlap.sim.machine import Machine
    from triton_overlap.sim.tasks import Program, Transfer

#: Chance that a program loses its turn at a store to memory that others reach.
_PAUSE_AT_STORE = 0.1
#: Pieces of stores on their way a program may have; beyond it, some land.
_MAX_PENDING = 48

_WORD_TYPES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
_INT_TYPES: dict[int, np.dtype] = {
    1: np.dtype(np.int8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}

#: The regions that an access touches, and the addresses in each.
Groups = list[tuple[Region, np.ndarray]]


class Agent(Protocol):
    """Who accesses memory: a program, or a copy."""

    name: str
    rank: int
    actor: Actor | None

    def pause(self) -> None:
        """Let others have a turn."""


class Accesses:
    """Performs the accesses of one world.

    Args:
        machine: whose memory, clocks and faults they are.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rng = machine.rng
        self._slots = machine.slots
        self._space = machine.space
        self._memory = machine.memory
        self._scheduler = machine.scheduler

    # ---- plain accesses of programs

    def load(
        self, program: Program, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype
    ) -> np.ndarray:
        """A plain load."""
        lanes = np.broadcast_to(mask, np.shape(addresses))
        whole = bool(lanes.all())
        active = np.ravel(addresses) if whole else np.asarray(addresses)[lanes]
        if not active.size:
            return raw.load(addresses, mask, other, dtype)
        groups = self._regions(program, active, dtype.itemsize, "load")
        where = ""
        if program.actor is not None or active.size == 1:
            where = source(sys._getframe(2))
        if program.actor is not None:
            self._order_load(program, program.actor, groups, dtype.itemsize, where)
        result = raw.load(addresses, mask, other, dtype)
        if any(region.weak for region, _ in groups):
            values = np.ravel(result) if whole else result[lanes]
            seen = self._memory.load(program.buffer, active, values, program)
            if whole:
                result = seen.reshape(np.shape(result))
            elif seen is not values:
                result = result.copy()
                result[lanes] = seen
        if active.size == 1:
            region = groups[0][0]
            if region.kind == "clock":
                self.poll_clock(program, "load", where)
            else:
                values = np.ravel(result).view(_INT_TYPES[dtype.itemsize])
                self._poll(
                    program, "load", active, tuple(values.tolist()), region, where, itemsize=dtype.itemsize, plain=True
                )
                if program.spinning:
                    program.pause()
        return result

    def store(
        self, program: Program, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, asynchronous: bool
    ) -> None:
        """A plain store, or a descriptor's (asynchronous) one."""
        shape = np.shape(addresses)
        lanes = np.broadcast_to(mask, shape)
        if lanes.all():
            active, content = np.ravel(addresses), np.ravel(np.broadcast_to(values, shape))
        else:
            active, content = np.asarray(addresses)[lanes], np.broadcast_to(values, shape)[lanes]
        if not active.size:
            return
        op = "descriptor store" if asynchronous else "store"
        itemsize = content.dtype.itemsize
        groups = self._regions(program, active, itemsize, op)
        if program.actor is not None:
            self._order_store(program, program.actor, groups, itemsize, source(sys._getframe(2)), asynchronous)
        program.moved()
        if not any(region.weak for region, _ in groups):
            write_words(active, content)
            self._scheduler.changed(int(active.min()), int(active.max()) + itemsize)
            return
        pending = program.buffer.pending
        for piece in self._memory.split(active, content, program):
            piece.asynchronous = asynchronous
            pending.append(piece)
        while len(pending) > _MAX_PENDING:
            self._memory.land_any(program.buffer)
        self._machine.track(program)
        if self._rng.random() < _PAUSE_AT_STORE:
            program.pause()

    def _order_load(self, agent: Agent, actor: Actor, groups: Groups, itemsize: int, where: str) -> None:
        assert self._slots is not None
        moment, slot = actor.plain()
        for region, part in groups:
            shadow = region.shadow
            if shadow is None:
                continue
            granules = shadow.granules((part - np.uint64(region.start)).view(np.int64), itemsize)
            conflict = shadow.check_load(granules, actor.clock)
            if conflict is not None:
                self._race(agent, "load", where, region, conflict)
            shadow.record_load(granules, moment, slot, self._slots.site("load", where))

    def _order_store(
        self, agent: Agent, actor: Actor, groups: Groups, itemsize: int, where: str, asynchronous: bool
    ) -> None:
        assert self._slots is not None
        op = "descriptor store" if asynchronous else "store"
        moment, slot = actor.descriptor_store() if asynchronous else actor.plain()
        clock: Clock = actor.descriptor_clock() if asynchronous else actor.clock
        for region, part in groups:
            shadow = region.shadow
            if shadow is None:
                continue
            granules = shadow.granules((part - np.uint64(region.start)).view(np.int64), itemsize)
            conflict = shadow.check_store(granules, clock)
            if conflict is not None:
                self._race(agent, op, where, region, conflict)
            shadow.record_store(granules, moment, slot, self._slots.site(op, where))

    # ---- atomics

    def atomic(self, program: Program, access: AtomicAccess, perform: Callable[[], Any]) -> Any:
        """An atomic of a kernel; ``perform`` changes memory and returns the interpreter's result."""
        program.pause()
        op = f"atomic {access.op}"
        addresses, itemsize = access.addresses, access.dtype.itemsize
        groups = self._regions(program, addresses, itemsize, op)
        region = groups[0][0]
        where = source(sys._getframe(2))
        if region.kind == "clock":
            result = perform()
            self.poll_clock(program, op, where)
            return result
        if access.release and access.scope != "cta":
            self._memory.land_fenced(program.buffer)
        self._memory.land_meeting(program.buffer, int(addresses.min()), int(addresses.max()) + itemsize)
        self._machine.track(program)
        result, changed = self._perform(
            program, access, perform, groups, where, self._fault_of(program, access, region)
        )
        if access.acquire and access.scope != "cta":
            program.buffer.view = self._memory.version
        if changed:
            program.moved()
        else:
            values = words_at(tuple(addresses.tolist()), itemsize)
            self._poll(program, op, addresses, values, region, where, itemsize=itemsize, plain=False)
        self._machine.event(program, op, region.place(int(addresses[0])))
        return result

    def _perform(
        self,
        agent: Agent,
        access: AtomicAccess,
        perform: Callable[[], Any],
        groups: Groups,
        where: str,
        fault: SignalFault | None = None,
    ) -> tuple[Any, bool]:
        """Effect, order and faults of an atomic. The second result tells whether its sender changed memory."""
        dtype = _WORD_TYPES[access.dtype.itemsize]
        addresses = access.addresses
        before = read_words(addresses, dtype)
        result = perform()
        after = read_words(addresses, dtype)
        if isinstance(fault, LoseSignal):
            write_words(addresses, before)
            return result, True  # its sender believes that it happened
        changed = not np.array_equal(before, after)
        if agent.actor is not None:
            # A compare-and-swap that failed was only a load, and so releases nothing.
            reads = access.only_reads or (access.op == "cas" and not changed)
            release = access.release and not (access.op == "cas" and not changed)
            self._order_atomic(agent, agent.actor, access, groups, where, reads=reads, release=release)
        if changed:
            self._memory.remember(addresses, before, agent)
            if isinstance(fault, TearHeader):
                write_words(addresses, _torn(before, after, fault))
                self._changed(addresses, dtype.itemsize)
                if not fault.lost:
                    for _ in range(self._rng.randint(1, 20)):
                        agent.pause()
                    write_words(addresses, after)
            self._changed(addresses, dtype.itemsize)
        if isinstance(fault, DoubleSignal):
            agent.pause()
            before = read_words(addresses, dtype)
            perform()
            self._memory.remember(addresses, before, agent)
            self._changed(addresses, dtype.itemsize)
        return result, changed

    def _fault_of(self, agent: Agent, access: AtomicAccess, region: Region) -> SignalFault | None:
        if region.kind != "symmetric" or access.only_reads:
            return None
        offset = int(access.addresses[0]) - region.start
        value = int(access.values[0]) if access.values.dtype.kind in "iub" else 0
        num_bytes = access.dtype.itemsize * access.addresses.size
        return self._machine.plan.signal(agent.rank, region.rank, offset, num_bytes, value)

    def _changed(self, addresses: np.ndarray, itemsize: int) -> None:
        self._scheduler.changed(int(addresses.min()), int(addresses.max()) + itemsize)

    def _order_atomic(
        self,
        agent: Agent,
        actor: Actor,
        access: AtomicAccess,
        groups: Groups,
        where: str,
        *,
        reads: bool,
        release: bool,
    ) -> None:
        """Races of an atomic with plain accesses, and what its semantics order."""
        assert self._slots is not None
        op = f"atomic {access.op}"
        itemsize = access.dtype.itemsize
        moment, slot = actor.atomic(access.block)
        stamp = stamp_of(moment, slot, self._slots.site(op, where))
        words = []
        for region, part in groups:
            shadow = region.shadow
            if shadow is None:
                continue
            for offset in (part - np.uint64(region.start)).tolist():
                word = shadow.word(offset, itemsize)
                conflict = shadow.check_atomic(offset, itemsize, actor.clock, writes=not reads)
                if conflict is not None:
                    self._race(agent, op, where, region, conflict)
                (word.reads if reads else word.writes)[slot] = stamp
                words.append(word.sync)
        if access.acquire:
            actor.acquire(words, access.scope, access.block)
        if release:
            actor.release(words, access.scope, access.block)

    # ---- the copy engine

    def copy(self, transfer: Transfer, start: int, stop: int) -> None:
        """One piece of a copy: read the source now, and the target has it."""
        order = transfer.order
        origin = transfer.source_address + start
        target = order.target.start + order.offset + start
        size = stop - start
        width = min((origin | target | size) & -(origin | target | size), 8)
        offsets = np.arange(0, size, width, dtype=np.uint64)
        addresses = np.uint64(target) + offsets
        if transfer.actor is not None:
            sources = [(transfer.source, np.uint64(origin) + offsets)]
            self._order_load(transfer, transfer.actor, sources, width, order.where)
            self._order_store(transfer, transfer.actor, [(order.target, addresses)], width, order.where, False)
        dtype = _WORD_TYPES[width]
        self._memory.remember(addresses, read_words(addresses, dtype), transfer)
        write_words(addresses, read_words(np.uint64(origin) + offsets, dtype))
        self._scheduler.changed(target, target + size)

    def raise_flag(self, transfer: Transfer) -> None:
        """The int32 flag of a copy whose bytes have all landed."""
        order = transfer.order
        address = np.array([order.target.start + order.flag_offset], dtype=np.uint64)
        value = np.array([order.flag_value], dtype=np.int32)
        if transfer.actor is not None:
            transfer.actor.barrier()
        access = AtomicAccess("store", address, value, value.dtype, False, True, "sys", False)
        groups = [(order.target, address)]
        fault = self._fault_of(transfer, access, order.target)
        self._perform(transfer, access, lambda: write_words(address, value), groups, order.where, fault)
        if transfer.stream is not None:
            self._machine.event(transfer.stream, "flag of a copy", order.target.place(int(address[0])))

    # ---- the network

    def acquire(self, agent: Agent, region: Region, address: int, where: str) -> int:
        """The int64 word at ``address``, read with acquire at device scope."""
        word = np.array([address], dtype=np.uint64)
        value = np.zeros(1, dtype=np.int64)
        access = AtomicAccess("load", word, value, value.dtype, True, False, "gpu", False)
        found, _ = self._perform(agent, access, lambda: read_words(word, value.dtype), [(region, word)], where)
        return int(found[0])

    def read_words(self, agent: Agent, region: Region, address: int, count: int, where: str) -> list[int]:
        """``count`` int64 words from ``address``, loaded plainly."""
        words = np.uint64(address) + np.uint64(8) * np.arange(count, dtype=np.uint64)
        if agent.actor is not None:
            self._order_load(agent, agent.actor, [(region, words)], 8, where)
        found: list[int] = read_words(words, _INT_TYPES[8]).tolist()
        return found

    def land_words(
        self,
        agent: Agent,
        source: tuple[Region, int],
        target: tuple[Region, int],
        words: np.ndarray,
        fault: SignalFault | None,
        where: str,
    ) -> None:
        """Words (uint64 indices) of a put: read the source now, and the target has them. Word 0 is an atomic, since it
        may be polled; ``fault`` is its, and what is left of it after the fault is for the caller to land."""
        (from_region, origin), (to_region, there) = source, target
        sources = np.uint64(origin) + np.uint64(8) * words
        targets = np.uint64(there) + np.uint64(8) * words
        values = read_words(sources, _INT_TYPES[8])
        plain = targets[words > 0]
        if agent.actor is not None:
            self._order_load(agent, agent.actor, [(from_region, sources)], 8, where)
            if plain.size:
                self._order_store(agent, agent.actor, [(to_region, plain)], 8, where, False)
        if plain.size:
            self._memory.remember(plain, read_words(plain, _INT_TYPES[8]), agent)
            write_words(plain, values[words > 0])
            self._changed(plain, 8)
        if plain.size < words.size and not isinstance(fault, LoseSignal):
            first, value = targets[words == 0], values[words == 0]
            if isinstance(fault, TearHeader):
                value = _torn(read_words(first, value.dtype), value, fault)
            access = AtomicAccess("xchg", first, value, value.dtype, False, False, "sys", False)
            self._perform(agent, access, lambda: write_words(first, value), [(to_region, first)], where)

    def add_signal(self, agent: Agent, region: Region, address: int, where: str) -> None:
        """Add 1 to the signal of a put whose bytes have all landed."""
        word = np.array([address], dtype=np.uint64)
        one = np.ones(1, dtype=np.int64)
        if agent.actor is not None:
            agent.actor.barrier()
        access = AtomicAccess("add", word, one, one.dtype, False, True, "sys", False)
        self._perform(
            agent, access, lambda: write_words(word, read_words(word, one.dtype) + one), [(region, word)], where
        )

    # ---- polls

    def poll_clock(self, program: Program, op: str, where: str) -> None:
        """``program`` looked at the clock."""
        machine = self._machine
        program.polled(
            Poll((machine.clock_address,), (self._scheduler.now_ns,), op, "the clock", where, reads_clock=True)
        )

    def _poll(
        self,
        program: Program,
        op: str,
        addresses: np.ndarray,
        values: tuple[int, ...],
        region: Region,
        where: str,
        *,
        itemsize: int,
        plain: bool,
    ) -> None:
        keys = tuple(addresses.tolist())
        poll = Poll(keys, values, op, region.place(keys[0]), where, itemsize)
        if plain:
            program.polled_plainly(poll)
        else:
            program.polled(poll)

    # ---- reports

    def _regions(self, program: Program, addresses: np.ndarray, itemsize: int, op: str) -> Groups:
        """The regions that the addresses lie in, if the program may use them."""
        groups, wild = self._space.split(addresses, itemsize)
        if wild is not None:
            self._fault(program, op, wild, itemsize, "lies in no registered region and in no argument of this launch")
        for region, part in groups:
            kind = region.kind
            if region.freed:
                self._fault(program, op, int(part[0]), itemsize, f"lies in {region.name}, which was freed")
            if kind == "local" and region.rank != program.rank:
                self._fault(program, op, int(part[0]), itemsize, f"lies in {region.name}, local memory of another rank")
            if kind == "argument" and not any(region.meets(argument) for argument in program.launch.arguments):
                self._fault(program, op, int(part[0]), itemsize, f"lies in {region.name}, no argument of this launch")
        return groups

    def _fault(self, program: Program, op: str, address: int, itemsize: int, reason: str) -> NoReturn:
        near = [
            f"{region.name} [{region.start:#x}, {region.end:#x})"
            for region in self._space.overlapping(max(address - 4096, 0), address + 4096)
        ]
        hint = f"; near it lie {', '.join(near)}" if near else ""
        where = source(sys._getframe(3))
        raise MemoryFaultError(f"{program.name} at {where}: {op} of {itemsize} bytes at {address:#x} {reason}{hint}")

    def _race(self, agent: Agent, op: str, where: str, region: Region, conflict: Conflict) -> NoReturn:
        assert self._slots is not None
        assert region.shadow is not None
        offset = conflict.granule * region.shadow.granule
        earlier = self._slots.user(conflict.slot, conflict.moment)
        raise RaceError(
            f"{agent.name}: {op} at {where} of {region.name}+{offset} is not ordered after the {conflict.site.op} by "
            f"{earlier} at {conflict.site.where}: no chain of release and acquire of sufficient scope leads from one "
            "to the other (a release covers a block's stores only after a tl.debug_barrier since them, and descriptor "
            "stores only after they were waited for)"
        )


def _torn(before: np.ndarray, after: np.ndarray, fault: TearHeader) -> np.ndarray:
    """Words of which one half is new."""
    lower = after.dtype.type((1 << (4 * after.dtype.itemsize)) - 1)
    new, old = (after, before) if fault.first == "lower" else (before, after)
    torn: np.ndarray = (new & lower) | (old & ~lower)
    return torn


def words_at(addresses: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The words that memory holds now, as signed integers."""
    return tuple(read_words(np.array(addresses, dtype=np.uint64), _INT_TYPES[itemsize]).tolist())
