"""Failures of a group on real processes: the documented error on every rank, in time, and the way back."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import triton_overlap as to
from tests.distributed import run_ranks
from triton_overlap.comm.group import Group
from triton_overlap.comm.user_buffers import UserBuffer
from triton_overlap.errors import (
    BackendError,
    ClosedError,
    CommError,
    CommMismatchError,
    CommTimeoutError,
    GroupBrokenError,
)
from triton_overlap.kernels import all_gather_matmul, matmul_reduce_scatter
from triton_overlap.sim import World

TIMEOUT_S = 3.0
HIDDEN = 32


def _start() -> tuple[Group, UserBuffer]:
    group = to.init_group(timeout_s=TIMEOUT_S)
    return group, group.user_buffer(64 * group.world_size, HIDDEN, torch.float32)


def _gather_matmul(buffer: UserBuffer, rows: int, n: int = 16) -> None:
    """One call with a result that is known on every rank."""
    x = torch.full((rows, HIDDEN), float(buffer.group.rank + 1))
    out = all_gather_matmul.launch(buffer, x, torch.ones(HIDDEN, n))
    expected = torch.arange(1, buffer.group.world_size + 1).float().repeat_interleave(rows) * HIDDEN
    torch.testing.assert_close(out, expected[:, None].expand(-1, n))


def _reduce_scatter(buffer: UserBuffer, rows: int) -> None:
    world_size = buffer.group.world_size
    out = matmul_reduce_scatter.launch(buffer, torch.ones(rows * world_size, 8), torch.ones(8, HIDDEN))
    torch.testing.assert_close(out, torch.full((rows, HIDDEN), 8.0 * world_size))


def _error(call: Callable[[], object]) -> CommError:
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        call()
    assert time.monotonic() - started < 4 * TIMEOUT_S
    return caught.value


def _report_of_a_peer(group: Group) -> CommError:
    """What ``check`` raises on a rank that makes no call, once a peer has given up on it."""
    deadline = time.monotonic() + 4 * TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            group.check()
        except CommError as error:
            return error
        time.sleep(0.05)
    raise AssertionError("no peer reported a failure")


def _broken_then_recovered(group: Group, buffer: UserBuffer) -> None:
    assert isinstance(_error(lambda: _gather_matmul(buffer, 4)), GroupBrokenError)
    assert isinstance(_error(lambda: group.user_buffer(8, 8, torch.float32)), GroupBrokenError)
    group.recover()
    for rows in (4, 64, 1):
        _gather_matmul(buffer, rows)
        _reduce_scatter(buffer, rows)
    group.check()
    group.close()


def _disagree_on_tokens() -> tuple[str, str]:
    group, buffer = _start()
    _gather_matmul(buffer, 8)
    group.barrier()  # else the call before may end by the failure of this one, where a third rank is slow
    error = _error(lambda: _gather_matmul(buffer, 8 if group.rank != 1 else 16))
    _broken_then_recovered(group, buffer)
    return type(error).__name__, str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_on_the_token_count(world_size: int) -> None:
    for name, message in run_ranks(world_size, _disagree_on_tokens):
        assert name == CommMismatchError.__name__
        assert f"T = {8 * world_size}" in message
        assert f"T = {16 * world_size}" in message
        assert "recover()" in message


def _disagree_on_operation() -> str:
    group, buffer = _start()
    call = _gather_matmul if group.rank == 0 else _reduce_scatter
    error = _error(lambda: call(buffer, 8))
    assert isinstance(error, CommMismatchError)
    _broken_then_recovered(group, buffer)
    return str(error)


def test_ranks_that_disagree_on_the_operation() -> None:
    for message in run_ranks(2, _disagree_on_operation):
        assert "all_gather_matmul in float32" in message
        assert "matmul_reduce_scatter in float32" in message


def _disagree_on_columns() -> str:
    group, buffer = _start()
    error = _error(lambda: _gather_matmul(buffer, 8, n=16 + group.rank))
    _broken_then_recovered(group, buffer)
    return str(error)


def test_ranks_that_disagree_on_columns() -> None:
    for message in run_ranks(2, _disagree_on_columns):
        assert "N = 16" in message
        assert "N = 17" in message


def _absent(operation: str) -> str:
    group, buffer = _start()
    x = torch.randn(8, HIDDEN)
    if group.rank == 1:
        error = _report_of_a_peer(group)
    else:
        calls: dict[str, Callable[[], object]] = {
            "all_gather_matmul": lambda: _gather_matmul(buffer, 8),
            "matmul_reduce_scatter": lambda: _reduce_scatter(buffer, 8),
            "all_gather": lambda: to.all_gather(x, buffer=buffer),
        }
        error = _error(calls[operation])
    assert isinstance(error, CommTimeoutError)
    assert error.record is not None
    assert error.record.peer == 1
    _broken_then_recovered(group, buffer)
    return str(error)


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "all_gather"])
def test_a_rank_that_never_arrives_is_named_everywhere(operation: str) -> None:
    for message in run_ranks(3, _absent, operation):
        assert "for rank 1: header" in message
        assert operation in message
        assert f"more than {TIMEOUT_S:g} s" in message


def _output_of_a_failed_call() -> None:
    group = to.init_group(timeout_s=TIMEOUT_S, check="async")
    buffer = group.user_buffer(16, HIDDEN, torch.float32)
    if group.rank == 0:
        b = torch.ones(HIDDEN, 24, requires_grad=True)
        outs, gathered = to.all_gather_matmul(torch.ones(8, HIDDEN), [b, b], buffer=buffer, return_gathered=True)
        for out in (*outs, gathered):
            assert out.isnan().all(), "a failed call fills all that it returns with NaN"
        # Raised without a synchronisation by the next call into the library.
        assert isinstance(_error(lambda: _gather_matmul(buffer, 8)), CommTimeoutError)
    else:
        _report_of_a_peer(group)
    group.recover()
    _gather_matmul(buffer, 8)
    group.close()


def test_a_failed_call_announces_nothing_and_returns_nan() -> None:
    run_ranks(2, _output_of_a_failed_call)


def _absent_of_four() -> str:
    """Chunks of several pieces: a rank that is stuck on the absent one does not push its own any more."""
    group, buffer = _start()
    if group.rank == 3:
        message = str(_report_of_a_peer(group))
    else:
        message = str(_error(lambda: _gather_matmul(buffer, 64)))
    _broken_then_recovered(group, buffer)
    return message


def test_the_absent_rank_is_blamed_and_not_one_that_waits_for_it() -> None:
    for message in run_ranks(4, _absent_of_four):
        assert "for rank 3: header" in message


def _interrupted() -> None:
    """A launch that raises after the headers may be out: the epoch is not used again."""
    group, buffer = _start()
    _gather_matmul(buffer, 8)
    epoch = buffer.epoch
    with pytest.raises(KeyboardInterrupt), buffer.call():
        raise KeyboardInterrupt
    assert buffer.epoch == epoch + 1
    assert "KeyboardInterrupt" in str(group.broken)
    _broken_then_recovered(group, buffer)


def test_an_interrupted_call_breaks_the_group() -> None:
    run_ranks(2, _interrupted)


def _recover_twice() -> None:
    """The first attempt of rank 0 expires before rank 1 comes; the second meets it."""
    group, buffer = _start()
    group.interrupted("a test")
    if group.rank == 0:
        assert isinstance(_error(group.recover), CommTimeoutError)
    dist.barrier()
    _broken_then_recovered(group, buffer)
    assert group.recoveries == 1


def test_recovery_can_be_tried_again() -> None:
    run_ranks(2, _recover_twice)


def _copies_and_threads() -> None:
    group, buffer = _start()
    assert copy.deepcopy(buffer) is buffer
    assert copy.deepcopy(group) is group
    for shared in (buffer, group):
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            pickle.dumps(shared)
    with ThreadPoolExecutor(1) as pool, buffer.call():
        with pytest.raises(RuntimeError, match="in use by another thread"):
            pool.submit(_gather_matmul, buffer, 8).result()
    group.close()


def test_copies_share_and_threads_are_refused() -> None:
    run_ranks(1, _copies_and_threads)


def _wrong_on_one_rank() -> str:
    """A mistake that a rank sees alone is its own ValueError, and a timeout on its peers."""
    group, buffer = _start()
    w = torch.ones(HIDDEN, 8)
    if group.rank == 0:
        with pytest.raises(ValueError, match="hidden size must stay 32"):
            to.all_gather_matmul(torch.ones(4, HIDDEN + 1), torch.ones(HIDDEN + 1, 8), buffer=buffer)
        assert buffer.epoch == 0, "nothing was announced"
        message = str(_report_of_a_peer(group))
    else:
        message = str(_error(lambda: to.all_gather_matmul(torch.ones(4, HIDDEN), w, buffer=buffer)))
    _broken_then_recovered(group, buffer)
    return message


def test_a_mistake_of_one_rank() -> None:
    for message in run_ranks(2, _wrong_on_one_rank):
        assert "rank 1 waited" in message


def _closed() -> None:
    group, buffer = _start()
    group.close()
    with pytest.raises(ClosedError):
        _gather_matmul(buffer, 4)
    with pytest.raises(ClosedError):
        group.check()
    with pytest.raises(ClosedError):
        group.recover()


def test_closed_groups_say_so() -> None:
    run_ranks(2, _closed)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"timeout_s": 0}, ValueError, "positive seconds, at most .* got 0"),
        ({"timeout_s": float("inf")}, ValueError, "got inf"),
        ({"timeout_s": "3"}, TypeError, "int or float, got '3'"),
        ({"timeout_s": True}, TypeError, "got True"),
        ({"check": "often"}, ValueError, "got 'often'"),
        ({"check": 1}, TypeError, "got 1"),
        ({"backend": "tcp"}, ValueError, "'tcp'"),
        ({"backend": None}, TypeError, "got None; known are 'auto'"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        to.init_group(**arguments)  # type: ignore[arg-type]


#: Of rank 1 alone, what every rank raises, and what it says.
_WRONG_ON_ONE_RANK: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"backend": "tcp"}, ValueError, "on rank 1: unknown backend 'tcp'; known are 'auto'"),
    ({"backend": 3}, TypeError, "on rank 1: backend must be the name of one, got 3"),
    ({"timeout_s": -1}, ValueError, "on rank 1: timeout_s must be positive seconds, at most 2.592e+06, got -1"),
    ({"timeout_s": "3"}, TypeError, "on rank 1: timeout_s must be a number of seconds"),
    ({"check": "often"}, ValueError, 'on rank 1: check must be "sync", "async" or None, got \'often\''),
    ({"timeout_s": 2 * TIMEOUT_S}, ValueError, "got rank 0: {'timeout_s': 3.0}; rank 1: {'timeout_s': 6.0}"),
    ({"backend": "shm"}, ValueError, "got rank 0: {'backend': 'auto'}; rank 1: {'backend': 'shm'}"),
    ({"check": "async"}, ValueError, "got rank 0: {'check': None}; rank 1: {'check': 'async'}"),
]


def _wrong_arguments_of_one_rank() -> list[tuple[str, str]]:
    raised = []
    for arguments, _, _ in _WRONG_ON_ONE_RANK:
        with pytest.raises((TypeError, ValueError)) as caught:
            to.init_group(**({"timeout_s": TIMEOUT_S} | (arguments if dist.get_rank() else {})))  # type: ignore[arg-type]
        raised.append((type(caught.value).__name__, str(caught.value)))
    if dist.get_rank():
        with pytest.raises(BackendError, match="got 'the world'"):
            to.init_group("the world", timeout_s=TIMEOUT_S)
    else:
        assert "the arguments of a group" in str(_error(lambda: to.init_group(timeout_s=0.1)))
    dist.barrier()
    group, buffer = _start()
    _gather_matmul(buffer, 8)
    group.close()
    return raised


def test_an_argument_that_is_wrong_on_one_rank_is_an_error_of_all_and_spoils_nothing() -> None:
    for raised in run_ranks(2, _wrong_arguments_of_one_rank):
        for (_, kind, says), (name, message) in zip(_WRONG_ON_ONE_RANK, raised, strict=True):
            assert name == kind.__name__
            assert says in message


def _backend_that_one_rank_cannot_load() -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setitem(sys.modules, "triton_overlap.comm.backends.shm", None)
        with pytest.raises(BackendError) as caught:
            to.init_group(timeout_s=TIMEOUT_S)
    return str(caught.value)


def test_a_backend_that_one_rank_cannot_load() -> None:
    for message in run_ranks(2, _backend_that_one_rank_cannot_load):
        assert "on rank 1: the shm backend cannot be loaded" in message


def _again_and_again() -> None:
    """Groups of the same ranks, one after another and two at once: none sees what another left behind."""
    mappings = []
    for round_ in range(3):
        (first, one), (second, two) = _start(), _start()
        # Calls of two models take turns, and differ in number: epochs and flags are each buffer's own.
        for rows in (64, 3, 17)[: round_ + 1]:
            _gather_matmul(one, rows)
            _reduce_scatter(two, rows)
            _gather_matmul(two, rows)
        assert (one.epoch, two.epoch) == (round_ + 1, 2 * round_ + 2)
        first.close()
        _gather_matmul(two, 5)  # one group's end is not the other's
        second.close()
        with open("/proc/self/maps") as maps:
            mappings.append(sum("triton_overlap-" in line for line in maps))
    # What an earlier test left to the garbage collector may be gone after the first round.
    assert mappings[2] <= mappings[1] <= mappings[0], f"mappings after each round: {mappings}"


def test_groups_side_by_side_and_made_again() -> None:
    run_ranks(2, _again_and_again)


def _absent_host() -> str:
    """A host that does not come to a collective: the others say what for, whom they missed, and what to do."""
    group, buffer = _start()
    if group.rank == 1:
        dist.barrier()
    else:
        message = str(_error(lambda: group.user_buffer(8, 16, torch.float32)))
        assert "capacity and dtype of a user buffer" in message
        assert f"waited {TIMEOUT_S:g} s for rank 1, to compare" in message
        assert "call group.recover() on every rank" in message
        assert isinstance(_error(lambda: _gather_matmul(buffer, 4)), GroupBrokenError)
        dist.barrier()
    group.recover()
    _gather_matmul(buffer, 8)
    again = group.user_buffer(8, 16, torch.float32)
    assert again.capacity_shape == (8, 16)
    group.close()
    return group.name


def test_a_host_collective_that_expires_breaks_the_group() -> None:
    run_ranks(2, _absent_host)


class _Planted(Exception):
    pass


def _recovery_fails_halfway(at: str) -> None:
    """On rank 1 alone, before or after it has its new memory."""
    group, buffer = _start()
    other = group.user_buffer(8, 16, torch.float32)
    counted = group.user_buffer(16, HIDDEN, torch.float32, device_count=True)
    kept = [(each.table.data_ptr(), each.memory.local.data_ptr()) for each in (buffer, other, counted)]
    gc.collect()  # earlier tests of these processes may have left groups in reference cycles
    mappings = _mappings()
    _gather_matmul(buffer, 8)
    group.interrupted("a test")
    if group.rank == 1:
        whom, name = {
            "control": (group, "symmetric_empty"),
            "buffer": (other, "_view_slots"),
            "end": (group, "barrier"),
        }[at]
        right = getattr(whom, name)

        def fail(*arguments: object) -> None:
            setattr(whom, name, right)
            raise _Planted("no room")

        setattr(whom, name, fail)
        with pytest.raises(_Planted):
            group.recover()
    else:
        assert "to " in str(_error(group.recover))
    for call in (lambda: _gather_matmul(buffer, 8), lambda: group.user_buffer(2, 2, torch.float32)):
        error = _error(call)
        assert isinstance(error, GroupBrokenError)
        assert "recover() failed on rank" in str(error)
        assert "a test" in str(error)
    # No barrier: the ranks begin again when each has seen its own failure.
    group.recover()
    assert group.recoveries == 1
    for rows in (4, 64, 1):
        _gather_matmul(buffer, rows)
        _reduce_scatter(buffer, rows)
    to.all_gather(torch.ones(4, 16), buffer=other)
    assert buffer.table.data_ptr() == kept[0][0], "tables stay where they are"
    assert (counted.table.data_ptr(), counted.memory.local.data_ptr()) == kept[2]
    group.check()
    gc.collect()
    assert _mappings() == mappings, "neither old memory nor that of the failed attempt is left"
    group.close()


def _mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("triton_overlap-" in line for line in maps)


@pytest.mark.parametrize("at", ["control", "buffer", "end"])
def test_a_recovery_that_fails_on_the_way_leaves_the_group_broken(at: str) -> None:
    run_ranks(2, _recovery_fails_halfway, at)


def test_a_recovery_that_fails_in_the_simulator() -> None:
    def rank(group: Group) -> None:
        buffer = group.user_buffer(8, 16, torch.float32)
        if group.rank == 1:
            buffer._view_slots = lambda: 1 / 0  # type: ignore[method-assign, assignment]
            with pytest.raises(ZeroDivisionError):
                group.recover()
            del buffer._view_slots
        else:
            assert isinstance(_error(group.recover), CommTimeoutError)
        with pytest.raises(GroupBrokenError, match=r"recover\(\) failed"):
            to.all_gather(torch.ones(4, 16), buffer=buffer)
        group.recover()
        out = to.all_gather(torch.full((4, 16), float(group.rank)), buffer=buffer)
        torch.testing.assert_close(out[:, 0], torch.tensor([0.0] * 4 + [1.0] * 4))

    for seed in range(5):
        World(2, seed, timeout_s=5.0).run(rank)


def _closed_on_one_rank() -> str:
    group, buffer = _start()
    surplus = group.user_buffer(12, 16, torch.float32)
    if group.rank == 1:
        surplus.close()
    group.interrupted("a test")
    with pytest.raises(ValueError, match=r"recover\(\) needs the same buffers") as caught:
        group.recover()
    assert isinstance(_error(lambda: _gather_matmul(buffer, 4)), GroupBrokenError)
    surplus.close()  # what the message says
    group.recover()
    _gather_matmul(buffer, 8)
    assert group.user_buffer(12, 16, torch.float32) is not surplus
    group.close()
    return str(caught.value)


def test_recovery_names_a_buffer_that_one_rank_has_closed() -> None:
    for message in run_ranks(3, _closed_on_one_rank):
        assert "UserBuffer [12, 16] torch.float32, is open on ranks 0, 2, and rank 1 closed it" in message
        assert "call its close() on ranks 0, 2 too, then recover() on every rank" in message


def _no_closed_buffer_is_kept() -> None:
    group, _ = _start()
    gc.collect()
    for columns in (16, 24):
        buffer = group.user_buffer(8, columns, torch.float32)
        gone = weakref.ref(buffer)
        buffer.close()
        del buffer
        group.user_buffer(8, 32, torch.float32)
        group.user_buffer(8, 8 * columns, torch.float32)
        gc.collect()
        assert gone() is None
    group.close()


def test_a_group_keeps_no_closed_buffer() -> None:
    run_ranks(1, _no_closed_buffer_is_kept)
