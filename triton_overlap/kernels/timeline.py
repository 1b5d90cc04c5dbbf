"""A record of every task of a kernel's queue: when it began, when it waited, and when it ended.

Off unless a caller asks (``recording``). Kernels get None for the rows then, and the compiler leaves no trace of it;
with rows they are compiled once more. A row is written by the one program that has the task.

    row      began  waited  went_on  ended  kind  program    int64, nanoseconds of ``now_ns``; zeros where no task ran
    kinds    tile of a peer's chunk, push, tile of the own chunk
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..comm.device import now_ns
from ..comm.user_buffers import UserBuffer

ROW_WORDS = tl.constexpr(6)
PEER_TILE = tl.constexpr(0)
PUSH = tl.constexpr(1)
OWN_TILE = tl.constexpr(2)
#: By number.
KINDS = ("peer tile", "push", "own tile")

_KEPT = "timeline"


@dataclass(frozen=True)
class Recorded:
    """One launch.

    Attributes:
        operation: its name.
        rows: int64 [tasks, ROW_WORDS], on the group's device.
    """

    operation: str
    rows: torch.Tensor


@triton.jit
def moment(timeline_ptr, buffer_ptr):
    """Now; 0 where nothing is recorded."""
    now = tl.full((), 0, tl.int64)
    if timeline_ptr is not None:
        now = now_ns(buffer_ptr)
    return now


@triton.jit
def record_task(timeline_ptr, buffer_ptr, task, kind, began, waited, went_on):
    """``task`` ends here; it waited for others from ``waited`` to ``went_on``."""
    if timeline_ptr is not None:
        tl.debug_barrier()  # for every warp
        row_ptr = timeline_ptr + task.to(tl.int64) * ROW_WORDS
        tl.store(row_ptr, began)
        tl.store(row_ptr + 1, waited)
        tl.store(row_ptr + 2, went_on)
        tl.store(row_ptr + 3, now_ns(buffer_ptr))
        tl.store(row_ptr + 4, kind.to(tl.int64))
        tl.store(row_ptr + 5, tl.program_id(0).to(tl.int64))


@contextmanager
def recording(buffer: UserBuffer) -> Iterator[list[Recorded]]:
    """What launches of the buffer's group record, one after the other, while this is open. Wait for the device before
    reading it."""
    kept = buffer.group.kept
    assert _KEPT not in kept, "one recording at a time"
    found: list[Recorded] = kept.setdefault(_KEPT, [])
    try:
        yield found
    finally:
        del kept[_KEPT]


def task_rows(buffer: UserBuffer, operation: str, tasks: Callable[[], int]) -> torch.Tensor | None:
    """Rows for a launch of at most ``tasks()`` tasks, or None where nothing is recorded."""
    found = buffer.group.kept.get(_KEPT)
    if found is None:
        return None
    rows = torch.zeros((tasks(), ROW_WORDS.value), dtype=torch.int64, device=buffer.group.device)
    found.append(Recorded(operation, rows))
    return rows
