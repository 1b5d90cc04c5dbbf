"""An all-gather in one kernel, small enough to simulate hundreds of times, with faults to plant.

``x [rows, COLS]`` of every rank -> ``out [world_size * rows, COLS]`` on every rank. Programs claim shares of the rows,
push each to every peer and raise its flag there; then they wait for all flags and copy the rows out. Slots and flags
alternate by epoch parity; peers send in every call, so finishing call e + 1 proves that all of them finished call e.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.sim.exchange_kernel import all_gather_kernel
from triton_overlap.comm.backends.sim import SimBackend

COLS = 8
MAX_ROWS = 12
#: Parts of a rank's rows, each with a flag.
SHARES = 3
#: Byte offset of the flags: int32 [2, world_size, SHARES].
FLAGS = 4096


def gather_repeatedly(backend: SimBackend, fault: str = "", calls: int = 4, seed: int = 0) -> list[bool]:
    """Gather fresh rows ``calls`` times; for each call, whether the result was right."""
    rank, world_size = backend.rank, backend.world_size
    memory = backend.symmetric_empty(8192, 10.0)
    counters = backend.local_zeros(12).view(torch.int32)
    generator = torch.Generator().manual_seed(seed)
    right = []
    for epoch in range(1, calls + 1):
        rows = int(torch.randint(1, MAX_ROWS + 1, (1,), generator=generator))
        every = torch.randn(world_size, rows, COLS, generator=generator)
        out = torch.full((world_size * rows, COLS), float("nan"))
        launch(backend, memory.table, counters, every[rank].clone(), out, epoch, fault)
        right.append(torch.equal(out, every.flatten(0, 1)))
    return right


def launch(
    backend: SimBackend, table: torch.Tensor, counters: torch.Tensor, x: torch.Tensor, out: torch.Tensor, epoch: int,
    fault: str = "",
) -> None:  # fmt: skip
    """One call of the kernel."""
    grid: Any = (backend.num_programs,)
    all_gather_kernel[grid](
        x, out, table, counters, backend.rank, backend.world_size, epoch, x.shape[0],
        fault=fault, SHARES=SHARES, FLAGS=FLAGS, MAX_ROWS=MAX_ROWS, COLS=COLS, BLOCK=64,
    )  # fmt: skip
