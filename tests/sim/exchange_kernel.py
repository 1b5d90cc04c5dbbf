"""The kernel of ``exchange.py``."""

import triton
import triton.language as tl


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
