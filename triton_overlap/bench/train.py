"""One rank of the benchmark of training steps whose token counts change.

A stack of transformer layers runs microbatches forward and backward, gradients accumulating, in three ways, with one
registration for all of them:

    fixed    every microbatch has the mean of the random counts
    random   every microbatch has another count, uniform up to the capacity
    padded   the random counts, each filled up to the capacity, which is what a buffer of one size takes

A figure is tokens (without padding) over the wall-clock time of a block of microbatches, the median over blocks, which
take turns; every random block has new counts. After the first blocks nothing should be compiled, and nothing allocated
symmetrically; both are counted.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import triton_overlap as to
from triton_overlap.bench.layer import (
    NUM_SETS,
    Inputs,
    Problem,
    build_layer,
    by_methods,
    check,
    forward_backward,
    make_inputs,
    reference,
)
from triton_overlap.bench.reports.train import FIXED, PADDED, RANDOM, Counters, Row
from triton_overlap.bench.results import Results
from triton_overlap.bench.session import Session


def draw_counts(microbatches: int, max_tokens: int, world_size: int, seed: int) -> list[int]:
    """Random token counts, multiples of ``world_size`` up to ``max_tokens``, the same on every rank."""
    draw = random.Random(seed)
    return [world_size * draw.randint(1, max_tokens // world_size) for _ in range(microbatches)]


def mean_count(counts: Sequence[int], world_size: int) -> int:
    """The mean, as a multiple of ``world_size``."""
    return max(1, round(statistics.mean(counts) / world_size)) * world_size


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **arguments: object) -> Tensor:
        for layer in self.layers:
            x = layer(x, **arguments)
        return x


@dataclass(frozen=True)
class _Trainer:
    """Blocks of microbatches. All microbatches are rows of the same random inputs, made once for the capacity."""

    stack: nn.Module
    sets: list[Inputs]
    problem: Problem
    session: Session

    def block(self, counts: Sequence[int]) -> float:
        """Collective: seconds of forward and backward at ``counts``, to the end of the device's work."""
        self.stack.zero_grad()
        arguments = [self._microbatch(index, tokens) for index, tokens in enumerate(counts)]
        self._synchronize()
        dist.barrier()
        began = time.perf_counter()
        for inputs in arguments:
            self.stack(inputs.x, **inputs.arguments).backward(inputs.grad)
        self._synchronize()
        return time.perf_counter() - began

    def _microbatch(self, index: int, tokens: int) -> Inputs:
        full = self.sets[index % len(self.sets)]
        rows = tokens // self.session.group.world_size
        problem = dataclasses.replace(self.problem, tokens=tokens)
        arguments = problem.arguments(self.session.device, full.arguments["rotary_pos_emb"])
        return Inputs(full.x.detach()[:rows].requires_grad_(), full.grad[:rows], arguments)

    def _synchronize(self) -> None:
        if self.session.device.type == "cuda":
            torch.cuda.synchronize()


def _counters(device: torch.device) -> Counters:
    cuda = device.type == "cuda"
    return Counters(
        specializations=to.specializations(),
        symmetric_allocations=to.symmetric_allocations(),
        device_allocations=torch.cuda.memory_stats(device)["num_device_alloc"] if cuda else 0,
        peak_bytes=torch.cuda.max_memory_allocated(device) if cuda else 0,
    )


def measure(problem: Problem, session: Session, num_layers: int, microbatches: int, method: str) -> Row:
    """Collective: one model; ``problem.tokens`` is the capacity."""
    world_size = session.group.world_size
    layers = [by_methods(build_layer(problem, session), method, method) for _ in range(num_layers)]
    sets = [make_inputs(problem, session, index) for index in range(NUM_SETS)]
    stack = Stack(layers)
    errors = check(session, problem, {method: lambda: forward_backward(stack, sets[0])}, reference(stack, sets[0]))
    trainer = _Trainer(stack, sets, problem, session)

    settings = session.settings
    blocks = settings.warmup + settings.rounds
    drawn = draw_counts(blocks * microbatches, problem.max_tokens, world_size, settings.seed)
    fixed_tokens = mean_count(drawn, world_size)
    order = random.Random(settings.seed)
    rates: dict[str, list[float]] = {name: [] for name in (FIXED, RANDOM, PADDED)}
    before = _counters(session.device)
    for turn in range(blocks):
        if turn == settings.warmup:
            before = _counters(session.device)
        counts = drawn[turn * microbatches : (turn + 1) * microbatches]
        for name in order.sample(sorted(rates), len(rates)):
            padded = {FIXED: [fixed_tokens] * microbatches, PADDED: [problem.max_tokens] * microbatches}
            elapsed = trainer.block(padded.get(name, counts))
            tokens = fixed_tokens * microbatches if name == FIXED else sum(counts)
            if turn >= settings.warmup:
                rates[name].append(tokens / elapsed)
    session.group.check()
    everyone = session.group.all_gather_object({name: statistics.median(found) for name, found in rates.items()})
    return Row(
        model=problem.model,
        layers=num_layers,
        method=method,
        capacity=problem.max_tokens,
        document=problem.document,
        world_size=world_size,
        dtype=str(settings.dtype).removeprefix("torch."),
        microbatches=settings.rounds * microbatches,
        random_tokens=sorted(drawn[settings.warmup * microbatches :]),
        fixed_tokens=fixed_tokens,
        tokens_per_second={name: round(min(found[name] for found in everyone), 1) for name in rates},
        before=before,
        after=_counters(session.device),
        relative_error=errors[method],
    )


def run(session: Session, problems: Sequence[Problem], num_layers: int, microbatches: int, method: str) -> Results:
    """Measure; collective.

    Args:
        session: of this rank; its rounds are blocks.
        problems: a row each, whose ``tokens`` are the capacity.
        num_layers: of the stack.
        microbatches: of a block.
        method: of all products.

    Raises:
        WrongResult: a result or a gradient is not the reference.
    """
    rows = [
        measure(problem, session, num_layers, microbatches, method)
        for problem in session.progress(problems, lambda problem: problem.model)
    ]
    return session.results(
        "train", rows, {"time": "wall clock of a block on the slowest rank, median over blocks; no optimizer"}
    )
