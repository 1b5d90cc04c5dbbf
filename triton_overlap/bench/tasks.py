"""Timelines of the fused kernels: one call of a problem with its tasks recorded, as a Chrome trace and a picture."""

from __future__ import annotations

from pathlib import Path

from triton_overlap import timeline
from triton_overlap.bench.session import Session
from triton_overlap.kernels.timeline import KINDS, recording
from triton_overlap.problems import Problem
from triton_overlap.tuning import run_method

#: Calls before the one that is kept; they compile the recording kernels, too.
WARMUP = 3


def spans_of(problem: Problem, session: Session, method: str) -> list[timeline.Span]:
    """Collective: the tasks of all ranks in one call. What the copy engine moves is no task of a kernel."""
    group = session.group
    inputs = problem.inputs(group.rank, session.settings.seed, session.device)
    buffer = group.user_buffer(problem.tokens, problem.hidden, problem.dtype)
    with recording(buffer) as found:
        for _ in range(WARMUP + 1):
            found.clear()
            group.barrier()
            run_method(problem, inputs, buffer, method)
            group.check()
    mine = [(recorded.operation, recorded.rows.tolist()) for recorded in found]
    everyone = group.all_gather_object(mine)
    return [
        span
        for rank, launches in enumerate(everyone)
        for operation, rows in launches
        for span in timeline.of_tasks(rank, operation, rows, KINDS)
    ]


def record(problem: Problem, session: Session, folder: Path, method: str) -> None:
    """Collective: write ``OPERATION_T_K_N.json`` and ``.png`` to ``folder``, on rank 0. ``method`` is ``fused``, with
    options or without."""
    spans = spans_of(problem, session, method)
    if session.group.rank != 0:
        return
    name = f"{problem.operation}_{problem.tokens}_{problem.k}_{problem.n}"
    timeline.save(spans, folder / f"{name}.json")
    title = (
        f"{problem.operation}, T {problem.tokens}, K {problem.k}, N {problem.n}, {method}, {session.group.device_name}"
    )
    timeline.draw(spans, folder / f"{name}.png", title=title)
    session.console.print(f"timeline: {folder / name}.json, .png", soft_wrap=True)
