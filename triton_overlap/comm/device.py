"""Device functions for Triton kernels: headers, flags, bounded waits, failure.

Kernels spin here, or in loops that ask ``may_wait`` at each turn.

Every function takes ``buffer_ptr``, the int64 table of a user buffer (:class:`triton_overlap.comm.layout.TableWord`).
An *epoch* is an int32; flags and headers are accepted only when they carry the epoch of the call, by equality, so a
wrapped epoch is harmless. The protocol and its proofs are in ``comm/README.md``; the arguments that a single line
relies on stand at that line.

What the primitives guarantee
    ``release_flag``   everything this program stored before it, by all its threads, is visible to whoever sees the flag
                       with ``wait_flags``. Not so for descriptor (TMA) stores, which are asynchronous.
    ``wait_flags``     when it returns 1, plain loads and descriptor loads of this program see what was stored before
                       each flag was released.
    ``wait_headers``   when it returns 1, the peers in question run the same operation on the same shapes in this epoch.

A wait returns 0 after a failure: another rank's, another program's, or its own deadline. The program must then announce
nothing more, take no more tasks and go to ``finish_call``.
"""

import triton
import triton.language as tl
from triton import knobs

from .layout import HEADER_WORDS as _HEADER_WORDS
from .layout import RECORD_WORDS as _RECORD_WORDS
from .layout import Failure, Place, StateWord, TableWord

RANK = tl.constexpr(int(TableWord.RANK))
WORLD_SIZE = tl.constexpr(int(TableWord.WORLD_SIZE))
HEADERS = tl.constexpr(int(TableWord.HEADERS))
FLAGS = tl.constexpr(int(TableWord.FLAGS))
DATA = tl.constexpr(int(TableWord.DATA))
SLOT_BYTES = tl.constexpr(int(TableWord.SLOT_BYTES))
FLAGS_PER_SOURCE = tl.constexpr(int(TableWord.FLAGS_PER_SOURCE))
STATE = tl.constexpr(int(TableWord.STATE))
STAGING = tl.constexpr(int(TableWord.STAGING))
STAGED = tl.constexpr(int(TableWord.STAGED))
RECORD = tl.constexpr(int(TableWord.RECORD))
CLOCK = tl.constexpr(int(TableWord.CLOCK))
TIMEOUT_NS = tl.constexpr(int(TableWord.TIMEOUT_NS))
PEERS = tl.constexpr(int(TableWord.PEERS))
TASK = tl.constexpr(int(StateWord.TASK))
DONE = tl.constexpr(int(StateWord.DONE))
EPOCH = tl.constexpr(int(StateWord.EPOCH))
HEADER_WORDS = tl.constexpr(_HEADER_WORDS)
RECORD_WORDS = tl.constexpr(_RECORD_WORDS)

#: What TASK holds, or more, once a call failed: beyond any number of tasks, and far from overflow.
STOPPED = tl.constexpr(1 << 30)
#: True where kernels run under Triton's interpreter, which has no inline assembly and no hardware timer.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
#: Polls of a flag between two looks at the clock and the failure notice. A look costs as much as a poll, so on a GPU
#: they are rare; under the interpreter every poll looks, so that a simulated schedule meets each of them.
POLLS_BETWEEN_LOOKS = tl.constexpr(1 if knobs.runtime.interpret else 64)

TIMEOUT = tl.constexpr(int(Failure.TIMEOUT))
MISMATCH = tl.constexpr(int(Failure.MISMATCH))
BAD_COUNT = tl.constexpr(int(Failure.COUNT))
SURPLUS = tl.constexpr(int(Failure.SURPLUS))
BAD_ROUTING = tl.constexpr(int(Failure.ROUTING))
AT_HEADER = tl.constexpr(int(Place.HEADER))
AT_DATA = tl.constexpr(int(Place.DATA_FLAG))
AT_STAGING = tl.constexpr(int(Place.STAGED_TILE))
AT_SIGNAL = tl.constexpr(int(Place.SIGNAL))
AT_PARTS = tl.constexpr(int(Place.PARTS_OF_CHANNEL))
AT_COUNT = tl.constexpr(int(Place.ACTIVE_COUNT))
AT_COUNTS = tl.constexpr(int(Place.COUNTS))
AT_FORWARDED = tl.constexpr(int(Place.FORWARDED_ROWS))
AT_ROUTING = tl.constexpr(int(Place.ROUTING))


@triton.jit
def peer_address(buffer_ptr, peer):
    """Address (int64) of ``peer``'s copy of the buffer."""
    return tl.load(buffer_ptr + PEERS + peer)


@triton.jit
def control_ptr(buffer_ptr, peer):
    """``peer``'s control block, int64 words."""
    world_size = tl.load(buffer_ptr + WORLD_SIZE)
    return tl.load(buffer_ptr + PEERS + world_size + peer).to(tl.pointer_type(tl.int64))


@triton.jit
def slot_address(buffer_ptr, peer, epoch):
    """Address (int64) of the data slot of ``epoch`` in ``peer``'s copy."""
    slot = (epoch & 1).to(tl.int64)
    return peer_address(buffer_ptr, peer) + tl.load(buffer_ptr + DATA) + slot * tl.load(buffer_ptr + SLOT_BYTES)


@triton.jit
def flags_ptr(buffer_ptr, peer, source, epoch):
    """The int32 flags that ``source`` sets in ``peer``'s copy in the slot of ``epoch``."""
    slot = (epoch & 1).to(tl.int64)
    row = slot * tl.load(buffer_ptr + WORLD_SIZE) + source
    address = peer_address(buffer_ptr, peer) + tl.load(buffer_ptr + FLAGS)
    return address.to(tl.pointer_type(tl.int32)) + row * tl.load(buffer_ptr + FLAGS_PER_SOURCE)


@triton.jit
def staged_ptr(buffer_ptr, owner):
    """The int32 flags, local to this device, of tiles staged for ``owner``."""
    flags = tl.load(buffer_ptr + STAGED).to(tl.pointer_type(tl.int32))
    return flags + owner.to(tl.int64) * tl.load(buffer_ptr + FLAGS_PER_SOURCE)


@triton.jit
def claim_task(buffer_ptr):
    """The next task of this call, each number handed out once. Announces nothing, so relaxed is enough.

    Claim a task when it can be started, not earlier: a push that waits behind a tile in its program's hands is late for
    a peer (claiming one task ahead made all-gathers 10 to 40 % slower on two H200s).
    """
    state = tl.load(buffer_ptr + STATE).to(tl.pointer_type(tl.int32))
    return tl.atomic_add(state + TASK, 1, sem="relaxed", scope="gpu")


@triton.jit
def failure_noticed(buffer_ptr):
    """The rank that failed first as seen here, plus 1; 0 while all is well."""
    notice = control_ptr(buffer_ptr, tl.load(buffer_ptr + RANK)) + tl.load(buffer_ptr + WORLD_SIZE) * RECORD_WORDS
    return tl.atomic_add(notice, 0, sem="acquire", scope="sys")


@triton.jit
def release_flag(flag_ptr, epoch):
    """Announce, at system scope, all that this program has stored: see the module's page."""
    # The atomic is one thread's; without the barrier the other threads' stores could still be on their way.
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def release_staged(flag_ptr, epoch):
    """As ``release_flag``, for readers on this device."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="gpu")


@triton.jit
def now_ns(buffer_ptr):
    """Nanoseconds of the hardware timer, or of the backend's clock word under the interpreter."""
    if INTERPRETED:
        clock = tl.load(buffer_ptr + CLOCK).to(tl.pointer_type(tl.int64))
        return tl.atomic_add(clock, 0, sem="relaxed", scope="sys")
    else:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _acquired():
    """Order every thread of the program, and its descriptor loads, after an acquire that one thread performed."""
    tl.debug_barrier()
    if not INTERPRETED:
        # A peer wrote through the generic proxy; TMA reads through the async proxy.
        tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def drain_descriptor_stores():
    """Wait until this program's descriptor stores are complete, not only read out of shared memory."""
    # Interpreted too (comm/interpreter.py): the simulator orders descriptor stores by it.
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _record(kind, operation, place, rank, peer, epoch, index, expected, seen, timeout_ns):
    """The eight words of a failure record; word 0 is never 0. Decoded by ``comm.signals.decode_record``."""
    lane = tl.arange(0, RECORD_WORDS)
    value = tl.where(lane == 0, kind | (operation.to(tl.int64) << 8) | (place << 40), 0)
    value = tl.where(lane == 1, rank + 1, value)
    value = tl.where(lane == 2, peer, value)
    value = tl.where(lane == 3, epoch, value)
    value = tl.where(lane == 4, index, value)
    value = tl.where(lane == 5, expected, value)
    value = tl.where(lane == 6, seen, value)
    value = tl.where(lane == 7, timeout_ns, value)
    return value


@triton.jit
def _publish_record(record_ptr, value):
    """Write a record so that a reader that sees word 0 sees the rest."""
    lane = tl.arange(0, RECORD_WORDS)
    tl.store(record_ptr + lane, value, mask=lane > 0)
    tl.debug_barrier()
    tl.atomic_xchg(record_ptr, tl.sum(tl.where(lane == 0, value, 0)), sem="release", scope="sys")


@triton.jit
def fail(buffer_ptr, kind, operation, place, peer, epoch, index, expected, seen):
    """Report a failure of this rank, unless one is known already: to the host, and to every peer."""
    rank = tl.load(buffer_ptr + RANK)
    world_size = tl.load(buffer_ptr + WORLD_SIZE)
    notice = control_ptr(buffer_ptr, rank) + world_size * RECORD_WORDS
    if tl.atomic_cas(notice, tl.full((), 0, tl.int64), rank + 1, sem="acq_rel", scope="sys") == 0:
        timeout_ns = tl.load(buffer_ptr + TIMEOUT_NS)
        value = _record(kind, operation, place, rank, peer, epoch, index, expected, seen, timeout_ns)
        _publish_record(tl.load(buffer_ptr + RECORD).to(tl.pointer_type(tl.int64)), value)
        for step in range(1, world_size):
            other = control_ptr(buffer_ptr, (rank + step) % world_size)
            _publish_record(other + rank * RECORD_WORDS, value)
            # The first notice stays: its record is the cause, later ones are consequences.
            tl.atomic_cas(
                other + world_size * RECORD_WORDS, tl.full((), 0, tl.int64), rank + 1, sem="acq_rel", scope="sys"
            )


@triton.jit
def _relay_record(buffer_ptr, reporter):
    """Copy what ``reporter`` wrote into this rank's control block to this rank's host."""
    lane = tl.arange(0, RECORD_WORDS)
    source = control_ptr(buffer_ptr, tl.load(buffer_ptr + RANK)) + reporter * RECORD_WORDS
    _publish_record(tl.load(buffer_ptr + RECORD).to(tl.pointer_type(tl.int64)), tl.load(source + lane, volatile=True))


@triton.jit
def send_headers(buffer_ptr, epoch, rows, n, k, operation):
    """Open a call: tell every peer the epoch, the rows of a chunk, N, K and the operation."""
    rank = tl.load(buffer_ptr + RANK)
    world_size = tl.load(buffer_ptr + WORLD_SIZE)
    for step in range(1, world_size):
        send_header(buffer_ptr, (rank + step) % world_size, epoch, rows, n, k, operation)


@triton.jit
def send_header(buffer_ptr, peer, epoch, rows, n, k, operation):
    """Open a call towards ``peer``. What the program stored before its last ``tl.debug_barrier`` comes before it.

    Each word carries the epoch in its upper half and is stored atomically, so that no order among them is needed.
    """
    row = (epoch & 1).to(tl.int64) * tl.load(buffer_ptr + WORLD_SIZE) + tl.load(buffer_ptr + RANK)
    lane = tl.arange(0, HEADER_WORDS)
    header = peer_address(buffer_ptr, peer) + tl.load(buffer_ptr + HEADERS)
    header_ptr = header.to(tl.pointer_type(tl.int64)) + row * HEADER_WORDS + lane
    tl.atomic_xchg(header_ptr, header_words(epoch, rows, n, k, operation), sem="release", scope="sys")


@triton.jit
def header_words(epoch, rows, n, k, operation):
    """The HEADER_WORDS int64 words of a header."""
    lane = tl.arange(0, HEADER_WORDS)
    value = tl.where(lane == 0, operation, tl.where(lane == 1, rows, tl.where(lane == 2, n, k)))
    return (epoch.to(tl.int64) << 32) | value.to(tl.int64)


@triton.jit
def open_call(buffer_ptr, task, epoch, rows, n, k, operation):
    """Open a call: the program that claimed task 0 sends the headers. Every program calls it with its first task.

    Returns 1, or 0 where the group has failed before. Every program looks: after a failed call the peers may still be
    two calls behind, so not even data without a flag may be pushed to them.
    """
    ok = tl.full((), 1, tl.int32)
    if failure_noticed(buffer_ptr) != 0:
        ok = tl.full((), 0, tl.int32)
    elif task == 0:
        send_headers(buffer_ptr, epoch, rows, n, k, operation)
    return ok


@triton.jit
def active_call(buffer_ptr, tokens_ptr, epoch, capacity, operation):
    """The epoch of this call and the rows of a chunk: the host's ``epoch`` and ``capacity``, or, where ``tokens_ptr``
    is given, those on the device. Every program calls it, before ``open_call``.

    A token count that breaks a rule is reported as a failure of this rank, and the rows are 0.
    """
    rows = capacity
    if tokens_ptr is not None:
        epoch = device_epoch(buffer_ptr)
        world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
        tokens = tl.load(tokens_ptr).to(tl.int32)
        rows = tokens // world_size
        if (tokens <= 0) | (rows > capacity) | (rows * world_size != tokens):
            rank = tl.load(buffer_ptr + RANK)
            fail(buffer_ptr, BAD_COUNT, operation, AT_COUNT, rank, epoch, 0, capacity * world_size, tokens)
            rows = capacity * 0
    return epoch, rows


@triton.jit
def end_call(buffer_ptr, tokens_ptr, ok, checked, epoch, rows, n, k, operation):
    """``close_call``, after which an epoch on the device is the next call's."""
    last = close_call(buffer_ptr, ok, checked, epoch, rows, n, k, operation)
    if tokens_ptr is not None:
        if last != 0:  # every program has read the epoch: it did so before it ended
            advance_epoch(buffer_ptr, epoch)
    return last


@triton.jit
def close_call(buffer_ptr, ok, checked, epoch, rows, n, k, operation):
    """End a program's part of a call, whether it went well (``ok``) or not.

    ``checked``: the headers of the ranks 1 to checked - 1 steps after this one agree already. Returns what
    ``finish_call`` does; on 2 the host has been told, and the caller poisons its output.
    """
    if ok == 1:
        # No call ends before it has every peer's header: two slots are enough because of that (comm/README.md).
        world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
        ok = wait_headers(buffer_ptr, checked, world_size, epoch, rows, n, k, operation)
    if ok == 0:
        stop_tasks(buffer_ptr)
    last = finish_call(buffer_ptr)
    if last == 2:
        reporter = failure_noticed(buffer_ptr) - 1
        if reporter != tl.load(buffer_ptr + RANK):
            tl.debug_barrier()
            _relay_record(buffer_ptr, reporter)
    return last


@triton.jit
def wait_headers(buffer_ptr, first, last, epoch, rows, n, k, operation):
    """Wait for the headers of the ranks ``first`` to ``last - 1`` steps after this one, and compare them.

    Returns 1 when all agree, else 0. Passing it for every peer is what proves that all peers have finished the call
    before this one (comm/README.md), so every call does so before it ends, also with nothing to receive.
    """
    rank = tl.load(buffer_ptr + RANK)
    world_size = tl.load(buffer_ptr + WORLD_SIZE)
    ok = tl.full((), 1, tl.int32)
    for step in range(first, last):
        if ok == 1:
            ok = wait_header(buffer_ptr, (rank + step) % world_size, epoch, rows, n, k, operation)
    return ok


@triton.jit
def wait_header(buffer_ptr, peer, epoch, rows, n, k, operation):
    """Wait for the header of ``peer``, and compare it. Returns 1 when it agrees, else 0."""
    rank = tl.load(buffer_ptr + RANK)
    world_size = tl.load(buffer_ptr + WORLD_SIZE)
    lane = tl.arange(0, HEADER_WORDS)
    expected = header_words(epoch, rows, n, k, operation)
    ok = tl.full((), 1, tl.int32)
    address = peer_address(buffer_ptr, rank) + tl.load(buffer_ptr + HEADERS)
    row = (epoch & 1).to(tl.int64) * world_size + peer
    header_ptr = address.to(tl.pointer_type(tl.int64)) + row * HEADER_WORDS + lane
    seen = tl.atomic_add(header_ptr, tl.zeros_like(expected), sem="acquire", scope="sys")
    polls = tl.full((), 0, tl.int32)
    start = now_ns(buffer_ptr)
    while (ok == 1) & (tl.sum(((seen >> 32) != epoch).to(tl.int32)) > 0):
        seen = tl.atomic_add(header_ptr, tl.zeros_like(expected), sem="acquire", scope="sys")
        polls += 1
        if polls % POLLS_BETWEEN_LOOKS == 0:
            if failure_noticed(buffer_ptr) != 0:
                # What a peer sent before it failed in a later call is here now.
                seen = tl.atomic_add(header_ptr, tl.zeros_like(expected), sem="acquire", scope="sys")
                if tl.sum(((seen >> 32) != epoch).to(tl.int32)) > 0:
                    ok = tl.full((), 0, tl.int32)
            elif now_ns(buffer_ptr) - start > tl.load(buffer_ptr + TIMEOUT_NS):
                fail(
                    buffer_ptr, TIMEOUT, operation, AT_HEADER, peer, epoch, 0,
                    rows, tl.sum(tl.where(lane == 0, seen, 0)),
                )  # fmt: skip
                ok = tl.full((), 0, tl.int32)
    if ok == 1:
        ok = compare_header(buffer_ptr, peer, epoch, expected, seen, operation)
    return ok


@triton.jit
def compare_header(buffer_ptr, peer, epoch, expected, seen, operation):
    """1 where the header that ``peer`` sent is as ``expected``; else 0, after reporting the first word that differs:
    the operation before the rows of a chunk, N and K."""
    ok = tl.full((), 1, tl.int32)
    lane = tl.arange(0, HEADER_WORDS)
    word = tl.min(tl.where(seen != expected, lane, HEADER_WORDS))
    if word < HEADER_WORDS:
        fail(
            buffer_ptr, MISMATCH, operation, AT_HEADER, peer, epoch, word,
            tl.sum(tl.where(lane == word, expected, 0)), tl.sum(tl.where(lane == word, seen, 0)),
        )  # fmt: skip
        ok = tl.full((), 0, tl.int32)
    return ok


@triton.jit
def wait_signal(buffer_ptr, signal_ptr, target, epoch, operation, place, peer, index):
    """Wait until the int64 signal has reached ``target``: then plain loads of this program see what was stored or put
    before each of the additions it counts. Returns 1, or 0 after a failure."""
    seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    ok = tl.full((), 1, tl.int32)
    polls = tl.full((), 0, tl.int32)
    start = now_ns(buffer_ptr)
    while (ok == 1) & (seen < target):
        polls += 1
        ok = may_wait(buffer_ptr, polls, start, epoch, operation, place, peer, index, target, seen)
        seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
        # What a peer sent before it failed in a later call is here after the notice.
        ok = tl.where(seen >= target, 1, ok)
    _acquired()
    return ok


@triton.jit
def may_wait(buffer_ptr, polls, start, epoch, operation, place, peer, index, expected, seen):
    """Whether a wait that began at ``start`` and has looked ``polls`` times may go on: 0 after anybody's failure, or
    after reporting its own, when the time is up. Poll once more on 0, before giving up: see ``wait_flags``.

    A wait for what a peer forwards ends because that peer's own wait does not: it gets an eighth more time, so that the
    record is of the wait at the root.
    """
    ok = tl.full((), 1, tl.int32)
    limit = tl.load(buffer_ptr + TIMEOUT_NS)
    if place == AT_FORWARDED:
        limit += limit // 8
    if polls % POLLS_BETWEEN_LOOKS == 0:
        if failure_noticed(buffer_ptr) != 0:
            ok = tl.full((), 0, tl.int32)
        elif now_ns(buffer_ptr) - start > limit:
            fail(buffer_ptr, TIMEOUT, operation, place, peer, epoch, index, expected, seen)
            ok = tl.full((), 0, tl.int32)
    return ok


@triton.jit
def _absent_peer(buffer_ptr, epoch):
    """A peer whose header for ``epoch`` is not here, the nearest after this rank, or -1."""
    rank = tl.load(buffer_ptr + RANK)
    world_size = tl.load(buffer_ptr + WORLD_SIZE)
    headers = peer_address(buffer_ptr, rank) + tl.load(buffer_ptr + HEADERS)
    absent = tl.full((), -1, tl.int64)
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        row = (epoch & 1).to(tl.int64) * world_size + peer
        header_ptr = headers.to(tl.pointer_type(tl.int64)) + row * HEADER_WORDS
        seen = tl.atomic_add(header_ptr, 0, sem="acquire", scope="sys")
        if (absent < 0) & ((seen >> 32) != epoch):
            absent = tl.full((), 0, tl.int64) + peer
    return absent


@triton.jit
def wait_flags(buffer_ptr, flag_ptr, first, count, epoch, operation, place, peer, LANES: tl.constexpr):
    """Wait until the flags ``first`` to ``first + count - 1`` (at most LANES of them) carry ``epoch``.

    Returns 1, or 0 after a failure. Call it outside the K loop, at most once a tile.
    """
    lane = tl.arange(0, LANES)
    pointers = flag_ptr + first + lane
    mask = lane < count
    zero = tl.zeros((LANES,), tl.int32)
    seen = tl.atomic_add(pointers, zero, mask=mask, sem="acquire", scope="sys")
    late = tl.where(mask & (seen != epoch), 1, 0)
    ok = tl.full((), 1, tl.int32)
    if tl.sum(late) > 0:
        polls = tl.full((), 0, tl.int32)
        start = now_ns(buffer_ptr)
        while (ok == 1) & (tl.sum(late) > 0):
            seen = tl.atomic_add(pointers, zero, mask=mask, sem="acquire", scope="sys")
            late = tl.where(mask & (seen != epoch), 1, 0)
            polls += 1
            if polls % POLLS_BETWEEN_LOOKS == 0:
                if failure_noticed(buffer_ptr) != 0:
                    # What a peer sent before it failed in a later call is here now.
                    seen = tl.atomic_add(pointers, zero, mask=mask, sem="acquire", scope="sys")
                    late = tl.where(mask & (seen != epoch), 1, 0)
                    if tl.sum(late) > 0:
                        ok = tl.full((), 0, tl.int32)
                elif now_ns(buffer_ptr) - start > tl.load(buffer_ptr + TIMEOUT_NS):
                    missing = tl.min(tl.where(late > 0, lane, LANES))
                    absent = _absent_peer(buffer_ptr, epoch)
                    if absent >= 0:  # then ``peer`` may be stuck itself, in a wait for that rank
                        fail(buffer_ptr, TIMEOUT, operation, AT_HEADER, absent, epoch, 0, 0, 0)
                    else:
                        fail(
                            buffer_ptr, TIMEOUT, operation, place, peer, epoch, first + missing,
                            epoch, tl.sum(tl.where(lane == missing, seen, 0)),
                        )  # fmt: skip
                    ok = tl.full((), 0, tl.int32)
    _acquired()
    return ok


@triton.jit
def device_epoch(buffer_ptr):
    """The epoch of this call, where epochs live in device memory: the same in every program of the launch."""
    return tl.load(tl.load(buffer_ptr + STATE).to(tl.pointer_type(tl.int32)) + EPOCH)


@triton.jit
def advance_epoch(buffer_ptr, epoch):
    """For the last program of a call, after ``finish_call``: the next launch is another call. Stays within 31 bits, is
    never 0, and alternates in parity when it wraps too."""
    state = tl.load(buffer_ptr + STATE).to(tl.pointer_type(tl.int32))
    tl.store(state + EPOCH, tl.where(epoch == 0x7FFFFFFE, 1, epoch + 1))


@triton.jit
def stop_tasks(buffer_ptr):
    """Hand out no further task of this call: a program that fails ends the work of the others, and the call."""
    state = tl.load(buffer_ptr + STATE).to(tl.pointer_type(tl.int32))
    tl.atomic_max(state + TASK, STOPPED, sem="relaxed", scope="gpu")


@triton.jit
def finish_call(buffer_ptr):
    """End this program's part of a call. Returns 0, or in the last program to end, after all others: 1, or 2 where the
    call failed.

    The last one hands the counters back for the next call, which starts after this launch on the same stream.
    """
    drain_descriptor_stores()
    tl.debug_barrier()
    state = tl.load(buffer_ptr + STATE).to(tl.pointer_type(tl.int32))
    # acq_rel: whatever the other programs stored and claimed happens before what the last one does.
    done = tl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu")
    last = tl.full((), 0, tl.int32)
    if done == tl.num_programs(0) - 1:
        tl.debug_barrier()
        tl.atomic_xchg(state + DONE, 0, sem="relaxed", scope="gpu")
        task = tl.atomic_xchg(state + TASK, 0, sem="relaxed", scope="gpu")
        # A notice fails the call, although its own data may be whole: a rank that has failed no longer keeps to the
        # protocol (copies that its host had enqueued go on), so what this call read may have been overwritten. The
        # notice was raised before any such store, so it is seen here by whoever read one.
        last = tl.where((task >= STOPPED) | (failure_noticed(buffer_ptr) != 0), 2, 1)
    return last


@triton.jit
def poison(out_ptr, numel, BLOCK: tl.constexpr):
    """After a failed call, in its last program: fill the contiguous output of ``numel`` (int64) elements with NaN."""
    lane = tl.arange(0, BLOCK).to(tl.int64)
    value = tl.full((BLOCK,), float("nan"), out_ptr.dtype.element_ty)
    for start in range(0, numel, BLOCK):
        offset = start + lane
        tl.store(out_ptr + offset, value, mask=offset < numel)
