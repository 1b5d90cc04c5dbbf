"""Faults on request."""

from __future__ import annotations

import pytest
import torch

from tests.sim import kernels as k
from tests.sim.exchange import FLAGS, gather_repeatedly
from tests.sim.test_scheduling import LIMIT_NS, bounded_wait
from triton_overlap.comm.backends.sim import SimBackend
from triton_overlap.errors import CommTimeoutError, DeadlockError
from triton_overlap.sim import (
    KILLED,
    DelayRank,
    DoubleSignal,
    Fault,
    KillRank,
    LoseSignal,
    StallSource,
    TearHeader,
    World,
)


def test_a_delayed_rank_changes_the_schedule_and_not_the_results() -> None:
    for seed in range(4):
        plain, delayed = World(3, seed), World(3, seed, faults=[DelayRank(1, turns=150)])
        assert all(all(right) for right in plain.run_backends(gather_repeatedly))
        assert all(all(right) for right in delayed.run_backends(gather_repeatedly))
        assert plain.trace != delayed.trace


def test_a_delay_at_any_moment_makes_nobody_lose_patience() -> None:
    for start in range(0, 120, 8):
        world = World(2, start, faults=[DelayRank(1, turns=100_000, start=start)])
        assert world.run_backends(lambda backend: bounded_wait(backend, True, False))[0] == [1, 0]


def test_a_delayed_rank_takes_no_turn_while_others_can() -> None:
    order = []

    def rank(backend: SimBackend) -> None:
        for _ in range(3):
            k.fill_kernel[(2,)](torch.zeros(8), 1.0, 8, BLOCK=4)
        order.append(backend.rank)

    for seed in range(5):
        order.clear()
        World(3, seed, faults=[DelayRank(0, turns=10_000)]).run_backends(rank)
        assert order[-1] == 0


def test_a_frozen_rank_comes_back_at_its_time() -> None:
    world = World(2, 1, faults=[DelayRank(1, seconds=7.5)])
    assert world.run_backends(lambda backend: backend.all_gather_object(backend.rank, 60.0)) == [[0, 1], [0, 1]]
    assert world.time_ns == 7_500_000_000


def test_a_killed_rank_leaves_the_others_to_their_timeouts() -> None:
    def rank(backend: SimBackend) -> object:
        waited = bounded_wait(backend, True, False)
        backend.barrier(20.0)
        return waited

    timeouts = 0
    for seed in range(10):
        first, second = World(2, seed, faults=[KillRank(1, turn=12)]).run_backends(rank, return_exceptions=True)
        assert second is KILLED
        assert isinstance(first, CommTimeoutError)
        assert "for rank 1 at a" in str(first)
        timeouts += 1
    assert timeouts == 10


def test_a_wait_without_bound_for_a_killed_rank_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError) as caught:
        World(2, 3, faults=[KillRank(1, turn=20)]).run_backends(gather_repeatedly)
    assert "rank0 all_gather_kernel" in str(caught.value)
    assert "host1" not in str(caught.value)


def test_a_lost_signal_is_waited_for_in_vain() -> None:
    for seed in range(5):
        outcome, waited = World(2, seed, faults=[LoseSignal(source=1, target=0)]).run_backends(
            lambda backend: bounded_wait(backend, True, False)
        )[0]
        assert outcome == 2
        assert waited > LIMIT_NS


def test_only_the_signals_that_match_are_lost() -> None:
    # The flag of the second share, from rank 1 to rank 0, in the second call alone.
    lost = LoseSignal(
        source=1, target=0, where=lambda offset, size: offset >= FLAGS and size == 4, when=lambda value: value == 2
    )
    with pytest.raises(DeadlockError) as caught:
        World(2, 0, faults=[lost]).run_backends(gather_repeatedly)
    assert "rank0 all_gather_kernel#2" in str(caught.value)
    never = LoseSignal(source=1, target=0, when=lambda value: value == 99)
    assert all(all(right) for right in World(2, 0, faults=[never]).run_backends(gather_repeatedly))


def test_skip_and_count_choose_among_the_signals() -> None:
    def rank(backend: SimBackend) -> int:
        memory = backend.symmetric_empty(2048, 10.0)
        k.count_kernel[(1,)](memory.table, 1 - backend.rank, 10)
        backend.barrier(10.0)
        return int(memory.local.view(torch.int32)[256])

    def counts(*faults: Fault) -> list[int]:
        return World(2, 0, faults=faults).run_backends(rank)

    assert counts() == [10, 10]
    assert counts(LoseSignal(source=0, skip=2, count=3)) == [10, 7]
    assert counts(LoseSignal(target=0, count=None)) == [0, 10]
    assert counts(DoubleSignal(source=1, count=4)) == [14, 10]
    assert counts(LoseSignal(source=0, skip=9, count=5)) == [10, 9]


def test_a_torn_header_shows_one_half_first() -> None:
    new, old = (5 << 32) | 77, 0

    def rank(backend: SimBackend) -> list[int]:
        memory = backend.symmetric_empty(2048, 10.0)
        out = torch.full((64,), -1, dtype=torch.int64)
        if backend.rank == 0:
            k.header_kernel[(1,)](memory.table, 1, new)
        else:
            k.watch_header_kernel[(1,)](memory.table, 1, new, out)
        return out[out != -1].tolist()

    whole = {value for seed in range(15) for value in World(2, seed).run_backends(rank)[1]}
    assert whole <= {old}
    torn = {
        value
        for seed in range(15)
        for value in World(2, seed, faults=[TearHeader(source=0, target=1)]).run_backends(rank)[1]
    }
    assert torn == {old, 77}


def test_a_stalled_copy_engine_waits_for_everybody_else() -> None:
    def rank(backend: SimBackend) -> list[float]:
        memory = backend.symmetric_empty(2048, 10.0)
        assert backend.copies is not None
        source = torch.ones(16)
        if backend.rank == 0:
            backend.copies.begin()
            backend.copies.push(memory, 1, 0, source, 1024, 1)
            for value in range(2, 6):
                # The source may not be touched before ``end``: a late reader shows it.
                source.fill_(float(value))
                backend.barrier(1e6)
            backend.copies.end()
        else:
            for _ in range(2, 6):
                backend.barrier(1e6)
            out = torch.empty(16)
            k.receive_kernel[(1,)](memory.table, 1, out, BLOCK=16, SEM="acquire", SCOPE="sys")
            return out.tolist()
        return []

    results = {
        tuple(World(2, seed, faults=[StallSource(0)], check_races=False).run_backends(rank)[1]) for seed in range(10)
    }
    assert results == {(5.0,) * 16}


@pytest.mark.parametrize("fault", [KillRank(2), DelayRank(-1), LoseSignal(target=5)], ids=str)
def test_a_fault_of_a_rank_that_does_not_exist_is_refused(fault: Fault) -> None:
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        World(2, 0, faults=[fault])


def test_something_else_than_a_fault_is_refused() -> None:
    with pytest.raises(TypeError, match="Fault objects"):
        World(2, 0, faults=["kill rank 1"])
