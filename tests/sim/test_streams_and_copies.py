"""Asynchronous streams, events, and the copy engine."""

from __future__ import annotations

import pytest
import torch

from tests.sim import kernels as k
from triton_overlap.comm.backend import Backend, CopyStream
from triton_overlap.comm.backends.sim import SimBackend
from triton_overlap.errors import ClosedError, RaceError
from triton_overlap.sim import World

N = 64


def test_the_backend_keeps_the_protocol() -> None:
    def rank(backend: Backend) -> None:
        assert (backend.name, backend.interpreted, backend.device.type) == ("sim", True, "cpu")
        assert isinstance(backend.copies, CopyStream)
        memory = backend.symmetric_empty(3000, 10.0)
        assert memory.local.shape == (3000,)
        assert memory.local.data_ptr() % 1024 == 0
        assert int(memory.table[backend.rank]) == memory.local.data_ptr()
        assert not memory.local.any()
        assert backend.host_words(3).tolist() == [0, 0, 0]
        assert backend.local_zeros(10).shape == (10,)
        assert backend.all_gather_object({"rank": backend.rank}, 10.0) == [{"rank": 0}, {"rank": 1}]
        backend.close()
        with pytest.raises(ClosedError):
            backend.barrier(1.0)

    World(2, 0).run_backends(rank)


def test_objects_are_copied_between_ranks() -> None:
    def rank(backend: SimBackend) -> int:
        mine = [backend.rank]
        theirs = backend.all_gather_object(mine, 10.0)
        theirs[0].append(9)
        backend.barrier(10.0)
        return len(mine)

    assert World(2, 0).run_backends(rank) == [1, 1]


def test_different_sizes_are_an_error_everywhere() -> None:
    results = World(3, 0).run_backends(
        lambda backend: backend.symmetric_empty(64 + backend.rank // 2, 10.0), return_exceptions=True
    )
    for result in results:
        assert isinstance(result, ValueError)
        assert "[64, 64, 65]" in str(result)


def test_a_side_stream_runs_beside_the_host() -> None:
    def rank(backend: SimBackend) -> bool:
        memory = backend.symmetric_empty(2048, 10.0)
        out = torch.zeros(16)
        with backend.stream():
            # Waits for what this host starts later: only an asynchronous launch can.
            k.receive_kernel[(1,)](memory.table, backend.rank, out, BLOCK=16, SEM="acquire", SCOPE="sys")
        k.send_kernel[(1,)](memory.table, backend.rank, 2.0, BLOCK=16, BARRIER=True, SEM="release", SCOPE="sys")
        backend.synchronize()
        return bool((out == 2.0).all())

    for seed in range(10):
        assert World(2, seed).run_backends(rank) == [True, True]


def test_launches_of_a_side_stream_keep_their_order() -> None:
    def rank(backend: SimBackend) -> list[float]:
        out = torch.zeros(4)
        with backend.stream() as stream:
            k.fill_kernel[(1,)](out, 5.0, 4, BLOCK=4)
            k.add_kernel[(1,)](out, 1.0, BLOCK=4)
        with backend.stream(stream):
            k.add_kernel[(1,)](out, 1.0, BLOCK=4)
        backend.synchronize()
        return out.tolist()

    for seed in range(10):
        assert World(1, seed).run_backends(rank) == [[7.0] * 4]


def ring(backend: SimBackend, end: bool = True, acquire: str = "acquire") -> bool:
    """Each rank copies a block to its right neighbour, whose kernel waits for the flag."""
    memory = backend.symmetric_empty(4096, 10.0)
    copies = backend.copies
    assert copies is not None
    right = (backend.rank + 1) % backend.world_size
    source = torch.arange(N, dtype=torch.float32) + 100 * backend.rank
    copies.begin()
    copies.push(memory, right, 0, source, 1024, 1)
    out = torch.empty(N)
    k.receive_kernel[(1,)](memory.table, backend.rank, out, BLOCK=N, SEM=acquire, SCOPE="sys")
    if end:
        copies.end()
    k.fill_kernel[(1,)](source, 0.0, N, BLOCK=N)
    left = (backend.rank - 1) % backend.world_size
    return torch.equal(out, torch.arange(N, dtype=torch.float32) + 100 * left)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_copies_arrive_before_their_flags(world_size: int) -> None:
    for check_races in (True, False):
        for seed in range(10):
            assert all(World(world_size, seed, check_races=check_races).run_backends(ring))


def test_reusing_a_source_before_end_is_a_race() -> None:
    for seed in range(5):
        with pytest.raises(RaceError, match=r"fill_kernel|copy to rank"):
            World(2, seed).run_backends(lambda backend: ring(backend, end=False))


def test_reading_a_copy_without_acquire_is_a_race() -> None:
    with pytest.raises(RaceError, match=r"after the store by rank[01] stream1 copy to rank[01] at sim/test_streams"):
        World(2, 0).run_backends(lambda backend: ring(backend, acquire="relaxed"))


def test_copies_run_in_the_order_they_were_pushed() -> None:
    def rank(backend: SimBackend) -> float:
        memory = backend.symmetric_empty(4096, 10.0)
        assert backend.copies is not None
        out = torch.empty(N)
        if backend.rank == 0:
            backend.copies.begin()
            for value in range(3):
                # Only the last one raises the flag that the receiver looks at.
                backend.copies.push(memory, 1, 0, torch.full((N,), float(value)), 1024 if value == 2 else 2048, 1)
            backend.copies.end()
        else:
            k.receive_kernel[(1,)](memory.table, 1, out, BLOCK=N, SEM="acquire", SCOPE="sys")
        return float(out[-1])

    for seed in range(10):
        assert World(2, seed).run_backends(rank)[1] == 2.0


def test_an_empty_copy_still_raises_its_flag() -> None:
    def rank(backend: SimBackend) -> None:
        memory = backend.symmetric_empty(4096, 10.0)
        assert backend.copies is not None
        backend.copies.begin()
        backend.copies.push(memory, 1 - backend.rank, 0, torch.empty(0), 1024, 1)
        k.receive_kernel[(1,)](memory.table, backend.rank, torch.empty(16), BLOCK=16, SEM="acquire", SCOPE="sys")
        backend.copies.end()

    for seed in range(5):
        World(2, seed).run_backends(rank)


def test_copies_outside_the_memory_are_refused() -> None:
    def rank(backend: SimBackend) -> None:
        memory = backend.symmetric_empty(128, 10.0)
        copies = backend.copies
        assert copies is not None
        for offset, size, flag in ((100, 16, 0), (-4, 4, 0), (0, 4, 126), (0, 4, 128)):
            with pytest.raises(ValueError, match=r"outside|no multiple"):
                copies.push(memory, 0, offset, torch.zeros(size), flag, 1)
        with pytest.raises(ValueError, match="contiguous"):
            copies.push(memory, 0, 0, torch.zeros(4, 4).t(), 64, 1)

    World(1, 0).run_backends(rank)


def test_copies_wait_for_the_stream_they_began_on() -> None:
    def rank(backend: SimBackend) -> list[float]:
        memory = backend.symmetric_empty(4096, 10.0)
        copies = backend.copies
        assert copies is not None
        source, out = torch.zeros(16), torch.empty(16)
        with backend.stream():
            k.fill_kernel[(1,)](source, 8.0, 16, BLOCK=16)
            copies.begin()
            copies.push(memory, 1 - backend.rank, 0, source, 1024, 1)
            k.receive_kernel[(1,)](memory.table, backend.rank, out, BLOCK=16, SEM="acquire", SCOPE="sys")
            copies.end()
            k.fill_kernel[(1,)](source, 0.0, 16, BLOCK=16)
        backend.synchronize()
        return out.tolist()

    for seed in range(10):
        assert World(2, seed).run_backends(rank) == [[8.0] * 16] * 2
