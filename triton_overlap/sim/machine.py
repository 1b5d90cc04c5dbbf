"""The simulated devices: their memory, streams and hosts, and the hooks through which kernels reach them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from triton_overlap.comm.interpreter import InterpreterError, raw
from triton_overlap.comm.interpreter_hooks import AtomicAccess, KernelLaunch
from triton_overlap.errors import ClosedError, MemoryFaultError, SimulationError
from triton_overlap.sim.accesses import Accesses, words_at
from triton_overlap.sim.costs import NetworkCost, NetworkUse
from triton_overlap.sim.faults import FaultPlan
from triton_overlap.sim.fibers import program_fiber
from triton_overlap.sim.happens_before import Clock, Shadow, Slots
from triton_overlap.sim.memory import AddressSpace, Region, WeakMemory, aligned_zeros
from triton_overlap.sim.network import Flight, NetworkInterface
from triton_overlap.sim.scheduler import Poll, Scheduler, Task, Wait
from triton_overlap.sim.settings import Settings
from triton_overlap.sim.streams import Event, RecordEvent, Stream, StreamOperation, WaitEvent
from triton_overlap.sim.tasks import CopyOrder, HostTask, Launch, LogEntry, Program, Transfer

#: Alignment of what the machine allocates, in bytes.
ALIGNMENT = 1024
#: Argument regions remembered after their launch, for order with later ones: number and bytes.
_MAX_ARGUMENTS = 256
_MAX_ARGUMENT_BYTES = 64 << 20


class Machine:
    """Everything that the ranks of one run share.

    Args:
        settings: of the world.
    """

    def __init__(self, settings: Settings) -> None:
        self.world_size = settings.world_size
        self.rng = random.Random(settings.seed)
        self.plan = FaultPlan(settings.faults, settings.world_size)
        self.slots = Slots() if settings.check_races else None
        self.make_fiber = program_fiber(settings.fibers)
        given = settings.num_programs
        self.num_programs = given if given is not None else self.rng.choice((1, 2, 3, 4))
        self.scheduler = Scheduler(self.rng, self, settings.max_steps)
        self.memory = WeakMemory(self.rng, self.scheduler.changed)
        self.space = AddressSpace()
        self.accesses = Accesses(self)
        self.log: list[LogEntry] | None = [] if settings.log else None
        self.network_cost = settings.network_cost or NetworkCost()
        #: By rank and peer.
        self.network: list[dict[int, NetworkUse]] = [{} for _ in range(settings.world_size)]
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

    def argument_region(self, tensor: torch.Tensor, rank: int, name: str) -> Region | None:
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
            own.name = f"{name}@rank{rank}"
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
        region = Region("argument", start, end, f"{name}@rank{rank}", rank, keep, shadow, weak=self.slots is None)
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
        self.track(program)
        return True

    def track(self, program: Program) -> None:
        """The stores of ``program`` that are on their way have changed."""
        known = program in self._dirty
        if program.buffer.pending and not known:
            self._dirty.append(program)
        elif known and not program.buffer.pending:
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
            self.event(task, "end")
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
        return poll.values == words_at(poll.addresses, poll.itemsize)

    def held_back(self, task: Task) -> bool:
        if not self.plan.holds_back:
            return False
        stalled = isinstance(task, (Stream, Flight)) and task.held_back()
        return stalled or self.plan.delays(task.rank, self.scheduler.steps)

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

    def submit(self, stream: Stream, operation: StreamOperation) -> None:
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

    def add_network_interface(self, rank: int, copies: list[Region], ring: torch.Tensor, entry_words: int) -> None:
        """Empty ``ring`` of ``rank`` into ``copies``, the ranks' copies of a symmetric allocation."""
        region = self.space.at(ring.data_ptr())
        assert region is not None
        self.scheduler.spawn(NetworkInterface(self, rank, copies, region, entry_words))

    def put_by(self, rank: int, peer: int, use: NetworkUse) -> None:
        """``rank`` has put something to ``peer``."""
        self.network[rank][peer] = self.network[rank].get(peer, NetworkUse()) + use

    def network_use(self, rank: int) -> NetworkUse:
        """What ``rank`` has put so far, to all peers."""
        return sum(self.network[rank].values(), NetworkUse())

    # ---- launches and copies

    def launch(self, kernel: KernelLaunch) -> None:
        host = self.host()
        regions: list[Region] = []
        for name, tensor in kernel.tensors:
            region = self.argument_region(tensor, host.rank, f"{name} of {kernel.name}")
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
            self.accesses.poll_clock(task, "bounded poll", task.where())
        return self.scheduler.now_ns

    def push(
        self,
        stream: Stream,
        source: torch.Tensor,
        target: Region,
        peer: int,
        offset: int,
        flag_offset: int,
        flag_value: int,
        where: str,
    ) -> None:
        """Queue a copy on ``stream``; the arguments are those of :class:`CopyOrder`."""
        order = CopyOrder(source, target, peer, offset, flag_offset, flag_value, where)
        host = self.host()
        region = self.argument_region(order.source, host.rank, "source of a copy")
        address = order.source.data_ptr()
        if region is None:  # nothing to copy, the flag alone: any region will do
            region, address = order.target, order.target.start
        region.users += 1
        stream.add(Transfer(self, host.rank, order, region, address, host.clock.copy()))

    # ---- what kernels do

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        task = self.scheduler.current
        if not isinstance(task, Program):
            return raw.load(addresses, mask, other, dtype)
        return self.accesses.load(task, addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, asynchronous: bool) -> None:
        task = self.scheduler.current
        if isinstance(task, Program):
            self.accesses.store(task, addresses, values, mask, asynchronous)
        else:
            raw.store(addresses, values, mask)

    def atomic(self, access: AtomicAccess, perform: Callable[[], Any]) -> Any:
        task = self.scheduler.current
        return self.accesses.atomic(task, access, perform) if isinstance(task, Program) else perform()

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

    def event(self, task: Task, what: str, place: str = "") -> None:
        if self.log is not None:
            scheduler = self.scheduler
            self.log.append(LogEntry(scheduler.steps, scheduler.now_ns, task.name, task.rank, what, place))

    # ---- the end

    def stop(self) -> None:
        """Unwind everything that still runs."""
        self.scheduler.stop_all()
