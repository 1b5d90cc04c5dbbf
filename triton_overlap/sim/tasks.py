"""What takes turns on a simulated device: hosts, programs of launches, copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from triton_overlap.comm.interpreter_hooks import KernelLaunch
from triton_overlap.sim.fibers import Fiber, ThreadFiber
from triton_overlap.sim.happens_before import Actor, Clock
from triton_overlap.sim.memory import Region, StoreBuffer
from triton_overlap.sim.scheduler import FiberTask
from triton_overlap.sim.source import source
from triton_overlap.sim.streams import Stream, cut

if TYPE_CHECKING:
    from triton_overlap.sim.machine import Machine


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
        return source(self.fiber.frame(), hosts_too=True)


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
        return source(self.fiber.frame())

    def pause(self) -> None:
        """Let others have a turn."""
        self.fiber.pause()


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
        """Start programs while there is room."""
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
            self.machine.scheduler.happened()

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
        self.machine.scheduler.happened()

    def can_go_on(self) -> bool:
        return not self.running

    def turn(self) -> bool:
        """End the launch. Not in the turn of its last program: until now its stores may have been on their way."""
        machine, stream = self.machine, self.stream
        assert stream is not None
        for program in self._ended:
            machine.memory.land_all(program.buffer)
            machine.track(program)
            if program.actor is not None:
                stream.clock.join(program.actor.end())
        if self.error is not None and stream.error is None:
            stream.error = self.error
        for region in self.arguments:
            region.users -= 1
        machine.prune_arguments()
        return True

    def describe(self) -> str:
        return f"the launch of {self.label}"

    def held_back(self) -> bool:
        return False


@dataclass(frozen=True)
class CopyOrder:
    """What the copy engine is asked for.

    Attributes:
        source: contiguous.
        target: region of the peer's memory.
        peer: whose it is.
        offset: bytes into ``target``.
        flag_offset: bytes into ``target``, of an int32.
        flag_value: what the flag becomes, after the bytes.
        where: file:line that asked.
    """

    source: torch.Tensor
    target: Region
    peer: int
    offset: int
    flag_offset: int
    flag_value: int
    where: str


@dataclass(eq=False)
class Transfer:
    """A copy by the copy engine: the bytes in pieces and in any order, then the flag, released at system scope."""

    machine: Machine
    rank: int
    order: CopyOrder
    source: Region
    source_address: int
    host_clock: Clock
    name: str = ""
    actor: Actor | None = None
    stream: Stream | None = None

    def start(self, stream: Stream) -> None:
        machine = self.machine
        self.stream = stream
        self.name = f"{stream.name} copy to rank{self.order.peer}"
        stream.clock.join(self.host_clock)
        self._pieces = cut(self.order.source.numel() * self.order.source.element_size(), machine.rng)
        if machine.slots is not None:
            self.actor = Actor(machine.slots, self.rank, (stream.number, "copy"), self.name, stream.clock.copy())

    def can_go_on(self) -> bool:
        return True

    def turn(self) -> bool:
        assert self.stream is not None
        if self._pieces:
            self.machine.accesses.copy(self, *self._pieces.pop())
            return False
        self.machine.accesses.raise_flag(self)
        self.source.users -= 1
        if self.actor is not None:
            self.stream.clock.join(self.actor.end())
        return True

    def pause(self) -> None:
        """A copy's flag takes no turns of its own."""

    def describe(self) -> str:
        return f"a copy from rank{self.rank} to rank{self.order.peer}"

    def held_back(self) -> bool:
        return self.machine.plan.stalls(self.rank, self.order.peer)
