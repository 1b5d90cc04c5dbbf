"""One rank of the benchmark of host time: what a call costs the processor before the device has anything to do.

A figure is the time of a batch of calls, without waiting for the device, over their number: the median over batches.
Batches of the ways to call take turns, and the device is idle before each. Problems are small, so that the device never
lags far enough for the host to wait for a place in its queue. Where kernels are interpreted none is launched.

The parts of a call come from calling deeper and deeper functions: the public function, the operator, the method, and
its launcher with the kernel's launch left out. A profile says where the Python part goes; it slows small functions more
than large ones, so it is for shares, not for times.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import triton_overlap as to
from triton_overlap.bench.reports.host import LAUNCHER, Row
from triton_overlap.bench.results import Results
from triton_overlap.bench.session import Session
from triton_overlap.kernels import by_method
from triton_overlap.kernels.methods import Method
from triton_overlap.problems import TOLERANCE, OverlappedOperation, Problem
from triton_overlap.reference import relative_error

#: Calls of a batch: fewer than the device's queue has places for, with a few entries a call.
BATCH = 100
#: Lines of a profile that are kept.
PROFILE_LINES = 30

#: Where launchers are.
_LAUNCHERS = "triton_overlap.kernels."

Run = Callable[[], object]


@dataclass(frozen=True)
class _Subject:
    """One operation with its operands."""

    problem: Problem
    buffer: to.UserBuffer
    counted: to.UserBuffer
    a: Tensor
    b: Tensor
    tokens: Tensor

    @property
    def _gathers(self) -> bool:
        return self.problem.gathers

    def function(self, a: Tensor, b: Tensor, **more: Any) -> Tensor:
        operation = to.all_gather_matmul if self._gathers else to.matmul_reduce_scatter
        out: Tensor = operation(a, b, **{"buffer": self.buffer, **more})
        return out

    def operator(self) -> object:
        handle = self.buffer.handle
        if self._gathers:
            return torch.ops.triton_overlap.all_gather_matmul(self.a, self.b, None, None, handle, False, "fused")
        return torch.ops.triton_overlap.matmul_reduce_scatter(self.a, self.b, None, None, handle, "fused")

    def by_method(self) -> object:
        method = Method.parse("fused")
        if self._gathers:
            return by_method.all_gather_matmul(self.buffer, self.a, [self.b], [None], method=method)
        return by_method.matmul_reduce_scatter(self.buffer, self.a, self.b, method=method)


def _no_launch(*_: object, **__: object) -> None:
    # A mock would keep its arguments, all the tensors among them.
    pass


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Launchers do all but launch."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(_LAUNCHERS) and hasattr(module, "launch_kernel"):
                stack.enter_context(mock.patch.object(module, "launch_kernel", _no_launch))
        yield


def _ways(subject: _Subject, cuda: bool) -> dict[str, Run]:
    """The ways to call, by name; ``reports.host`` says what each is. Collective."""
    a, b = subject.a, subject.b
    weight = b.detach().clone().requires_grad_()
    x = a.detach().clone().requires_grad_()
    grad = torch.ones(subject.problem.out_shape, dtype=a.dtype, device=a.device)

    def forward_backward() -> object:
        return torch.autograd.grad(subject.function(x, weight), [x, weight], grad)

    ways: dict[str, Run] = {
        "function": lambda: subject.function(a, b),
        "operator": subject.operator,
        "method": subject.by_method,
        LAUNCHER: subject.by_method,
        "forward for a gradient": lambda: subject.function(x, weight),
        "forward and backward": forward_backward,
        "count on the device": lambda: subject.function(a, b, buffer=subject.counted, active_tokens=subject.tokens),
        "torch.matmul": lambda: a @ b,
    }
    if cuda:
        ways["compiled"] = _compiled(subject)
        ways["graph"] = _captured(ways["count on the device"])
    return ways


def _compiled(subject: _Subject) -> Run:
    function = torch.compile(subject.function, fullgraph=True, dynamic=True)
    function(subject.a, subject.b)
    return lambda: function(subject.a, subject.b)


def _captured(run: Run) -> Run:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _batch_us(name: str, run: Run, device: torch.device) -> float:
    """Microseconds of a call."""
    _synchronize(device)
    dist.barrier()
    with without_launches() if name == LAUNCHER else contextlib.nullcontext():
        began = time.perf_counter()
        for _ in range(BATCH):
            run()
        elapsed = time.perf_counter() - began
    _synchronize(device)
    return 1e6 * elapsed / BATCH


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_ways(ways: Mapping[str, Run], session: Session) -> dict[str, float]:
    """Collective: the median over batches of each way, on the rank where it was longest."""
    settings = session.settings
    order = random.Random(settings.seed)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(settings.warmup + settings.rounds):
        for name in order.sample(sorted(ways), len(ways)):
            sample = _batch_us(name, ways[name], session.device)
            if turn >= settings.warmup:
                samples[name].append(sample)
    everyone = session.group.all_gather_object({name: statistics.median(found) for name, found in samples.items()})
    return {name: round(max(found[name] for found in everyone), 2) for name in ways}


def profile(run: Run, device: torch.device, calls: int = 5 * BATCH) -> list[tuple[str, float, float]]:
    """(function, calls of it, share of the time that is its own) for each call of ``run``, the longest first."""
    profiler = cProfile.Profile()
    for start in range(0, calls, BATCH):
        _synchronize(device)
        dist.barrier()
        profiler.enable()
        for _ in range(min(BATCH, calls - start)):
            run()
        profiler.disable()
    stats = pstats.Stats(profiler)
    total = stats.total_tt  # type: ignore[attr-defined]
    found = [
        (_place(*where), count / calls, own / total)
        for where, (_, count, own, _, _) in stats.stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(found, key=lambda line: -line[2])


def _place(file: str, line: int, function: str) -> str:
    """Where a function is, without the folders of this machine."""
    parts = Path(file).parts
    for package in ("triton_overlap", "triton", "torch"):
        if package in parts:
            file = "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
            break
    else:
        file = parts[-1] if parts else file
    return function if file == "~" else f"{file}:{line} {function}"


def _measure(problem: Problem, session: Session) -> Row:
    group, device = session.group, session.device
    inputs = problem.inputs(group.rank, session.settings.seed, device)
    shape = problem.tokens, problem.hidden
    subject = _Subject(
        problem,
        group.user_buffer(*shape, problem.dtype),
        group.user_buffer(*shape, problem.dtype, device_count=True),
        inputs.a,
        inputs.b,
        torch.tensor(problem.tokens, dtype=torch.int32, device=device),
    )
    expected = problem.reference(group.rank, session.settings.seed, device)
    error = relative_error(subject.function(inputs.a, inputs.b), expected)
    worst = session.check(problem, {"fused": error}, TOLERANCE[problem.dtype])
    cuda = device.type == "cuda"
    with contextlib.nullcontext() if cuda else without_launches():
        ways = _ways(subject, cuda)
        times = time_ways(ways, session)
        lines = profile(ways["function"], device)
    return Row(
        operation=problem.operation,
        tokens=problem.tokens,
        k=problem.k,
        n=problem.n,
        world_size=problem.world_size,
        dtype=str(problem.dtype).removeprefix("torch."),
        launches=cuda,
        times_us=times,
        profile=[list(line) for line in lines[:PROFILE_LINES]],
        relative_error=worst["fused"],
    )


def run(session: Session, tokens: int, k: int, n: int) -> Results:
    """Measure; collective.

    Args:
        session: of this rank.
        tokens: T, few enough for the device to keep up with the host.
        k, n: of a rank's GEMM.

    Raises:
        WrongResult: a result is not the reference.
    """
    group, dtype = session.group, session.settings.dtype
    problems = [Problem(op, tokens, n, k, group.world_size, dtype) for op in list(OverlappedOperation)[:2]]
    before, group.check_mode = group.check_mode, "async"
    try:
        rows = [_measure(problem, session) for problem in session.progress(problems, lambda p: p.operation)]
    finally:
        group.check_mode = before
    return session.results("host", rows, {"batch": BATCH, "time": "see triton_overlap/bench/host.py"})
