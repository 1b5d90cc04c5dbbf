"""The protocol of a backend: everything the rest of the library asks of the memory it runs on.

A new backend is one class with these members. From this package a backend imports ``errors`` and what ``comm`` holds
beside groups and buffers (this page, ``bootstrap``, ``collectives``, ``processes``, ``interpreter``); never another
backend, never ``kernels``. Where the ranks are processes, ``processes.ProcessBackend`` has the members by which their
hosts meet. What a backend needs from outside (torch, Triton, a vendor's library) is its own affair: it is imported
only when it is asked for.

What a backend promises
    * ``symmetric_empty`` is collective: every rank calls it in the same order with the same size, and gets
      zero-filled memory whose every copy all ranks' kernels can load, store and use atomics on, until ``free``.
    * A store followed by a release at system scope to symmetric memory is seen by an acquire at system scope of
      that value on any rank.
    * ``copies`` run in the order they were pushed, each flag becomes visible after its own bytes, they need no
      program of any kernel to be resident or to finish, and they start after everything that the calling stream
      held at ``begin``.

What it does not promise
    * A barrier synchronises hosts. It makes nothing visible that was not released.
    * Symmetric memory is never unmapped under a peer that still writes: callers agree on ``free`` beforehand.

Whoever builds a model may have set a default device (``with torch.device("meta")``) or be in inference mode. So every
tensor made here says its device, and what outlives a call is made outside of inference mode.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, eq=False)
class SymmetricMemory:
    """One symmetric allocation, as one rank sees it.

    Attributes:
        local: this rank's copy, uint8 ``[num_bytes]`` on the backend's device.
        table: int64 ``[world_size]`` on the backend's device; entry r is the address, valid in this rank's kernels,
            of rank r's copy.
        handle: the backend's own, for instance what keeps a mapping alive.
    """

    local: torch.Tensor
    table: torch.Tensor
    handle: Any = None


@runtime_checkable
class CopyStream(Protocol):
    """Transfers beside the kernels: the copy engine of a GPU, a task in the simulator, a plain copy over shared
    memory."""

    def begin(self) -> None:
        """Later pushes start after everything that the caller's current stream holds now."""

    def push(
        self,
        memory: SymmetricMemory,
        peer: int,
        byte_offset: int,
        source: torch.Tensor,
        flag_byte_offset: int,
        flag_value: int,
    ) -> None:
        """Copy contiguous ``source`` to ``peer``'s copy of ``memory`` at ``byte_offset``, then release the int32
        ``flag_value`` to ``peer``'s copy at ``flag_byte_offset``."""

    def end(self) -> None:
        """Whatever the caller's current stream gets next starts after all pushes; ``source`` may be freed then."""


class Collectives(Protocol):
    """A communication library's own collectives over the ranks of a group, on the caller's current stream."""

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """``out`` [W * n, ...] gets every rank's contiguous ``x`` [n, ...], in rank order."""

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """``out`` [n, ...] gets this rank's part of the sum of every rank's contiguous ``x`` [W * n, ...]."""


class Backend(Protocol):
    """See the module's page.

    Attributes:
        name: ``"cuda"``, ``"nvshmem"``, ``"shm"`` or ``"sim"``.
        rank: this rank, ``0 <= rank < world_size``.
        world_size: the number of ranks.
        device: where kernels run and symmetric memory lives.
        interpreted: True where kernels run under Triton's interpreter.
        num_programs: programs of a persistent grid: the multiprocessors of a GPU, 1 or more where interpreted.
        clock_address: address of an int64 word of nanoseconds that ticks by itself (wall time) or when nothing else
            can move (virtual time); 0 where kernels read the hardware timer.
        copies: transfers beside the kernels, or None where there are none.
        collectives: those of the process group that the ranks come from, or None where there is none.
    """

    name: str
    rank: int
    world_size: int
    device: torch.device
    interpreted: bool
    num_programs: int
    clock_address: int
    copies: CopyStream | None
    collectives: Collectives | None

    def barrier(self, timeout_s: float) -> None:
        """Return once every rank has called it. ``CommTimeoutError`` names the missing ranks."""

    def rejoin(self, timeout_s: float) -> None:
        """Return once every rank has called it, wherever each had stopped: a barrier that meets no other collective.
        Later host collectives, and allocations, are counted from none. Where an attempt expired, or what followed it
        failed on some rank, all call it again, each as often as it needs. ``CommTimeoutError`` names missing ranks."""

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        """Every rank's ``value`` (picklable), in rank order. ``CommTimeoutError`` names the missing ranks."""

    def symmetric_empty(self, num_bytes: int, timeout_s: float) -> SymmetricMemory:
        """Collective; zero-filled; aligned to at least 1024 bytes. Ranks that ask for different sizes all get a
        ``ValueError`` that lists the sizes."""

    def free(self, memory: SymmetricMemory) -> None:
        """Local; the caller has made sure that no peer still writes to it."""

    def local_zeros(self, num_bytes: int) -> torch.Tensor:
        """uint8 ``[num_bytes]`` on the device, that kernels of this rank reach by address (not as an argument)."""

    def host_words(self, count: int) -> torch.Tensor:
        """int64 ``[count]`` zeros in host memory that kernels write by address and the host reads without a
        synchronisation (pinned memory on GPUs)."""

    def record_event(self, again: Any = None) -> Any:
        """An event after everything that the current stream holds now; ``again``, one that nobody else keeps, is
        recorded anew and may be what is returned."""

    def wait_event(self, event: Any) -> None:
        """What the current stream gets next starts after ``event``."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """Inside, a stream of the backend's own is the current one, the same at every use. Events alone order it with
        others. It takes kernels; what torch computes inside may happen at once."""

    def synchronize(self) -> None:
        """Return once everything this rank launched has finished."""

    def close(self) -> None:
        """Local; release what the backend itself holds. No call is legal afterwards."""
