"""What backends whose ranks are processes have in common: the hosts meet through a bootstrap."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_overlap.comm.bootstrap import Bootstrap
from triton_overlap.comm.collectives import ProcessGroupCollectives
from triton_overlap.errors import BackendError, ClosedError


class ProcessBackend:
    """The host side of :class:`triton_overlap.comm.backend.Backend`, to derive a backend from.

    Args:
        bootstrap: how the hosts of the ranks meet.
        process_group: the same ranks, for collectives; None for none.
    """

    name: str

    def __init__(self, bootstrap: Bootstrap, process_group: dist.ProcessGroup | None) -> None:
        self.rank = bootstrap.rank
        self.world_size = bootstrap.world_size
        self.collectives = None if process_group is None else ProcessGroupCollectives(process_group)
        self._bootstrap = bootstrap
        self._generation = 0
        self._closed = False

    def barrier(self, timeout_s: float) -> None:
        self._check_open()
        self._bootstrap.barrier(timeout_s)

    def rejoin(self, timeout_s: float) -> None:
        self._check_open()
        self._generation = self._bootstrap.rejoin(timeout_s)

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        self._check_open()
        return self._bootstrap.all_gather_object(value, timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {self.name} backend is closed")

    def _check_allocation(self, num_bytes: int) -> None:
        """Local, first of all that an allocation does."""
        self._check_open()
        if num_bytes <= 0:
            raise ValueError(f"a symmetric allocation needs at least one byte, got {num_bytes}")

    def _agree_on_allocation(self, num_bytes: int, problem: str | None, timeout_s: float) -> None:
        """Collective: every rank raises alike where the sizes differ, or where any rank has a ``problem``."""
        entries = self._bootstrap.all_gather_object((num_bytes, problem), timeout_s)
        sizes = [size for size, _ in entries]
        if len(set(sizes)) != 1:
            raise ValueError(f"ranks ask for different sizes of one symmetric allocation, in bytes by rank: {sizes}")
        for rank, (_, found) in enumerate(entries):
            if found is not None:
                raise BackendError(f"symmetric allocation failed on rank {rank}: {found}")


def pushed_bytes(source: torch.Tensor) -> torch.Tensor:
    """``source`` as flat uint8, for ``CopyStream.push``; ValueError unless it is contiguous."""
    if not source.is_contiguous():
        raise ValueError(
            f"a pushed tensor must be contiguous, got shape {list(source.shape)} and stride {source.stride()}"
        )
    return source.detach().reshape(-1).view(torch.uint8)
