"""Where the hosts of a simulated world meet: barriers and exchanges, each bounded in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from triton_overlap.errors import CommTimeoutError
from triton_overlap.sim.happens_before import Clock
from triton_overlap.sim.machine import Machine
from triton_overlap.sim.scheduler import Wait


@dataclass
class _Meeting:
    values: dict[int, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    complete: bool = False
    left: set[int] = field(default_factory=set)  # came, and gave up


class Meetings:
    """Each rank's n-th meeting of a kind is with every other rank's n-th of that kind.

    Args:
        machine: whose hosts meet.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._rejoining = _Meeting()

    def rejoin(self, timeout_s: float) -> None:
        """Wait for all ranks; from then on meetings are counted from none, whatever was left of earlier ones.

        Raises:
            CommTimeoutError: as ``meet`` does.
        """
        meeting = self._rejoining
        self._come(meeting, None)
        if meeting.complete:
            self._rejoining = _Meeting()
            self._meetings.clear()
            self._counts.clear()
        self._wait(meeting, "rejoin", 0, timeout_s)

    def meet(self, kind: str, value: Any, timeout_s: float) -> list[Any]:
        """Wait for all ranks, and return their values in rank order. What a host knew before, all know afterwards.

        Raises:
            CommTimeoutError: after ``timeout_s`` seconds of virtual time; names the missing ranks. The caller has then
                left the meeting, and its next of this kind takes its place.
        """
        rank = self._machine.host().rank
        number = self._counts.get((kind, rank), 0)
        meeting = self._meetings.setdefault((kind, number), _Meeting())
        self._come(meeting, value)
        self._wait(meeting, kind, number, timeout_s)
        self._counts[kind, rank] = number + 1
        return [meeting.values[rank] for rank in range(self._machine.world_size)]

    def _come(self, meeting: _Meeting, value: Any) -> None:
        """This host is at ``meeting``, which is complete with the last one."""
        host = self._machine.host()
        meeting.left.discard(host.rank)
        meeting.values[host.rank] = value
        meeting.clock.join(host.clock)
        meeting.complete = meeting.complete or len(meeting.values) == self._machine.world_size
        self._machine.scheduler.happened()

    def _wait(self, meeting: _Meeting, kind: str, number: int, timeout_s: float) -> None:
        """Until ``meeting`` is complete."""
        machine = self._machine
        host = machine.host()
        scheduler = machine.scheduler
        deadline = scheduler.now_ns + round(timeout_s * 1e9)

        def ready() -> bool:
            return meeting.complete or scheduler.now_ns >= deadline

        machine.block(Wait(ready, f"the other ranks at its {kind} number {number + 1}", deadline))
        if not meeting.complete:
            del meeting.values[host.rank]
            meeting.left.add(host.rank)
            here = meeting.left | meeting.values.keys()
            missing = [rank for rank in range(machine.world_size) if rank not in here]
            whom = f"for {_ranks(missing)} " if missing else ""
            gave_up = sorted(meeting.left - {host.rank})
            before = f"; {_ranks(gave_up)} came and had given up" if gave_up and not missing else ""
            raise CommTimeoutError(f"rank {host.rank} waited {timeout_s:g} s {whom}at a {kind}{before}")
        host.clock.join(meeting.clock)


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
