"""How calls are timed, in benchmarks and in ``tune``.

On a GPU one sample is: a host barrier, a sleep on the stream long enough for the host to enqueue everything behind it,
a small collective that lines the ranks up on their devices, then the call between two events. So a sample is device
time, and the host's own time is kept beside it. Calls take turns within a round, in another order each round, and every
call gets the next input set, so that none finds its operands in a cache or the clocks in its favour.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

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
    """Samples of one call on one problem, in milliseconds."""

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


@dataclass(frozen=True)
class EventTimer:
    """CUDA events, as the module's page describes.

    Args:
        barrier: of the hosts.
        line_up: enqueues a small collective on the current stream.
        sleep_cycles: of the sleep, at least as long as the host takes to enqueue the call.
    """

    barrier: Callable[[], object]
    line_up: Callable[[], object]
    sleep_cycles: int = SLEEP_CYCLES

    def __call__(self, call: Call, index: int) -> Sample:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.barrier()
        torch.cuda._sleep(self.sleep_cycles)
        self.line_up()
        start.record()
        began = time.perf_counter()
        call(index)
        host_ms = 1e3 * (time.perf_counter() - began)
        end.record()
        torch.cuda.synchronize()
        return Sample(start.elapsed_time(end), host_ms)


@dataclass(frozen=True)
class HostTimer:
    """Wall-clock time, for processors whose calls return when they are done.

    Args:
        barrier: of the hosts.
    """

    barrier: Callable[[], object]

    def __call__(self, call: Call, index: int) -> Sample:
        self.barrier()
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


def slowest(timings: Iterable[Mapping[str, Timing]]) -> dict[str, Timing]:
    """Of the ranks' ``timings``, for each call those of the rank with the largest median."""
    found: dict[str, Timing] = {}
    for of_rank in timings:
        for name, timing in of_rank.items():
            if name not in found or timing.median_ms > found[name].median_ms:
                found[name] = timing
    return found
