"""One rank of the tensor-parallel benchmark, and of a table's measurement: check every result, then time in turns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
from triton_overlap.bench.results import Measurement, Results, Row, now
from triton_overlap.bench.rivals import NotThisOperation, Rival, Run, Unavailable, all_rivals
from triton_overlap.problems import TOLERANCE, Inputs, Problem, WrongResult, cache_bytes_of, leave_nan
from triton_overlap.reference import relative_error
from triton_overlap.timing import Call, EventTimer, HostTimer, Timer, slowest, take_turns


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


def _start(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"rank {rank} needs GPU {device.index}, this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


@contextmanager
def _ranks() -> Iterator[to.Group]:
    """This rank's group, over the process group that torchrun's variables describe."""
    _start(int(os.environ["RANK"]))
    group = to.init_group()
    try:
        yield group
    finally:
        group.close()
        dist.destroy_process_group()


def _timer(device: torch.device) -> Timer:
    if device.type != "cuda":
        return HostTimer(dist.barrier)
    one = torch.zeros(1, device=device)
    return EventTimer(dist.barrier, lambda: dist.all_reduce(one))


@dataclass(frozen=True)
class Bench:
    """What one rank keeps during a run."""

    group: to.Group
    rivals: list[Rival]
    settings: Settings
    link_gbps: float | None

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
            timer=_timer(device),
            num_sets=num_sets,
            rounds=self.settings.rounds,
            warmup=self.settings.warmup,
            seed=self.settings.seed,
        )
        timings = slowest(self.group.all_gather_object(mine))
        gemm_ms = timings["gemm"].median_ms
        link_ms = problem.link_bytes / self.link_gbps / 1e6 if self.link_gbps else 0.0
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


def copy_engine_gbps(device: torch.device, peer: torch.device, num_bytes: int = 1 << 28, repeats: int = 10) -> float:
    """10^9 bytes a second that the copy engine moves from ``device`` to ``peer``, the best of ``repeats``."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=peer)
    best_ms = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return num_bytes / best_ms / 1e6


def _link_gbps(group: to.Group) -> float | None:
    """What the copy engine moves to the next rank's GPU, the least over ranks; None without peers."""
    if group.device.type != "cuda" or group.world_size == 1:
        return None
    peer = torch.device("cuda", ((group.device.index or 0) + 1) % torch.cuda.device_count())
    return min(group.all_gather_object(copy_engine_gbps(group.device, peer)))


def _method(settings: Settings, group: to.Group, link_gbps: float | None) -> dict[str, Any]:
    return {
        "rounds": settings.rounds,
        "warmup": settings.warmup,
        "seed": settings.seed,
        "inputs": "normal, in turns over sets larger than twice the L2 cache",
        "time": "median over rounds on the slowest rank; see triton_overlap/timing.py",
        "backend": group.backend.name,
        "process_group": dist.get_backend(),
        "copy_engine_gbps": link_gbps,
    }


def run(settings: Settings, console: Console) -> Results | None:
    """Measure; collective. Returns the results on rank 0, None on the others.

    Raises:
        WrongResult: a result is not the reference.
        ValueError: a size that the ranks do not divide, fewer GPUs than ranks, or a table that does not fit.
    """
    with _ranks() as group:
        if settings.table is not None:
            to.load_table(settings.table, group=group)
        problems = settings.problems(group.world_size)
        link_gbps = _link_gbps(group)
        rivals = all_rivals(group, max(settings.tokens), settings.dtype)
        bench = Bench(group, rivals, settings, link_gbps)
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
            method=_method(settings, group, link_gbps),
            rows=rows,
        )


def tune(settings: Settings, effort: to.Effort) -> to.Table | None:
    """Measure a table for ``auto``; collective. Returns it on rank 0, None on the others.

    Raises:
        WrongResult: a result is not the reference.
        ValueError: a size that the ranks do not divide, or fewer GPUs than ranks.
    """
    with _ranks() as group:
        table = to.tune(group, settings.problems(group.world_size), effort=effort)
        if group.rank != 0:
            return None
        commit = settings.commit or table.about["commit"]
        return dataclasses.replace(table, about={**table.about, "commit": commit, "command": settings.command})
