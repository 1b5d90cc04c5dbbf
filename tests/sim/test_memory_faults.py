"""Addresses that no kernel was given are errors, not crashes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.sim import kernels as k
from triton_overlap.comm.backends.sim import SimBackend
from triton_overlap.errors import MemoryFaultError, RaceError
from triton_overlap.sim import World


def touch(address: int, offset: int = 0, n: int = 8, store: bool = True) -> None:
    k.address_kernel[(1,)](address, offset, n, BLOCK=8, STORE=store)


def fault(rank: object, world_size: int = 1, match: str = "lies in no registered region") -> str:
    with pytest.raises(MemoryFaultError, match=match) as caught:
        World(world_size, 0).run_backends(rank)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("store", [True, False], ids=["store", "load"])
def test_a_wild_address(store: bool) -> None:
    report = fault(lambda backend: touch(1 << 40, store=store))
    assert "rank0 address_kernel#1(0, 0, 0) at sim/kernels.py:" in report
    assert ("store" if store else "load") + " of 4 bytes at 0x10000000000" in report


def test_one_element_past_the_end() -> None:
    def rank(backend: SimBackend, offset: int) -> None:
        touch(backend.local_zeros(64).data_ptr(), offset)

    World(1, 0).run_backends(lambda backend: rank(backend, 8))
    assert "near it lie local" in fault(lambda backend: rank(backend, 9))
    fault(lambda backend: rank(backend, -1))


def test_lanes_that_are_masked_off_do_not_count() -> None:
    World(1, 0).run_backends(lambda backend: touch(1 << 40, n=0))
    World(1, 0).run_backends(lambda backend: touch(backend.local_zeros(16).data_ptr(), n=4))


def test_symmetric_memory_may_be_touched_by_all_and_local_memory_by_its_rank_only() -> None:
    def rank(backend: SimBackend, local: bool) -> None:
        memory = backend.symmetric_empty(64, 10.0)
        addresses = backend.all_gather_object(backend.local_zeros(64).data_ptr() if local else 0, 10.0)
        target = addresses[1] if local else int(memory.table[1])
        if backend.rank == 0:
            touch(target)

    World(2, 0).run_backends(lambda backend: rank(backend, False))
    fault(lambda backend: rank(backend, True), 2, "local memory of another rank")


def test_freed_memory() -> None:
    def rank(backend: SimBackend) -> None:
        memory = backend.symmetric_empty(64, 10.0)
        backend.free(memory)
        touch(int(memory.table[backend.rank]))

    fault(rank, 1, "which was freed")


def test_an_argument_of_an_earlier_launch_is_no_longer_one() -> None:
    def rank(backend: SimBackend) -> None:
        x = torch.zeros(8)
        k.fill_kernel[(1,)](x, 1.0, 8, BLOCK=8)
        touch(x.data_ptr())

    fault(rank, 1, "no argument of this launch")


def test_the_whole_storage_of_an_argument_may_be_touched() -> None:
    def rank(backend: SimBackend) -> list[float]:
        x = torch.zeros(16)
        k.fill_kernel[(1,)](x[4:8], 1.0, 12, BLOCK=16)
        return x.tolist()

    assert World(1, 0).run_backends(rank)[0] == [0.0] * 4 + [1.0] * 12


def test_host_descriptors_count_as_arguments() -> None:
    def rank(backend: SimBackend) -> bool:
        x = torch.zeros(4, 16)
        k.descriptor_fill_kernel[(2,)](TensorDescriptor(x, [4, 16], [16, 1], [2, 16]), 1.0, ROWS=2, COLS=16)
        return bool((x == 1).all())

    assert World(1, 0).run_backends(rank) == [True]


def test_overlapping_storages_of_one_memory_are_one_region() -> None:
    def rank(backend: SimBackend) -> list[float]:
        memory = np.zeros(24, dtype=np.float32)
        low, high = torch.from_numpy(memory[:16]), torch.from_numpy(memory[8:])
        with backend.stream():
            k.fill_kernel[(2,)](low, 1.0, 16, BLOCK=8)
            k.scale_kernel[(2,)](low, high, 3.0, 16, BLOCK=8)
        backend.synchronize()
        return memory.tolist()

    # The second kernel's programs overlap each other's operands: only the check for races may object.
    for seed in range(5):
        with pytest.raises(RaceError):
            World(1, seed).run_backends(rank)
        World(1, seed, check_races=False).run_backends(rank)


def test_two_views_of_one_storage_are_one_region() -> None:
    def rank(backend: SimBackend) -> None:
        x = torch.zeros(32)
        k.scale_kernel[(2,)](x[:8], x[16:24], 2.0, 8, BLOCK=4)
        k.scale_kernel[(2,)](x[16:24], x[:8], 2.0, 8, BLOCK=4)

    World(1, 0).run_backends(rank)
