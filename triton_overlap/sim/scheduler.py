"""Tasks that run in turns, the seeded choice of whose turn it is, and virtual time.

Exactly one task runs at any time, and it runs until it pauses by itself: at an atomic, at some stores, or because it
waits. So the order of events follows from the random numbers alone, and these from the seed.

A task that polls in vain (the same words, the same values, three times over) is set aside until one of the words
changes. When every task is set aside or blocked, the scheduler first lands stores that are still on their way, then
lets the tasks run a few more rounds (a loop that only reads may still end), then moves time forward. If nobody looks at
the clock and no deadline is left, that is a deadlock.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triton_overlap.errors import DeadlockError
from triton_overlap.sim.fibers import Fiber, Stopped

#: The first step of virtual time when nothing can move, in nanoseconds; each further step is four times as long.
_FIRST_STEP_NS = 1_000_000
_LONG_STEP_NS = 64_000_000_000
#: Time that may pass without anything happening before waiting is called a deadlock: a kernel that looks at the clock
#: but would never give up.
_ENDLESS_NS = 10_000_000 * 1_000_000_000
#: Vain polls of one word before a task is set aside: atomics, and plain loads, which also reread constants.
_VAIN_POLLS = 3
_VAIN_LOADS = 64


@dataclass
class Poll:
    """A word, or block of words, that a task read without changing it.

    Attributes:
        addresses, values: of the words read.
        op, place, where: what was done, to which region and offset, and file:line.
        itemsize: bytes of a word.
        reads_clock: the word is the clock.
        count: how often in a row with these values.
    """

    addresses: tuple[int, ...]
    values: tuple[int, ...]
    op: str
    place: str
    where: str
    itemsize: int = 8
    reads_clock: bool = False
    count: int = 1

    @property
    def vain(self) -> bool:
        """False for the plain loads that every program repeats."""
        return self.op != "load" or self.count >= _VAIN_LOADS

    @property
    def text(self) -> str:
        seen = ", ".join(f"{value} ({value:#x})" for value in self.values[:8])
        return f"{self.op} at {self.where} of {self.place} saw {seen}"


@dataclass
class Wait:
    """Why a task is blocked.

    Attributes:
        ready: true once it may go on.
        text: what it waits for.
        deadline_ns: virtual time at which it goes on anyway, or None.
    """

    ready: Callable[[], bool]
    text: str
    deadline_ns: int | None = None


class Task:
    """Something that takes turns.

    Attributes:
        name: unique in the world and the same for the same seed.
        rank: whose it is.
        slow: chosen more rarely in some schedules.
        done: it has ended.
        wait: why it is blocked, or None.
        polls: what it read in vain since it last got anywhere, by address.
        spinning: it polls in vain, and waits for a word among its polls to change.
        progress: counts whatever distinguishes it from a task that spins.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.slow = False
        self.done = False
        self.wait: Wait | None = None
        self.polls: dict[tuple[int, ...], Poll] = {}
        self.last_poll: Poll | None = None
        self.spinning = False
        self.progress = 0

    def turn(self) -> None:
        """Run until the next pause."""
        raise NotImplementedError

    def stop(self) -> None:
        """Unwind at the end of the world."""

    def where(self) -> str:
        """file:line where it stands, for reports."""
        return ""

    def moved(self) -> None:
        """It did something that others can notice, so what it polled before says nothing about a spin."""
        self.progress += 1
        if self.polls:
            self.polls = {}
        self.spinning = False

    def polled(self, poll: Poll, limit: int = _VAIN_POLLS) -> None:
        """It read words and changed nothing."""
        before = self.polls.get(poll.addresses)
        self.last_poll = poll
        if before is None or before.values != poll.values:
            self.progress += 1
            self.spinning = False
        else:
            poll.count = before.count + 1
            if poll.count >= limit and not poll.reads_clock:
                self.spinning = True
        self.polls[poll.addresses] = poll

    def polled_plainly(self, poll: Poll) -> None:
        """It loaded a single word; programs do that for many reasons, so it takes more of them to call it a spin."""
        self.polled(poll, _VAIN_LOADS)

    def report(self) -> str:
        """One line for a deadlock report."""
        where = self.where()
        place = f" at {where}" if where else ""
        if self.wait is not None:
            return f"{self.name}{place}: waits for {self.wait.text}"
        polls = [poll for poll in self.polls.values() if not poll.reads_clock and poll.vain]
        if not polls and self.last_poll is not None:
            polls = [self.last_poll]
        return f"{self.name}{place}: polls " + ("; ".join(poll.text for poll in polls[-4:]) or "nothing")


class FiberTask(Task):
    """A task with code of its own."""

    def __init__(
        self, name: str, rank: int, make: Callable[[Callable[[], None]], Fiber], body: Callable[[], None]
    ) -> None:
        super().__init__(name, rank)
        self.error: BaseException | None = None
        self._body = body
        self.fiber = make(self._main)

    def _main(self) -> None:
        try:
            self._body()
        except Stopped:
            raise
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for this task
            self.error = error
        self.done = True

    def turn(self) -> None:
        self.fiber.resume()

    def stop(self) -> None:
        self.fiber.stop()


class Surroundings(Protocol):
    """What the scheduler asks of the world around it."""

    def land_somewhere(self, *, must: bool) -> bool:
        """Land a store that is on its way, always or by chance; False if there is none."""

    def before_turn(self, task: Task) -> None:
        """``task`` runs next."""

    def after_turn(self, task: Task) -> None:
        """``task`` has paused or ended."""

    def time_moved(self, now_ns: int) -> None:
        """Virtual time is ``now_ns``."""

    def catch_up(self, task: Task) -> None:
        """Let a task that polls see memory as it is."""

    def memory_holds(self, poll: Poll) -> bool:
        """True if the words still have the values that the poll saw."""

    def held_back(self, task: Task) -> bool:
        """True where a fault holds the task back as long as others can go on."""

    def frozen_until_ns(self, task: Task) -> int:
        """Virtual time before which a fault keeps the task from any turn; 0 for none."""


class Scheduler:
    """Chooses whose turn it is.

    Args:
        rng: every decision comes from it.
        surroundings: see :class:`Surroundings`.
        max_steps: turns after which a run is given up as endless.
    """

    def __init__(self, rng: random.Random, surroundings: Surroundings, max_steps: int) -> None:
        self._rng = rng
        self._surroundings = surroundings
        self._max_steps = max_steps
        self.steps = 0
        self.now_ns = 0
        self.current: Task | None = None
        self._ready: list[Task] = []
        self._aside: list[Task] = []  # blocked or spinning
        self._check_waits = True
        self._changes = 0
        self._trace = hashlib.sha256()
        self._step_ns = _FIRST_STEP_NS
        self._quiet_since_ns: int | None = None
        self._quiet_changes = -1
        self._killed: list[Task] = []
        self._slowness = rng.choice((0.0, 0.5, 0.95))
        self._stickiness = rng.choice((0.0, 0.0, 0.5, 0.9))

    # ---- called by tasks and by the world

    def spawn(self, task: Task) -> None:
        """``task`` takes turns from now on."""
        task.slow = self._rng.random() < 0.3
        (self._ready if task.wait is None else self._aside).append(task)
        self.happened()

    def happened(self) -> None:
        """Something that a blocked task may wait for."""
        self._check_waits = True
        self._changes += 1

    def changed(self, low: int, high: int) -> None:
        """Memory in ``[low, high)`` changed: whoever polls there gets another turn."""
        self._changes += 1
        for task in self._aside:
            if (
                task.wait is None
                and task.spinning
                and any(
                    low < address + 8 and address < high for poll in task.polls.values() for address in poll.addresses
                )
            ):
                self._revive(task)

    def _revive(self, task: Task) -> None:
        task.spinning = False
        task.polls = {}
        self._check_waits = True

    @property
    def trace(self) -> str:
        """Digest of the order of turns so far."""
        return self._trace.hexdigest()

    # ---- the loop

    def run(self, finished: Callable[[], bool]) -> None:
        """Give turns until ``finished``.

        Raises:
            DeadlockError: no task can go on, or there is no end to the turns.
        """
        while not finished():
            if self._check_waits:
                self._collect()
            self._surroundings.land_somewhere(must=False)
            task = self._choose()
            if task is None:
                self._stuck()
            else:
                self._turn(task)

    def _collect(self) -> None:
        """Make ready whoever may go on."""
        self._check_waits = False
        still = []
        for task in self._aside:
            if task.done:
                continue
            blocked = task.wait is not None and not task.wait.ready()
            if blocked or (task.wait is None and task.spinning):
                still.append(task)
            else:
                task.wait = None
                self._ready.append(task)
        self._aside = still

    def _choose(self) -> Task | None:
        rng = self._rng
        candidates = [task for task in self._ready if not (self._surroundings.held_back(task) or self._frozen(task))]
        if not candidates:
            return None
        last = self.current
        if self._stickiness and last is not None and rng.random() < self._stickiness and last in candidates:
            return last
        task = candidates[rng.randrange(len(candidates))]
        if task.slow and rng.random() < self._slowness:
            task = candidates[rng.randrange(len(candidates))]
        return task

    def _frozen(self, task: Task) -> bool:
        return self._surroundings.frozen_until_ns(task) > self.now_ns

    def _turn(self, task: Task) -> None:
        self.steps += 1
        if self.steps > self._max_steps:
            raise DeadlockError(f"no end after {self._max_steps} turns:\n{self.report()}")
        self._trace.update(task.name.encode())
        self.current = task
        self._surroundings.before_turn(task)
        task.turn()
        self._surroundings.after_turn(task)
        if task.done:
            if task in self._ready:
                self._ready.remove(task)
            self.happened()
        elif (task.wait is not None or self._spins(task)) and task in self._ready:
            self._ready.remove(task)
            self._aside.append(task)

    def _spins(self, task: Task) -> bool:
        if not task.spinning:
            return False
        if all(self._surroundings.memory_holds(poll) for poll in task.polls.values()):
            return True
        # What it saw was its own store, still on its way, which must not stay there for as long as the task polls.
        self._surroundings.land_somewhere(must=True)
        self._revive(task)
        return False

    def _stuck(self) -> None:
        """Nobody is ready: find something that can still happen."""
        if self._surroundings.land_somewhere(must=True):
            return
        if self._ready_in_spite_of_faults():
            self._quiet_since_ns = None
            return
        if self._quiet_since_ns is None or self._changes != self._quiet_changes:
            if self._runs_on():
                self._quiet_since_ns = None
                return
            self._quiet_since_ns, self._quiet_changes = self.now_ns, self._changes
            self._step_ns = _FIRST_STEP_NS
        self._pass_time()

    def _ready_in_spite_of_faults(self) -> bool:
        """A delayed task is held back only while others can move."""
        held = [task for task in self._ready if not self._frozen(task)]
        if not held:
            return False
        self._turn(held[self._rng.randrange(len(held))])
        return True

    def _runs_on(self) -> bool:
        """Give every polling task some more turns; True if one of them gets anywhere."""
        for task in [task for task in self._aside if task.wait is None]:
            self._surroundings.catch_up(task)
            progress, changes = task.progress, self._changes
            for _ in range(4 * len(task.polls) + 8):
                self._turn(task)
                if task.done or task.wait is not None or task.progress != progress or self._changes != changes:
                    if task.done:
                        self._aside.remove(task)
                    elif task.wait is None:
                        task.spinning = False
                    self._check_waits = True
                    return True
        return False

    def _pass_time(self) -> None:
        watchers = [
            task for task in self._aside if task.wait is None and any(poll.reads_clock for poll in task.polls.values())
        ]
        deadlines = [
            task.wait.deadline_ns for task in self._aside if task.wait is not None and task.wait.deadline_ns is not None
        ]
        deadlines += [self._surroundings.frozen_until_ns(task) for task in self._ready if self._frozen(task)]
        assert self._quiet_since_ns is not None
        if not (watchers or deadlines) or self.now_ns - self._quiet_since_ns > _ENDLESS_NS:
            raise DeadlockError(f"no task can make progress:\n{self.report()}")
        if watchers:
            step = self._step_ns
            if step < _LONG_STEP_NS or self.now_ns - self._quiet_since_ns > 100 * _LONG_STEP_NS:
                self._step_ns *= 4
            if deadlines:
                step = max(1, min(step, min(deadlines) - self.now_ns))
        else:
            step = max(1, min(deadlines) - self.now_ns)
        self.now_ns += step
        self._trace.update(b"time")
        self._surroundings.time_moved(self.now_ns)
        self._check_waits = True
        for task in watchers:
            self._revive(task)

    # ---- reports and the end

    def report(self) -> str:
        """What every task that still lives waits for, a line each."""
        lines = [f"  {task.report()}" for task in [*self._aside, *self._ready] if not task.done and self._counts(task)]
        return "\n".join(lines) or "  (no task is left)"

    @staticmethod
    def _counts(task: Task) -> bool:
        return task.wait is None or bool(task.wait.text)

    def discard(self, task: Task) -> None:
        """Unwind ``task`` and give it no more turns."""
        task.stop()
        task.done = True
        self._ready = [other for other in self._ready if other is not task]
        self._aside = [other for other in self._aside if other is not task]
        self.happened()

    def remove_rank(self, rank: int) -> None:
        """Take the tasks of ``rank`` out of the race without unwinding them."""
        self._killed += [task for task in [*self._ready, *self._aside] if task.rank == rank]
        self._ready = [task for task in self._ready if task.rank != rank]
        self._aside = [task for task in self._aside if task.rank != rank]
        self.happened()

    def stop_all(self) -> None:
        """Unwind every task."""
        for task in [*self._ready, *self._aside, *self._killed]:
            self.current = task
            task.stop()
        self.current = None
