"""Methods other than the fused one: values, failures and errors on rank processes and in the simulator."""

from __future__ import annotations

import pytest
import torch

import triton_overlap as to
from tests.ops import method_bodies
from tests.ops.cases import DTYPES, SMALL_CPU, Sizes, in_simulator, on_ranks
from triton_overlap.kernels import steps
from triton_overlap.kernels.methods import Method, chunk_groups, gather_method, part_of_pieces, reduce_method

GATHER = [
    "ring_exchange",
    "ring_exchange(aggregate=True)",
    "ring_exchange(use_ce=True)",
    "ring_exchange(aggregate=True,use_ce=True)",
]
#: More parts than pieces too.
REDUCE = ["ring_exchange", "ring_exchange(use_ce=True)", "pipeline", "pipeline(num_splits=2,num_sm=2)"]
BULK = ["bulk", "bulk(use_ce=True)", "bulk(use_ce=False,num_sm=1)"]
#: Methods that need a process group.
NCCL = ["nccl"]
#: Several pieces a chunk, ends inside a piece, one row.
PIECES = Sizes(hidden=24, features=40, rows=(9, 1), max_rows=11)
ONE_COUNT = Sizes(hidden=16, features=16, rows=(5,), max_rows=6)
TINY = Sizes(hidden=16, features=16, rows=(5, 2), max_rows=6)
DTYPES_AND_SIZES = (
    (2, torch.bfloat16),
    pytest.param(2, torch.float16, marks=pytest.mark.long),
    (3, torch.float32),
)


@pytest.mark.parametrize("world_size, dtype", DTYPES_AND_SIZES, ids=str)
def test_values(world_size: int, dtype: torch.dtype) -> None:
    on_ranks(world_size, method_bodies.values, PIECES, dtype, [*GATHER, *NCCL], [*REDUCE, *NCCL])


def test_values_of_one_rank() -> None:
    on_ranks(1, method_bodies.values, PIECES, torch.float32, [*GATHER, *NCCL], [*REDUCE, *NCCL])
    on_ranks(1, method_bodies.beside, PIECES, torch.float32, BULK)


@pytest.mark.parametrize("world_size, dtype", DTYPES_AND_SIZES, ids=str)
def test_collective_beside_a_product(world_size: int, dtype: torch.dtype) -> None:
    on_ranks(world_size, method_bodies.beside, PIECES, dtype, BULK[:2])


@pytest.mark.parametrize("world_size, seed", ((2, 0), pytest.param(3, 1, marks=pytest.mark.long)))
def test_collective_beside_a_product_in_any_schedule(world_size: int, seed: int) -> None:
    in_simulator(world_size, seed, method_bodies.beside, ONE_COUNT, torch.float32, BULK[:2])


def test_either_sender_is_compiled_at_the_first_call() -> None:
    # Columns that no other test has: what a process compiled once is not compiled again.
    on_ranks(2, method_bodies.either_sender, Sizes(hidden=40, features=8, rows=(3,), max_rows=3), torch.float16)


def test_without_sequence_parallelism() -> None:
    on_ranks(2, method_bodies.all_reduce, PIECES, torch.float32, [*REDUCE, *NCCL])


def test_opcheck() -> None:
    on_ranks(2, method_bodies.opcheck, SMALL_CPU)


def test_compiled_for_every_token_count() -> None:
    on_ranks(2, method_bodies.compiled, SMALL_CPU)


def test_no_process_group() -> None:
    in_simulator(2, 0, method_bodies.no_collectives, TINY)


@pytest.mark.parametrize("world_size, seed", ((2, 0), pytest.param(3, 1, marks=pytest.mark.long)))
def test_any_schedule(world_size: int, seed: int) -> None:
    in_simulator(world_size, seed, method_bodies.once, TINY, torch.float32, GATHER, REDUCE)


def test_any_schedule_of_three_ranks() -> None:
    in_simulator(3, 1, method_bodies.once, ONE_COUNT, torch.float32, GATHER[1:2], REDUCE[2:3])


@pytest.mark.long
@pytest.mark.parametrize(
    "world_size, seed", [(size, seed) for size, seeds in ((2, 60), (3, 30), (5, 4)) for seed in range(seeds)]
)
def test_campaign(world_size: int, seed: int) -> None:
    in_simulator(world_size, seed, method_bodies.once, TINY, DTYPES[seed % 3], GATHER, REDUCE)
    in_simulator(world_size, seed, method_bodies.beside, TINY, DTYPES[seed % 3], BULK)


def test_methods_in_turn() -> None:
    in_simulator(2, 0, method_bodies.mixed, ONE_COUNT, torch.float32, ["fused", *GATHER[:2]], ["fused", *REDUCE[1:3]])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_all_methods_in_turn(seed: int) -> None:
    in_simulator(3, seed, method_bodies.mixed, TINY, torch.float32, ["fused", *GATHER], ["fused", *REDUCE])


@pytest.mark.parametrize("seed", range(3))
def test_methods_in_turn_without_synchronising(seed: int) -> None:
    in_simulator(2, seed, method_bodies.mixed_asynchronously, TINY, torch.float32, ["ring_exchange"], REDUCE[2:])


def test_a_delayed_rank() -> None:
    world = to.sim.World(3, seed=4, faults=[to.sim.DelayRank(1, turns=300, start=40)])
    world.run(lambda group: method_bodies.once(group, ONE_COUNT, torch.float32, GATHER[1:3], REDUCE[1:3]))


def test_a_wait_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.Steps, "wait_for", lambda self, first, last: None)
    with pytest.raises(AssertionError, match="relative error inf"):
        in_simulator(2, 0, method_bodies.once, ONE_COUNT, torch.float32, GATHER[:1], [])


@pytest.mark.parametrize(
    "mine",
    (("ring_exchange", "fused"), ("fused", "ring_exchange"), ("nccl", "fused"), ("ring_exchange", "nccl")),
    ids="-".join,
)
def test_ranks_with_different_methods(mine: tuple[str, str]) -> None:
    if "nccl" not in mine:
        in_simulator(3, 0, method_bodies.other_method, TINY, mine)
    on_ranks(2, method_bodies.other_method, TINY, mine)


def test_other_method_found_by_the_peer() -> None:
    on_ranks(2, method_bodies.other_method_found_by_the_peer, TINY)


def test_errors() -> None:
    on_ranks(2, method_bodies.errors, SMALL_CPU)
    on_ranks(2, method_bodies.beside_errors, SMALL_CPU)


@pytest.mark.parametrize("seed", range(2))
def test_an_exception_in_the_middle_of_a_call(seed: int) -> None:
    in_simulator(2, seed, method_bodies.half_done, TINY)


@pytest.mark.parametrize("method", GATHER[:3])
def test_a_missing_rank_leaves_nan(method: str) -> None:
    in_simulator(3, 0, method_bodies.poisoned_outputs, TINY, method)


def test_every_method_reads_back() -> None:
    for method in (
        *map(Method, Method.NAMES),
        Method("ring_exchange", True, False, 3),
        Method("pipeline", num_splits=7),
    ):
        assert Method.parse(str(method)) == method
    assert to.Method is Method
    assert gather_method("pipeline(num_splits=2,num_sm=3)") == "ring_exchange(num_sm=3)"
    assert reduce_method("ring_exchange(aggregate=True,use_ce=True)") == "ring_exchange(use_ce=True)"


@pytest.mark.parametrize("aggregate", (False, True))
@pytest.mark.parametrize("world_size", range(1, 8))
def test_every_chunk_once_and_the_own_first(world_size: int, aggregate: bool) -> None:
    for rank in range(world_size):
        groups = chunk_groups(rank, world_size, aggregate)
        assert sorted(chunk for first, last in groups for chunk in range(first, last)) == list(range(world_size))
        assert groups[0][0] <= rank < groups[0][1]
        assert len(groups) == (-(-world_size // 2) if aggregate else world_size)


@pytest.mark.parametrize("pieces", range(1, 20))
@pytest.mark.parametrize("num_splits", (1, 2, 3, 4, 7))
def test_no_piece_is_left_over(pieces: int, num_splits: int) -> None:
    parts = part_of_pieces(pieces, num_splits)
    assert [piece for first, last in parts for piece in range(first, last)] == list(range(pieces))
    assert all(first < last for first, last in parts)
    assert len(parts) == min(pieces, num_splits)
