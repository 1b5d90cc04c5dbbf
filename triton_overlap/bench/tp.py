"""One rank of the tensor-parallel benchmark, and of the measurement of a table for ``auto``: check every result, then
time in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import triton_overlap as to
from triton_overlap.bench.problems import layer_sizes
from triton_overlap.bench.ranks import Link, measure_link
from triton_overlap.bench.reports.tp import Row
from triton_overlap.bench.results import Measurement, Results
from triton_overlap.bench.rivals import NotThisOperation, Rival, Run, Unavailable, all_rivals
from triton_overlap.bench.session import Session
from triton_overlap.problems import TOLERANCE, Inputs, Problem, cache_bytes_of, leave_nan
from triton_overlap.reference import relative_error
from triton_overlap.timing import Call


@dataclass(frozen=True)
class Bench:
    """What one rank keeps during a run."""

    session: Session
    rivals: list[Rival]
    link: Link

    def measure(self, problem: Problem) -> Row:
        """Collective: every rank's errors are shared before anything is timed, so all go on or all stop."""
        session = self.session
        num_sets = problem.num_input_sets(cache_bytes_of(session.device))
        sets = [problem.inputs(session.group.rank, session.settings.seed + i, session.device) for i in range(num_sets)]
        runs: dict[str, Run] = {}
        unavailable: dict[str, str] = {}
        for rival in self.rivals:
            try:
                runs[rival.name] = rival.prepare(problem)
            except Unavailable as reason:
                unavailable[rival.name] = str(reason)
            except NotThisOperation:
                continue
        errors = session.check(problem, self._errors(problem, runs, sets), TOLERANCE[problem.dtype])

        def call(run: Run) -> Call:
            return lambda index: run(sets[index])

        timings = session.time({name: call(run) for name, run in runs.items()}, num_sets)
        k, n = layer_sizes(problem)
        return Row(
            operation=problem.operation,
            tokens=problem.tokens,
            k=k,
            n=n,
            world_size=problem.world_size,
            dtype=str(problem.dtype).removeprefix("torch."),
            bound_ms=max(timings["gemm"].median_ms, self.link.time_ms(problem.link_bytes)),
            measurements={name: Measurement(name, timings[name], errors[name]) for name in runs},
            unavailable=unavailable,
        )

    def _errors(self, problem: Problem, runs: dict[str, Run], sets: list[Inputs]) -> dict[str, float]:
        """Each rival's largest error on this rank, over the input sets."""
        rank, seed, device = self.session.group.rank, self.session.settings.seed, self.session.device
        worst = dict.fromkeys(runs, 0.0)
        for index, inputs in enumerate(sets):
            references: dict[bool, torch.Tensor] = {}
            for rival in self.rivals:
                if rival.name not in runs:
                    continue
                kind = rival.communicates or problem.gathers  # a gathered product is the same either way
                if kind not in references:
                    references[kind] = problem.reference(rank, seed + index, device, communicates=kind)
                leave_nan((references[kind].shape[0], problem.n), inputs.a)
                error = relative_error(runs[rival.name](inputs), references[kind])
                worst[rival.name] = error if error != error else max(worst[rival.name], error)
        return worst


def run(session: Session, problems: Sequence[Problem], methods: Sequence[str], table: Path | None = None) -> Results:
    """Measure; collective.

    Args:
        session: of this rank.
        problems: of one dtype.
        methods: of this library, as text; and ``"bulk"``.
        table: for ``auto``, before those that it has anyway.

    Raises:
        WrongResult: a result is not the reference.
        ValueError: a table that does not fit.
    """
    group = session.group
    if table is not None:
        to.load_table(table, group=group)
    link = measure_link(group)
    rivals = all_rivals(group, max(problem.tokens for problem in problems), methods)
    bench = Bench(session, rivals, link)
    rows = [bench.measure(p) for p in session.progress(problems, lambda p: f"{p.operation} T {p.tokens}")]
    return session.results(
        "tp",
        rows,
        {
            "inputs": "normal, in turns over sets larger than twice the L2 cache",
            "time": "median over rounds on the slowest rank; see triton_overlap/timing.py",
            "copy_engine_gbps": link.gbps,
        },
    )


def tune(session: Session, problems: Sequence[Problem], max_seconds: float | None) -> to.Table:
    """Measure a table for ``auto``; collective.

    Raises:
        WrongResult: a result is not the reference.
    """
    settings = session.settings
    effort = to.Effort(rounds=settings.rounds, warmup=settings.warmup, max_seconds=max_seconds, seed=settings.seed)
    table = to.tune(session.group, problems, effort=effort)
    commit = settings.commit or table.about["commit"]
    return dataclasses.replace(table, about={**table.about, "commit": commit, "command": settings.command})
