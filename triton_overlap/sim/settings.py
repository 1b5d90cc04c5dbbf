"""What a simulated world is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triton_overlap.sim.costs import NetworkCost
from triton_overlap.sim.faults import Fault, FaultPlan
from triton_overlap.sim.fibers import program_fiber


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of :class:`World`, under the same names.

    Attributes:
        world_size: number of ranks, at least 1.
        seed: of every decision.
        faults: from :mod:`triton_overlap.sim`, such as ``KillRank(1, turn=40)``.
        check_races: report accesses that nothing orders as :class:`RaceError`, whatever they did in this schedule.
        num_programs: of persistent grids on every rank; None draws 1 to 4 from the seed.
        timeout_s: bound of the group's waits, in seconds of virtual time.
        max_steps: turns after which a run is given up as endless.
        fibers: what programs run on: ``"greenlet"``, ``"thread"``, or ``"auto"``, which prefers greenlets. The schedule
            does not depend on it.
        network_cost: what a put costs its rank's network interface (``World.network``); None for nothing.
        log: keep a list of events in ``World.log``.

    Raises:
        TypeError: a number is no number, a fault no fault, or a cost no cost.
        ValueError: a number is not positive, ``fibers`` is unknown or not installed, or a fault names a rank that does
            not exist.
    """

    world_size: int
    seed: int = 0
    faults: Sequence[Fault] | None = None
    check_races: bool = True
    num_programs: int | None = None
    timeout_s: float = 300.0
    max_steps: int = 2_000_000
    fibers: str = "auto"
    network_cost: NetworkCost | None = None
    log: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", "seed", "num_programs", "max_steps"):
            value = getattr(self, name)
            if value is None and name == "num_programs":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} of a world must be a whole number, got {value!r}")
            if name != "seed" and value < 1:
                raise ValueError(f"{name} of a world must be positive, got {value}")
        if not isinstance(self.network_cost, NetworkCost | None):
            raise TypeError(f"network_cost of a world must be a NetworkCost, got {self.network_cost!r}")
        FaultPlan(self.faults, self.world_size)
        program_fiber(self.fibers)
