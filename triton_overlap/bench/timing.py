"""How calls are timed.

On a GPU one sample is: a host barrier, a sleep on the stream long enough for the host to enqueue everything behind it,
a one-element all-reduce that lines the ranks up on their devices, then the call between two events. So a sample is
device time, and the host's own time is kept beside it. Rivals take turns within a round, in another order each round,
and every call gets the next input set, so that no rival finds its operands in a cache or the clocks in its favour.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

#: Cycles of the sleep before a sample, about 2 ms on current GPUs.
SLEEP_CYCLES = 4_000_000

#: What is timed: a call on the input set of that index.
Call = Callable[[int], object]


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one call: on the device, and of the host until it had enqueued the call."""

    device_ms: float
    host_ms: float


@dataclass(frozen=True)
class Timing:
    """Samples of one rival on one problem, in milliseconds."""

    median_ms: float
    min_ms: float
    max_ms: float
    host_median_ms: float

    @classmethod
    def of(cls, samples: list[Sample]) -> Timing:
        device = [sample.device_ms for sample in samples]
        host = [sample.host_ms for sample in samples]
        figures = statistics.median(device), min(device), max(device), statistics.median(host)
        # Ten nanoseconds are finer than an event's resolution.
        return cls(*(round(figure, 5) for figure in figures))


class Timer(Protocol):
    """Times one call on every rank at once."""

    def __call__(self, call: Call, index: int) -> Sample: ...


class EventTimer:
    """CUDA events, as the module's page describes."""

    def __init__(self, device: torch.device) -> None:
        self._line_up = torch.zeros(1, device=device)

    def __call__(self, call: Call, index: int) -> Sample:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(self._line_up)
        start.record()
        began = time.perf_counter()
        call(index)
        host_ms = 1e3 * (time.perf_counter() - began)
        end.record()
        torch.cuda.synchronize()
        return Sample(start.elapsed_time(end), host_ms)


class HostTimer:
    """Wall-clock time, for processors whose calls return when they are done."""

    def __call__(self, call: Call, index: int) -> Sample:
        dist.barrier()
        began = time.perf_counter()
        call(index)
        elapsed_ms = 1e3 * (time.perf_counter() - began)
        return Sample(elapsed_ms, elapsed_ms)


def take_turns(
    calls: Mapping[str, Call], *, timer: Timer, num_sets: int, rounds: int, warmup: int, seed: int
) -> dict[str, Timing]:
    """Time ``calls`` in turns for ``rounds`` rounds after ``warmup`` untimed ones.

    Collective: every rank gives the same names and the same ``seed``, which shuffles the order within each round.
    """
    shuffle = random.Random(seed)
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    index = 0
    for turn in range(warmup + rounds):
        for name in shuffle.sample(sorted(calls), len(calls)):
            sample = timer(calls[name], index % num_sets)
            index += 1
            if turn >= warmup:
                samples[name].append(sample)
    return {name: Timing.of(found) for name, found in samples.items()}


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
