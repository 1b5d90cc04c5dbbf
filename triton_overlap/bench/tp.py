"""One rank of the tensor-parallel benchmark, and of a table's measurement: check every result, then time in turns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import triton_overlap as to
from triton_overlap import environment
from triton_overlap.bench.problems import layer_problems, layer_sizes, model_problems
from triton_overlap.bench.ranks import Link, measure_link, ranks, timer_of
from triton_overlap.bench.results import Measurement, Results, Row, now
from triton_overlap.bench.rivals import NotThisOperation, Rival, Run, Unavailable, all_rivals
from triton_overlap.problems import TOLERANCE, Inputs, Problem, WrongResult, cache_bytes_of, leave_nan
from triton_overlap.reference import relative_error
from triton_overlap.timing import Call, slowest, take_turns


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        tokens: gathered counts.
        k, n: of the layer (bench/problems.py), unless there are
        models: names whose layers are measured instead.
        table: for ``auto``, before those that it has anyway.
        dtype, rounds, warmup, seed: of all problems.
        command, commit: kept with the results.
    """

    tokens: list[int]
    k: int
    n: int
    models: list[str]
    table: Path | None
    dtype: torch.dtype
    rounds: int
    warmup: int
    seed: int
    command: list[str]
    commit: str | None

    def problems(self, world_size: int) -> list[Problem]:
        if self.models:
            return model_problems(self.models, self.tokens, world_size, self.dtype)
        return layer_problems(self.tokens, self.k, self.n, world_size, self.dtype)


@dataclass(frozen=True)
class Bench:
    """What one rank keeps during a run."""

    group: to.Group
    rivals: list[Rival]
    settings: Settings
    link: Link

    def measure(self, problem: Problem) -> Row:
        """Collective: every rank's errors are shared before anything is timed, so all go on or all stop."""
        device = self.group.device
        num_sets = problem.num_input_sets(cache_bytes_of(device))
        sets = [problem.inputs(self.group.rank, self.settings.seed + i, device) for i in range(num_sets)]
        runs: dict[str, Run] = {}
        unavailable: dict[str, str] = {}
        for rival in self.rivals:
            try:
                runs[rival.name] = rival.prepare(problem)
            except Unavailable as reason:
                unavailable[rival.name] = str(reason)
            except NotThisOperation:
                continue
        errors = self._check(problem, runs, sets)

        def call(run: Run) -> Call:
            return lambda index: run(sets[index])

        mine = take_turns(
            {name: call(run) for name, run in runs.items()},
            timer=timer_of(self.group),
            num_sets=num_sets,
            rounds=self.settings.rounds,
            warmup=self.settings.warmup,
            seed=self.settings.seed,
        )
        timings = slowest(self.group.all_gather_object(mine))
        gemm_ms = timings["gemm"].median_ms
        link_ms = self.link.time_ms(problem.link_bytes)
        k, n = layer_sizes(problem)
        return Row(
            operation=problem.operation,
            tokens=problem.tokens,
            k=k,
            n=n,
            world_size=problem.world_size,
            dtype=str(problem.dtype).removeprefix("torch."),
            bound_ms=max(gemm_ms, link_ms),
            measurements={name: Measurement(name, timings[name], errors[name]) for name in runs},
            unavailable=unavailable,
        )

    def _check(self, problem: Problem, runs: dict[str, Run], sets: list[Inputs]) -> dict[str, float]:
        """Each rival's largest error over all ranks and input sets; raises on every rank where one is too large."""
        worst = dict.fromkeys(runs, 0.0)
        for index, inputs in enumerate(sets):
            references: dict[bool, torch.Tensor] = {}
            for rival in self.rivals:
                if rival.name not in runs:
                    continue
                kind = rival.communicates
                if kind not in references:
                    seed = self.settings.seed + index
                    references[kind] = problem.reference(self.group.rank, seed, self.group.device, communicates=kind)
                leave_nan((references[kind].shape[0], problem.n), inputs.a)
                result = runs[rival.name](inputs)
                worst[rival.name] = max(worst[rival.name], relative_error(result, references[kind]))
        for found in self.group.all_gather_object(worst):
            worst = {name: max(worst[name], found[name]) for name in worst}
        wrong = {name: error for name, error in worst.items() if not error <= TOLERANCE[problem.dtype]}
        if wrong:
            listed = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
            raise WrongResult(f"{problem}: relative error over {TOLERANCE[problem.dtype]:.0e}: {listed}")
        return worst


def _method(settings: Settings, group: to.Group, link: Link) -> dict[str, Any]:
    return {
        "rounds": settings.rounds,
        "warmup": settings.warmup,
        "seed": settings.seed,
        "inputs": "normal, in turns over sets larger than twice the L2 cache",
        "time": "median over rounds on the slowest rank; see triton_overlap/timing.py",
        "backend": group.backend.name,
        "process_group": dist.get_backend(),
        "copy_engine_gbps": link.gbps,
    }


def run(settings: Settings, console: Console) -> Results | None:
    """Measure; collective. Returns the results on rank 0, None on the others.

    Raises:
        WrongResult: a result is not the reference.
        ValueError: a size that the ranks do not divide, fewer GPUs than ranks, or a table that does not fit.
    """
    with ranks() as group:
        if settings.table is not None:
            to.load_table(settings.table, group=group)
        problems = settings.problems(group.world_size)
        link = measure_link(group)
        rivals = all_rivals(group, max(settings.tokens), settings.dtype)
        bench = Bench(group, rivals, settings, link)
        rows = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=group.rank != 0) as progress:
            task = progress.add_task("", total=len(problems))
            for problem in problems:
                progress.update(task, description=f"{problem.operation} T {problem.tokens}")
                rows.append(bench.measure(problem))
                progress.advance(task)
        if group.rank != 0:
            return None
        return Results(
            created=now(),
            command=settings.command,
            commit=settings.commit or environment.commit(),
            hardware=environment.hardware(group.device),
            versions=environment.versions(),
            method=_method(settings, group, link),
            rows=rows,
        )


def tune(settings: Settings, effort: to.Effort) -> to.Table | None:
    """Measure a table for ``auto``; collective. Returns it on rank 0, None on the others.

    Raises:
        WrongResult: a result is not the reference.
        ValueError: a size that the ranks do not divide, or fewer GPUs than ranks.
    """
    with ranks() as group:
        table = to.tune(group, settings.problems(group.world_size), effort=effort)
        if group.rank != 0:
            return None
        commit = settings.commit or table.about["commit"]
        return dataclasses.replace(table, about={**table.about, "commit": commit, "command": settings.command})
