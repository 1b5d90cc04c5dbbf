"""One rank of the benchmark of token counts in device memory: one graph of a layer's forward and backward, captured at
the capacity, beside the same layer called with each count from the host.

The layer is that of bench/layer.py, by the fused method. All inputs have room for the capacity and stay where they are;
the graph's count is written before it is replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from triton_overlap.bench.layer import (
    LAYER_SLEEP_CYCLES,
    Inputs,
    Problem,
    build_layer,
    check,
    forward_backward,
    make_inputs,
    reference,
)
from triton_overlap.bench.reports.counts import EAGER, GRAPH, UNCAPTURED, Row
from triton_overlap.bench.results import Measurement, Results
from triton_overlap.bench.session import Session
from triton_overlap.timing import Call


class _DeviceCount:
    """A layer on inputs of the full capacity, the first of whose tokens are active.

    Args:
        layer: of this library.
        inputs: for the capacity.
        world_size: ranks that the tokens are split over.

    Attributes:
        inputs: with the arguments that say which tokens are active.
    """

    def __init__(self, layer: nn.Module, inputs: Inputs, world_size: int) -> None:
        device = inputs.x.device
        self._layer = layer
        self._world_size = world_size
        self._tokens = torch.zeros((), dtype=torch.int32, device=device)
        arguments = inputs.arguments | {"active_tokens": self._tokens}
        self._bounds: Tensor = arguments["cu_seqlens_q"]
        self._full_bounds = self._bounds.clone()
        self.inputs = Inputs(inputs.x, inputs.grad, arguments)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: list[Tensor] = []

    def set_count(self, tokens: int) -> None:
        self._tokens.fill_(tokens)
        self._bounds.copy_(self._full_bounds.clamp(max=tokens))

    def step(self) -> list[Tensor]:
        """Forward and backward, as any other call."""
        return forward_backward(self._layer, self.inputs)

    def capture(self) -> None:
        """``replay`` is ``step`` from here on. Collective."""
        self.step()  # compiles, and registers buffers
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = self.step()

    def replay(self) -> list[Tensor]:
        assert self._graph is not None
        self._graph.replay()
        return self._results

    def active(self, results: list[Tensor], tokens: int) -> list[Tensor]:
        """``results`` without the rows of output and input gradient that are not active."""
        rows = tokens // self._world_size
        return [results[0][:rows], results[1][:rows], *results[2:]]


def _rows(session: Session, capacity: Problem, counts: Sequence[int]) -> list[Row]:
    layer = build_layer(capacity, session)
    inputs = make_inputs(capacity, session, 0)
    counted = _DeviceCount(layer, inputs, session.group.world_size)
    counted.set_count(capacity.tokens)
    device_steps: dict[str, Callable[[], list[Tensor]]] = {UNCAPTURED: counted.step}
    if session.device.type == "cuda":
        counted.capture()
        device_steps[GRAPH] = counted.replay
    found = []
    for tokens in session.progress(counts, lambda tokens: f"{capacity.model} T {tokens}"):
        counted.set_count(tokens)
        found.append(_row(session, dataclasses.replace(capacity, tokens=tokens), layer, counted, device_steps))
    return found


def _row(
    session: Session,
    problem: Problem,
    layer: nn.Module,
    counted: _DeviceCount,
    device_steps: dict[str, Callable[[], list[Tensor]]],
) -> Row:
    """Collective: one count, from the host and on the device. The inputs of either are the same numbers."""
    full = counted.inputs
    rows = problem.tokens // session.group.world_size
    own = make_inputs(problem, session, 0)
    inputs = Inputs(full.x.detach()[:rows].requires_grad_(), full.grad[:rows], own.arguments)

    def on_active(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
        return lambda: counted.active(step(), problem.tokens)

    def eager() -> list[Tensor]:
        return forward_backward(layer, inputs)

    steps = {name: on_active(step) for name, step in device_steps.items()} | {EAGER: eager}
    errors = check(session, problem, steps, reference(layer, inputs))

    def call(step: Callable[[], list[Tensor]]) -> Call:
        return lambda _: step()

    calls = {name: call(step) for name, step in (device_steps | {EAGER: eager}).items()}
    timings = session.time(calls, 1, LAYER_SLEEP_CYCLES)
    return Row(
        model=problem.model,
        tokens=problem.tokens,
        capacity=problem.max_tokens,
        document=problem.document,
        world_size=session.group.world_size,
        dtype=str(session.settings.dtype).removeprefix("torch."),
        measurements={name: Measurement(name, timings[name], errors[name]) for name in calls},
    )


def run(session: Session, problems: Sequence[Problem], counts: Sequence[int]) -> Results:
    """Measure; collective.

    Args:
        session: of this rank.
        problems: a layer each, whose ``tokens`` are the capacity that is captured.
        counts: up to it.

    Raises:
        WrongResult: a result or a gradient is not the reference.
    """
    rows = [row for problem in problems for row in _rows(session, problem, counts)]
    return session.results(
        "counts",
        rows,
        {
            "inputs": "normal, one set: a layer's weights are more than a cache holds",
            "time": "forward and backward, median over rounds on the slowest rank; see triton_overlap/timing.py",
            "reference": "float32, torch's products and collectives",
        },
    )
