"""What a call leaves alone once its group has failed, and operands that lie oddly in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import triton_overlap as to
from tests.distributed import run_ranks
from triton_overlap.comm.group import Group
from triton_overlap.comm.user_buffers import UserBuffer
from triton_overlap.kernels import all_gather, all_gather_matmul, matmul_reduce_scatter, reduce_scatter
from triton_overlap.kernels.config import TileConfig

HIDDEN, ROWS = 32, 24
SMALL = TileConfig(16, 16, 32, 2, 256, num_stages=1, num_warps=1, descriptors=True)
CALLS: dict[str, Callable[[UserBuffer], object]] = {
    "all_gather_matmul": lambda buffer: all_gather_matmul.launch(
        buffer, torch.ones(ROWS, HIDDEN), torch.ones(HIDDEN, 16), config=SMALL
    ),
    "matmul_reduce_scatter": lambda buffer: matmul_reduce_scatter.launch(
        buffer, torch.ones(2 * ROWS, 16), torch.ones(16, HIDDEN), config=SMALL
    ),
    "all_gather": lambda buffer: all_gather.launch(buffer, torch.ones(ROWS, HIDDEN), config=SMALL),
    "reduce_scatter": lambda buffer: reduce_scatter.launch(buffer, torch.ones(2 * ROWS, HIDDEN), config=SMALL),
}


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("seed", range(3))
def test_a_call_behind_a_failed_one_touches_no_peer(operation: str, seed: int) -> None:
    """Rank 1 never comes. Rank 0's call fails, and one that its host had enqueued behind it must store nothing."""

    def rank(group: Group) -> bool:
        buffer = group.user_buffer(2 * ROWS, HIDDEN, torch.float32)
        if group.rank == 0:
            group.check_mode = "async"
            group._raise_failure = lambda: None  # type: ignore[method-assign]  # as a host that is far ahead
            for _ in range(2):
                CALLS[operation](buffer)
        group.backend.barrier(1e6)
        second = 2 % 2  # the slot of the second call
        words = buffer.memory.local[buffer.layout.headers :].view(torch.int64)
        headers = words[second * 2 * 4 :][: 2 * 4]
        flags = buffer.memory.local[buffer.layout.flag_offset(second, 0, 0) :].view(torch.int32)
        flags = flags[: 2 * buffer.layout.flags_per_source]
        untouched = not headers.any() and not flags.any() and not buffer.slot(second).any()
        first = buffer.memory.local[buffer.layout.headers :].view(torch.int64)[2 * 4 :][: 2 * 4]
        return bool(untouched) and (group.rank == 0 or bool(first.any()))

    assert to.sim.World(2, seed=seed, num_programs=3).run(rank) == [True, True]


def _bias_views() -> None:
    group = to.init_group(timeout_s=20)
    buffer = group.user_buffer(8, HIDDEN, torch.float32)
    x, b = torch.randn(8, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    for bias in (torch.arange(2.0 * HIDDEN)[::2], torch.full((1,), 3.0).expand(HIDDEN)):
        for operation in (all_gather_matmul, matmul_reduce_scatter):
            torch.testing.assert_close(operation.launch(buffer, x, b, bias), x @ b + bias)
    group.close()


def test_a_bias_may_be_a_view() -> None:
    run_ranks(1, _bias_views)
