"""Receiving of a dispatch: what scale-out peers put here, in whatever order, forwarded to scale-up ranks."""

import triton
import triton.language as tl

from ..comm.device import AT_PARTS, AT_SIGNAL, RANK, SURPLUS, fail, may_wait, now_ns, wait_signal
from .ep_geometry import MAX_SUB_PARTS as _MAX_SUB_PARTS
from .ep_layout import FIXED_WORDS as _FIXED_WORDS
from .ep_partials import find_partials
from .ep_parts import part_size, part_start, sub_part_count, sub_part_start
from .ep_slots import (
    CHANNELS,
    CUT,
    FORWARDED,
    FORWARDED_COUNTS,
    FORWARDED_ROWS,
    INCOMING,
    MAX_TOKENS,
    SCALE_OUT,
    SCALE_UP,
    SLOT_BYTES,
    SLOTS,
    TOPK,
    base_ptr,
    channel_slot,
    copy_words,
    data_signal,
    header_valid,
    number,
    row_slot,
    tail_signal,
    words_at,
)

FIXED_WORDS = tl.constexpr(_FIXED_WORDS)
SUB_LANES = tl.constexpr(_MAX_SUB_PARTS)


@triton.jit
def forward_slots(
    buffer_ptr, ep_ptr, routing_ptr, source_out, channel, first, count, partials, K_LANES: tl.constexpr
):  # fmt: skip
    """Copy ``count`` slots that have come in to the ranks they are for, and remember them for the combine. Returns the
    rows stored."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up, max_tokens = number(ep_ptr, SCALE_UP), number(ep_ptr, MAX_TOKENS)
    source = source_out * scale_up + rank % scale_up
    rows = tl.full((), 0, tl.int32)
    for slot in range(first, first + count):
        slot_ptr = words_at(buffer_ptr, rank, channel_slot(ep_ptr, INCOMING, source_out, channel, slot))
        meta_ptr = slot_ptr.to(tl.pointer_type(tl.int32))
        index = (source_out * number(ep_ptr, CHANNELS) + channel) * number(ep_ptr, SLOTS) + slot
        kept_ptr = routing_ptr + tl.load(ep_ptr + FORWARDED) + index * (scale_up + 2)
        tl.store(kept_ptr, tl.load(meta_ptr + 2))
        k = tl.arange(0, K_LANES)
        expert = tl.load(meta_ptr + FIXED_WORDS + scale_up + k, mask=k < number(ep_ptr, TOPK), other=-1)
        _, _, own = find_partials(ep_ptr, expert, rank // scale_up, partials, K_LANES)
        tl.store(kept_ptr + 1 + scale_up, tl.sum(own << k))
        for up in range(scale_up):
            position = tl.load(meta_ptr + FIXED_WORDS + up)
            tl.store(kept_ptr + 1 + up, position)
            if position >= 0:
                peer = rank // scale_up * scale_up + up
                target_ptr = words_at(buffer_ptr, peer, row_slot(ep_ptr, source * max_tokens + position))
                copy_words(slot_ptr, target_ptr, tl.load(ep_ptr + SLOT_BYTES) // 8)
                rows += 1
    return rows


@triton.jit
def poll_part(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES: tl.constexpr):
    """Signal of a part above its base, then the header of every (sub-part, source), each read once, in that order.

    Completed puts are a subset of those whose header is valid. Signal first: so when it counts as many as are valid,
    these are the same, and every batch seen is complete. The other order is unsafe: a put that completes between the
    two reads would be counted for one whose header is valid and whose bytes are still under way.
    """
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    cut_ptr = tl.load(ep_ptr + CUT).to(tl.pointer_type(tl.int32))
    scale_out = number(ep_ptr, SCALE_OUT)
    signal = data_signal(ep_ptr, channel, part)
    counted = tl.atomic_add(words_at(buffer_ptr, rank, signal), 0, sem="acquire", scope="sys")
    # Not sampled in this call: a fast peer's put may be in the signal already.
    counted -= tl.load(base_ptr(ep_ptr, signal))
    size = part_size(cut_ptr, part)
    subs = sub_part_count(cut_ptr, size)
    lane = tl.arange(0, SUB_LANES * SOURCE_LANES)
    sub_part, source_out = lane // SOURCE_LANES, lane % SOURCE_LANES
    mask = (sub_part < subs) & (source_out < scale_out) & (source_out != rank // number(ep_ptr, SCALE_UP))
    slot = part_start(cut_ptr, part) + sub_part_start(size, subs, sub_part)
    header_ptr = words_at(buffer_ptr, rank, channel_slot(ep_ptr, INCOMING, source_out, channel, slot))
    header = tl.atomic_add(header_ptr, tl.zeros_like(lane).to(tl.int64), mask=mask, sem="acquire", scope="sys")
    return counted, tl.where(mask, header, 0)


@triton.jit
def receive_channel(
    buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, partials,
    SOURCE_LANES: tl.constexpr, K_LANES: tl.constexpr,
):  # fmt: skip
    """Every part of ``channel`` from every scale-out peer. Returns 1, or 0 after a failure."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, channels = number(ep_ptr, SCALE_OUT), number(ep_ptr, CHANNELS)
    cut_ptr = tl.load(ep_ptr + CUT).to(tl.pointer_type(tl.int32))
    source = tl.arange(0, SOURCE_LANES)
    # A source that has ended, that is no source, or that is this rank's own sends nothing more.
    own = (source >= scale_out) | (source == rank // number(ep_ptr, SCALE_UP))
    ended = tl.where(own, 1, 0).to(tl.int32)
    tokens = tl.zeros((SOURCE_LANES,), tl.int32)
    rows = tl.zeros((SOURCE_LANES,), tl.int32)
    ok = tl.full((), 1, tl.int32)
    for part in range(tl.load(cut_ptr)):
        if (ok == 1) & (tl.min(ended) == 0):
            ok, ended, tokens, rows = receive_part(
                buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, part, ended, tokens, rows, partials,
                SOURCE_LANES, K_LANES,
            )  # fmt: skip
    index = source * channels + channel
    tl.store(routing_ptr + tl.load(ep_ptr + FORWARDED_COUNTS) + index, tokens, mask=source < scale_out)
    tl.store(routing_ptr + tl.load(ep_ptr + FORWARDED_ROWS) + index, rows, mask=source < scale_out)
    return ok


@triton.jit
def receive_part(
    buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, part, ended, tokens, rows, partials,
    SOURCE_LANES: tl.constexpr, K_LANES: tl.constexpr,
):  # fmt: skip
    """Poll one part until every source has either filled or ended it, and forward what is complete.

    Returns ok and, by source, whether it has ended, the tokens and the rows so far. When it returns 1 the signal has
    counted exactly the puts that the headers tell of, and its base is their number further. A look that finds more
    counted than valid meets a network that breaks its promise, and nothing follows from counts then: the call fails,
    when the missing header comes, or when the time is up.
    """
    cut_ptr = tl.load(ep_ptr + CUT).to(tl.pointer_type(tl.int32))
    size = part_size(cut_ptr, part)
    subs = sub_part_count(cut_ptr, size)
    source = tl.arange(0, SOURCE_LANES)
    taken = tl.zeros((SOURCE_LANES,), tl.int32)
    ok = tl.full((), 1, tl.int32)
    polls = tl.full((), 0, tl.int32)
    surplus = tl.full((), 0, tl.int64)
    start = now_ns(buffer_ptr)
    while (ok == 1) & (tl.min(tl.where((ended == 1) | (taken == subs), 1, 0)) == 0):
        counted, header = poll_part(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES)
        valid = header_valid(header, epoch)
        visible = tl.sum(valid.to(tl.int32))
        surplus = tl.maximum(surplus, counted - visible)
        before = tl.sum(taken)
        if counted >= visible:
            # One thread acquired the signal; the batches are for all of them.
            tl.debug_barrier()
            for source_out in range(number(ep_ptr, SCALE_OUT)):
                more = 1 - tl.sum(tl.where(source == source_out, ended, 0))
                sub_part = tl.sum(tl.where(source == source_out, taken, 0))
                # The prefix of this source, by the headers captured above: one read again may be newer than the count.
                while (more == 1) & (sub_part < subs):
                    at = tl.arange(0, SUB_LANES * SOURCE_LANES) == sub_part * SOURCE_LANES + source_out
                    batch = tl.sum(tl.where(at & valid, header, 0))
                    more = tl.where(batch == 0, 2, (batch & 1).to(tl.int32)).to(tl.int32)
                    if more != 2:
                        count = ((batch >> 1) & 0x3FFFFFFF).to(tl.int32)
                        first = part_start(cut_ptr, part) + sub_part_start(size, subs, sub_part)
                        stored = forward_slots(
                            buffer_ptr, ep_ptr, routing_ptr, source_out, channel, first, count, partials, K_LANES
                        )
                        tokens += tl.where(source == source_out, count, 0)
                        rows += tl.where(source == source_out, stored, 0)
                        taken += tl.where(source == source_out, 1, 0)
                        ended = tl.where((source == source_out) & (more == 0), 1, ended).to(tl.int32)
                        sub_part += 1
        if tl.sum(taken) == before:
            polls += 1
            late = tl.min(tl.where((ended == 0) & (taken < subs), source, SOURCE_LANES))
            peer = late * number(ep_ptr, SCALE_UP) + tl.load(buffer_ptr + RANK) % number(ep_ptr, SCALE_UP)
            ok = may_wait(buffer_ptr, polls, start, epoch, operation, AT_PARTS, peer, channel, visible, counted)
        else:
            start = now_ns(buffer_ptr)
    if (ok == 1) & (surplus > 0):
        rank = tl.load(buffer_ptr + RANK)
        puts = tl.sum(taken)
        fail(buffer_ptr, SURPLUS, operation, AT_PARTS, rank, epoch, channel, puts - surplus, puts)
        ok = tl.full((), 0, tl.int32)
    if ok == 1:
        base = base_ptr(ep_ptr, data_signal(ep_ptr, channel, part))
        tl.store(base, tl.load(base) + tl.sum(taken))
    return ok, ended, tokens, rows


@triton.jit
def wait_promised_header(buffer_ptr, header_ptr, epoch, operation, peer, channel, puts):
    """The header of put ``puts`` of a channel, which the tail has counted, so that it is there at the first look. If it
    is not, the network has broken its promise, and the call fails: when it comes, or when the time is up. Returns ok
    and the header."""
    header = tl.atomic_add(header_ptr, 0, sem="acquire", scope="sys")
    ok = tl.full((), 1, tl.int32)
    polls = tl.full((), 0, tl.int32)
    start = now_ns(buffer_ptr)
    while (ok == 1) & (header_valid(header, epoch) == 0):
        polls += 1
        ok = may_wait(buffer_ptr, polls, start, epoch, operation, AT_PARTS, peer, channel, puts - 1, puts)
        header = tl.atomic_add(header_ptr, 0, sem="acquire", scope="sys")
    if (ok == 1) & (polls > 0):
        fail(buffer_ptr, SURPLUS, operation, AT_PARTS, peer, epoch, channel, puts - 1, puts)
        ok = tl.full((), 0, tl.int32)
    return ok, header


@triton.jit
def receive_in_order(
    buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, partials, K_LANES: tl.constexpr
):  # fmt: skip
    """``receive_channel`` for a network with strong signals: one source after the other, put by put.

    A tail that counts n puts of a source stands for the bytes of the first n of them, whichever it counted: the latest
    of these is at least the n-th, and its addition shows every earlier put. So the header of put n - 1 is there.
    """
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up, channels = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP), number(ep_ptr, CHANNELS)
    cut_ptr = tl.load(ep_ptr + CUT).to(tl.pointer_type(tl.int32))
    ok = tl.full((), 1, tl.int32)
    for step in range(1, scale_out):
        source_out = (rank // scale_up + step) % scale_out
        signal = tail_signal(ep_ptr, source_out, channel)
        base = base_ptr(ep_ptr, signal)
        before = tl.load(base)
        puts = tl.full((), 0, tl.int64)
        tokens = tl.full((), 0, tl.int32)
        rows = tl.full((), 0, tl.int32)
        part = tl.full((), 0, tl.int32)
        sub_part = tl.full((), 0, tl.int32)
        more = tl.full((), 1, tl.int32)
        while (ok == 1) & (more == 1):
            peer = source_out * scale_up + rank % scale_up
            signal_ptr = words_at(buffer_ptr, rank, signal)
            puts += 1
            ok = wait_signal(buffer_ptr, signal_ptr, before + puts, epoch, operation, AT_SIGNAL, peer, channel)
            if ok == 1:
                size = part_size(cut_ptr, part)
                subs = sub_part_count(cut_ptr, size)
                first = part_start(cut_ptr, part) + sub_part_start(size, subs, sub_part)
                header_ptr = words_at(buffer_ptr, rank, channel_slot(ep_ptr, INCOMING, source_out, channel, first))
                ok, header = wait_promised_header(buffer_ptr, header_ptr, epoch, operation, peer, channel, puts)
            if ok == 1:
                count = ((header >> 1) & 0x3FFFFFFF).to(tl.int32)
                more = (header & 1).to(tl.int32)
                rows += forward_slots(
                    buffer_ptr, ep_ptr, routing_ptr, source_out, channel, first, count, partials, K_LANES
                )
                tokens += count
                ends_part = sub_part == subs - 1
                part = tl.where(ends_part & (more == 1), part + 1, part).to(tl.int32)
                sub_part = tl.where(ends_part, 0, sub_part + 1).to(tl.int32)
        tl.store(base, before + puts)
        index = source_out * channels + channel
        tl.store(routing_ptr + tl.load(ep_ptr + FORWARDED_COUNTS) + index, tokens)
        tl.store(routing_ptr + tl.load(ep_ptr + FORWARDED_ROWS) + index, rows)
    return ok
