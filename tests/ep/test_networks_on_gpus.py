"""Expert buffers on GPUs whose scale-out peers are reached by puts of each network: against the twin at small sizes,
and against the direct network bit by bit at larger ones, eager and in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.distributed import Ranks, close_pools
from tests.ops import ep_bodies

#: Many small puts: up to four parts of up to three of them.
MANY_PUTS: dict[str, Any] = {"min_tokens_per_part": 1, "num_sub_parts": 3}


def against_the_twin(backend: str, network: str, scale_up: int, kernel: str) -> None:
    """Every routing, forward and backward."""
    group = to.init_group(backend=backend, timeout_s=60, check="sync")
    buffer = ep_bodies.make_buffer(
        group, torch.bfloat16, network=network, num_scale_up=scale_up, kernel=kernel, **MANY_PUTS
    )
    for expand in (False, True):
        for routing in ep_bodies.ROUTINGS.values():
            problem = ep_bodies.Round(buffer, routing, expand, biases=1)
            for cpu_sync in (True, False):
                problem.check(cpu_sync=cpu_sync)
    group.close()


@dataclass(frozen=True)
class Step:
    """A dispatch and a combine of a buffer."""

    buffer: to.ExpertBuffer

    def __call__(self, x: Tensor, idx: Tensor, weights: Tensor) -> list[Tensor]:
        """Rows, their experts and weights, with zeros past what came in, and the sum that comes back."""
        rows, experts, own, handle, _ = self.buffer.dispatch(x, idx, weights, cpu_sync=False)
        assert isinstance(rows, Tensor)
        assert own is not None
        there = torch.arange(rows.shape[0], device=rows.device)[:, None] < handle.view("prefix")[-1]
        out, _, _ = self.buffer.combine(rows * (1 + self.buffer.group.rank), handle)
        return [torch.where(there, rows, 0), torch.where(there, experts, 0), torch.where(there, own, 0), out]


def against_the_direct_network(backend: str, network: str, scale_up: int, calls: int) -> None:
    """Back-to-back calls without any host barrier, then replays of a graph; all bits are those of puts by stores."""
    group = to.init_group(backend=backend, timeout_s=60, check="async")
    tokens, hidden, topk, experts = 96, 1024, 4, 4 * group.world_size
    buffers = [
        to.ExpertBuffer(
            group,
            num_max_tokens_per_rank=tokens,
            hidden=hidden,
            num_topk=topk,
            num_experts=experts,
            num_scale_up=scale_up,
            network=name,
            num_sms=4,
            channels_per_sm=2,
            **MANY_PUTS,
        )
        for name in ("direct", network)
    ]
    direct, other = (Step(buffer) for buffer in buffers)
    generator = torch.Generator(group.device).manual_seed(group.rank)

    def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {"generator": generator, "device": group.device}
        scores = torch.rand(count, experts, **options)
        idx = scores.topk(topk, dim=1).indices
        idx[torch.rand(count, topk, **options) < 0.2] = -1
        return torch.randn(count, hidden, **options).bfloat16(), idx, torch.rand(count, topk, **options)

    given = [inputs((tokens, 0, 1, 57)[(call + group.rank) % 4]) for call in range(calls)]
    found = [other(*each) for each in given]
    for index, each in enumerate(given):
        for mine, theirs in zip(found[index], direct(*each), strict=True):
            assert torch.equal(mine, theirs), f"call {index}"

    place = inputs(tokens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other(*place)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = other(*place)
    for replay in range(calls):
        for target, source in zip(place, inputs(tokens), strict=True):
            target.copy_(source)
        graph.replay()
        for mine, theirs in zip(results, direct(*place), strict=True):
            assert torch.equal(mine, theirs), f"replay {replay}"
    group.check()
    group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("network, kernel", [("simulated", "unordered"), ("simulated_strong", "ordered")])
def test_shuffled_puts_give_what_the_twin_gives(gpu_ranks: Ranks, network: str, kernel: str) -> None:
    gpu_ranks.run(against_the_twin, "cuda", network, gpu_ranks.world_size // 2, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["simulated", "simulated_strong"])
def test_shuffled_puts_give_what_stores_give(gpu_ranks: Ranks, network: str) -> None:
    gpu_ranks.run(against_the_direct_network, "cuda", network, 1, 12)


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Processes that have allocated no symmetric memory yet, and whose memory stays theirs alone."""
    close_pools()
    yield Ranks(2, "cuda")
    close_pools()


@pytest.mark.gpu(2)
def test_puts_of_nvshmem(fresh_ranks: Ranks) -> None:
    fresh_ranks.run(against_the_twin, "nvshmem", "nvshmem", 1, "unordered")
    fresh_ranks.run(against_the_direct_network, "nvshmem", "nvshmem", 1, 12)
