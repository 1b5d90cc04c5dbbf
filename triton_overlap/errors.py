"""The exception tree.

TritonOverlapError
├── ActiveShapeError (ValueError)        a rule of the active shape is broken; nothing was changed
├── ClosedError (ValueError)             a buffer or group was used after it was closed
├── BackendError (RuntimeError)          a backend cannot run here; says why and what would
├── CommError (RuntimeError)             a collective call failed; the group is broken until ``recover()``
│   ├── CommTimeoutError (TimeoutError)  a bounded wait expired; names who waited for whom
│   ├── CommMismatchError                ranks called with another T or another operation
│   ├── CommSignalError                  a signal counted more than was sent: a network broke its promise
│   ├── ActiveCountError (ValueError)    a token count on the device breaks a rule
│   ├── RoutingError (ValueError)        the handle of a failed dispatch was used
│   └── GroupBrokenError                 a call on a group that an earlier failure broke
└── SimulationError (RuntimeError)       found by the simulator
    ├── DeadlockError                    no task can make progress; lists every wait
    ├── RaceError                        conflicting accesses that nothing orders
    └── MemoryFaultError                 a kernel touched memory that was never registered
"""

from __future__ import annotations

from dataclasses import dataclass


class TritonOverlapError(Exception):
    """Base of every error this library raises on purpose."""


class ActiveShapeError(TritonOverlapError, ValueError):
    """An active shape breaks one of the rules; the state is as it was before the call."""


class ClosedError(TritonOverlapError, ValueError):
    """A closed buffer or group was used."""


class BackendError(TritonOverlapError, RuntimeError):
    """A backend cannot do what was asked here."""


@dataclass(frozen=True)
class FailureRecord:
    """What a kernel wrote when it gave up: who waited for whom, and for what.

    Attributes:
        kind: ``"timeout"``, ``"mismatch"``, ``"count"``, ``"surplus"`` or ``"routing"``.
        operation: name of the operation, such as ``"all_gather_matmul"``.
        rank: the rank that gave up first.
        peer: the rank it waited for, or whose header did not match.
        place: what was waited for (``"header"``, ``"data flag"``, ...; ``comm.layout.Place``).
        index: which flag of that place, for instance the tile of the chunk.
        epoch: the epoch of the call.
        expected: the value waited for, already decoded to words.
        seen: the value last seen, already decoded to words.
        reported_by: the rank whose abort brought this record here; equals ``rank`` at its source.
        timeout_s: how long the rank may wait at most.
    """

    kind: str
    operation: str
    rank: int
    peer: int
    place: str
    index: int
    epoch: int
    expected: str
    seen: str
    reported_by: int
    timeout_s: float

    def __str__(self) -> str:
        return (
            f"{self.operation}: rank {self.rank} waited for rank {self.peer}, {self.place} {self.index}, "
            f"epoch {self.epoch}: expected {self.expected}, saw {self.seen}"
        )


class CommError(TritonOverlapError, RuntimeError):
    """A collective call failed on the device or between hosts.

    Attributes:
        record: the :class:`FailureRecord`, or None where the failure happened between hosts.
    """

    def __init__(self, message: str, record: FailureRecord | None = None) -> None:
        super().__init__(message)
        self.record = record


class CommTimeoutError(CommError, TimeoutError):
    """A bounded wait expired; the message names who waited for whom."""


class CommMismatchError(CommError):
    """Ranks disagree on the token count, the operation or the routing of one call."""


class CommSignalError(CommError):
    """A signal counted more than was sent: the network signalled twice, or before all bytes were there."""


class ActiveCountError(CommError, ValueError):
    """A token count that a call read on the device is not one the call can have."""


class RoutingError(CommError, ValueError):
    """A call was given the handle of an expert-parallel dispatch that failed."""


class GroupBrokenError(CommError):
    """The group failed before; call ``group.recover()`` on every rank."""


class SimulationError(TritonOverlapError, RuntimeError):
    """Something the simulator found."""


class DeadlockError(SimulationError):
    """No task can make progress; the message lists every task and its wait."""


class RaceError(SimulationError):
    """Two conflicting accesses that no chain of release and acquire orders."""


class MemoryFaultError(SimulationError):
    """A kernel touched an address outside every registered region and every argument of its launch."""
