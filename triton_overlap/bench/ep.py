"""One rank of the expert-parallel benchmark: check every result, then time calls in turns.

Two things are measured. *Calls*: dispatch and combine among ranks that reach each other by stores, against an
all-to-all and against what the bytes need. *Variants*: the cut of channels into parts and puts, with every rank a
scale-out rank of its own, so that all rows travel by puts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triton_overlap as to
from triton_overlap.bench.ep_problems import EpOperation, EpProblem, Expected, Received
from triton_overlap.bench.ep_results import Comparison, EpResults, EpRow, Variant
from triton_overlap.bench.ep_rivals import AllToAll, Rival, Run, ThisLibrary, Work
from triton_overlap.bench.ranks import Link, gpus_are_shared, measure_link
from triton_overlap.bench.results import Measurement
from triton_overlap.bench.session import Session
from triton_overlap.problems import TOLERANCE, cache_bytes_of
from triton_overlap.reference import relative_error

#: min_tokens_per_part and num_sub_parts of the variants; the first one is the control.
VARIANTS = ((1, 1), (1, 2), (15, 1), (15, 2))
CALLS, COMPARED = "calls", "variants"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        problems: as ``EpProblem.parse`` reads them.
        parts: of the benchmark: ``"calls"``, ``"variants"``.
        network, num_sms, channels_per_sm: of the variants.
        repetitions: of the variants, each of as many rounds as the calls have.
    """

    problems: list[str]
    parts: list[str]
    network: str
    num_sms: int
    channels_per_sm: int
    repetitions: int


@dataclass(frozen=True)
class Prepared:
    """Inputs of a problem on this rank, and what calls on them must give."""

    work: Work
    expected: list[Expected]

    @classmethod
    def of(cls, problem: EpProblem, group: to.Group, seed: int) -> Prepared:
        device = group.device
        seeds = range(seed, seed + problem.num_input_sets(cache_bytes_of(device)))
        expected = [Expected.of(problem, group.rank, each, device) for each in seeds]
        sets = [problem.inputs(group.rank, each, device) for each in seeds]
        return cls(Work(problem, group.rank, sets, [found.y for found in expected]), expected)


@dataclass(frozen=True)
class Bench:
    """What one rank keeps during a run."""

    session: Session
    plan: Plan
    link: Link

    @property
    def group(self) -> to.Group:
        return self.session.group

    def measure_calls(self, prepared: Prepared) -> list[EpRow]:
        """A row for each operation. Collective."""
        problem = prepared.work.problem
        unavailable: dict[str, str] = {}
        others: list[Rival] = []
        if gpus_are_shared(self.group):
            unavailable["all_to_all"] = "the ranks share GPUs, which NCCL refuses"
        else:
            others.append(AllToAll())
        if self.group.device.type != "cuda":
            unavailable["graph"] = "CUDA graphs need a GPU"
        rows = []
        with self._buffer(problem, use_fp8_dispatch=True) as buffer:
            for operation in EpOperation:
                calls: dict[str, Run] = {}
                for rival in (ThisLibrary(buffer), *others):
                    calls.update(rival.calls(operation, prepared.work))
                errors = self.check(operation, calls, prepared)
                timings = self.session.time(calls, len(prepared.work.sets))
                moved = self._moved_bytes(operation, prepared)
                rows.append(
                    EpRow(
                        operation=operation.value,
                        tokens=problem.tokens,
                        hidden=problem.hidden,
                        topk=problem.topk,
                        experts=problem.experts,
                        world_size=problem.world_size,
                        moved_bytes=moved,
                        bound_ms=self.link.time_ms(moved),
                        measurements={name: Measurement(name, timings[name], errors[name]) for name in calls},
                        unavailable=unavailable,
                    )
                )
        return rows

    def measure_variants(self, prepared: Prepared) -> list[Comparison]:
        """The variants of dispatch and of combine. Collective."""
        problem = prepared.work.problem
        comparisons = []
        with self._variants(problem) as buffers:
            for operation, call in ((EpOperation.DISPATCH, "device_counts"), (EpOperation.COMBINE, "eager")):
                calls = {
                    str(index): ThisLibrary(buffer).calls(operation, prepared.work)[call]
                    for index, buffer in enumerate(buffers)
                }
                self.check(operation, calls, prepared)
                means: dict[str, list[float]] = {name: [] for name in calls}
                for repetition in range(self.plan.repetitions):
                    found = self.session.time_here(calls, len(prepared.work.sets), repetition=repetition)
                    of_ranks = self.group.all_gather_object({name: each.median_ms for name, each in found.items()})
                    for name, collected in means.items():
                        collected.append(sum(medians[name] for medians in of_ranks) / len(of_ranks))
                comparisons.append(
                    Comparison(
                        operation=operation.value,
                        tokens=problem.tokens,
                        hidden=problem.hidden,
                        topk=problem.topk,
                        experts=problem.experts,
                        topology=f"{problem.world_size}x1",
                        network=self.plan.network,
                        channels=buffers[0].layout.geometry.num_channels,
                        variants=[
                            Variant(*knobs, buffer.layout.geometry.sub_part_sizes, means[str(index)])
                            for index, (knobs, buffer) in enumerate(zip(VARIANTS, buffers, strict=True))
                        ],
                    )
                )
        return comparisons

    def check(self, operation: EpOperation, calls: dict[str, Run], prepared: Prepared) -> dict[str, float]:
        """Each call's largest error over all ranks and input sets.

        Raises:
            WrongResult: on every rank, where a dispatch is not exact or a combine's error is too large.
        """
        worst = dict.fromkeys(calls, 0.0)
        for index, expected in enumerate(prepared.expected):
            for name, run in calls.items():
                leave_nan(prepared.work.problem, expected)
                worst[name] = max(worst[name], error_of(operation, run(index), expected, prepared.work.problem))
        tolerance = TOLERANCE[torch.bfloat16] if operation == EpOperation.COMBINE else 0.0
        return self.session.check(f"{operation.value}, {prepared.work.problem}", worst, tolerance)

    def _moved_bytes(self, operation: EpOperation, prepared: Prepared) -> float:
        problem, seed = prepared.work.problem, self.session.settings.seed
        rows = [
            problem.rows_moved(self.group.rank, seed + index, operation, self.group.device)
            for index in range(len(prepared.work.sets))
        ]
        mean = sum(rows) / len(rows) * problem.row_bytes(operation)
        return max(self.group.all_gather_object(mean))

    @contextmanager
    def _buffer(self, problem: EpProblem, **settings: Any) -> Iterator[to.ExpertBuffer]:
        buffer = to.ExpertBuffer(
            self.group,
            num_max_tokens_per_rank=problem.tokens,
            hidden=problem.hidden,
            num_topk=problem.topk,
            num_experts=problem.experts,
            **settings,
        )
        yield buffer
        # Its memory goes: no rank may be in a call.
        self.group.check()
        self.group.barrier()
        buffer.close()

    @contextmanager
    def _variants(self, problem: EpProblem, chosen: tuple[tuple[int, int], ...] = VARIANTS) -> Iterator[list[Any]]:
        """A buffer for each of them."""
        if not chosen:
            yield []
            return
        (min_tokens_per_part, num_sub_parts), *others = chosen
        settings = {
            "num_scale_up": 1,
            "network": self.plan.network,
            "num_sms": self.plan.num_sms,
            "channels_per_sm": self.plan.channels_per_sm,
            "min_tokens_per_part": min_tokens_per_part,
            "num_sub_parts": num_sub_parts,
        }
        with self._buffer(problem, **settings) as buffer, self._variants(problem, tuple(others)) as later:
            yield [buffer, *later]


def leave_nan(problem: EpProblem, expected: Expected) -> None:
    """Leave NaN in the memory that the next result will probably get from the allocator: a call that stores nothing
    must not find what an earlier one stored."""
    x = expected.dispatch.x
    for rows in (problem.tokens, x.shape[0], problem.world_size * problem.tokens):
        for num_bytes in (problem.hidden, 2 * problem.hidden):
            torch.full((rows, num_bytes), 255, dtype=torch.uint8, device=x.device)  # NaN in both dtypes


def error_of(operation: EpOperation, found: Received | Tensor, expected: Expected, problem: EpProblem) -> float:
    """Relative error of a combine; 0 for a dispatch that is exact, and infinity for another."""
    if operation == EpOperation.COMBINE:
        assert isinstance(found, Tensor)
        return relative_error(found, expected.combine)
    assert isinstance(found, Received)
    right = expected.dispatch_fp8 if operation == EpOperation.DISPATCH_FP8 else expected.dispatch
    rows = right.x.shape[0]
    if found.x.shape[0] not in (rows, problem.world_size * problem.tokens):
        return float("inf")
    pairs = [(found.x, right.x), (found.topk_idx, right.topk_idx), (found.scales, right.scales)]
    if found.topk_weights is not None:
        pairs.append((found.topk_weights, right.topk_weights))
    return 0.0 if all(_same_bits(mine, theirs) for mine, theirs in pairs) else float("inf")


def _same_bits(found: Tensor | None, expected: Tensor | None) -> bool:
    """Of the rows that are expected."""
    if found is None or expected is None:
        return found is expected
    rows = found[: expected.shape[0]].contiguous()
    return rows.dtype == expected.dtype and torch.equal(rows.view(torch.uint8), expected.contiguous().view(torch.uint8))


def run(session: Session, plan: Plan) -> EpResults:
    """Measure; collective.

    Raises:
        WrongResult: a result is not the reference.
        ValueError: a problem that cannot be.
    """
    group = session.group
    problems = [EpProblem.parse(text, group.world_size) for text in plan.problems]
    link = measure_link(group)
    bench = Bench(session, plan, link)
    rows: list[EpRow] = []
    comparisons: list[Comparison] = []
    parts = plan.parts
    if COMPARED in parts and group.world_size == 1:
        session.console.print("no variants: one rank sends nothing by puts")
        parts = [part for part in parts if part != COMPARED]
    steps = [(problem, part) for problem in problems for part in parts]
    for problem, part in session.progress(steps, lambda step: f"T {step[0].tokens} x {step[0].hidden}, {step[1]}"):
        if part == parts[0]:
            prepared = Prepared.of(problem, group, session.settings.seed)
        if part == CALLS:
            rows += bench.measure_calls(prepared)
        else:
            comparisons += bench.measure_variants(prepared)
    method = {
        "ranks": group.world_size,
        "repetitions": plan.repetitions,
        "inputs": "normal rows, uniform routings, in turns over sets larger than twice the L2 cache",
        "time": "median over rounds on the slowest rank, variants: its mean over ranks; see triton_overlap/timing.py",
        "gpus_are_shared": gpus_are_shared(group),
        "over": link.name,
        "gbps": link.gbps,
    }
    return EpResults(rows=rows, comparisons=comparisons, **session.record(method))
