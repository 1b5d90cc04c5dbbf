"""An all-gather in one kernel, small enough to simulate hundreds of times, with faults to plant.

``x [rows, COLS]`` of every rank -> ``out [world_size * rows, COLS]`` on every rank. Programs claim shares of the rows,
push each to every peer and raise its flag there; then they wait for all flags and copy the rows out. Slots and flags
alternate by epoch parity; peers send in every call, so finishing call e + 1 proves that all of them finished call e.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_overlap.comm.backends.sim import SimBackend

COLS = 8
MAX_ROWS = 12
#: Parts of a rank's rows, each with a flag.
SHARES = 3
#: Byte offset of the flags: int32 [2, world_size, SHARES].
FLAGS = 4096


@triton.jit
def wait_for(flag_ptr, epoch, fault: tl.constexpr):
    """Poll until the flag carries ``epoch``."""
    order: tl.constexpr = "relaxed" if fault == "no_acquire" else "acquire"
    scope: tl.constexpr = "gpu" if fault == "gpu_scope" else "sys"
    seen = tl.atomic_add(flag_ptr, 0, sem=order, scope=scope)
    if fault == "any_epoch":
        while seen == 0:
            seen = tl.atomic_add(flag_ptr, 0, sem=order, scope=scope)
    else:
        while seen != epoch:
            seen = tl.atomic_add(flag_ptr, 0, sem=order, scope=scope)


@triton.jit
def all_gather_kernel(
    x_ptr, out_ptr, table_ptr, counters_ptr, rank, world_size, epoch, rows,
    fault: tl.constexpr, SHARES: tl.constexpr, FLAGS: tl.constexpr, MAX_ROWS: tl.constexpr, COLS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    parity = epoch % 2
    data_parity = parity * 0 if fault == "no_parity" else parity
    if fault == "not_resident":
        # Everybody waits until every program of the launch has started.
        tl.atomic_add(counters_ptr + 2, 1, sem="relaxed", scope="gpu")
        while tl.atomic_add(counters_ptr + 2, 0, sem="relaxed", scope="gpu") < programs * epoch:
            pass
    lane = tl.arange(0, BLOCK)
    length = tl.cdiv(rows * COLS, SHARES)
    # Shares are claimed, not assigned: however few programs are resident, all is sent before anybody waits.
    share = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
    while share < SHARES:
        first = share * length
        last = tl.minimum(first + length, rows * COLS)
        for step in range(world_size):
            base = tl.load(table_ptr + (rank + step) % world_size)
            data = base.to(tl.pointer_type(tl.float32)) + (data_parity * world_size + rank) * MAX_ROWS * COLS
            flag = (base + FLAGS).to(tl.pointer_type(tl.int32)) + (parity * world_size + rank) * SHARES + share
            if fault == "flag_first":
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
            for start in range(first, last, BLOCK):
                offset = start + lane
                tl.store(data + offset, tl.load(x_ptr + offset, mask=offset < last), mask=offset < last)
            if fault != "no_barrier":
                tl.debug_barrier()
            if fault == "no_release":
                tl.atomic_xchg(flag, epoch, sem="relaxed", scope="sys")
            elif fault == "gpu_scope":
                tl.atomic_xchg(flag, epoch, sem="release", scope="gpu")
            elif fault != "flag_first":
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
        share = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
    own = tl.load(table_ptr + rank)
    for step in range(world_size):
        # Each program waits for all flags, which is what makes two slots enough, and copies out its part.
        source = (tl.program_id(0) + step) % world_size
        flags = (own + FLAGS).to(tl.pointer_type(tl.int32)) + (parity * world_size + source) * SHARES
        for index in range(SHARES):
            wait_for(flags + index, epoch, fault)
        if source % programs == tl.program_id(0):
            data = own.to(tl.pointer_type(tl.float32)) + (data_parity * world_size + source) * MAX_ROWS * COLS
            for start in range(0, rows * COLS, BLOCK):
                offset = start + lane
                value = tl.load(data + offset, mask=offset < rows * COLS)
                tl.store(out_ptr + source * rows * COLS + offset, value, mask=offset < rows * COLS)
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        # All others have counted, and claimed before that, so plain stores may reset the counters.
        tl.store(counters_ptr, 0)
        tl.store(counters_ptr + 1, 0)


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
