"""What benchmarks share beside their ranks: calls in turns, errors that stop all ranks, progress, and the record.

A benchmark is a function of a :class:`Session`. It checks every rival's result (``Session.check``), times them in turns
(``Session.time``), and hands its rows to ``Session.results``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import triton_overlap as to
from triton_overlap import environment
from triton_overlap.bench.ranks import timer_of
from triton_overlap.bench.results import Results, now
from triton_overlap.problems import WrongResult
from triton_overlap.timing import SLEEP_CYCLES, Call, Timing, slowest, take_turns

_T = TypeVar("_T")


@dataclass(frozen=True)
class Settings:
    """What all benchmarks are told.

    Attributes:
        dtype: of operands and results.
        rounds, warmup: timed calls of each rival, and untimed ones before them.
        seed: of inputs and of the order of calls.
        command, commit: kept with the results.
    """

    dtype: torch.dtype
    rounds: int
    warmup: int
    seed: int
    command: list[str]
    commit: str | None


@dataclass(frozen=True)
class Session:
    """One rank's part of a run. Every method but ``progress`` is collective.

    Attributes:
        group: of all ranks.
        settings: the same on every rank.
        console: rank 0 prints to it.
    """

    group: to.Group
    settings: Settings
    console: Console

    @property
    def device(self) -> torch.device:
        return self.group.device

    def time(self, calls: Mapping[str, Call], num_sets: int, sleep_cycles: int = SLEEP_CYCLES) -> dict[str, Timing]:
        """Each call's timing on the rank that was slowest at it; calls take turns over ``num_sets`` input sets."""
        return slowest(self.group.all_gather_object(self.time_here(calls, num_sets, sleep_cycles=sleep_cycles)))

    def time_here(
        self, calls: Mapping[str, Call], num_sets: int, *, repetition: int = 0, sleep_cycles: int = SLEEP_CYCLES
    ) -> dict[str, Timing]:
        """The same on this rank; each ``repetition`` has an order of its own."""
        settings = self.settings
        return take_turns(
            calls,
            timer=timer_of(self.group, sleep_cycles),
            num_sets=num_sets,
            rounds=settings.rounds,
            warmup=settings.warmup,
            seed=settings.seed + repetition,
        )

    def check(self, what: object, errors: Mapping[str, float], tolerance: float) -> dict[str, float]:
        """Each rival's largest error over the ranks.

        Raises:
            WrongResult: on every rank, where one is above ``tolerance``, or is NaN.
        """
        everyone = self.group.all_gather_object(dict(errors))
        worst = {name: _largest([found[name] for found in everyone]) for name in errors}
        wrong = {name: error for name, error in worst.items() if not error <= tolerance}
        if wrong:
            listed = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
            raise WrongResult(f"{what}: relative error over {tolerance:.0e}: {listed}")
        return worst

    def progress(self, items: Sequence[_T], describe: Callable[[_T], str]) -> Iterator[_T]:
        """``items``, with a bar on rank 0 that says which one is being measured."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, disable=self.group.rank != 0) as progress:
            task = progress.add_task("", total=len(items))
            for item in items:
                progress.update(task, description=describe(item))
                yield item
                progress.advance(task)

    def results(self, kind: str, rows: Iterable[Any], method: Mapping[str, Any]) -> Results:
        """The record of a run whose rows are of one kind."""
        return Results(kind=kind, rows=list(rows), **self.record(method))

    def record(self, method: Mapping[str, Any]) -> dict[str, Any]:
        """All that is needed to know what a run's figures mean: the fields of ``Kept``."""
        settings = self.settings
        return {
            "created": now(),
            "command": settings.command,
            "commit": settings.commit or environment.commit(),
            "hardware": environment.hardware(self.device),
            "versions": environment.versions(),
            "method": {
                "rounds": settings.rounds,
                "warmup": settings.warmup,
                "seed": settings.seed,
                "backend": self.group.backend.name,
                "process_group": dist.get_backend(),
                **method,
            },
        }


def _largest(errors: list[float]) -> float:
    """The largest error; one that is no number is worse than any."""
    return next((error for error in errors if error != error), max(errors))
