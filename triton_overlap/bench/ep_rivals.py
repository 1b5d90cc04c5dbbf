"""How expert-parallel calls are made: by this library, and by all-to-all collectives of torch.distributed (on a GPU:
NCCL) with the permutations that they need. Both give rows in the order of source rank and token.

Calls of this library
    eager           counts on the host: the call waits for the device
    device_counts   ``cpu_sync=False``: nothing waits, tensors have the largest size
    cached          with the handle of an earlier dispatch, no counts and no weights
    graph           ``device_counts`` as a CUDA graph

Calls of the all-to-all
    all_to_all         counts exchanged and read by the host, as its sizes are the host's
    all_to_all_cached  with the sizes of an earlier call
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import triton_overlap as to
from triton_overlap.bench.ep_problems import FP8, EpOperation, EpProblem, Inputs, Received

#: A call on the input set of that index.
Run = Callable[[int], Any]

#: The all-to-all that a call is compared with.
RIVAL_OF = {
    "eager": "all_to_all",
    "device_counts": "all_to_all",
    "graph": "all_to_all",
    "cached": "all_to_all_cached",
}


@dataclass(frozen=True)
class Work:
    """What one rank's calls start from.

    Attributes:
        problem: the size.
        rank: whose inputs they are.
        sets: inputs, used in turns.
        ys: for each set, [R, H], what a combine takes.
    """

    problem: EpProblem
    rank: int
    sets: list[Inputs]
    ys: list[Tensor]


class Rival(Protocol):
    """One way to make the calls."""

    def calls(self, operation: EpOperation, work: Work) -> dict[str, Run]:
        """By name. A dispatch gives a :class:`Received`, whose rows may be more than came in, a combine [T, H].
        Collective."""


class ThisLibrary:
    """Calls on ``buffer``."""

    def __init__(self, buffer: to.ExpertBuffer) -> None:
        self._buffer = buffer

    def calls(self, operation: EpOperation, work: Work) -> dict[str, Run]:
        @functools.cache
        def handle(index: int) -> to.EpHandle:
            return self._buffer.dispatch(work.sets[index].x, work.sets[index].topk_idx)[3]

        def combine(index: int) -> Tensor:
            return self._buffer.combine(work.ys[index], handle(index))[0]

        def dispatch(index: int, cpu_sync: bool) -> Received:
            given = work.sets[index]
            rows = rows_of(given, operation)
            return received(self._buffer.dispatch(rows, given.topk_idx, given.topk_weights, cpu_sync=cpu_sync))

        if operation == EpOperation.COMBINE:
            for index in range(len(work.sets)):
                handle(index)  # not in a capture
            return self._with_graph({"eager": combine}, "eager", work)
        calls: dict[str, Run] = {
            "eager": lambda index: dispatch(index, True),
            "device_counts": lambda index: dispatch(index, False),
            "cached": lambda index: received(
                self._buffer.dispatch(rows_of(work.sets[index], operation), handle=handle(index))
            ),
        }
        return self._with_graph(calls, "device_counts", work)

    def _with_graph(self, calls: dict[str, Run], name: str, work: Work) -> dict[str, Run]:
        """``calls``, and on a GPU the one of that name as graphs, one for each input set."""
        if self._buffer.group.device.type == "cuda":
            calls["graph"] = captured(calls[name], len(work.sets))
        return calls


def rows_of(given: Inputs, operation: EpOperation) -> Tensor | tuple[Tensor, Tensor]:
    """What a dispatch sends."""
    return (given.fp8, given.scales) if operation == EpOperation.DISPATCH_FP8 else given.x


def received(found: tuple[Any, ...]) -> Received:
    """Of what ``ExpertBuffer.dispatch`` returned."""
    rows, topk_idx, topk_weights = found[:3]
    x, scales = rows if isinstance(rows, tuple) else (rows, None)
    return Received(x, topk_idx, topk_weights, scales)


def captured(run: Run, num_sets: int) -> Run:
    """``run`` as CUDA graphs, one for each input set. ``run`` itself is called once before, on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
    stream.synchronize()
    graphs, results = [], []
    for index in range(num_sets):
        graph = torch.cuda.CUDAGraph()
        # A process group may have a thread that asks for events.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results.append(run(index))
        graphs.append(graph)

    def replay(index: int) -> Any:
        graphs[index].replay()
        return results[index]

    return replay


@dataclass(frozen=True)
class _Route:
    """Where an all-to-all sends rows.

    Attributes:
        tokens: of each row that is sent, by destination.
        sent, received: rows for each rank and from each.
    """

    tokens: Tensor
    sent: list[int]
    received: list[int]


class AllToAll:
    """``torch.distributed.all_to_all_single``: a token's row once to each rank that hosts an expert of it."""

    def calls(self, operation: EpOperation, work: Work) -> dict[str, Run]:
        routes = [self._route(work.problem, given.topk_idx) for given in work.sets]
        if operation == EpOperation.COMBINE:
            return {"all_to_all": lambda index: self._combine(work, index, routes[index])}

        def counted(index: int) -> Received:
            route = self._route(work.problem, work.sets[index].topk_idx)
            return self._dispatch(work, index, route, operation)

        return {
            "all_to_all": counted,
            "all_to_all_cached": lambda index: self._dispatch(work, index, routes[index], operation),
        }

    def _route(self, problem: EpProblem, topk_idx: Tensor) -> _Route:
        goes = problem.host_of(topk_idx)
        sent = goes.sum(dim=0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        tokens = goes.t().nonzero()[:, 1]
        sizes = torch.stack([sent, received]).tolist()
        return _Route(tokens, *sizes)

    def _dispatch(self, work: Work, index: int, route: _Route, operation: EpOperation) -> Received:
        given, problem = work.sets[index], work.problem
        words = [given.topk_idx.int(), given.topk_weights.view(torch.int32)]
        if operation == EpOperation.DISPATCH_FP8:
            words.append(given.scales.view(torch.int32))
        about = _exchange(torch.cat(words, dim=1)[route.tokens], route.sent, route.received)
        rows = given.fp8.view(torch.uint8) if operation == EpOperation.DISPATCH_FP8 else given.x
        x = _exchange(rows[route.tokens], route.sent, route.received)
        idx, weights, scales = about.split([problem.topk, problem.topk, about.shape[1] - 2 * problem.topk], dim=1)
        experts = problem.experts // problem.world_size
        local = idx.long() - work.rank * experts
        here = (local >= 0) & (local < experts)
        return Received(
            x=x.view(FP8) if operation == EpOperation.DISPATCH_FP8 else x,
            topk_idx=torch.where(here, local, -1),
            topk_weights=torch.where(here, weights.view(torch.float32), 0.0),
            scales=scales.contiguous().view(torch.float32) if operation == EpOperation.DISPATCH_FP8 else None,
        )

    def _combine(self, work: Work, index: int, route: _Route) -> Tensor:
        y = work.ys[index]
        back = _exchange(y, route.received, route.sent)
        out = torch.zeros(work.problem.tokens, work.problem.hidden, device=y.device)
        return out.index_add_(0, route.tokens, back.float()).to(y.dtype)


def _exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """``rows`` to the ranks, by their numbers for each, and what comes from them."""
    found = rows.new_empty(sum(received), rows.shape[1])
    # As bytes, since not every process group knows every dtype.
    dist.all_to_all_single(found.view(torch.uint8), rows.contiguous().view(torch.uint8), received, sent)
    return found
