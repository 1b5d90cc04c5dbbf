"""Turns, time, deadlocks, errors, and what belongs to a rank."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import triton.language as tl

from tests.sim import kernels as k
from tests.sim.exchange import gather_repeatedly
from triton_overlap.comm.backends.sim import SimBackend
from triton_overlap.comm.group import Group
from triton_overlap.errors import BackendError, ClosedError, CommTimeoutError, DeadlockError, RaceError
from triton_overlap.sim import DelayRank, World
from triton_overlap.sim.fibers import greenlet

BLOCK = 16
LIMIT_NS = 300_000_000_000

needs_greenlet = pytest.mark.skipif(greenlet is None, reason="the greenlet package is not installed")


def notes_of(error: BaseException) -> list[str]:
    """What was added to an error; before Python 3.11 no error has the attribute of its own accord."""
    return list(getattr(error, "__notes__", []))


# ---- one seed, one schedule


def test_the_same_seed_gives_the_same_schedule() -> None:
    traces = set()
    for seed in range(6):
        worlds = [World(2, seed) for _ in range(2)]
        results = [world.run_backends(gather_repeatedly) for world in worlds]
        assert results[0] == results[1]
        assert worlds[0].trace == worlds[1].trace
        assert (worlds[0].steps, worlds[0].time_ns) == (worlds[1].steps, worlds[1].time_ns)
        traces.add(worlds[0].trace)
    assert len(traces) == 6


def test_run_passes_a_group_and_closes_it() -> None:
    def rank(group: Group) -> tuple[Group, list[int]]:
        group.barrier()
        assert group.timeout_s == 12.0
        return group, group.all_gather_object(group.rank)

    (first, ranks), (second, _) = World(2, 1, timeout_s=12.0).run(rank)
    assert ranks == [0, 1]
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
    with pytest.raises(ClosedError):
        first.barrier()


def test_a_world_can_run_twice() -> None:
    world = World(2, 3)
    world.run_backends(gather_repeatedly)
    trace = world.trace
    world.run_backends(gather_repeatedly)
    assert world.trace == trace


_OTHER_PROCESS = """
import triton_overlap
from tests.sim.exchange import gather_repeatedly
from triton_overlap.sim import World
for seed in range(3):
    world = World(3, seed)
    world.run_backends(gather_repeatedly)
    print(world.trace)
"""


def test_another_process_has_the_same_schedule() -> None:
    traces = []
    for seed in range(3):
        world = World(3, seed)
        world.run_backends(gather_repeatedly)
        traces.append(world.trace)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONHASHSEED": "12345", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS],
        cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == traces


@needs_greenlet
def test_threads_and_greenlets_give_the_same_schedule() -> None:
    for seed in range(3):
        worlds = [World(2, seed, fibers=fibers) for fibers in ("greenlet", "thread")]
        results = [world.run_backends(gather_repeatedly) for world in worlds]
        assert results[0] == results[1]
        assert worlds[0].trace == worlds[1].trace


def test_fault_reports_repeat_with_the_seed() -> None:
    reports = set()
    for _ in range(2):
        with pytest.raises(RaceError) as caught:
            World(2, 11).run_backends(lambda backend: gather_repeatedly(backend, "no_barrier"))
        reports.add(str(caught.value))
    assert len(reports) == 1


# ---- programs of a launch


def test_programs_start_in_any_order() -> None:
    def rank(backend: SimBackend) -> tuple[int, ...]:
        out = torch.full((4,), -1, dtype=torch.int32)
        k.order_kernel[(4,)](torch.zeros(1, dtype=torch.int32), out)
        return tuple(out.tolist())

    orders = {World(1, seed, check_races=False).run_backends(rank)[0] for seed in range(30)}
    assert len(orders) >= 10
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_not_every_schedule_has_all_programs_resident() -> None:
    def rank(backend: SimBackend) -> None:
        k.all_at_once_kernel[(3,)](torch.zeros(1, dtype=torch.int32))

    outcomes = []
    for seed in range(20):
        try:
            World(1, seed).run_backends(rank)
            outcomes.append(True)
        except DeadlockError:
            outcomes.append(False)
    assert set(outcomes) == {True, False}


def test_num_programs_follows_the_seed_or_the_argument() -> None:
    drawn = {World(1, seed).run_backends(lambda backend: backend.num_programs)[0] for seed in range(20)}
    assert drawn == {1, 2, 3, 4}
    assert World(2, 0, num_programs=5).run_backends(lambda backend: backend.num_programs) == [5, 5]


# ---- waiting


def test_a_deadlock_lists_every_wait() -> None:
    def rank(backend: SimBackend) -> None:
        memory = backend.symmetric_empty(2048, 10.0)
        if backend.rank == 0:
            memory.local.view(torch.int32)[256] = 41
            k.spin_kernel[(1,)](memory.table, 0)
        else:
            event_that_never_comes(backend, memory.table)

    with pytest.raises(DeadlockError) as caught:
        World(2, 5).run_backends(rank)
    report = str(caught.value)
    assert "rank0 spin_kernel#1(0, 0, 0) at sim/kernels.py:" in report
    assert "polls atomic add at sim/kernels.py:" in report
    assert "of symmetric0@rank0+1024 saw 41 (0x29)" in report
    assert "host0 at sim/test_scheduling.py:" in report
    assert "waits for the launch of spin_kernel#1" in report
    assert "host1 at sim/test_scheduling.py:" in report
    assert "an event on rank1 stream2" in report
    assert any("seed=5" in note for note in notes_of(caught.value))


def event_that_never_comes(backend: SimBackend, table: torch.Tensor) -> None:
    with backend.stream():
        k.spin_kernel[(1,)](table, 1)
        event = backend.record_event()
    backend.wait_event(event)


def test_a_store_of_its_own_does_not_keep_a_task_turning() -> None:
    """Its store may be on its way as long as anything happens, and no longer."""

    def rank(backend: SimBackend) -> None:
        memory = backend.symmetric_empty(2048, 10.0)
        k.spin_on_own_store_kernel[(1,)](memory.table, 0)

    for seed in range(12):
        with pytest.raises(DeadlockError, match="no task can make progress"):
            World(1, seed, max_steps=5000).run_backends(rank)


def test_an_endless_run_is_given_up() -> None:
    def rank(backend: SimBackend) -> None:
        k.restless_kernel[(1,)](torch.zeros(1, dtype=torch.int32))

    with pytest.raises(DeadlockError, match="no end after 500 turns"):
        World(1, 0, max_steps=500).run_backends(rank)


def bounded_wait(backend: SimBackend, deliver: bool, plain_clock: bool, limit_ns: int = LIMIT_NS) -> list[int]:
    memory = backend.symmetric_empty(2048, 10.0)
    out = torch.zeros(2, dtype=torch.int64)
    if backend.rank == 0:
        k.bounded_wait_kernel[(1,)](
            memory.table, 0, backend.clock_address, limit_ns, out, PLAIN_CLOCK=plain_clock
        )  # fmt: skip
    elif deliver:
        # Work that takes many turns, so that the waiting rank would lose patience if turns were time.
        for _ in range(20):
            k.fill_kernel[(2,)](torch.zeros(8), 1.0, 8, BLOCK=4)
        k.raise_kernel[(1,)](memory.table, 0, 1)
    return out.tolist()


@pytest.mark.parametrize("plain_clock", [True, False], ids=["load", "atomic"])
def test_a_lost_flag_always_times_out_and_a_delivered_one_never(plain_clock: bool) -> None:
    for seed in range(15):
        delivered = World(2, seed).run_backends(lambda backend: bounded_wait(backend, True, plain_clock))[0]
        assert delivered == [1, 0]
        lost, waited = World(2, seed).run_backends(lambda backend: bounded_wait(backend, False, plain_clock))[0]
        assert lost == 2
        assert LIMIT_NS < waited < 2 * LIMIT_NS


def test_a_shorter_wait_expires_first() -> None:
    def rank(backend: SimBackend) -> list[int]:
        # Rank 1 gives up after one second and then raises the flag that rank 0 would wait for five minutes.
        memory = backend.symmetric_empty(2048, 10.0)
        out = torch.zeros(2, dtype=torch.int64)
        limit = LIMIT_NS if backend.rank == 0 else 1_000_000_000
        k.bounded_wait_kernel[(1,)](
            memory.table, backend.rank, backend.clock_address, limit, out, PLAIN_CLOCK=False
        )  # fmt: skip
        if backend.rank == 1:
            k.raise_kernel[(1,)](memory.table, 0, 1)
        return out.tolist()

    for seed in range(10):
        (first, _), (second, waited) = World(2, seed).run_backends(rank)
        assert (first, second) == (1, 2)
        assert waited < 10_000_000_000


def test_a_kernel_that_never_gives_up_is_a_deadlock_in_spite_of_its_clock() -> None:
    with pytest.raises(DeadlockError, match="bounded_wait_kernel"):
        World(2, 0).run_backends(lambda backend: bounded_wait(backend, False, False, limit_ns=1 << 62))


def test_a_barrier_names_the_missing_ranks() -> None:
    def rank(backend: SimBackend) -> None:
        if backend.rank != 1:
            backend.barrier(30.0)

    world = World(3, 2)
    results = world.run_backends(rank, return_exceptions=True)
    assert results[1] is None
    for index in (0, 2):
        assert isinstance(results[index], CommTimeoutError)
        assert f"rank {index} waited 30 s for rank 1 at a barrier" in str(results[index])
    assert world.time_ns == 30_000_000_000


def test_a_barrier_that_all_missed_says_so() -> None:
    def rank(backend: SimBackend) -> None:
        backend.barrier(2.0)

    early, late = World(2, 0, faults=[DelayRank(1, seconds=5.0)]).run_backends(rank, return_exceptions=True)
    assert str(early) == "rank 0 waited 2 s for rank 1 at a barrier"
    assert str(late) == "rank 1 waited 2 s at a barrier; rank 0 came and had given up"


def test_a_rank_that_gave_up_can_meet_again() -> None:
    def rank(backend: SimBackend) -> list[int]:
        if backend.rank == 0:
            with pytest.raises(CommTimeoutError):
                backend.all_gather_object("late", 5.0)
        return backend.all_gather_object(backend.rank, 60.0)

    for seed in range(10):
        # Rank 0 is frozen for its first seconds elsewhere; here rank 1 comes six seconds late.
        world = World(2, seed, faults=[DelayRank(1, seconds=6.0)])
        assert world.run_backends(rank) == [[0, 1], [0, 1]]


def test_plain_polls_end_once_the_flag_is_there() -> None:
    def rank(backend: SimBackend) -> None:
        memory = backend.symmetric_empty(2048, 10.0)
        if backend.rank == 0:
            k.plain_spin_kernel[(1,)](memory.table, 0)
        else:
            k.raise_kernel[(1,)](memory.table, 0, 1)

    for seed in range(10):
        World(2, seed, check_races=False).run_backends(rank)


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton has no tl.atomic_poll")
def test_atomic_poll_waits_in_virtual_time() -> None:
    def rank(backend: SimBackend, deliver: bool) -> int:
        memory = backend.symmetric_empty(2048, 10.0)
        out = torch.full((1,), -1, dtype=torch.int32)
        if backend.rank == 0:
            k.poll_kernel[(1,)](memory.table, 0, out, 2_000_000_000)
        elif deliver:
            k.raise_kernel[(1,)](memory.table, 0, 1)
        return int(out)

    for seed in range(5):
        assert World(2, seed).run_backends(lambda backend: rank(backend, True))[0] == 1
        assert World(2, seed).run_backends(lambda backend: rank(backend, False))[0] == 0


# ---- errors


def test_the_first_error_is_raised_with_the_others_as_notes() -> None:
    def rank(backend: SimBackend) -> None:
        if backend.rank == 1:
            raise ValueError("rank 1 knows better")
        backend.barrier(10.0)

    with pytest.raises(ValueError, match="rank 1 knows better") as caught:
        World(3, 0).run_backends(rank)
    notes = "\n".join(notes_of(caught.value))
    assert "raised by rank 1 of a simulated world of 3, seed=0" in notes
    assert "rank 0 raised CommTimeoutError" in notes
    assert "rank 2 raised CommTimeoutError" in notes


def test_an_error_that_leaves_others_waiting_for_ever_is_the_one_raised() -> None:
    def rank(backend: SimBackend) -> None:
        memory = backend.symmetric_empty(2048, 10.0)
        if backend.rank == 1:
            raise ValueError("gone")
        k.spin_kernel[(1,)](memory.table, 0)

    with pytest.raises(ValueError, match="gone") as caught:
        World(2, 0).run_backends(rank)
    assert any("DeadlockError" in note for note in notes_of(caught.value))
    with pytest.raises(DeadlockError) as found:
        World(2, 0).run_backends(rank, return_exceptions=True)
    assert any("rank 1 had raised ValueError: gone" in note for note in notes_of(found.value))


def test_a_race_is_raised_in_spite_of_an_earlier_error() -> None:
    def rank(backend: SimBackend) -> None:
        if backend.rank == 1:
            raise ValueError("gone")
        for _ in range(20):
            k.fill_kernel[(1,)](torch.zeros(4), 1.0, 4, BLOCK=4)
        k.add_kernel[(2,)](torch.zeros(4), 1.0, BLOCK=4)

    with pytest.raises(RaceError) as caught:
        World(2, 0, faults=[DelayRank(0, turns=50)]).run_backends(rank)
    assert any("rank 1 had raised ValueError: gone" in note for note in notes_of(caught.value))


def test_an_error_in_a_kernel_reaches_its_host_and_only_it() -> None:
    def rank(backend: SimBackend) -> str:
        if backend.rank == 0:
            with pytest.raises(Exception, match="deliberate"):
                k.failing_kernel[(2,)](torch.zeros(1))
        out = torch.zeros(4)
        k.fill_kernel[(1,)](out, 2.0, 4, BLOCK=4)
        return str(out.tolist())

    assert World(2, 0).run_backends(rank) == ["[2.0, 2.0, 2.0, 2.0]"] * 2


def test_an_error_in_a_kernel_on_a_side_stream_is_raised_by_synchronize() -> None:
    def rank(backend: SimBackend) -> None:
        with backend.stream():
            k.failing_kernel[(1,)](torch.zeros(1))
        with pytest.raises(Exception, match="deliberate"):
            backend.synchronize()
        backend.synchronize()

    World(1, 0).run_backends(rank)


def test_no_thread_outlives_its_world() -> None:
    before = threading.active_count()
    for fibers in ("auto", "thread"):
        with pytest.raises(RaceError):
            World(3, 0, fibers=fibers).run_backends(lambda backend: gather_repeatedly(backend, "no_release"))
        with pytest.raises(DeadlockError):
            World(2, 1, num_programs=3, fibers=fibers).run_backends(
                lambda backend: gather_repeatedly(backend, "not_resident")
            )
    assert threading.active_count() == before


def test_a_host_that_waits_again_in_its_cleanup_is_unwound_all_the_same() -> None:
    ends = []

    def rank(backend: SimBackend) -> None:
        memory = backend.symmetric_empty(2048, 1e9)
        try:
            k.spin_kernel[(1,)](memory.table, backend.rank)
        finally:
            ends.append(backend.rank)
            backend.barrier(1e9)

    before = threading.active_count()
    with pytest.raises(DeadlockError):
        World(2, 0).run_backends(rank)
    assert sorted(ends) == [0, 1]
    assert threading.active_count() == before


def test_a_backend_of_an_ended_world_is_closed() -> None:
    backends = World(1, 0).run_backends(lambda backend: backend)
    with pytest.raises(ClosedError, match="has ended"):
        backends[0].barrier(1.0)


def test_one_world_at_a_time() -> None:
    def rank(backend: SimBackend) -> None:
        with pytest.raises(BackendError, match="one set of hooks at a time"):
            World(1, 0).run_backends(lambda inner: None)

    World(1, 0).run_backends(rank)


@pytest.mark.parametrize(
    "arguments",
    [{"world_size": 0}, {"world_size": 2, "num_programs": 0}, {"world_size": 2, "fibers": "fast"}],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        World(**arguments)  # type: ignore[arg-type]


# ---- what belongs to a rank


def test_each_rank_has_its_own_random_state_and_the_caller_keeps_its() -> None:
    def rank(backend: SimBackend) -> list[float]:
        torch.manual_seed(backend.rank)
        values = []
        for _ in range(3):
            values += torch.rand(2).tolist()
            backend.barrier(10.0)
        return values

    torch.manual_seed(77)
    state = torch.get_rng_state()
    results = World(3, 4).run_backends(rank)
    assert torch.equal(torch.get_rng_state(), state)
    for index, values in enumerate(results):
        generator = torch.Generator().manual_seed(index)
        assert values == torch.cat([torch.rand(2, generator=generator) for _ in range(3)]).tolist()


class _Scale(torch.autograd.Function):
    """x * 3 by a kernel, forward and backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return _scaled(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return _scaled(grad.contiguous())


def _scaled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    k.scale_kernel[(2,)](x, out, 3.0, x.numel(), BLOCK=4)
    return out


def test_autograd_and_grad_mode_belong_to_a_rank() -> None:
    def rank(backend: SimBackend) -> tuple[list[float], bool]:
        x = torch.arange(8.0, requires_grad=True)
        if backend.rank == 1:
            with torch.no_grad():
                backend.barrier(10.0)
                y = _Scale.apply(x)
                return y.tolist(), y.requires_grad
        y = _Scale.apply(x)
        backend.barrier(10.0)
        (y * y).sum().backward()
        assert x.grad is not None
        return x.grad.tolist(), y.requires_grad

    for seed in range(5):
        first, second = World(2, seed).run_backends(rank)
        assert first == ([18.0 * value for value in range(8)], True)
        assert second == ([3.0 * value for value in range(8)], False)


def test_the_log_tells_what_happened_when() -> None:
    world = World(2, 0, log=True)
    world.run_backends(gather_repeatedly)
    assert world.log
    assert {"atomic add", "atomic xchg", "end"} <= {entry.what for entry in world.log}
    assert [entry.turn for entry in world.log] == sorted(entry.turn for entry in world.log)
    assert {entry.rank for entry in world.log} == {0, 1}
    assert World(2, 0).log is None
