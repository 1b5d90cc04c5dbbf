"""The pool of rank processes itself: what a test sees when ranks fail, hang or die."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks


def _identity(offset: int) -> tuple[int, int, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"hello from {dist.get_rank()}")
    return dist.get_rank() + offset, os.getpid(), float(total)


def _fail_on_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("out of paper")


def _hang_on_1() -> None:
    if dist.get_rank() == 1:
        _sleep_long()


def _sleep_long() -> None:
    time.sleep(1000)


def _die_on_1() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _uninitialized() -> bool:
    return bool(torch.empty(8).isnan().all())


def test_results_are_in_rank_order_and_processes_are_reused(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run_ranks(2, _identity, 10), run_ranks(2, _identity, 10)
    assert first == second
    assert [(value, total) for value, _, total in first] == [(10, 2.0), (11, 2.0)]
    assert "[rank 1] hello from 1" in capsys.readouterr().out


def test_failure_shows_the_traceback_and_the_pool_recovers() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(2, _fail_on_1)
    assert "rank 0 of 2 on cpu: finished" in str(raised.value)
    assert "rank 1 of 2 on cpu: raised" in str(raised.value)
    assert "ValueError: out of paper" in str(raised.value)
    assert [value for value, _, _ in run_ranks(2, _identity, 0)] == [0, 1]


def test_hang_shows_the_stack_of_the_hung_rank() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(2, _hang_on_1, timeout_s=3.0)
    assert "rank 1 of 2 on cpu: did not finish within 3 s" in str(raised.value)
    assert "in _sleep_long" in str(raised.value)


def test_death_is_a_failure_unless_it_was_meant() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 on cpu: died of SIGKILL"):
        run_ranks(2, _die_on_1)
    assert run_ranks(2, _die_on_1, killed=[1]) == ["alive", None]
    with pytest.raises(RankError, match="rank 1 of 2 on cpu: was to be killed, but finished"):
        run_ranks(2, _identity, 0, killed=[1])


def test_uninitialized_memory_is_nan_everywhere() -> None:
    assert _uninitialized()
    assert run_ranks(2, _uninitialized) == [True, True]
