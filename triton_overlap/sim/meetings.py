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
        self._meetings: dict[tuple[int, str, int], _Meeting] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._generations: dict[int, int] = {}

    def rejoin(self, generation: int) -> None:
        """Later meetings of this host are those of ``generation``, counted from none."""
        rank = self._machine.host().rank
        self._generations[rank] = generation
        self._counts = {key: count for key, count in self._counts.items() if key[1] != rank}

    def meet(self, kind: str, value: Any, timeout_s: float) -> list[Any]:
        """Wait for all ranks, and return their values in rank order. What a host knew before, all know afterwards.

        Raises:
            CommTimeoutError: after ``timeout_s`` seconds of virtual time; names the missing ranks. The caller has then
                left the meeting, and its next of this kind takes its place.
        """
        machine = self._machine
        host = machine.host()
        scheduler = machine.scheduler
        number = self._counts.get((kind, host.rank), 0)
        meeting = self._meetings.setdefault((self._generations.get(host.rank, 0), kind, number), _Meeting())
        meeting.values[host.rank] = value
        meeting.clock.join(host.clock)
        meeting.complete = meeting.complete or len(meeting.values) == machine.world_size
        scheduler.happened()
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
        self._counts[kind, host.rank] = number + 1
        host.clock.join(meeting.clock)
        return [meeting.values[rank] for rank in range(machine.world_size)]


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
