"""The exchange of objects between hosts, on real processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from triton_overlap.comm.bootstrap import PIECE_BYTES, LocalBootstrap, StoreBootstrap
from triton_overlap.errors import BackendError, CommMismatchError, CommTimeoutError

TIMEOUT_S = 30.0


def _bootstrap() -> StoreBootstrap:
    assert dist.group.WORLD is not None
    return StoreBootstrap(dist.group.WORLD)


def _gather_in_order() -> list[list[Any]]:
    bootstrap = _bootstrap()
    results = []
    for number in range(20):
        bootstrap.barrier(TIMEOUT_S)
        results.append(bootstrap.all_gather_object((number, bootstrap.rank, b"\x00\xff"), TIMEOUT_S))
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_gather_object_is_in_rank_order(world_size: int) -> None:
    expected = [[(number, rank, b"\x00\xff") for rank in range(world_size)] for number in range(20)]
    assert run_ranks(world_size, _gather_in_order) == [expected] * world_size


def _large_values(sizes: list[int]) -> list[int]:
    """Keys that the store keeps after values of these many bytes, alternating between the ranks, and a barrier."""
    bootstrap = _bootstrap()
    bootstrap.barrier(TIMEOUT_S)  # the keys of the first meeting stay
    before = bootstrap._store.num_keys()
    bootstrap.barrier(TIMEOUT_S)
    for number, size in enumerate(sizes):
        value = torch.arange(size if (number + bootstrap.rank) % 2 else 3, dtype=torch.uint8)
        gathered = bootstrap.all_gather_object(value, TIMEOUT_S)
        for rank, other in enumerate(gathered):
            assert torch.equal(other, torch.arange(size if (number + rank) % 2 else 3, dtype=torch.uint8))
    bootstrap.barrier(TIMEOUT_S)
    bootstrap.barrier(TIMEOUT_S)
    return [before, bootstrap._store.num_keys()]


def test_values_larger_than_the_store_takes_at_once() -> None:
    """What torch's own store refuses, by closing the connection, goes in pieces, which do not stay."""
    for before, after in run_ranks(2, _large_values, [9 << 20, PIECE_BYTES, 2 * PIECE_BYTES, 30 << 20]):
        assert after - before <= 4  # the last two collectives' own


def _missing() -> tuple[str, list[int]]:
    bootstrap = _bootstrap()
    bootstrap.barrier(TIMEOUT_S)
    message = ""
    if bootstrap.rank in (0, 2):
        with pytest.raises(CommTimeoutError) as raised:
            bootstrap.barrier(1.5)
        message = str(raised.value)
        dist.barrier()
        bootstrap.all_gather_object(None, TIMEOUT_S)  # the two that were late for the barrier come for this one
    else:
        dist.barrier()
        bootstrap.barrier(TIMEOUT_S)
        bootstrap.all_gather_object(None, TIMEOUT_S)
    return message, bootstrap.all_gather_object(bootstrap.rank, TIMEOUT_S)


def test_timeout_names_the_missing_ranks_and_later_calls_do_not_mix() -> None:
    results = run_ranks(4, _missing)
    for rank in (0, 2):
        assert results[rank][0] == f"barrier number 1: rank {rank} of 4 waited 1.5 s for ranks 1, 3"
    assert [gathered for _, gathered in results] == [[0, 1, 2, 3]] * 4


def _different_collectives() -> None:
    bootstrap = _bootstrap()
    call = partial(bootstrap.all_gather_object, 1) if bootstrap.rank else bootstrap.barrier
    with pytest.raises(CommMismatchError, match=r"collective number 0.*barrier, all_gather_object"):
        call(TIMEOUT_S)
    bootstrap.barrier(TIMEOUT_S)


def test_different_collectives_are_an_error_on_every_rank() -> None:
    run_ranks(2, _different_collectives)


def _rejoined() -> list[int]:
    bootstrap = _bootstrap()
    bootstrap.barrier(TIMEOUT_S)
    rank = bootstrap.rank
    if rank == 0:
        with pytest.raises(CommTimeoutError, match=r"rejoin: rank 0 of 3 waited 1 s for ranks 1, 2$"):
            bootstrap.rejoin(1.0)
    elif rank == 1:
        with pytest.raises(CommTimeoutError):
            bootstrap.barrier(0.01)
    dist.barrier()
    generations = [bootstrap.rejoin(TIMEOUT_S)]  # the ranks have tried twice, once and once
    assert bootstrap.all_gather_object(rank, TIMEOUT_S) == [0, 1, 2]
    if rank != 2:
        # What rank 2 has left in the store is not rank 2.
        with pytest.raises(CommTimeoutError, match=r"for rank 2$"):
            bootstrap.rejoin(1.0)
    dist.barrier()
    generations.append(bootstrap.rejoin(TIMEOUT_S))
    assert bootstrap.all_gather_object(rank, TIMEOUT_S) == [0, 1, 2]
    return generations


def test_ranks_begin_anew_together_wherever_they_were() -> None:
    first, *others = run_ranks(3, _rejoined)
    assert first == sorted(set(first))
    assert others == [first, first]


def _given_up() -> list[list[int]]:
    """Two bootstraps, of which rank 1 makes neither, or gives up on one, before the ranks make one together."""
    gathered = []
    if dist.get_rank() == 0:
        for _ in range(2):
            with pytest.raises(CommTimeoutError, match=r"first meeting: rank 0 of 2 waited 0.05 s for rank 1$"):
                _bootstrap().barrier(0.05)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(CommTimeoutError, match=r"waited 0.05 s for rank 0$"):
            _bootstrap().barrier(0.05)
    dist.barrier()
    first, second = _bootstrap(), _bootstrap()
    for bootstrap in (second, first, second):
        gathered.append(bootstrap.all_gather_object(dist.get_rank(), TIMEOUT_S))
    return gathered


def test_a_bootstrap_that_one_rank_gave_up_leaves_later_ones_sound() -> None:
    assert run_ranks(2, _given_up) == [[[0, 1]] * 3] * 2


def _subgroup() -> tuple[int, list[str]] | str:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(BackendError, match="member"):
            StoreBootstrap(group)
        return "outside"
    bootstrap = StoreBootstrap(group)
    return bootstrap.rank, bootstrap.all_gather_object(f"world rank {dist.get_rank()}", TIMEOUT_S)


def test_subgroup_that_is_not_contiguous() -> None:
    gathered = ["world rank 0", "world rank 2"]
    assert run_ranks(3, _subgroup) == [(0, gathered), "outside", (1, gathered)]


def _keys() -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    bootstrap = StoreBootstrap(group)
    other = StoreBootstrap(group)
    counts = []
    for _ in range(3):
        for number in range(30):
            bootstrap.barrier(TIMEOUT_S)
            assert other.all_gather_object(number, TIMEOUT_S) == [number] * 2
        dist.barrier()
        counts.append(group.get_group_store().num_keys())
        dist.barrier()
    return counts


def test_store_does_not_grow() -> None:
    for counts in run_ranks(2, _keys):
        assert len(set(counts)) == 1, counts


def test_local_bootstrap() -> None:
    bootstrap = LocalBootstrap()
    value = [1, "x"]
    gathered = bootstrap.all_gather_object(value, 0.0)
    bootstrap.barrier(0.0)
    assert gathered == [value]
    assert gathered[0] is not value
