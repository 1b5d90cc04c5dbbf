"""The opening of an expert-parallel call: its first task, and the barrier after which all ranks are in the call."""

import triton
import triton.language as tl

from ..comm.device import (
    AT_ROUTING,
    AT_SIGNAL,
    BAD_ROUTING,
    HEADER_WORDS,
    RANK,
    SURPLUS,
    advance_epoch,
    claim_task,
    compare_header,
    fail,
    failure_noticed,
    header_words,
    send_header,
    wait_header,
    wait_signal,
)
from .ep_slots import (
    ARRIVAL_SIGNALS,
    COUNT_LANES,
    COUNTS,
    DISPATCH_EPOCH,
    EXPERTS,
    HELLO_IN,
    HELLO_OUT,
    HELLO_SIGNALS,
    SCALE_OUT,
    SCALE_UP,
    SENT_COUNTS,
    base_ptr,
    copy_words,
    number,
    words_at,
)

#: Signals that a program looks at together.
SIGNAL_LANES = tl.constexpr(256)


@triton.jit
def open_expert_call(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, counts, tasks, PUT: tl.constexpr):
    """Every program's way into a call of ``tasks`` tasks. Returns ok, and the first task after 0 that it claimed.

    Whoever claims task 0 tells every rank that this one is in the call, and with which routing; a program that has
    found work waits until all ranks are.
    """
    ok = tl.full((), 1, tl.int32)
    # A call that counts makes the routing, and writes its epoch there when every program has come this far.
    routed = epoch
    if counts == 0:
        routed = tl.load(routing_ptr + tl.load(ep_ptr + DISPATCH_EPOCH))
    task = claim_task(buffer_ptr)
    if task == 0:
        ok = check_entry(buffer_ptr, ep_ptr, epoch, routed, operation)
        if ok == 1:
            ok = enter_call(buffer_ptr, ep_ptr, routing_ptr, epoch, routed, operation, counts, PUT)
        task = claim_task(buffer_ptr)
    if (ok == 1) & (task < tasks):
        ok = wait_entered(buffer_ptr, ep_ptr, epoch, routed, operation)
    return ok, task


@triton.jit
def check_entry(buffer_ptr, ep_ptr, epoch, routed, operation):
    """What must hold before any rank is told of a call: 1, or 0 after a failure."""
    ok = tl.full((), 1, tl.int32)
    if failure_noticed(buffer_ptr) != 0:
        ok = tl.full((), 0, tl.int32)
    elif routed == 0:
        fail(buffer_ptr, BAD_ROUTING, operation, AT_ROUTING, tl.load(buffer_ptr + RANK), epoch, 0, 0, 0)
        ok = tl.full((), 0, tl.int32)
    else:
        ok = check_signals(buffer_ptr, ep_ptr, epoch, operation)
    return ok


@triton.jit
def settle_call(buffer_ptr, ep_ptr, epoch, operation, last):
    """After ``close_call``, which returned ``last``: the last program looks at the signals. Returns ``last``, or 2
    where signals are wrong."""
    if last == 1:
        last = 2 - check_signals(buffer_ptr, ep_ptr, epoch, operation)
    if last != 0:
        advance_epoch(buffer_ptr, epoch)
    return last


@triton.jit
def check_signals(buffer_ptr, ep_ptr, epoch, operation):
    """Report a signal that has counted more than was put, of a network that signals twice. Returns 1, or 0 after that.

    For the last program of a call, and the first of the next before it tells anybody: nobody puts anything here in
    between but hellos of peers that have gone ahead, one of a parity each. Every other signal then stands exactly at
    its base.
    """
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out = number(ep_ptr, SCALE_OUT)
    first = tl.load(ep_ptr + HELLO_SIGNALS)
    count = ((tl.load(ep_ptr + ARRIVAL_SIGNALS) - first) // 8).to(tl.int32) + number(ep_ptr, SCALE_UP)
    # Without puts there is nothing that a network could count.
    count = tl.where(scale_out > 1, count, 0)
    signals_ptr, bases_ptr = words_at(buffer_ptr, rank, first), base_ptr(ep_ptr, first)
    ok = tl.full((), 1, tl.int32)
    for start in range(0, count, SIGNAL_LANES):
        lane = start + tl.arange(0, SIGNAL_LANES)
        mask = lane < count
        zero = tl.zeros((SIGNAL_LANES,), tl.int64)
        seen = tl.atomic_add(signals_ptr + lane, zero, mask=mask, sem="relaxed", scope="sys")
        base = tl.load(bases_ptr + lane, mask=mask, other=0)
        over = mask & (seen > base + tl.where(lane < 2 * scale_out, 1, 0))
        index = tl.min(tl.where(over, lane, 0x7FFFFFFF))
        if (ok == 1) & (index < count):
            at = lane == index
            expected, found = tl.sum(tl.where(at, base, 0)), tl.sum(tl.where(at, seen, 0))
            fail(buffer_ptr, SURPLUS, operation, AT_SIGNAL, rank, epoch, index, expected, found)
            ok = tl.full((), 0, tl.int32)
    return ok


@triton.jit
def enter_call(buffer_ptr, ep_ptr, routing_ptr, epoch, routed, operation, counts, PUT: tl.constexpr):
    """The first task of a call: tell every rank that this one is in it, and pass on what scale-out peers say.

    First the scale-out peers of the same scale-up index, by one put each; then, after theirs have come, the scale-up
    peers: so whoever has the headers of its scale-up peers, and its own, knows that all ranks have entered. With
    ``counts`` the puts carry the rows that this rank sends to each rank there. Returns 1, or 0 after a failure.
    """
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    own_out, own_up = rank // scale_up, rank % scale_up
    count_words = number(ep_ptr, EXPERTS) + 1
    hello_words = scale_up * count_words + HEADER_WORDS
    parity = epoch & 1
    lane = tl.arange(0, HEADER_WORDS)
    header = header_words(epoch, routed, 0, 0, operation)
    for step in range(1, scale_out):
        peer_out = (own_out + step) % scale_out
        out = tl.load(ep_ptr + HELLO_OUT) + (parity * scale_out + peer_out).to(tl.int64) * hello_words * 8
        into = tl.load(ep_ptr + HELLO_IN) + (parity * scale_out + own_out).to(tl.int64) * hello_words * 8
        out_ptr = words_at(buffer_ptr, rank, out)
        tl.store(out_ptr + lane, header)
        num_bytes = tl.full((), 8 * HEADER_WORDS, tl.int64)
        if counts != 0:
            first = peer_out * scale_up * count_words
            sent_ptr = routing_ptr + tl.load(ep_ptr + SENT_COUNTS) + first
            tag_counts(sent_ptr, out_ptr + HEADER_WORDS, scale_up * count_words, epoch)
            num_bytes = hello_words.to(tl.int64) * 8
        signal = hello_signal(ep_ptr, epoch, own_out)
        PUT(buffer_ptr, peer_out * scale_up + own_up, out, into, num_bytes, signal)
    ok = tl.full((), 1, tl.int32)
    for step in range(1, scale_out):
        if ok == 1:
            ok = _hear(buffer_ptr, ep_ptr, (own_out + step) % scale_out, epoch, operation, header)
    if ok == 1:
        for step in range(scale_up):
            peer_up = (own_up + step) % scale_up
            peer = own_out * scale_up + peer_up
            if counts != 0:
                _relay(buffer_ptr, ep_ptr, routing_ptr, peer, peer_up, epoch, count_words, hello_words)
            tl.debug_barrier()
            send_header(buffer_ptr, peer, epoch, routed, 0, 0, operation)
    return ok


@triton.jit
def tag_counts(source_ptr, target_ptr, count, epoch):
    """Copy ``count`` int32 to int64 whose upper half is the epoch: a reader need not trust what told it of them."""
    tag = epoch.to(tl.int64) << 32
    lane = tl.arange(0, COUNT_LANES)
    for start in range(0, count, COUNT_LANES):
        mask = start + lane < count
        value = tl.load(source_ptr + start + lane, mask=mask).to(tl.int64) | tag
        tl.store(target_ptr + start + lane, value, mask=mask)


@triton.jit
def hello_signal(ep_ptr, epoch, source_out):
    """Byte offset of the signal of ``source_out``'s hello for ``epoch``.

    One for each parity: a peer that has heard of all ranks may end the call and put its next hello, while the last one
    is still under way. Unordered puts that shared a signal could then stand for each other. It is never two calls
    ahead: for that it needs this rank's hello of the next call.
    """
    return tl.load(ep_ptr + HELLO_SIGNALS) + ((epoch & 1) * number(ep_ptr, SCALE_OUT) + source_out).to(tl.int64) * 8


@triton.jit
def _hear(buffer_ptr, ep_ptr, source_out, epoch, operation, header):
    """Wait until the peer in ``source_out`` is in this call, and compare its header."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    peer = source_out * scale_up + rank % scale_up
    signal = hello_signal(ep_ptr, epoch, source_out)
    # One addition every other call, so the base moves on by one, here: nobody else reads it.
    base = base_ptr(ep_ptr, signal)
    target = tl.load(base) + 1
    ok = wait_signal(
        buffer_ptr, words_at(buffer_ptr, rank, signal), target, epoch, operation, AT_SIGNAL, peer, source_out
    )
    tl.store(base, target)
    counted = tl.atomic_add(words_at(buffer_ptr, rank, signal), 0, sem="relaxed", scope="sys")
    if (ok == 1) & (counted > target):
        # Its next hello here comes two calls on, after this rank has entered the call between.
        fail(buffer_ptr, SURPLUS, operation, AT_SIGNAL, peer, epoch, source_out, target, counted)
        ok = tl.full((), 0, tl.int32)
    if ok == 1:
        hello_words = scale_up * (number(ep_ptr, EXPERTS) + 1) + HEADER_WORDS
        row = ((epoch & 1) * scale_out + source_out).to(tl.int64)
        hello = words_at(buffer_ptr, rank, tl.load(ep_ptr + HELLO_IN) + row * hello_words * 8)
        seen = tl.load(hello + tl.arange(0, HEADER_WORDS))
        ok = compare_header(buffer_ptr, peer, epoch, header, seen, operation)
    return ok


@triton.jit
def _relay(buffer_ptr, ep_ptr, routing_ptr, peer, peer_up, epoch, count_words, hello_words):
    """Store in ``peer``'s counts what this rank, and its scale-out peers through it, will send there."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    parity = epoch & 1
    for source_out in range(scale_out):
        row = (parity * scale_out * scale_up + source_out * scale_up + rank % scale_up).to(tl.int64)
        target_ptr = words_at(buffer_ptr, peer, tl.load(ep_ptr + COUNTS) + row * count_words * 8)
        if source_out == rank // scale_up:
            own = routing_ptr + tl.load(ep_ptr + SENT_COUNTS) + peer * count_words
            tag_counts(own, target_ptr, count_words, epoch)
        else:
            hello = tl.load(ep_ptr + HELLO_IN) + (parity * scale_out + source_out).to(tl.int64) * hello_words * 8
            source_ptr = words_at(buffer_ptr, rank, hello) + HEADER_WORDS + peer_up * count_words
            copy_words(source_ptr, target_ptr, count_words)


@triton.jit
def wait_entered(buffer_ptr, ep_ptr, epoch, routed, operation):
    """Wait until every rank is in this call, with the same routing. Returns 1, or 0 after a failure."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up = number(ep_ptr, SCALE_UP)
    first = rank // scale_up * scale_up
    ok = tl.full((), 1, tl.int32)
    for step in range(scale_up):
        if ok == 1:
            ok = wait_header(buffer_ptr, first + (rank + step) % scale_up, epoch, routed, 0, 0, operation)
    # The headers were acquired by lanes; what came before them is for every thread.
    tl.debug_barrier()
    return ok
