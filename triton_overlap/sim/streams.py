"""Streams of a simulated device: launches, copies and events in order, each stream a task of its own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triton_overlap.sim.happens_before import Clock
from triton_overlap.sim.scheduler import Task, Wait


class StreamOperation(Protocol):
    """What a stream does in one or several turns."""

    def start(self, stream: Stream) -> None:
        """Everything before it on the stream has finished."""

    def can_go_on(self) -> bool:
        """True if a turn would do something, or end it."""

    def turn(self) -> bool:
        """Do something; True once finished."""

    def describe(self) -> str:
        """For reports."""

    def held_back(self) -> bool:
        """True where a fault makes it wait for everybody else."""


@dataclass(eq=False)
class Event:
    """A point on a stream.

    Attributes:
        clock: what the stream had done by then; None until it got there.
    """

    name: str
    clock: Clock | None = None


class Stream(Task):
    """Runs operations in order.

    Args:
        name: for reports and the trace.
        rank: whose device.
        number: of the stream on its rank; 0 is the default stream.
        happened: to call when an operation ends.
    """

    def __init__(self, name: str, rank: int, number: int, happened: Callable[[], None]) -> None:
        super().__init__(name, rank)
        self.number = number
        self.clock = Clock()
        self.error: BaseException | None = None
        self._happened = happened
        self._queue: deque[StreamOperation] = deque()
        self._started = False
        self._idle = Wait(self._can_go_on, "")
        self.wait = self._idle

    @property
    def idle(self) -> bool:
        """True if everything it was given has finished."""
        return not self._queue

    def _can_go_on(self) -> bool:
        return bool(self._queue) and (not self._started or self._queue[0].can_go_on())

    def add(self, operation: StreamOperation) -> None:
        """Append an operation."""
        self._queue.append(operation)
        self._happened()

    def held_back(self) -> bool:
        return bool(self._queue) and self._queue[0].held_back()

    def turn(self) -> None:
        operation = self._queue[0]
        if not self._started:
            operation.start(self)
            self._started = True
        elif operation.turn():
            self._queue.popleft()
            self._started = False
            self._happened()
        if not self._can_go_on():
            self.wait = self._idle
            # Of the default stream's operations the host tells that waits for them.
            self._idle.text = self._queue[0].describe() if self._queue and self.number else ""


@dataclass(eq=False)
class RecordEvent:
    """Completes ``event`` when the stream gets there."""

    event: Event

    def start(self, stream: Stream) -> None:
        self.event.clock = stream.clock.copy()

    def can_go_on(self) -> bool:
        return True

    def turn(self) -> bool:
        return True

    def describe(self) -> str:
        return self.event.name

    def held_back(self) -> bool:
        return False


@dataclass(eq=False)
class WaitEvent:
    """Holds the stream until ``event`` is complete, and learns what it stands for."""

    event: Event
    stream: Stream | None = None

    def start(self, stream: Stream) -> None:
        self.stream = stream

    def can_go_on(self) -> bool:
        return self.event.clock is not None

    def turn(self) -> bool:
        assert self.stream is not None
        assert self.event.clock is not None
        self.stream.clock.join(self.event.clock)
        return True

    def describe(self) -> str:
        return self.event.name

    def held_back(self) -> bool:
        return False


def cut(num_bytes: int, rng: random.Random) -> list[tuple[int, int]]:
    """``[start, stop)`` ranges of a copy's one to four pieces, at multiples of 16 bytes, in the order they land."""
    units = -(-num_bytes // 16)
    count = min(units, rng.choice((1, 2, 4)))
    cuts = [16 * unit for unit in sorted(rng.sample(range(1, units), count - 1))] if count > 1 else []
    pieces = list(zip([0, *cuts], [*cuts, num_bytes], strict=True)) if num_bytes else []
    rng.shuffle(pieces)
    return pieces
