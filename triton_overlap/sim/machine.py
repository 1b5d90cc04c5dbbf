"""The simulated devices: answers the interpreter's loads, stores, atomics, barriers and launches.

Every access is checked against the regions that exist, then for order with earlier accesses, and then takes effect as
the model of memory says (``memory.py``). An atomic is also where the running task may lose its turn.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import triton

from triton_overlap.comm import interpreter
from triton_overlap.comm.interpreter import AtomicAccess, InterpreterError, KernelLaunch, raw
from triton_overlap.errors import ClosedError, MemoryFaultError, RaceError, SimulationError
from triton_overlap.sim.faults import DoubleSignal, Fault, FaultPlan, LoseSignal, TearHeader
from triton_overlap.sim.happens_before import Actor, Clock, Conflict, Shadow, Slots
from triton_overlap.sim.memory import (
    AddressSpace,
    Region,
    StoreBuffer,
    WeakMemory,
    aligned_zeros,
    read_words,
    write_words,
)
from triton_overlap.sim.scheduler import Fiber, FiberTask, Poll, Scheduler, Task, ThreadFiber, Wait
from triton_overlap.sim.streams import Event, Operation, RecordEvent, Stream, WaitEvent, cut

#: Alignment of what the machine allocates, in bytes.
ALIGNMENT = 1024
#: Chance that a task loses its turn at a store to memory that others reach.
_PAUSE_AT_STORE = 0.1
#: Argument regions remembered after their launch, for order with later ones: number and bytes.
_MAX_ARGUMENTS = 256
_MAX_ARGUMENT_BYTES = 64 << 20

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


@dataclass(frozen=True)
class LogEntry:
    """One event of a run, for timelines.

    Attributes:
        turn: of the scheduler.
        time_ns: virtual time.
        task: name of the task.
        rank: whose task.
        what: such as ``"start"``, ``"atomic add"``, ``"copy"``, ``"end"``.
        place: region and offset, where there is one.
    """

    turn: int
    time_ns: int
    task: str
    rank: int
    what: str
    place: str


class HostTask(FiberTask):
    """A rank's host code."""

    def __init__(self, rank: int, body: Callable[[], None], rng_state: torch.Tensor) -> None:
        super().__init__(f"host{rank}", rank, ThreadFiber, body)
        self.rng_state = rng_state
        self.clock = Clock()
        self.streams: list[Stream] = []
        self.current_stream: list[Stream] = []

    def where(self) -> str:
        return _source(self.fiber.frame(), hosts_too=True)


class Program(FiberTask):
    """One program of a launch."""

    def __init__(
        self, launch: Launch, position: tuple[int, int, int], make: Callable[[Callable[[], None]], Fiber], view: int
    ) -> None:
        name = f"rank{launch.rank} {launch.label}{position}"
        super().__init__(name, launch.rank, make, lambda: launch.kernel.function(**launch.kernel.arguments))
        self.launch = launch
        self.grid = (position, launch.kernel.grid)
        self.buffer = StoreBuffer(view)
        self.actor: Actor | None = None

    def where(self) -> str:
        return _source(self.fiber.frame())


@dataclass(eq=False)
class Launch:
    """A kernel launch on a stream: starts programs, a few at a time, in any order."""

    machine: Machine
    kernel: KernelLaunch
    rank: int
    label: str
    host_clock: Clock
    arguments: list[Region]
    stream: Stream | None = None
    finished: bool = False
    error: BaseException | None = None

    def start(self, stream: Stream) -> None:
        self.stream = stream
        stream.clock.join(self.host_clock)
        rng = self.machine.rng
        self._waiting = list(self.kernel.program_ids())
        rng.shuffle(self._waiting)
        total = len(self._waiting)
        self._resident = max(1, rng.choice((total, 1, rng.randint(1, max(total, 1)))))
        self._ended: list[Program] = []
        self.running: list[Program] = []
        self.admit()

    def admit(self) -> None:
        """Start programs while there is room; end the launch with the last of them."""
        stream = self.stream
        assert stream is not None
        while self._waiting and len(self.running) < self._resident:
            program = Program(self, self._waiting.pop(), self.machine.make_fiber, self.machine.memory.version)
            if self.machine.slots is not None:
                key = (stream.number, *program.grid[0])
                program.actor = Actor(self.machine.slots, self.rank, key, program.name, stream.clock.copy())
            self.running.append(program)
            self.machine.scheduler.spawn(program)
        if not self.running:
            self._finish()

    def program_ended(self, program: Program) -> None:
        """One of the programs has run to its end."""
        self.running.remove(program)
        self._ended.append(program)
        self.admit()

    def fail(self, error: BaseException) -> None:
        """A program raised: the others do not go on."""
        self.error = error
        for program in self.running:
            if not program.done:
                self.machine.scheduler.discard(program)
        self._ended += self.running
        self.running, self._waiting = [], []
        self._finish()

    def _finish(self) -> None:
        machine, stream = self.machine, self.stream
        assert stream is not None
        for program in self._ended:
            machine.memory.land_all(program.buffer)
            machine.forget(program)
            if program.actor is not None:
                stream.clock.join(program.actor.end())
        for region in self.arguments:
            region.users -= 1
        self.finished = True
        machine.scheduler.happened()
        machine.prune_arguments()

    def can_go_on(self) -> bool:
        return self.finished

    def turn(self) -> bool:
        return True

    def describe(self) -> str:
        return f"the launch of {self.label}"

    def held_back(self) -> bool:
        return False


@dataclass(eq=False)
class Transfer:
    """A copy by the copy engine: the bytes in pieces and in any order, then the flag, released at system scope."""

    machine: Machine
    rank: int
    peer: int
    source: Region
    source_address: int
    target: Region
    target_address: int
    num_bytes: int
    flag_address: int
    flag_value: int
    host_clock: Clock
    where: str
    keep: torch.Tensor
    stream: Stream | None = None

    def start(self, stream: Stream) -> None:
        machine = self.machine
        self.stream = stream
        stream.clock.join(self.host_clock)
        self._pieces = cut(self.num_bytes, machine.rng)
        self._actor: Actor | None = None
        if machine.slots is not None:
            name = f"{stream.name} to rank{self.peer}"
            self._actor = Actor(machine.slots, self.rank, (stream.number, "copy"), name, stream.clock.copy())

    def can_go_on(self) -> bool:
        return True

    def turn(self) -> bool:
        machine, actor = self.machine, self._actor
        assert self.stream is not None
        if self._pieces:
            start, stop = self._pieces.pop()
            machine.copy_bytes(self, actor, start, stop)
            return False
        machine.release_flag(self, actor)
        self.source.users -= 1
        if actor is not None:
            self.stream.clock.join(actor.end())
        return True

    def describe(self) -> str:
        return f"a copy from rank{self.rank} to rank{self.peer}"

    def held_back(self) -> bool:
        return self.machine.plan.stalls(self.rank, self.peer)


class Machine:
    """Everything that the ranks of one run share.

    Args:
        world_size: ranks.
        seed: of every decision.
        faults: see ``faults.py``.
        check_races: keep happens-before.
        num_programs: of persistent grids; None draws 1 to 4.
        max_steps: turns after which a run counts as endless.
        make_fiber: what programs run on.
        log: keep a list of events.
    """

    def __init__(
        self,
        world_size: int,
        seed: int,
        *,
        faults: Sequence[Fault] | None,
        check_races: bool,
        num_programs: int | None,
        max_steps: int,
        make_fiber: Callable[[Callable[[], None]], Fiber],
        log: bool,
    ) -> None:
        self.world_size = world_size
        self.rng = random.Random(seed)
        self.plan = FaultPlan(faults, world_size)
        self.slots = Slots() if check_races else None
        self.make_fiber = make_fiber
        self.num_programs = num_programs if num_programs is not None else self.rng.choice((1, 2, 3, 4))
        self.scheduler = Scheduler(self.rng, self, max_steps)
        self.memory = WeakMemory(self.rng, self.scheduler.changed)
        self.space = AddressSpace()
        self.log: list[LogEntry] | None = [] if log else None
        self.hosts: list[HostTask] = []
        self.killed: list[int] = []
        self.on_host_end: Callable[[HostTask], None] = lambda host: None
        self.failure: BaseException | None = None
        self._landing = self.rng.choice((0.0, 0.02, 0.3))
        self._dirty: list[Program] = []
        self._arguments: dict[int, Region] = {}
        self._launches: dict[tuple[int, str], int] = {}
        self._rng_owner: HostTask | None = None
        clock = self.allocate("clock", 8, -1, "clock")
        self.clock_address = clock.start
        self._clock_word = clock.keep.view(torch.int64).numpy()

    # ---- allocation

    def allocate(self, kind: str, num_bytes: int, rank: int, name: str) -> Region:
        """A new zero-filled region; ``keep`` is its tensor, uint8 ``[num_bytes]``."""
        tensor = aligned_zeros(num_bytes, ALIGNMENT)
        start = tensor.data_ptr()
        shadow = Shadow(num_bytes, self.slots) if self.slots is not None and kind != "clock" else None
        region = Region(kind, start, start + num_bytes, name, rank, tensor, shadow, weak=kind != "clock")
        if num_bytes:
            self.space.add(region)
        return region

    def argument_region(self, tensor: torch.Tensor, rank: int) -> Region | None:
        """The region that a tensor given to a kernel or a copy lies in, known from now on."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes == 0 or tensor.numel() == 0:
            return None
        own = self.space.at(tensor.data_ptr())
        if own is not None and own.kind != "argument":
            return own
        start, end = storage.data_ptr(), storage.data_ptr() + num_bytes
        if own is not None and own.start <= start and end <= own.end:
            self._arguments[own.start] = self._arguments.pop(own.start)  # the youngest again
            return own
        keep: list[Any] = [storage]
        for other in self.space.overlapping(start, end):
            if other.kind != "argument":
                raise MemoryFaultError(f"an argument's storage covers {other.name}, which kernels reach by address")
            start, end = min(start, other.start), max(end, other.end)
            keep.append(other.keep)
            self._forget_argument(other)
        shadow = None if self.slots is None else Shadow(end - start, self.slots)
        # What a launch's programs do not order among themselves is a race, which the checker reports; only without it
        # do late stores to arguments show anything more.
        region = Region("argument", start, end, f"argument@rank{rank}", rank, keep, shadow, weak=self.slots is None)
        self.space.add(region)
        self._arguments[start] = region
        return region

    def _forget_argument(self, region: Region) -> None:
        self.space.remove(region)
        del self._arguments[region.start]

    def prune_arguments(self) -> None:
        """Forget old arguments whose every access happens before whatever their ranks' default streams do next."""
        total = sum(region.end - region.start for region in self._arguments.values())
        if len(self._arguments) <= _MAX_ARGUMENTS and total <= _MAX_ARGUMENT_BYTES:
            return
        settled = Clock()
        if self.slots is not None:
            settled.reach(len(self.slots))
            for slot, rank in enumerate(self.slots.ranks):
                known = self.hosts[rank].streams[0].clock.known
                settled.known[slot] = known[slot] if slot < len(known) else 0
        for region in list(self._arguments.values())[: len(self._arguments) // 2]:
            if region.users == 0 and (region.shadow is None or region.shadow.known_to(settled)):
                self._forget_argument(region)

    # ---- what the scheduler asks

    def land_somewhere(self, *, must: bool) -> bool:
        if not self._dirty or (not must and self.rng.random() >= self._landing):
            return False
        program = self.rng.choice(self._dirty)
        self.memory.land_any(program.buffer)
        if not program.buffer.pending:
            self._dirty.remove(program)
        return True

    def forget(self, program: Program) -> None:
        """Everything ``program`` stored has landed."""
        if program in self._dirty:
            self._dirty.remove(program)

    def before_turn(self, task: Task) -> None:
        if isinstance(task, HostTask) and task is not self._rng_owner:
            # Ranks share torch's default generator; each gets the state it left behind.
            if self._rng_owner is not None:
                self._rng_owner.rng_state = torch.get_rng_state()
            torch.set_rng_state(task.rng_state)
            self._rng_owner = task

    def after_turn(self, task: Task) -> None:
        if isinstance(task, Program) and task.done:
            self._event(task, "end")
            if task.error is None:
                task.launch.program_ended(task)
            else:
                self._program_failed(task, task.error)
        elif isinstance(task, HostTask) and task.done:
            self.on_host_end(task)
        if self.failure is not None:
            raise self.failure
        if task.rank not in self.killed and self.plan.dies(task.rank):
            self.killed.append(task.rank)
            self.scheduler.remove_rank(task.rank)

    def _program_failed(self, program: Program, error: BaseException) -> None:
        found: BaseException | None = error
        while found is not None and not isinstance(found, SimulationError):
            found = found.__cause__  # the interpreter wraps what a device function raises
        if found is not None:
            self.failure = found
            return
        wrapped = error
        if isinstance(error, Exception) and not isinstance(error, InterpreterError):
            wrapped = InterpreterError(repr(error))
            wrapped.__cause__ = error
        program.launch.fail(wrapped)

    def time_moved(self, now_ns: int) -> None:
        self._clock_word[0] = now_ns

    def catch_up(self, task: Task) -> None:
        if isinstance(task, Program):
            task.buffer.view = self.memory.version

    def memory_holds(self, poll: Poll) -> bool:
        if poll.reads_clock:
            return poll.values == (self.scheduler.now_ns,)
        return poll.values == _words_at(poll.addresses, poll.itemsize)

    def held_back(self, task: Task) -> bool:
        if isinstance(task, Stream):
            return task.held_back() or self.plan.delays(task.rank, self.scheduler.steps)
        return self.plan.holds_back and self.plan.delays(task.rank, self.scheduler.steps)

    def frozen_until_ns(self, task: Task) -> int:
        return self.plan.frozen_until_ns(task.rank) if self.plan.holds_back else 0

    # ---- host side

    def host(self) -> HostTask:
        """The rank whose host code runs now.

        Raises:
            ClosedError: called outside the run of a world.
        """
        task = self.scheduler.current
        if not isinstance(task, HostTask):
            raise ClosedError("this group belongs to a simulated world that has ended, or to another thread")
        return task

    def block(self, wait: Wait) -> None:
        """Let others run until ``wait`` is over."""
        host = self.host()
        if wait.ready():
            return
        host.moved()
        host.wait = wait
        host.fiber.pause()

    def new_stream(self, rank: int, number: int) -> Stream:
        """A stream of ``rank``; starts empty."""
        stream = Stream(f"rank{rank} stream{number}", rank, number, self.scheduler.happened)
        self.scheduler.spawn(stream)
        return stream

    def add_stream(self) -> Stream:
        """A further stream of the running rank."""
        host = self.host()
        stream = self.new_stream(host.rank, len(host.streams))
        host.streams.append(stream)
        return stream

    def current_stream(self) -> Stream:
        """Where the running rank's launches go."""
        host = self.host()
        return host.current_stream[-1] if host.current_stream else host.streams[0]

    def submit(self, stream: Stream, operation: Operation) -> None:
        """Append to a stream. The default stream finishes it before the host goes on."""
        if stream.error is not None:
            raise stream.error
        stream.add(operation)
        if stream.number == 0:
            self.block(Wait(lambda: stream.idle, operation.describe()))
            self._raise_stream_error(stream)

    @staticmethod
    def _raise_stream_error(stream: Stream) -> None:
        if stream.error is not None:
            error, stream.error = stream.error, None
            raise error

    def record_event(self) -> Event:
        """An event on the current stream."""
        return self.record_event_on(self.current_stream())

    def record_event_on(self, stream: Stream) -> Event:
        """An event after what ``stream`` holds now."""
        event = Event(f"an event on {stream.name}")
        if stream.idle:
            stream.clock.join(self.host().clock)
            event.clock = stream.clock.copy()
        else:
            stream.add(RecordEvent(event))
        return event

    def wait_event(self, event: Event, stream: Stream | None = None) -> None:
        """What ``stream`` (None: the current one) gets next comes after ``event``."""
        self.submit(self.current_stream() if stream is None else stream, WaitEvent(event))

    def synchronize(self) -> None:
        """Return once every stream of the running rank is idle."""
        host = self.host()
        self.block(Wait(lambda: all(stream.idle for stream in host.streams), "its streams"))
        for stream in host.streams:
            host.clock.join(stream.clock)
            self._raise_stream_error(stream)

    # ---- launches and copies

    def launch(self, kernel: KernelLaunch) -> None:
        host = self.host()
        regions: list[Region] = []
        for tensor in kernel.tensors:
            region = self.argument_region(tensor, host.rank)
            if region is not None:
                region.users += 1
                regions.append(region)
        count = self._launches[host.rank, kernel.name] = self._launches.get((host.rank, kernel.name), 0) + 1
        label = f"{kernel.name}#{count}"
        self.submit(self.current_stream(), Launch(self, kernel, host.rank, label, host.clock.copy(), regions))

    def program(self) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
        task = self.scheduler.current
        return task.grid if isinstance(task, Program) else None

    def time_ns(self) -> int:
        task = self.scheduler.current
        if isinstance(task, Program):
            self._poll(task, "read", np.array([self.clock_address], dtype=np.uint64), 8, [], clock=True)
        return self.scheduler.now_ns

    def push(
        self,
        stream: Stream,
        source: torch.Tensor,
        target: Region,
        peer: int,
        byte_offset: int,
        flag_byte_offset: int,
        flag_value: int,
        where: str,
    ) -> None:
        """Queue a copy of contiguous ``source`` to ``target``, and its flag."""
        host = self.host()
        region = self.argument_region(source, host.rank)
        size = source.numel() * source.element_size()
        address = source.data_ptr()
        if region is None:  # nothing to copy: the flag alone, with the target standing for the source
            region, address = target, target.start
        region.users += 1
        transfer = Transfer(
            self, host.rank, peer, region, address, target, target.start + byte_offset, size,
            target.start + flag_byte_offset, flag_value, host.clock.copy(), where, source,
        )  # fmt: skip
        stream.add(transfer)

    def copy_bytes(self, transfer: Transfer, actor: Actor | None, start: int, stop: int) -> None:
        """One piece of a copy: read the source now, and the target has it."""
        source, target = transfer.source_address + start, transfer.target_address + start
        size = stop - start
        if actor is not None and self.slots is not None:
            moment, slot = actor.plain()
            for region, address, op in ((transfer.source, source, "read"), (transfer.target, target, "write")):
                shadow = region.shadow
                assert shadow is not None
                granules = shadow.byte_range(address - region.start, address - region.start + size)
                check = shadow.check_load if op == "read" else shadow.check_store
                site = self.slots.site(f"copy engine's {op}", transfer.where)
                conflict = check(granules, actor.clock)
                if conflict is not None:
                    self._race(transfer.rank, f"copy engine's {op}", transfer.where, region, conflict)
                (shadow.record_load if op == "read" else shadow.record_store)(granules, moment, slot, site)
        width = min((source | target | size) & -(source | target | size), 8)
        offsets = np.arange(0, size, width, dtype=np.uint64)
        addresses = np.uint64(target) + offsets
        dtype = _WORD_TYPES[width]
        self.memory.remember(addresses, read_words(addresses, dtype), transfer)
        write_words(addresses, read_words(np.uint64(source) + offsets, dtype))
        self.scheduler.changed(target, target + size)

    def release_flag(self, transfer: Transfer, actor: Actor | None) -> None:
        """The flag of a copy, an int32."""
        address = np.array([transfer.flag_address], dtype=np.uint64)
        value = np.array([transfer.flag_value], dtype=np.int32)
        access = AtomicAccess("store", address, value, np.dtype(np.int32), False, True, "sys", False)
        if actor is not None:
            actor.barrier()
        self._perform(
            access,
            lambda: write_words(address, value),
            actor,
            transfer.rank,
            transfer.where,
            transfer,
            lambda: None,
            [(transfer.target, address)],
        )
        if self.log is not None and transfer.stream is not None:
            self._event(transfer.stream, "flag of a copy", transfer.target.place(transfer.flag_address))

    # ---- what kernels do

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        task = self.scheduler.current
        if not isinstance(task, Program):
            return raw.load(addresses, mask, other, dtype)
        lanes = np.broadcast_to(mask, np.shape(addresses))
        whole = bool(lanes.all())
        active = np.ravel(addresses) if whole else np.asarray(addresses)[lanes]
        if not active.size:
            return raw.load(addresses, mask, other, dtype)
        groups = self._regions(task, active, dtype.itemsize, "load")
        if task.actor is not None and self.slots is not None:
            moment, slot = task.actor.plain()
            for region, part in groups:
                shadow = region.shadow
                if shadow is None:
                    continue
                granules = shadow.granules((part - np.uint64(region.start)).view(np.int64), dtype.itemsize)
                conflict = shadow.check_load(granules, task.actor.clock)
                where = _source(sys._getframe(1))
                if conflict is not None:
                    self._race_of(task, "load", where, region, conflict)
                shadow.record_load(granules, moment, slot, self.slots.site("load", where))
        result = raw.load(addresses, mask, other, dtype)
        if any(region.weak for region, _ in groups):
            if whole:
                seen = self.memory.load(task.buffer, active, np.ravel(result), task)
                result = seen.reshape(np.shape(result))
            else:
                values = result[lanes]
                seen = self.memory.load(task.buffer, active, values, task)
                if seen is not values:
                    result = result.copy()
                    result[lanes] = seen
        if active.size == 1:
            clock = groups[0][0].kind == "clock"
            self._poll(task, "load", active, dtype.itemsize, groups, clock=clock, value=result, plain=True)
            if task.spinning:
                task.fiber.pause()
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, asynchronous: bool) -> None:
        task = self.scheduler.current
        if not isinstance(task, Program):
            raw.store(addresses, values, mask)
            return
        shape = np.shape(addresses)
        lanes = np.broadcast_to(mask, shape)
        if lanes.all():
            active, content = np.ravel(addresses), np.ravel(np.broadcast_to(values, shape))
        else:
            active, content = np.asarray(addresses)[lanes], np.broadcast_to(values, shape)[lanes]
        if not active.size:
            return
        op = "descriptor store" if asynchronous else "store"
        groups = self._regions(task, active, content.dtype.itemsize, op)
        actor = task.actor
        if actor is not None and self.slots is not None:
            moment, slot = actor.descriptor_store() if asynchronous else actor.plain()
            clock = actor.descriptor_clock() if asynchronous else actor.clock
            for region, part in groups:
                shadow = region.shadow
                if shadow is None:
                    continue
                granules = shadow.granules((part - np.uint64(region.start)).view(np.int64), content.dtype.itemsize)
                conflict = shadow.check_store(granules, clock)
                where = _source(sys._getframe(1))
                if conflict is not None:
                    self._race_of(task, op, where, region, conflict)
                shadow.record_store(granules, moment, slot, self.slots.site(op, where))
        task.moved()
        if not any(region.weak for region, _ in groups):
            write_words(active, content)
            self.scheduler.changed(int(active.min()), int(active.max()) + content.dtype.itemsize)
            return
        if not task.buffer.pending:
            self._dirty.append(task)
        for piece in self.memory.split(active, content, task):
            piece.asynchronous = asynchronous
            task.buffer.pending.append(piece)
        if self.rng.random() < _PAUSE_AT_STORE:
            task.fiber.pause()

    def barrier(self) -> None:
        task = self.scheduler.current
        if isinstance(task, Program):
            task.buffer.fence()
            if task.actor is not None:
                task.actor.barrier()

    def wait_descriptors(self) -> None:
        task = self.scheduler.current
        if isinstance(task, Program):
            for piece in task.buffer.pending:
                piece.asynchronous = False
            if task.actor is not None:
                task.actor.wait_descriptors()

    def atomic(self, access: AtomicAccess, perform: Callable[[], Any]) -> Any:
        task = self.scheduler.current
        if not isinstance(task, Program):
            return perform()
        task.fiber.pause()
        groups = self._regions(task, access.addresses, access.dtype.itemsize, f"atomic {access.op}")
        if groups[0][0].kind == "clock":
            result = perform()
            self._poll(task, f"atomic {access.op}", access.addresses, access.dtype.itemsize, groups, clock=True)
            return result
        if access.release and access.scope != "cta":
            self.memory.land_fenced(task.buffer)
        low, high = int(access.addresses.min()), int(access.addresses.max()) + access.dtype.itemsize
        self.memory.land_meeting(task.buffer, low, high)
        if not task.buffer.pending:
            self.forget(task)
        where = _source(sys._getframe(1))
        result, changed = self._perform(access, perform, task.actor, task.rank, where, task, task.fiber.pause, groups)
        if access.acquire and access.scope != "cta":
            task.buffer.view = self.memory.version
        if changed:
            task.moved()
        else:
            self._poll(task, f"atomic {access.op}", access.addresses, access.dtype.itemsize, groups, where=where)
        if self.log is not None:
            self._event(task, f"atomic {access.op}", groups[0][0].place(low))
        return result

    def _perform(
        self,
        access: AtomicAccess,
        perform: Callable[[], Any],
        actor: Actor | None,
        rank: int,
        where: str,
        writer: Task | Transfer,
        pause: Callable[[], None],
        groups: list[tuple[Region, np.ndarray]],
    ) -> tuple[Any, bool]:
        """An atomic of a program or a copy: order, faults and effect. The second result tells if memory changed."""
        itemsize = access.dtype.itemsize
        dtype = _WORD_TYPES[itemsize]
        addresses = access.addresses
        before = read_words(addresses, dtype)
        region = groups[0][0]
        fault = None
        if region.kind == "symmetric" and not access.only_reads:
            low = int(addresses[0])
            value = int(np.ravel(access.values)[0]) if access.values.dtype.kind in "iub" else 0
            fault = self.plan.signal(rank, region.rank, low - region.start, itemsize * addresses.size, value)
        result = perform()
        after = read_words(addresses, dtype)
        if isinstance(fault, LoseSignal):
            write_words(addresses, before)
            return result, True  # its sender believes that it happened
        if actor is not None and self.slots is not None:
            self._order_atomic(access, actor, rank, where, writer, groups)
        changed = not np.array_equal(before, after)
        low, high = int(addresses.min()), int(addresses.max()) + itemsize
        if changed:
            self.memory.remember(addresses, before, writer)
            if isinstance(fault, TearHeader):
                lower = dtype.type((1 << (4 * itemsize)) - 1)
                write_words(addresses, (after & lower) | (before & ~lower))
                self.scheduler.changed(low, high)
                for _ in range(self.rng.randint(1, 20)):
                    pause()
                write_words(addresses, after)
            self.scheduler.changed(low, high)
        if isinstance(fault, DoubleSignal):
            pause()
            again = read_words(addresses, dtype)
            perform()
            self.memory.remember(addresses, again, writer)
            self.scheduler.changed(low, high)
        return result, changed

    def _order_atomic(
        self,
        access: AtomicAccess,
        actor: Actor,
        rank: int,
        where: str,
        writer: Task | Transfer,
        groups: list[tuple[Region, np.ndarray]],
    ) -> None:
        """Races of an atomic with plain accesses, and what its semantics order."""
        assert self.slots is not None
        op = f"atomic {access.op}"
        itemsize = access.dtype.itemsize
        moment, slot = actor.atomic(access.block)
        site = self.slots.site(op, where)
        stamp = moment << 32 | slot << 18 | site
        words = []
        for region, part in groups:
            shadow = region.shadow
            if shadow is None:
                continue
            for offset in (part - np.uint64(region.start)).tolist():
                word = shadow.word(offset, itemsize)
                conflict = shadow.check_atomic(offset, itemsize, actor.clock, writes=not access.only_reads)
                if conflict is not None:
                    self._race(rank, op, where, region, conflict, writer)
                (word.reads if access.only_reads else word.writes)[slot] = stamp
                words.append(word.sync)
        if access.acquire:
            for sync in words:
                actor.acquire(sync, access.scope, access.block)
        if access.release:
            for sync in words:
                actor.release(sync, access.scope, access.block)

    # ---- checks and reports

    def _regions(self, task: Program, addresses: np.ndarray, itemsize: int, op: str) -> list[tuple[Region, np.ndarray]]:
        groups, wild = self.space.split(addresses, itemsize)
        if wild is not None:
            self._fault(task, op, wild, itemsize, "lies in no registered region and in no argument of this launch")
        for region, part in groups:
            kind = region.kind
            if region.freed:
                self._fault(task, op, int(part[0]), itemsize, f"lies in {region.name}, which was freed")
            if kind == "local" and region.rank != task.rank:
                self._fault(task, op, int(part[0]), itemsize, f"lies in {region.name}, local memory of another rank")
            if kind == "argument" and not any(region is argument for argument in task.launch.arguments):
                self._fault(task, op, int(part[0]), itemsize, f"lies in {region.name}, no argument of this launch")
        return groups

    def _fault(self, task: Program, op: str, address: int, itemsize: int, reason: str) -> NoReturn:
        near = [
            f"{region.name} [{region.start:#x}, {region.end:#x})"
            for region in self.space.overlapping(max(address - 4096, 0), address + 4096)
        ]
        hint = f"; near it lie {', '.join(near)}" if near else ""
        raise MemoryFaultError(
            f"{task.name} at {_source(sys._getframe(2))}: {op} of {itemsize} bytes at {address:#x} {reason}{hint}"
        )

    def _race_of(self, task: Program, op: str, where: str, region: Region, conflict: Conflict) -> NoReturn:
        self._race(task.rank, op, where, region, conflict, task)

    def _race(
        self, rank: int, op: str, where: str, region: Region, conflict: Conflict, writer: Task | Transfer | None = None
    ) -> NoReturn:
        assert self.slots is not None
        assert region.shadow is not None
        name = writer.name if isinstance(writer, Task) else f"rank{rank} copy engine"
        offset = conflict.granule * region.shadow.granule
        earlier = self.slots.user(conflict.slot, conflict.moment)
        raise RaceError(
            f"{name}: {op} at {where} of {region.name}+{offset} is not ordered after the {conflict.site.op} by "
            f"{earlier} at {conflict.site.where}: no chain of release and acquire of sufficient scope leads from one "
            "to the other (a release covers a block's stores only after a tl.debug_barrier since them, and descriptor "
            "stores only after they were waited for)"
        )

    def _poll(
        self,
        task: Program,
        op: str,
        addresses: np.ndarray,
        itemsize: int,
        groups: list[tuple[Region, np.ndarray]],
        *,
        clock: bool = False,
        value: np.ndarray | None = None,
        plain: bool = False,
        where: str | None = None,
    ) -> None:
        keys = tuple(addresses.tolist())
        if clock:
            values: tuple[int, ...] = (self.scheduler.now_ns,)
        elif value is not None:
            values = tuple(np.ravel(value).view(_INT_TYPES[itemsize]).tolist())
        else:
            values = _words_at(keys, itemsize)
        place = groups[0][0].place(keys[0]) if groups else "clock+0"
        poll = Poll(keys, values, op, place, where or (_source(sys._getframe(2))), itemsize, clock)
        if plain:
            task.polled_plainly(poll)
        else:
            task.polled(poll)

    def _event(self, task: Task, what: str, place: str = "") -> None:
        if self.log is not None:
            scheduler = self.scheduler
            self.log.append(LogEntry(scheduler.steps, scheduler.now_ns, task.name, task.rank, what, place))

    # ---- the end

    def stop(self) -> None:
        """Unwind everything that still runs."""
        self.scheduler.stop_all()


def _words_at(addresses: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(read_words(np.array(addresses, dtype=np.uint64), _INT_TYPES[itemsize]).tolist())


# ---- where in the source ----------------------------------------------------------------------------------------

_TRITON = os.path.dirname(os.path.abspath(triton.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PLUMBING = (os.path.abspath(interpreter.__file__), os.path.join("comm", "backends", "sim.py"))
_foreign: dict[CodeType, bool] = {}
_names: dict[tuple[CodeType, int, CodeType, int], str] = {}


def _is_plumbing(code: CodeType) -> bool:
    known = _foreign.get(code)
    if known is None:
        name = os.path.abspath(code.co_filename)
        known = _foreign[code] = (
            name.startswith((_TRITON, _HERE)) or name.endswith(_PLUMBING) or code.co_filename.endswith("threading.py")
        )
    return known


def _source(frame: FrameType | None, *, hosts_too: bool = False) -> str:
    """file:line of the innermost frame that is a kernel's, and of the kernel itself where that is another function."""
    while frame is not None and _is_plumbing(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return "?"
    inner = outer = frame
    if not hosts_too:
        step = frame.f_back
        while step is not None and step.f_code is not _PROGRAM_BODY:
            if not _is_plumbing(step.f_code):
                outer = step
            step = step.f_back
    key = (inner.f_code, inner.f_lineno, outer.f_code, outer.f_lineno)
    text = _names.get(key)
    if text is None:
        text = _name(inner)
        if outer is not inner:
            text += f" (in {outer.f_code.co_name}, {_name(outer)})"
        _names[key] = text
    return text


def _name(frame: FrameType) -> str:
    return f"{os.sep.join(frame.f_code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno}"


_PROGRAM_BODY = FiberTask._main.__code__
