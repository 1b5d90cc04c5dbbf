"""What kernels record of their tasks, and that it changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.distributed import run_ranks
from tests.kernels.compiling import OneRankOfMany, compiled
from triton_overlap.comm.group import Group
from triton_overlap.comm.user_buffers import UserBuffer
from triton_overlap.kernels import all_gather_matmul, matmul_reduce_scatter
from triton_overlap.kernels.timeline import KINDS, recording

TOKENS, K, N = 48, 32, 24


def launch(operation: str, buffer: UserBuffer, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if operation == "all_gather_matmul":
        x = torch.randn(TOKENS // world_size, K, generator=generator)
        return all_gather_matmul.launch(buffer, x, torch.randn(K, N, generator=generator))
    a = torch.randn(TOKENS, N, generator=generator)
    return matmul_reduce_scatter.launch(buffer, a, torch.randn(N, K, generator=generator))


def recorded(operation: str) -> tuple[bool, list[list[int]], int]:
    group = to.init_group()
    buffer = group.user_buffer(TOKENS, K, torch.float32)
    plain = launch(operation, buffer, group.rank, group.world_size)
    with recording(buffer) as found:
        out = launch(operation, buffer, group.rank, group.world_size)
    launch(operation, buffer, group.rank, group.world_size)
    rows: list[list[int]] = [row for each in found for row in each.rows.tolist()]
    programs = group.backend.num_programs
    group.close()
    return torch.equal(out, plain), rows, programs


# One tile a chunk: the interpreter's are as large as the matrix.
EXPECTED = {
    "all_gather_matmul": {"own tile": 1, "peer tile": 1, "push": 1},
    "matmul_reduce_scatter": {"own tile": 1, "peer tile": 1, "push": 1},
}


@pytest.mark.parametrize("operation", EXPECTED)
def test_every_task_of_one_call_is_recorded(operation: str) -> None:
    for same, rows, programs in run_ranks(2, recorded, operation):
        assert same
        assert all(began > 0 for began, *_ in rows), "a task without a record, or rows for too many"
        assert Counter(KINDS[kind] for *_, kind, _ in rows) == EXPECTED[operation]
        for began, waited, went_on, ended, _, program in rows:
            assert began <= waited <= went_on <= ended
            assert 0 <= program < programs


def drive_recording() -> None:
    buffer = Group(OneRankOfMany(2)).user_buffer(2048, 512, torch.bfloat16)
    weight = torch.zeros(256, 512, dtype=torch.bfloat16)
    with recording(buffer) as found:
        for rows in (1, 64, 1000):
            all_gather_matmul.launch(buffer, torch.zeros(rows, 512, dtype=torch.bfloat16), weight.t())
            matmul_reduce_scatter.launch(buffer, torch.zeros(2 * rows, 256, dtype=torch.bfloat16), weight)
    assert [len(each.rows) for each in found] == [3, 6, 3, 6, 24, 48]


@pytest.mark.long
def test_recording_kernels_compile_once_and_spill_nothing() -> None:
    compiled(drive_recording).check({"all_gather_matmul_kernel": 1, "matmul_reduce_scatter_kernel": 1})


def test_recordings_do_not_nest() -> None:
    group = to.init_group()
    buffer = group.user_buffer(TOKENS, K, torch.float32)
    with recording(buffer), pytest.raises(AssertionError, match="one recording at a time"), recording(buffer):
        pass
    with recording(buffer) as found:
        pass
    assert found == []
    group.close()
