"""One rank of the tensor-parallel benchmark: check every result, then time the rivals in turns."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import triton_overlap as to
from triton_overlap.bench import environment
from triton_overlap.bench.problems import TOLERANCE, Inputs, Problem, tensor_parallel_problems
from triton_overlap.bench.results import Measurement, Results, Row, now
from triton_overlap.bench.rivals import Rival, Run, Unavailable, all_rivals
from triton_overlap.bench.timing import Call, EventTimer, HostTimer, Timing, copy_engine_gbps, take_turns
from triton_overlap.reference import relative_error


class WrongResult(RuntimeError):
    """A rival's result is not the reference; it is not timed."""


@dataclass(frozen=True)
class Settings:
    """What to measure. ``tokens`` are gathered counts; ``k`` and ``n`` are those of problems.py."""

    tokens: list[int]
    k: int
    n: int
    dtype: torch.dtype
    rounds: int
    warmup: int
    seed: int
    command: list[str]
    commit: str | None


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


def _poison(problem: Problem, rival: Rival, inputs: Inputs) -> None:
    """Leave NaN in the memory that the next result of this shape will probably get from the allocator."""
    rows, columns = problem.out_shape if rival.communicates else (inputs.gathered.shape[0], inputs.b.shape[1])
    inputs.a.new_full((rows, columns), float("nan"))


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
        cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
        num_sets = problem.num_input_sets(cache)
        sets = [problem.inputs(self.group.rank, self.settings.seed + i, device) for i in range(num_sets)]
        runs: dict[str, Run] = {}
        unavailable: dict[str, str] = {}
        for rival in self.rivals:
            try:
                runs[rival.name] = rival.prepare(problem)
            except Unavailable as reason:
                unavailable[rival.name] = str(reason)
        errors = self._check(problem, runs, sets)

        def call(run: Run) -> Call:
            return lambda index: run(sets[index])

        timer = EventTimer(device) if device.type == "cuda" else HostTimer()
        timings = take_turns(
            {name: call(run) for name, run in runs.items()},
            timer=timer,
            num_sets=num_sets,
            rounds=self.settings.rounds,
            warmup=self.settings.warmup,
            seed=self.settings.seed,
        )
        slowest: dict[str, Timing] = {}
        for found in self.group.all_gather_object(timings):
            for name, timing in found.items():
                if name not in slowest or timing.median_ms > slowest[name].median_ms:
                    slowest[name] = timing
        gemm_ms = slowest["gemm"].median_ms
        link_ms = problem.link_bytes / self.link_gbps / 1e6 if self.link_gbps else 0.0
        return Row(
            operation=problem.operation.value,
            tokens=problem.tokens,
            k=problem.k,
            n=problem.n,
            world_size=problem.world_size,
            dtype=str(problem.dtype).removeprefix("torch."),
            bound_ms=max(gemm_ms, link_ms),
            measurements={name: Measurement(name, slowest[name], errors[name]) for name in runs},
            unavailable=unavailable,
        )

    def _check(self, problem: Problem, runs: dict[str, Run], sets: list[Inputs]) -> dict[str, float]:
        """Each rival's largest error over all ranks and input sets; raises on every rank where one is too large."""
        worst = dict.fromkeys(runs, 0.0)
        for index, inputs in enumerate(sets):
            for rival in self.rivals:
                if rival.name not in runs:
                    continue
                reference = problem.reference(
                    self.group.rank, self.settings.seed + index, self.group.device, communicates=rival.communicates
                )
                _poison(problem, rival, inputs)
                result = runs[rival.name](inputs)
                worst[rival.name] = max(worst[rival.name], relative_error(result, reference))
        for found in self.group.all_gather_object(worst):
            worst = {name: max(worst[name], found[name]) for name in worst}
        wrong = {name: error for name, error in worst.items() if not error <= TOLERANCE[problem.dtype]}
        if wrong:
            listed = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
            raise WrongResult(f"{problem}: relative error over {TOLERANCE[problem.dtype]:.0e}: {listed}")
        return worst


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
        "time": "median over rounds on the slowest rank; see triton_overlap/bench/timing.py",
        "backend": group.backend.name,
        "process_group": dist.get_backend(),
        "copy_engine_gbps": link_gbps,
    }


def run(settings: Settings, console: Console) -> Results | None:
    """Measure; collective. Returns the results on rank 0, None on the others.

    Raises:
        WrongResult: a result is not the reference.
        ValueError: a token count that the ranks do not divide, or fewer GPUs than ranks.
    """
    rank = int(os.environ["RANK"])
    _start(rank)
    group = to.init_group()
    try:
        problems = tensor_parallel_problems(settings.tokens, settings.k, settings.n, group.world_size, settings.dtype)
        link_gbps = _link_gbps(group)
        bench = Bench(group, all_rivals(group, max(settings.tokens)), settings, link_gbps)
        rows = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=rank != 0) as progress:
            task = progress.add_task("", total=len(problems))
            for problem in problems:
                progress.update(task, description=f"{problem.operation.value} T {problem.tokens}")
                rows.append(bench.measure(problem))
                progress.advance(task)
        if rank != 0:
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
    finally:
        group.close()
        dist.destroy_process_group()
