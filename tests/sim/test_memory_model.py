"""Late stores, late loads, and what orders them: asked with small kernels, without the checker unless said."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.sim import kernels as k
from triton_overlap.comm.backends.sim import SimBackend
from triton_overlap.errors import RaceError
from triton_overlap.sim import World
from triton_overlap.sim.memory import Piece, StoreBuffer, WeakMemory

BLOCK = 16
SEEDS = range(20)


def pass_message(
    barrier: bool = True, release: str = "release", acquire: str = "acquire", scope: str = "sys"
) -> list[torch.Tensor]:
    """What rank 1 receives from rank 0, one result a seed, without the checker."""

    def rank(backend: SimBackend) -> torch.Tensor:
        memory = backend.symmetric_empty(2048, 10.0)
        out = torch.full((BLOCK,), -1.0)
        if backend.rank == 0:
            k.send_kernel[(1,)](memory.table, 1, 3.0, BLOCK=BLOCK, BARRIER=barrier, SEM=release, SCOPE=scope)
        else:
            k.receive_kernel[(1,)](memory.table, 1, out, BLOCK=BLOCK, SEM=acquire, SCOPE=scope)
        return out

    return [World(2, seed, check_races=False).run_backends(rank)[1] for seed in SEEDS]


def test_release_and_acquire_deliver_the_whole_message() -> None:
    for out in pass_message():
        assert (out == 3.0).all()


@pytest.mark.parametrize(
    "fault",
    [{"barrier": False}, {"release": "relaxed"}, {"acquire": "relaxed"}, {"scope": "cta"}],
    ids=["no barrier", "no release", "no acquire", "cta scope"],
)
def test_without_order_parts_of_the_message_are_late(fault: dict[str, object]) -> None:
    outs = pass_message(**fault)  # type: ignore[arg-type]
    late = [out for out in outs if (out != 3.0).any()]
    assert len(late) >= 3
    assert all(((out == 3.0) | (out == 0.0)).all() for out in outs)
    torn = [out for out in late if (out == 3.0).any()]
    assert torn, "a store lands in pieces"


def test_a_program_sees_its_own_stores_in_order() -> None:
    def rank(backend: SimBackend) -> torch.Tensor:
        memory = backend.symmetric_empty(1024, 10.0)
        out = torch.empty(BLOCK)
        k.own_stores_kernel[(1,)](memory.table, 1 - backend.rank, out, BLOCK=BLOCK)
        backend.barrier(10.0)
        return torch.cat([out, memory.local.view(torch.float32)[:BLOCK]])

    expected = torch.tensor([2.0, 1.0] * (BLOCK // 2))
    for seed in SEEDS:
        for out in World(2, seed, check_races=False).run_backends(rank):
            # Read back by the program itself, and landed in order at the end of the launch.
            assert torch.equal(out, torch.cat([expected, expected]))


def test_the_end_of_a_launch_lands_everything() -> None:
    def rank(backend: SimBackend) -> bool:
        memory = backend.symmetric_empty(1024, 10.0)
        k.write_kernel[(1,)](memory.table, 1 - backend.rank, 4.0, BLOCK=BLOCK)
        backend.barrier(10.0)
        return bool((memory.local.view(torch.float32)[:BLOCK] == 4.0).all())

    for seed in SEEDS:
        assert World(2, seed).run_backends(rank) == [True, True]


def test_a_release_covers_a_descriptor_store_only_after_a_wait() -> None:
    def rank(backend: SimBackend, wait: bool = False) -> torch.Tensor:
        memory = backend.symmetric_empty(2048, 10.0)
        out = torch.full((BLOCK,), -1.0)
        if backend.rank == 0:
            own = memory.local.view(torch.float32)[:BLOCK].view(1, BLOCK)
            desc = TensorDescriptor(own, [1, BLOCK], [BLOCK, 1], [1, BLOCK])
            k.descriptor_send_kernel[(1,)](desc, memory.table, 1, COLS=BLOCK, WAIT=wait)
        else:
            # Rank 1 pulls what rank 0 announced.
            k.receive_from_kernel[(1,)](memory.table, 1, 0, out, BLOCK=BLOCK)
        return out

    outs = [World(2, seed, check_races=False).run_backends(rank)[1] for seed in SEEDS]
    assert any((out != 7.0).any() for out in outs)
    with pytest.raises(RaceError, match=r"not ordered after the descriptor store by rank0 descriptor_send_kernel"):
        World(2, 0).run_backends(rank)
    for seed in SEEDS:
        for check_races in (True, False):
            world = World(2, seed, check_races=check_races)
            assert (world.run_backends(lambda backend: rank(backend, True))[1] == 7.0).all()


def test_the_next_launch_sees_a_descriptor_store() -> None:
    def rank(backend: SimBackend) -> torch.Tensor:
        x = torch.zeros(4, BLOCK)
        desc = TensorDescriptor(x, [4, BLOCK], [BLOCK, 1], [2, BLOCK])
        k.descriptor_fill_kernel[(2,)](desc, 2.0, ROWS=2, COLS=BLOCK)
        k.add_kernel[(1,)](x, 1.0, BLOCK=4 * BLOCK)
        return x

    for seed in range(5):
        assert (World(1, seed).run_backends(rank)[0] == 3.0).all()


# ---- the parts, alone


def memory_and_words(seed: int = 0) -> tuple[WeakMemory, np.ndarray, np.ndarray]:
    """A model, eight words, and their addresses."""
    words = np.zeros(8, dtype=np.int32)
    addresses = (words.ctypes.data + 4 * np.arange(8)).astype(np.uint64)
    return WeakMemory(random.Random(seed), lambda low, high: None), words, addresses


def test_pieces_of_one_program_land_in_order_where_they_meet() -> None:
    for seed in range(20):
        memory, words, addresses = memory_and_words(seed)
        buffer = StoreBuffer(0)
        for value in (1, 2, 3):
            buffer.pending += memory.split(addresses, np.full(8, value, dtype=np.int32), "p")
        memory.land_all(buffer)
        assert (words == 3).all()


def test_a_release_lands_only_what_was_fenced() -> None:
    memory, words, addresses = memory_and_words()
    buffer = StoreBuffer(0)
    buffer.pending += memory.split(addresses[:4], np.full(4, 1, dtype=np.int32), "p")
    buffer.fence()
    buffer.pending += memory.split(addresses[4:], np.full(4, 2, dtype=np.int32), "p")
    memory.land_fenced(buffer)
    assert words.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_late_loads_never_hide_the_readers_own_store() -> None:
    seen = set()
    for seed in range(60):
        memory, words, addresses = memory_and_words(seed)
        reader, other = StoreBuffer(0), StoreBuffer(0)
        other.pending.append(Piece(addresses[:2], np.array([1, 1], dtype=np.int32), "other"))
        memory.land_all(other)
        reader.pending.append(Piece(addresses[:1], np.array([2], dtype=np.int32), "reader"))
        memory.land_all(reader)
        seen.add(tuple(memory.load(reader, addresses[:2], words[:2].copy(), "reader").tolist()))
    assert seen == {(2, 0), (2, 1)}


def test_loads_do_not_go_back_in_time() -> None:
    for seed in range(40):
        memory, words, addresses = memory_and_words(seed)
        writer, reader = StoreBuffer(0), StoreBuffer(0)
        for value in range(1, 6):
            writer.pending.append(Piece(addresses[:1], np.array([value], dtype=np.int32), "w"))
            memory.land_all(writer)
        values = [int(memory.load(reader, addresses[:1], words[:1].copy(), "r")[0]) for _ in range(8)]
        assert values == sorted(values)
