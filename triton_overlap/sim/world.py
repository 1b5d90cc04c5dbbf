"""``World``: N ranks in one process, their kernels under Triton's interpreter, every schedule from one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from triton_overlap.comm import interpreter
from triton_overlap.comm.backends.sim import SimBackend
from triton_overlap.errors import DeadlockError, SimulationError
from triton_overlap.sim.costs import NetworkUse
from triton_overlap.sim.faults import KILLED
from triton_overlap.sim.machine import Machine
from triton_overlap.sim.meetings import Meetings
from triton_overlap.sim.settings import Settings
from triton_overlap.sim.tasks import HostTask, LogEntry

if TYPE_CHECKING:
    from triton_overlap.comm.group import Group


class World:
    """A deterministic simulation of ``world_size`` ranks.

    Each rank runs host code of yours on a thread of its own, and launches Triton kernels; programs, streams and copies
    take turns in an order that ``seed`` decides. See ``docs/simulator.md`` for what is modelled.

    Args:
        world_size: number of ranks, at least 1.
        seed: of every decision. The same seed, world and program give the same schedule and the same results.
        options: the other fields of :class:`Settings`, which describes them, such as ``faults`` or ``num_programs``.

    Attributes:
        settings: what the world was made from, a :class:`Settings`.
        trace: digest of the schedule of the last run: equal digests, equal schedules.
        steps: turns the last run took.
        time_ns: virtual time at its end, in nanoseconds.
        network: of the last run, by rank, what it put to each peer: dicts of :class:`NetworkUse`.
        log: list of :class:`LogEntry` of the last run, or None.

    Raises:
        TypeError, ValueError: see :class:`Settings`.
        BackendError: Triton's interpreter is not active in this process.

    Example::

        def exchange(group):
            return group.all_gather_object(group.rank)

        assert World(2, seed=7).run(exchange) == [[0, 1], [0, 1]]
    """

    def __init__(self, world_size: int, seed: int = 0, **options: Any) -> None:
        self.settings = Settings(world_size=world_size, seed=seed, **options)
        interpreter.prepare()
        self.trace = ""
        self.steps = 0
        self.time_ns = 0
        self.network: list[dict[int, NetworkUse]] = []
        self.log: list[LogEntry] | None = None

    def run(self, fn: Callable[[Group], Any], *, return_exceptions: bool = False) -> list[Any]:
        """Call ``fn(group)`` on every rank and return the results in rank order.

        Args:
            fn: host code of a rank. ``group`` is a :class:`triton_overlap.comm.group.Group`.
            return_exceptions: put an exception that a rank raised in the place of its result, instead of raising the
                first of them. What the simulator itself finds is raised all the same. A rank that a fault killed has
                ``KILLED`` as its result.

        Raises:
            DeadlockError: no task can make progress.
            RaceError: two accesses that nothing orders.
            MemoryFaultError: an access to memory that no kernel was given.
            Exception: the first exception that a rank raised; notes name those of the other ranks.
        """
        from triton_overlap.comm.group import Group  # the group knows backends, and backends know this package

        def enter(backend: SimBackend) -> Group:
            return Group(backend, timeout_s=self.settings.timeout_s, check="sync")

        return _Run(self.settings, enter, fn, lambda group: group.close()).run(self, return_exceptions)

    def run_backends(self, fn: Callable[[SimBackend], Any], *, return_exceptions: bool = False) -> list[Any]:
        """As :meth:`run`, with the bare backend in place of a group: ``fn(backend)``, which closes what it opens."""

        def enter(backend: SimBackend) -> SimBackend:
            return backend

        def leave(backend: SimBackend) -> None:
            """The caller's to close."""

        return _Run(self.settings, enter, fn, leave).run(self, return_exceptions)


class _Run:
    """One run of a world.

    Args:
        settings: of the world.
        enter: makes what ``fn`` gets, on every rank.
        fn: host code of a rank.
        leave: ends what ``enter`` made.
    """

    def __init__(
        self,
        settings: Settings,
        enter: Callable[[SimBackend], Any],
        fn: Callable[[Any], Any],
        leave: Callable[[Any], None],
    ) -> None:
        self._settings = settings
        self._enter, self._fn, self._leave = enter, fn, leave
        self._machine = Machine(settings)
        self._meetings = Meetings(self._machine)
        self._results: list[Any] = [None] * settings.world_size
        self._errors: list[tuple[int, BaseException]] = []  # in the order they were raised
        self._machine.on_host_end = self._host_ended

    def run(self, world: World, return_exceptions: bool) -> list[Any]:
        """The results; ``world`` keeps what is known of the run."""
        machine = self._machine
        interpreter.install(machine)
        rng_state = torch.get_rng_state()
        num_threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            for rank in range(self._settings.world_size):
                host = HostTask(rank, self._body(rank), rng_state)
                machine.hosts.append(host)
                host.streams.append(machine.new_stream(rank, 0))
            for host in machine.hosts:
                machine.scheduler.spawn(host)
            machine.scheduler.run(self._finished)
        except SimulationError as error:
            self._raise_found(error, return_exceptions)
        finally:
            machine.stop()
            interpreter.uninstall(machine)
            torch.set_num_threads(num_threads)
            torch.set_rng_state(rng_state)
            world.trace, world.steps = machine.scheduler.trace, machine.scheduler.steps
            world.time_ns, world.log = machine.scheduler.now_ns, machine.log
            world.network = machine.network
        for rank in machine.killed:
            self._results[rank] = KILLED
        if return_exceptions:
            for rank, raised in self._errors:
                self._results[rank] = raised
        elif self._errors:
            raise self._first_error()
        return self._results

    def _body(self, rank: int) -> Callable[[], None]:
        def body() -> None:
            backend = SimBackend(self._machine, self._meetings, rank)
            self._machine.hosts[rank].streams.append(backend.copy_stream)
            argument = self._enter(backend)
            try:
                self._results[rank] = self._fn(argument)
            except Exception as error:
                # Now, and not when this rank has left: that may take until its peers' waits for it have expired, and
                # the first error is the cause of theirs.
                self._errors.append((rank, error))
                self._leave_after(error, argument)
                raise
            self._leave(argument)

        return body

    def _leave_after(self, error: Exception, argument: Any) -> None:
        try:
            self._leave(argument)
        except Exception as closing:  # noqa: BLE001 - a consequence of ``error``, which it must not hide
            _note(error, f"closing its group afterwards raised {type(closing).__name__}: {closing}")

    def _finished(self) -> bool:
        killed = self._machine.killed
        return all(
            host.rank in killed or (host.done and all(stream.idle for stream in host.streams))
            for host in self._machine.hosts
        )

    def _host_ended(self, host: HostTask) -> None:
        if host.error is not None:
            if not isinstance(host.error, Exception):
                raise host.error  # an interrupt, or SystemExit: not this world's to keep
            if all(error is not host.error for _, error in self._errors):
                self._errors.append((host.rank, host.error))

    def _raise_found(self, found: SimulationError, return_exceptions: bool) -> None:
        """Raise what the simulator found. Where a rank had raised before, a deadlock is its consequence, and the
        rank's error is the one to raise."""
        _note(found, f"simulated world: world_size={self._settings.world_size}, seed={self._settings.seed}")
        if self._errors and isinstance(found, DeadlockError) and not return_exceptions:
            first = self._first_error()
            _note(first, f"then: DeadlockError: {found}")
            raise first
        for rank, error in self._errors:
            _note(found, f"rank {rank} had raised {type(error).__name__}: {error}")
        raise found

    def _first_error(self) -> BaseException:
        (rank, first), *others = self._errors
        world = f"a simulated world of {self._settings.world_size}, seed={self._settings.seed}"
        _note(first, f"raised by rank {rank} of {world}")
        for other_rank, other in others:
            _note(first, f"rank {other_rank} raised {type(other).__name__}: {other}")
        return first


def _note(error: BaseException, text: str) -> None:
    """``error.add_note(text)``, also before Python 3.11, where it is kept but not printed."""
    error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
