"""Small kernels that each ask one question of the simulator. Symmetric memory comes as a table of addresses."""

import triton
import triton.language as tl


@triton.jit
def f32(table_ptr, rank):
    """``rank``'s copy of symmetric memory, as float32."""
    return tl.load(table_ptr + rank).to(tl.pointer_type(tl.float32))


@triton.jit
def flag_of(table_ptr, rank, OFFSET: tl.constexpr):
    """The int32 word at byte ``OFFSET`` of ``rank``'s copy."""
    return (tl.load(table_ptr + rank) + OFFSET).to(tl.pointer_type(tl.int32))


@triton.jit
def send_kernel(table_ptr, peer, value, BLOCK: tl.constexpr, BARRIER: tl.constexpr, SEM: tl.constexpr,
                SCOPE: tl.constexpr):  # fmt: skip
    """Store ``value`` to BLOCK words of ``peer``, then raise its flag at byte 1024."""
    tl.store(f32(table_ptr, peer) + tl.arange(0, BLOCK), tl.full((BLOCK,), 1.0, tl.float32) * value)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(flag_of(table_ptr, peer, 1024), 1, sem=SEM, scope=SCOPE)


@triton.jit
def receive_kernel(table_ptr, rank, out_ptr, BLOCK: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr):
    """Wait for the flag and copy the words out."""
    flag = flag_of(table_ptr, rank, 1024)
    while tl.atomic_add(flag, 0, sem=SEM, scope=SCOPE) != 1:
        pass
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.load(f32(table_ptr, rank) + lane))


@triton.jit
def block_receive_kernel(table_ptr, rank, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """As ``receive_kernel``, polling a block of flags of which one counts."""
    lanes = tl.arange(0, 4)
    flags = flag_of(table_ptr, rank, 1024) + lanes
    zero = tl.zeros((4,), tl.int32)
    while tl.sum(tl.atomic_add(flags, zero, sem="acquire", scope="sys")) != 1:
        pass
    if BARRIER:
        tl.debug_barrier()
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.load(f32(table_ptr, rank) + lane))


@triton.jit
def own_stores_kernel(table_ptr, rank, out_ptr, BLOCK: tl.constexpr):
    """Overwrite words of a peer twice and read them back."""
    lane = tl.arange(0, BLOCK)
    target = f32(table_ptr, rank)
    tl.store(target + lane, tl.full((BLOCK,), 1.0, tl.float32))
    tl.store(target + lane, tl.full((BLOCK,), 2.0, tl.float32), mask=lane % 2 == 0)
    tl.store(out_ptr + lane, tl.load(target + lane))


@triton.jit
def write_kernel(table_ptr, peer, value, BLOCK: tl.constexpr):
    """Plain stores to a peer, announced by nothing."""
    tl.store(f32(table_ptr, peer) + tl.arange(0, BLOCK), tl.full((BLOCK,), 1.0, tl.float32) * value)


@triton.jit
def read_kernel(table_ptr, peer, out_ptr, BLOCK: tl.constexpr):
    """Plain loads of a peer's words."""
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.load(f32(table_ptr, peer) + lane))


@triton.jit
def fill_kernel(out_ptr, value, n, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.full((BLOCK,), 1.0, tl.float32) * value, mask=lane < n)


@triton.jit
def add_kernel(out_ptr, value, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.load(out_ptr + lane) + value)


@triton.jit
def two_programs_kernel(state_ptr, out_ptr, SEM: tl.constexpr, SCOPE: tl.constexpr, BARRIER: tl.constexpr):
    """Whoever comes second reads what the first stored in memory of one device."""
    pid = tl.program_id(0)
    tl.store(state_ptr + 1 + pid, pid + 10)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(state_ptr, 1, sem=SEM, scope=SCOPE) == 1:
        tl.store(out_ptr, tl.load(state_ptr + 1) + tl.load(state_ptr + 2))
        tl.store(state_ptr, 0)


@triton.jit
def claim_kernel(state_ptr, out_ptr, tasks):
    """Relaxed claims of tasks, each written by its claimer; the last program resets the counters."""
    task = tl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu")
    while task < tasks:
        tl.store(out_ptr + task, task * 3)
        task = tl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(state_ptr, 0)
        tl.store(state_ptr + 1, 0)


@triton.jit
def peek_kernel(state_ptr, out_ptr, ATOMIC: tl.constexpr):
    """One program counts; the other looks at the counter, with a plain load or an atomic."""
    if tl.program_id(0) == 0:
        tl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu")
    else:
        if ATOMIC:
            tl.store(out_ptr, tl.atomic_add(state_ptr, 0, sem="relaxed", scope="gpu"))
        else:
            tl.store(out_ptr, tl.load(state_ptr))


@triton.jit
def neighbours_kernel(out_ptr, ITEMS: tl.constexpr):
    """Programs write adjacent 2-byte elements."""
    lane = tl.arange(0, ITEMS)
    tl.store(out_ptr + tl.program_id(0) * ITEMS + lane, tl.full((ITEMS,), 1.0, tl.float16))


@triton.jit
def descriptor_send_kernel(desc, table_ptr, peer, COLS: tl.constexpr, WAIT: tl.constexpr):
    """Announce a descriptor's store with a release, after waiting for it or not."""
    desc.store([0, 0], tl.full((1, COLS), 7.0, tl.float32))
    if WAIT:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    tl.atomic_xchg(flag_of(table_ptr, peer, 1024), 1, sem="release", scope="sys")


@triton.jit
def descriptor_fill_kernel(desc, value, ROWS: tl.constexpr, COLS: tl.constexpr):
    desc.store([tl.program_id(0) * ROWS, 0], tl.full((ROWS, COLS), 1.0, tl.float32) * value)


@triton.jit
def bounded_wait_kernel(table_ptr, rank, clock_address, limit_ns, out_ptr, PLAIN_CLOCK: tl.constexpr):
    """Wait for the flag at most ``limit_ns``; out[0] = 1 if it came, 2 if time ran out; out[1] = the time waited."""
    flag = flag_of(table_ptr, rank, 1024)
    clock = clock_address.to(tl.pointer_type(tl.int64))
    start = tl.load(clock) if PLAIN_CLOCK else tl.atomic_add(clock, 0, sem="relaxed", scope="sys")
    waited = start - start
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen != 1) & (waited <= limit_ns):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        now = tl.load(clock) if PLAIN_CLOCK else tl.atomic_add(clock, 0, sem="relaxed", scope="sys")
        waited = now - start
    tl.store(out_ptr, tl.where(seen == 1, 1, 2))
    tl.store(out_ptr + 1, waited)


@triton.jit
def raise_kernel(table_ptr, peer, value):
    """Release the flag."""
    tl.atomic_xchg(flag_of(table_ptr, peer, 1024), value, sem="release", scope="sys")


@triton.jit
def count_kernel(table_ptr, peer, times):
    """Add to a peer's counter."""
    for _ in range(times):
        tl.atomic_add(flag_of(table_ptr, peer, 1024), 1, sem="release", scope="sys")


@triton.jit
def header_kernel(table_ptr, peer, value):
    """Write an 8-byte word."""
    word = (tl.load(table_ptr + peer) + 1024).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def watch_header_kernel(table_ptr, rank, last, out_ptr):
    """Record every value that an 8-byte word takes until it is ``last``."""
    word = (tl.load(table_ptr + rank) + 1024).to(tl.pointer_type(tl.int64))
    seen = tl.atomic_add(word, tl.full((), 0, tl.int64), sem="acquire", scope="sys")
    slot = 0
    while seen != last:
        tl.store(out_ptr + slot % 64, seen)
        slot += 1
        seen = tl.atomic_add(word, tl.full((), 0, tl.int64), sem="acquire", scope="sys")


@triton.jit
def spin_kernel(table_ptr, rank):
    """Poll a flag that nobody raises."""
    while tl.atomic_add(flag_of(table_ptr, rank, 1024), 0, sem="acquire", scope="sys") != 5:
        pass


@triton.jit
def spin_on_own_store_kernel(table_ptr, rank):
    """Wait for the flag to be what the program itself has stored beside it, and reads again at each look."""
    own = flag_of(table_ptr, rank, 1032)
    tl.store(own, 1)
    while tl.atomic_add(flag_of(table_ptr, rank, 1024), 0, sem="acquire", scope="sys") != tl.load(own):
        pass


@triton.jit
def plain_spin_kernel(table_ptr, rank):
    """Poll with plain loads a flag that another launch raises."""
    while tl.load(flag_of(table_ptr, rank, 1024), volatile=True) != 1:
        pass


@triton.jit
def restless_kernel(state_ptr):
    """Changes memory for ever."""
    while tl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu") >= 0:
        pass


@triton.jit
def all_at_once_kernel(state_ptr):
    """Waits until every program of the launch has started: right only if all are resident."""
    tl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu")
    while tl.atomic_add(state_ptr, 0, sem="relaxed", scope="gpu") < tl.num_programs(0):
        pass


@triton.jit
def order_kernel(state_ptr, out_ptr):
    """In which order programs start."""
    out = tl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu")
    tl.store(out_ptr + out, tl.program_id(0))


@triton.jit
def address_kernel(address, offset, n, BLOCK: tl.constexpr, STORE: tl.constexpr):
    """Touch words at an address that came as a number."""
    lane = tl.arange(0, BLOCK)
    pointer = address.to(tl.pointer_type(tl.float32)) + offset + lane
    if STORE:
        tl.store(pointer, tl.full((BLOCK,), 1.0, tl.float32), mask=lane < n)
    else:
        tl.load(pointer, mask=lane < n)


@triton.jit
def failing_kernel(x_ptr):
    tl.static_assert(False, "deliberate")


@triton.jit
def scale_kernel(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane, mask=lane < n) * factor, mask=lane < n)


@triton.jit
def poll_kernel(table_ptr, rank, out_ptr, timeout_ns: tl.constexpr):
    """``tl.atomic_poll``, where Triton has it."""
    flag = flag_of(table_ptr, rank, 1024)
    matched = tl.atomic_poll(flag, 1, sem="acquire", scope="sys", timeout_ns=timeout_ns)
    tl.store(out_ptr, matched.to(tl.int32))


@triton.jit
def receive_from_kernel(table_ptr, rank, source, out_ptr, BLOCK: tl.constexpr):
    """Wait for the flag and copy words of ``source``'s memory out."""
    while tl.atomic_add(flag_of(table_ptr, rank, 1024), 0, sem="acquire", scope="sys") != 1:
        pass
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.load(f32(table_ptr, source) + lane))


@triton.jit
def failed_swap_kernel(table_ptr, peer, value, BLOCK: tl.constexpr, EXPECTED: tl.constexpr):
    """Store words, then try to announce them with a compare-and-swap from EXPECTED to 1."""
    tl.store(f32(table_ptr, peer) + tl.arange(0, BLOCK), tl.full((BLOCK,), 1.0, tl.float32) * value)
    tl.debug_barrier()
    tl.atomic_cas(flag_of(table_ptr, peer, 1024), EXPECTED, 1, sem="acq_rel", scope="sys")
