"""The checker: what it reports, and what it must not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sim import kernels as k
from triton_overlap.comm.backends.sim import SimBackend
from triton_overlap.errors import RaceError
from triton_overlap.sim import World
from triton_overlap.sim.happens_before import Actor, Clock, Shadow, Slots, SyncWord

BLOCK = 16


def race(world_size: int, rank: object, seeds: range = range(10), **options: int) -> str:
    """The report of a race that every one of the seeds must find."""
    reports = []
    for seed in seeds:
        with pytest.raises(RaceError) as caught:
            World(world_size, seed, **options).run_backends(rank)  # type: ignore[arg-type]
        reports.append(str(caught.value))
    return reports[0]


def no_race(world_size: int, rank: object, seeds: range = range(10), **options: int) -> list[list[object]]:
    """The results of all seeds."""
    return [World(world_size, seed, **options).run_backends(rank) for seed in seeds]  # type: ignore[arg-type]


# ---- messages between ranks


def message(**fault: object) -> object:
    options = {"BARRIER": True, "SEM": "release", "SCOPE": "sys", "acquire": "acquire", "acquire_scope": "sys", **fault}
    acquire, acquire_scope = options.pop("acquire"), options.pop("acquire_scope")

    def rank(backend: SimBackend) -> torch.Tensor:
        memory = backend.symmetric_empty(2048, 10.0)
        out = torch.full((BLOCK,), -1.0)
        if backend.rank == 0:
            k.send_kernel[(1,)](memory.table, 1, 3.0, BLOCK=BLOCK, **options)
        else:
            k.receive_kernel[(1,)](memory.table, 1, out, BLOCK=BLOCK, SEM=acquire, SCOPE=acquire_scope)
        return out

    return rank


def test_an_ordered_message_is_no_race() -> None:
    for results in no_race(2, message()):
        assert (results[1] == 3.0).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fault",
    [
        {"BARRIER": False},
        {"SEM": "relaxed"},
        {"SEM": "acquire"},
        {"acquire": "relaxed"},
        {"acquire": "release"},
        {"SCOPE": "gpu"},
        {"SCOPE": "cta"},
        {"acquire_scope": "gpu"},
        {"acquire_scope": "cta"},
    ],
    ids=str,
)
def test_each_missing_part_of_the_order_is_a_race(fault: dict[str, object]) -> None:
    report = race(2, message(**fault))
    assert "rank1 receive_kernel#1(0, 0, 0): load at sim/kernels.py:" in report
    assert "by rank0 send_kernel#1(0, 0, 0) at sim/kernels.py:" in report
    assert "of symmetric0@rank1+0 " in report


def test_the_lanes_of_a_block_acquire_for_themselves() -> None:
    def rank(backend: SimBackend, barrier: bool) -> None:
        memory = backend.symmetric_empty(2048, 10.0)
        if backend.rank == 0:
            k.send_kernel[(1,)](memory.table, 1, 3.0, BLOCK=BLOCK, BARRIER=True, SEM="release", SCOPE="sys")
        else:
            k.block_receive_kernel[(1,)](memory.table, 1, torch.empty(BLOCK), BLOCK=BLOCK, BARRIER=barrier)

    no_race(2, lambda backend: rank(backend, True))
    race(2, lambda backend: rank(backend, False))


def test_a_compare_and_swap_that_fails_releases_nothing() -> None:
    def rank(backend: SimBackend, expected: int) -> None:
        memory = backend.symmetric_empty(2048, 10.0)
        if backend.rank == 1:
            memory.local.view(torch.int32)[256] = 1 - expected
        backend.barrier(10.0)
        if backend.rank == 0:
            k.failed_swap_kernel[(1,)](memory.table, 1, 3.0, BLOCK=BLOCK, EXPECTED=0)
        else:
            k.receive_kernel[(1,)](memory.table, 1, torch.empty(BLOCK), BLOCK=BLOCK, SEM="acquire", SCOPE="sys")

    no_race(2, lambda backend: rank(backend, 1))
    race(2, lambda backend: rank(backend, 0))


# ---- programs of one launch


def together(kernel_options: dict[str, object], programs: int = 2) -> object:
    def rank(backend: SimBackend) -> int:
        state = torch.zeros(4, dtype=torch.int32)
        out = torch.zeros(1, dtype=torch.int32)
        k.two_programs_kernel[(programs,)](state, out, **kernel_options)
        return int(out)

    return rank


def test_device_scope_orders_programs_of_one_rank() -> None:
    for results in no_race(2, together({"SEM": "acq_rel", "SCOPE": "gpu", "BARRIER": True})):
        assert results == [21, 21]


@pytest.mark.parametrize(
    "options",
    [
        {"SEM": "relaxed", "SCOPE": "gpu", "BARRIER": True},
        {"SEM": "release", "SCOPE": "gpu", "BARRIER": True},
        {"SEM": "acq_rel", "SCOPE": "cta", "BARRIER": True},
        {"SEM": "acq_rel", "SCOPE": "gpu", "BARRIER": False},
    ],
    ids=str,
)
def test_programs_of_one_rank_race_with_less(options: dict[str, object]) -> None:
    assert "state_ptr of two_programs_kernel@rank0+" in race(1, together(options))


def test_relaxed_claims_and_a_reset_by_the_last_program_are_no_race() -> None:
    def rank(backend: SimBackend) -> list[int]:
        state = backend.local_zeros(8).view(torch.int32)
        for _ in range(3):
            out = torch.zeros(8, dtype=torch.int32)
            k.claim_kernel[(3,)](state, out, 8)
        return out.tolist()

    for results in no_race(2, rank):
        assert results == [[3 * task for task in range(8)]] * 2


def test_a_plain_load_of_a_counter_is_a_race_and_an_atomic_is_not() -> None:
    def rank(backend: SimBackend, atomic: bool) -> None:
        k.peek_kernel[(2,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), ATOMIC=atomic)

    no_race(1, lambda backend: rank(backend, True))
    reports = set()
    for seed in range(20):
        with pytest.raises(RaceError) as caught:
            World(1, seed).run_backends(lambda backend: rank(backend, False))
        reports.add(str(caught.value).split(" at ")[0].split(": ")[1])
    assert reports == {"load", "atomic add"}  # whichever came second


def test_neighbouring_elements_do_not_race() -> None:
    def rank(backend: SimBackend) -> bool:
        out = torch.zeros(4 * 3, dtype=torch.float16)
        k.neighbours_kernel[(3,)](out, ITEMS=4)
        return bool((out == 1).all())

    assert all(all(results) for results in no_race(1, rank))


def test_two_programs_writing_one_element_race() -> None:
    def rank(backend: SimBackend) -> None:
        k.add_kernel[(2,)](torch.zeros(8), 1.0, BLOCK=8)

    assert "out_ptr of add_kernel@rank0+" in race(1, rank)


# ---- launches, streams, hosts


def test_launches_of_one_stream_are_ordered() -> None:
    def rank(backend: SimBackend) -> bool:
        out = torch.zeros(8)
        for value in range(3):
            k.fill_kernel[(2,)](out, float(value), 8, BLOCK=4)
            k.add_kernel[(1,)](out, 1.0, BLOCK=8)
        return bool((out == 3.0).all())

    assert all(all(results) for results in no_race(2, rank))


def side_stream(backend: SimBackend, event: bool) -> torch.Tensor:
    out = torch.zeros(8)
    k.fill_kernel[(1,)](out, 1.0, 8, BLOCK=8)
    ready = backend.record_event()
    with backend.stream():
        if event:
            backend.wait_event(ready)
        k.add_kernel[(1,)](out, 1.0, BLOCK=8)
        done = backend.record_event()
    backend.wait_event(done)
    k.add_kernel[(1,)](out, 1.0, BLOCK=8)
    backend.synchronize()
    return out


def test_events_order_streams() -> None:
    for results in no_race(1, lambda backend: side_stream(backend, True)):
        assert (results[0] == 3.0).all()  # type: ignore[attr-defined]


def test_a_missing_wait_for_an_event_is_a_race() -> None:
    assert "add_kernel" in race(1, lambda backend: side_stream(backend, False))


def hand_over(backend: SimBackend, synchronize: bool) -> torch.Tensor:
    memory = backend.symmetric_empty(1024, 10.0)
    out = torch.zeros(BLOCK)
    if backend.rank == 0:
        k.write_kernel[(1,)](memory.table, 1, 5.0, BLOCK=BLOCK)
        if synchronize:
            backend.synchronize()
    backend.barrier(10.0)
    if backend.rank == 1:
        k.read_kernel[(1,)](memory.table, 1, out, BLOCK=BLOCK)
    return out


def test_a_host_barrier_orders_hosts_and_launches_only_after_synchronize() -> None:
    for results in no_race(2, lambda backend: hand_over(backend, True)):
        assert (results[1] == 5.0).all()  # type: ignore[attr-defined]
    race(2, lambda backend: hand_over(backend, False))


def test_many_launches_do_not_pile_up_regions() -> None:
    def rank(backend: SimBackend) -> int:
        for _ in range(1200):
            k.fill_kernel[(1,)](torch.zeros(4), 1.0, 4, BLOCK=4)
        return len(backend._machine._arguments)

    assert World(1, 0).run_backends(rank)[0] <= 260


def test_relaxed_polls_before_an_acquire_keep_the_order() -> None:
    """A release is found by the acquire that reads it, whoever looked at the word in between."""
    slots = Slots()
    writer = Actor(slots, 0, ("w",), "writer", Clock())
    reader = Actor(slots, 1, ("r",), "reader", Clock())
    shadow = Shadow(64, slots)
    site = slots.site("store", "here:1")
    moment, slot = writer.plain()
    granules = shadow.granules(np.array([0, 4, 8]), 4)
    shadow.record_store(granules, moment, slot, site)
    assert shadow.check_load(granules, reader.clock) is not None
    writer.barrier()
    word = SyncWord()
    writer.release([word], "sys", False)
    writer.release([word], "sys", False)
    reader.acquire([word], "sys", False)
    assert shadow.check_load(granules, reader.clock) is None
    moment, slot = writer.plain()
    shadow.record_store(granules, moment, slot, site)  # after the release: not covered
    conflict = shadow.check_load(granules, reader.clock)
    assert conflict is not None
    assert conflict.site.where == "here:1"


def test_granules_refine_without_losing_accesses() -> None:
    slots = Slots()
    writer = Actor(slots, 0, ("w",), "writer", Clock())
    reader = Actor(slots, 0, ("r",), "reader", Clock())
    shadow = Shadow(64, slots)
    site = slots.site("store", "here:1")
    moment, slot = writer.plain()
    shadow.record_store(shadow.granules(np.array([16, 24]), 8), moment, slot, site)
    for offset, expected in ((15, False), (16, True), (31, True), (32, False)):
        conflict = shadow.check_load(shadow.granules(np.array([offset]), 1), reader.clock)
        assert (conflict is not None) == expected, offset


def test_a_plain_access_to_half_of_an_atomic_word_races_with_it() -> None:
    slots = Slots()
    atomic = Actor(slots, 0, ("a",), "atomic", Clock())
    reader = Actor(slots, 0, ("r",), "reader", Clock())
    shadow = Shadow(64, slots)
    moment, slot = atomic.atomic(False)
    shadow.word(8, 8).writes[slot] = moment << 32 | slot << 18
    slots.site("atomic add", "here:1")
    assert shadow.check_load(shadow.granules(np.array([12]), 4), reader.clock) is not None
    assert shadow.check_load(shadow.granules(np.array([16]), 4), reader.clock) is None
    assert shadow.check_load(shadow.granules(np.array([4]), 4), reader.clock) is None
