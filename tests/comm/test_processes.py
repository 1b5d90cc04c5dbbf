"""What backends over processes share, on a bootstrap whose peers are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from triton_overlap.comm.processes import ProcessBackend, pushed_bytes
from triton_overlap.errors import BackendError, ClosedError


class _Peers:
    """Rank 0 of a group whose other ranks always answer ``answers``."""

    rank = 0

    def __init__(self, *answers: Any) -> None:
        self.world_size = 1 + len(answers)
        self.answers = answers
        self.calls: list[str] = []

    def barrier(self, timeout_s: float) -> None:
        self.calls.append(f"barrier {timeout_s:g}")

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        self.calls.append(f"all_gather_object {timeout_s:g}")
        return [value, *self.answers]

    def rejoin(self, timeout_s: float) -> int:
        self.calls.append(f"rejoin {timeout_s:g}")
        return 1


class _Backend(ProcessBackend):
    name = "made-up"

    def close(self) -> None:
        self._closed = True

    def allocate(self, num_bytes: int, problem: str | None = None) -> None:
        self._check_allocation(num_bytes)
        self._agree_on_allocation(num_bytes, problem, 5.0)


def test_hosts_meet_through_the_bootstrap_until_the_backend_is_closed() -> None:
    peers = _Peers("theirs")
    backend = _Backend(peers, None)
    assert (backend.rank, backend.world_size, backend.collectives) == (0, 2, None)
    backend.barrier(3.0)
    assert backend.all_gather_object("mine", 4.0) == ["mine", "theirs"]
    backend.rejoin(2)
    assert peers.calls == ["barrier 3", "all_gather_object 4", "rejoin 2"]
    backend.close()
    calls: list[Callable[[], object]] = [
        lambda: backend.barrier(3.0),
        lambda: backend.all_gather_object("mine", 4.0),
        lambda: backend.rejoin(2),
        lambda: backend.allocate(8),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="this made-up backend is closed"):
            call()
    assert len(peers.calls) == 3, "a closed backend meets nobody"


def test_ranks_agree_on_an_allocation() -> None:
    _Backend(_Peers((8, None)), None).allocate(8)
    with pytest.raises(ValueError, match=r"different sizes .* in bytes by rank: \[8, 16\]"):
        _Backend(_Peers((16, None)), None).allocate(8)
    with pytest.raises(BackendError, match="failed on rank 1: no room"):
        _Backend(_Peers((8, "no room")), None).allocate(8)
    with pytest.raises(BackendError, match="failed on rank 0: none here"):
        _Backend(_Peers((8, None)), None).allocate(8, "none here")
    peers = _Peers((0, None))
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        _Backend(peers, None).allocate(0)
    assert not peers.calls


def test_pushed_bytes() -> None:
    x = torch.arange(4, dtype=torch.int32)
    assert pushed_bytes(x).tolist() == x.view(torch.uint8).tolist()
    with pytest.raises(ValueError, match=r"contiguous, got shape \[2, 2\] and stride \(1, 2\)"):
        pushed_bytes(x.view(2, 2).t())
