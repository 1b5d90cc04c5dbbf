"""Faults that a simulated world can be given: ``World(..., faults=[KillRank(1, turn=40), LoseSignal(target=0)])``.

A fault object only describes; it can be reused in many worlds. A *signal* is an atomic that a kernel, the copy engine
or the network performs on symmetric memory: a flag, a header word, a counter. A put has two of them: its first word,
and then its signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class Fault:
    """Base of all faults."""


@dataclass(frozen=True)
class DelayRank(Fault):
    """No task of ``rank`` takes a turn for a while, as long as any other task can go on.

    Args:
        rank: whom to delay.
        turns: turns of the whole world that the delay lasts.
        start: turn of the world at which it begins.
        seconds: instead of ``turns``, virtual seconds from the start of the world, whether others can go on or not.
    """

    rank: int
    turns: int = 1000
    start: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class KillRank(Fault):
    """All tasks of ``rank`` stop for good, wherever they stand. ``World.run`` has :data:`KILLED` as its result.

    Args:
        rank: whom to kill.
        turn: after this many turns of the rank's own tasks.
    """

    rank: int
    turn: int = 0


@dataclass(frozen=True)
class StallSource(Fault):
    """The copy engine of ``rank`` moves only when nothing else in the world can: sources are read as late as possible.

    Args:
        rank: whose copies.
        peer: only those to this rank; None for all.
    """

    rank: int
    peer: int | None = None


@dataclass(frozen=True)
class LateBody(Fault):
    """Puts whose first word lands as others' do, and the rest only when nothing else in the world can move. The network
    may do that: who takes a header for the put goes wrong.

    Args:
        source: rank that puts; None for any.
        target: rank that they go to; None for any.
        skip: such puts that stay as they were before the first is hit.
        count: how many are hit; None for all.
    """

    source: int | None = None
    target: int | None = None
    skip: int = 0
    count: int | None = 1


@dataclass(frozen=True)
class SignalFault(Fault):
    """A fault of some of the signals.

    Args:
        source: rank that sends them; None for any.
        target: rank whose memory they go to; None for any.
        where: called with byte offset and size in the symmetric allocation; None for every place.
        when: called with the value written, or added; None for every value.
        skip: matching signals that stay unharmed before the first is hit.
        count: how many are hit; None for all.
    """

    source: int | None = None
    target: int | None = None
    where: Callable[[int, int], bool] | None = None
    when: Callable[[int], bool] | None = None
    skip: int = 0
    count: int | None = 1


@dataclass(frozen=True)
class LoseSignal(SignalFault):
    """The signal never happens; its sender does not notice. Args as of :class:`SignalFault`."""


@dataclass(frozen=True)
class DoubleSignal(SignalFault):
    """The signal happens twice: a counter counts twice, a flag is written twice with other tasks in between. A put's
    signal counts again some turns later, or, where the seed says so, only when nothing else in the world can move.
    Args as of :class:`SignalFault`."""


@dataclass(frozen=True)
class TearHeader(SignalFault):
    """One half of the word arrives first, the other half after other tasks had turns; of a put's first word, only when
    nothing else in the world can move.

    Args:
        first: ``"lower"`` or ``"upper"`` half.
        lost: the other half never arrives. The signal of a put comes all the same; lose that one too for a put that
            never ends. The others as of :class:`SignalFault`.

    Raises:
        ValueError: another half.
    """

    first: str = "lower"
    lost: bool = False

    def __post_init__(self) -> None:
        if self.first not in ("lower", "upper"):
            raise ValueError(f'a header is torn with first="lower" or "upper", got {self.first!r}')


class Killed:
    """The type of :data:`KILLED`."""

    def __repr__(self) -> str:
        return "KILLED"


#: Result of a rank that a :class:`KillRank` stopped.
KILLED = Killed()


class FaultPlan:
    """The faults of one world, with what they have done so far.

    Raises:
        ValueError: a fault names a rank that does not exist.
        TypeError: not a fault.
    """

    def __init__(self, faults: Sequence[Fault] | None, world_size: int) -> None:
        self._faults = list(faults or ())
        for fault in self._faults:
            if not isinstance(fault, Fault):
                raise TypeError(f"faults are Fault objects, got {fault!r}")
            ranks: list[Any] = [getattr(fault, name, None) for name in ("rank", "peer", "source", "target")]
            for rank in ranks:
                if rank is not None and not 0 <= rank < world_size:
                    raise ValueError(f"{fault} names rank {rank}; ranks are 0 to {world_size - 1}")
        self._delays = [fault for fault in self._faults if isinstance(fault, DelayRank)]
        self._kills = [fault for fault in self._faults if isinstance(fault, KillRank)]
        self._stalls = [fault for fault in self._faults if isinstance(fault, StallSource)]
        self._signals = [fault for fault in self._faults if isinstance(fault, SignalFault)]
        self._bodies = [fault for fault in self._faults if isinstance(fault, LateBody)]
        self._matched = [0] * (len(self._signals) + len(self._bodies))
        self._turns = [0] * world_size
        tears = any(isinstance(fault, TearHeader) for fault in self._signals)
        self.holds_back = bool(self._delays or self._stalls or self._bodies or tears)

    def delays(self, rank: int, turn: int) -> bool:
        """True while turns of the world hold ``rank`` back."""
        return any(
            fault.rank == rank and fault.seconds is None and fault.start <= turn < fault.start + fault.turns
            for fault in self._delays
        )

    def frozen_until_ns(self, rank: int) -> int:
        """Virtual time before which ``rank`` takes no turn at all."""
        return max(
            (round(fault.seconds * 1e9) for fault in self._delays if fault.rank == rank and fault.seconds is not None),
            default=0,
        )

    def dies(self, rank: int) -> bool:
        """Count a turn of ``rank``; True if it was its last."""
        if not self._kills:
            return False
        self._turns[rank] += 1
        return any(fault.rank == rank and self._turns[rank] > fault.turn for fault in self._kills)

    def stalls(self, rank: int, peer: int) -> bool:
        """True if copies from ``rank`` to ``peer`` wait for everybody else."""
        return any(fault.rank == rank and fault.peer in (None, peer) for fault in self._stalls)

    def signal(self, source: int, target: int, offset: int, num_bytes: int, value: int) -> SignalFault | None:
        """What happens to a signal, if anything."""
        for index, fault in enumerate(self._signals):
            if fault.source not in (None, source) or fault.target not in (None, target):
                continue
            if fault.where is not None and not fault.where(offset, num_bytes):
                continue
            if fault.when is not None and not fault.when(value):
                continue
            if self._hits(index, fault):
                return fault
        return None

    def late_body(self, source: int, target: int) -> bool:
        """Count a put; True if all of it but its first word waits for everybody else."""
        late = False
        for index, fault in enumerate(self._bodies, len(self._signals)):
            if fault.source in (None, source) and fault.target in (None, target):
                late = self._hits(index, fault) or late
        return late

    def _hits(self, index: int, fault: SignalFault | LateBody) -> bool:
        nth = self._matched[index]
        self._matched[index] += 1
        return nth >= fault.skip and (fault.count is None or nth < fault.skip + fault.count)
