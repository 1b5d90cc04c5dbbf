"""Dispatch: every token once to each scale-out rank that needs it, and from there to the ranks of its experts.

The protocol, its ordering argument and the induction of progress are in ``docs/expert_parallel.md``. Tasks, in the
order in which programs claim them; each class waits only for classes before it:

    enter      1          tell every rank that this one is in the call, with what it will send
    send       S * C      a channel's tokens to one scale-out rank, the own one last: straight to the ranks there
    receive    C          a channel's parts from all scale-out peers, forwarded to scale-up ranks; none where S = 1
    arrive     U          wait for the channels of one scale-up rank; the first one also adds up the counts
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..comm.device import (
    AT_PARTS,
    AT_SIGNAL,
    RANK,
    advance_epoch,
    claim_task,
    close_call,
    device_epoch,
    failure_noticed,
    may_wait,
    now_ns,
    wait_signal,
)
from .ep_geometry import MAX_SUB_PARTS as _MAX_SUB_PARTS
from .ep_layout import FIXED_WORDS as _FIXED_WORDS
from .ep_parts import part_size, part_start, sub_part_count, sub_part_start
from .ep_slots import (
    ARRIVAL_SIGNALS,
    CHANNELS,
    COUNT_LANES,
    COUNTS,
    CUT,
    EXPERT_COUNTS,
    EXPERTS,
    FORWARDED,
    FORWARDED_COUNTS,
    FORWARDED_ROWS,
    INCOMING,
    MAP,
    MAX_TOKENS,
    POSITIONS,
    PREFIX,
    ROW_OFFSET,
    SCALE_OFFSET,
    SCALE_OUT,
    SCALE_UP,
    SENT,
    SLOT_BYTES,
    SLOTS,
    STAGING,
    TOPK,
    base_ptr,
    batch_header,
    channel_slot,
    copy_words,
    data_signal,
    enter_call,
    header_valid,
    number,
    row_slot,
    wait_entered,
    words_at,
)
from .launching import launch_kernel

FIXED_WORDS = tl.constexpr(_FIXED_WORDS)
SUB_LANES = tl.constexpr(_MAX_SUB_PARTS)


@triton.jit
def write_slot(ep_ptr, routing_ptr, payload, slot_ptr, token, scale_out, META_LANES: tl.constexpr):
    """Everything of a slot but its header: token index, links into ``scale_out``, experts, weights, scales, row.

    ``payload`` is (x, scales, topk_idx, topk_weights) with the int64 words of a row and the int32 words of its scales;
    pointers that are not there are None.
    """
    x_ptr, scales_ptr, topk_idx_ptr, weights_ptr, row_words, scale_words = payload
    scale_up, topk, max_tokens = number(ep_ptr, SCALE_UP), number(ep_ptr, TOPK), number(ep_ptr, MAX_TOKENS)
    lane = tl.arange(0, META_LANES)
    link, k = lane - FIXED_WORDS, lane - FIXED_WORDS - scale_up
    is_link = (link >= 0) & (link < scale_up)
    position_ptr = routing_ptr + tl.load(ep_ptr + POSITIONS) + (scale_out * scale_up + link) * max_tokens + token
    value = tl.where(lane == 2, token, tl.load(position_ptr, mask=is_link, other=0))
    is_k = (k >= 0) & (k < topk)
    expert = tl.load(topk_idx_ptr + token * topk.to(tl.int64) + k, mask=is_k, other=0)
    value = tl.where(is_k, expert.to(tl.int32), value)
    if weights_ptr is not None:
        is_weight = (k >= topk) & (k < 2 * topk)
        weight = tl.load(weights_ptr + token * topk.to(tl.int64) + k - topk, mask=is_weight, other=0.0)
        value = tl.where(is_weight, weight.to(tl.int32, bitcast=True), value)
    words = FIXED_WORDS + scale_up + 2 * topk
    tl.store(slot_ptr.to(tl.pointer_type(tl.int32)) + lane, value, mask=(lane >= 2) & (lane < words))
    if scales_ptr is not None:
        target = slot_ptr.to(tl.pointer_type(tl.int32)) + tl.load(ep_ptr + SCALE_OFFSET) // 4
        for start in range(0, scale_words, COUNT_LANES):
            offset = start + tl.arange(0, COUNT_LANES)
            mask = offset < scale_words
            tl.store(
                target + offset, tl.load(scales_ptr + token * scale_words.to(tl.int64) + offset, mask=mask), mask=mask
            )
    copy_words(x_ptr + token * row_words.to(tl.int64), slot_ptr + tl.load(ep_ptr + ROW_OFFSET) // 8, row_words)


@triton.jit
def needs(ep_ptr, routing_ptr, token, scale_out, UP_LANES: tl.constexpr):
    """Whether any rank of ``scale_out`` hosts an expert of ``token``."""
    scale_up = number(ep_ptr, SCALE_UP)
    lane = tl.arange(0, UP_LANES)
    rows = (scale_out * scale_up + lane) * number(ep_ptr, MAX_TOKENS)
    position = tl.load(routing_ptr + tl.load(ep_ptr + POSITIONS) + rows + token, mask=lane < scale_up, other=-1)
    return tl.max(position) >= 0


@triton.jit
def send_sub_part(buffer_ptr, ep_ptr, epoch, peer_out, channel, part, first, count, more, PUT: tl.constexpr):
    """Header of the sub-part at slot ``first``, then one put of its ``count`` slots; of its header alone if empty."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up = number(ep_ptr, SCALE_UP)
    source = channel_slot(ep_ptr, STAGING, peer_out, channel, first)
    target = channel_slot(ep_ptr, INCOMING, rank // scale_up, channel, first)
    tl.store(words_at(buffer_ptr, rank, source), batch_header(epoch, count, more))
    num_bytes = tl.where(count == 0, 32, count * tl.load(ep_ptr + SLOT_BYTES))
    peer = peer_out * scale_up + rank % scale_up
    PUT(buffer_ptr, peer, source, target, num_bytes, data_signal(ep_ptr, channel, part))


@triton.jit
def send_channel(
    buffer_ptr, ep_ptr, routing_ptr, payload, tokens, epoch, peer_out, channel,
    META_LANES: tl.constexpr, UP_LANES: tl.constexpr, PUT: tl.constexpr,
):  # fmt: skip
    """The tokens of ``channel`` for scale-out rank ``peer_out``: sub-parts as they fill, then the end of the input."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    channels = number(ep_ptr, CHANNELS)
    cut_ptr = tl.load(ep_ptr + CUT).to(tl.pointer_type(tl.int32))
    parts = tl.load(cut_ptr)
    sent = tl.full((), 0, tl.int32)
    part = tl.full((), 0, tl.int32)
    sub_part = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    size = part_size(cut_ptr, part)
    end = sub_part_start(size, sub_part_count(cut_ptr, size), 1)
    more = tl.full((), 1, tl.int32)
    for token in range(channel, tokens, channels):
        goes = needs(ep_ptr, routing_ptr, token, peer_out, UP_LANES)
        map_ptr = routing_ptr + tl.load(ep_ptr + MAP) + token * number(ep_ptr, SCALE_OUT) + peer_out
        tl.store(map_ptr, tl.where(goes, sent, -1))
        if goes:
            slot_ptr = words_at(buffer_ptr, rank, channel_slot(ep_ptr, STAGING, peer_out, channel, sent))
            write_slot(ep_ptr, routing_ptr, payload, slot_ptr, token, peer_out, META_LANES)
            sent += 1
            if sent == end:
                count = sub_part_count(cut_ptr, size)
                last = (part == parts - 1) & (sub_part == count - 1)
                more = tl.where(last, 0, 1).to(tl.int32)
                send_sub_part(buffer_ptr, ep_ptr, epoch, peer_out, channel, part, first, sent - first, more, PUT)
                first = sent
                ends_part = sub_part == count - 1
                part = tl.where(ends_part & (more == 1), part + 1, part).to(tl.int32)
                sub_part = tl.where(ends_part, 0, sub_part + 1).to(tl.int32)
                size = part_size(cut_ptr, part)
                count = sub_part_count(cut_ptr, size)
                end = part_start(cut_ptr, part) + sub_part_start(size, count, sub_part + 1)
    if more == 1:
        send_sub_part(buffer_ptr, ep_ptr, epoch, peer_out, channel, part, first, sent - first, more * 0, PUT)
    tl.store(routing_ptr + tl.load(ep_ptr + SENT) + peer_out * channels + channel, sent)


@triton.jit
def announce_channel(buffer_ptr, ep_ptr):
    """Tell the scale-up ranks that a channel's rows of theirs are all there: own tokens, or forwarded ones."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up = number(ep_ptr, SCALE_UP)
    signal = tl.load(ep_ptr + ARRIVAL_SIGNALS) + (rank % scale_up).to(tl.int64) * 8
    # The additions are one thread's; the rows were stored by all of them.
    tl.debug_barrier()
    for step in range(scale_up):
        peer = rank // scale_up * scale_up + (rank + step) % scale_up
        tl.atomic_add(words_at(buffer_ptr, peer, signal), 1, sem="release", scope="sys")


@triton.jit
def send_directly(buffer_ptr, ep_ptr, routing_ptr, payload, tokens, channel, META_LANES: tl.constexpr):
    """The tokens of ``channel`` for the ranks of the own scale-out rank, each into the row where it stays."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up, max_tokens = number(ep_ptr, SCALE_UP), number(ep_ptr, MAX_TOKENS)
    own_out = rank // scale_up
    for token in range(channel, tokens, number(ep_ptr, CHANNELS)):
        found = tl.full((), -1, tl.int32)
        for step in range(scale_up):
            peer = own_out * scale_up + (rank + step) % scale_up
            position = tl.load(routing_ptr + tl.load(ep_ptr + POSITIONS) + peer * max_tokens + token)
            if position >= 0:
                found = tl.full((), 0, tl.int32)
                slot_ptr = words_at(buffer_ptr, peer, row_slot(ep_ptr, rank * max_tokens + position))
                write_slot(ep_ptr, routing_ptr, payload, slot_ptr, token, own_out, META_LANES)
        tl.store(routing_ptr + tl.load(ep_ptr + MAP) + token * number(ep_ptr, SCALE_OUT) + own_out, found)
    announce_channel(buffer_ptr, ep_ptr)


@triton.jit
def forward_slots(buffer_ptr, ep_ptr, routing_ptr, source_out, channel, first, count):
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
        kept_ptr = routing_ptr + tl.load(ep_ptr + FORWARDED) + index * (scale_up + 1)
        tl.store(kept_ptr, tl.load(meta_ptr + 2))
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
    buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, SOURCE_LANES: tl.constexpr
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
                buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, part, ended, tokens, rows, SOURCE_LANES
            )
    index = source * channels + channel
    tl.store(routing_ptr + tl.load(ep_ptr + FORWARDED_COUNTS) + index, tokens, mask=source < scale_out)
    tl.store(routing_ptr + tl.load(ep_ptr + FORWARDED_ROWS) + index, rows, mask=source < scale_out)
    return ok


@triton.jit
def receive_part(
    buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, part, ended, tokens, rows, SOURCE_LANES: tl.constexpr
):
    """Poll one part until every source has either filled or ended it, and forward what is complete.

    Returns ok and, by source, whether it has ended, the tokens and the rows so far. When it returns 1 the signal has
    counted exactly the puts that the headers tell of, and its base is their number further.
    """
    cut_ptr = tl.load(ep_ptr + CUT).to(tl.pointer_type(tl.int32))
    size = part_size(cut_ptr, part)
    subs = sub_part_count(cut_ptr, size)
    source = tl.arange(0, SOURCE_LANES)
    taken = tl.zeros((SOURCE_LANES,), tl.int32)
    ok = tl.full((), 1, tl.int32)
    polls = tl.full((), 0, tl.int32)
    start = now_ns(buffer_ptr)
    while (ok == 1) & (tl.min(tl.where((ended == 1) | (taken == subs), 1, 0)) == 0):
        counted, header = poll_part(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES)
        valid = header_valid(header, epoch)
        visible = tl.sum(valid.to(tl.int32))
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
                        stored = forward_slots(buffer_ptr, ep_ptr, routing_ptr, source_out, channel, first, count)
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
    if ok == 1:
        base = base_ptr(ep_ptr, data_signal(ep_ptr, channel, part))
        tl.store(base, tl.load(base) + tl.sum(taken))
    return ok, ended, tokens, rows


@triton.jit
def add_counts(buffer_ptr, ep_ptr, routing_ptr, epoch, RANK_LANES: tl.constexpr):
    """Rows from each rank before those of the next, and rows for each local expert, from the exchanged counts."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = number(ep_ptr, SCALE_OUT) * number(ep_ptr, SCALE_UP)
    experts = number(ep_ptr, EXPERTS)
    first = tl.load(ep_ptr + COUNTS) + ((epoch & 1) * world_size).to(tl.int64) * (experts + 1) * 8
    counts_ptr = words_at(buffer_ptr, rank, first)
    source = tl.arange(0, RANK_LANES)
    mask = source < world_size
    count = tl.load(counts_ptr + source * (experts + 1), mask=mask, other=0).to(tl.int32)
    prefix_ptr = routing_ptr + tl.load(ep_ptr + PREFIX)
    tl.store(prefix_ptr, 0)
    tl.store(prefix_ptr + 1 + source, tl.cumsum(count, 0), mask=mask)
    for expert in range(experts):
        count = tl.load(counts_ptr + source * (experts + 1) + 1 + expert, mask=mask, other=0).to(tl.int32)
        tl.store(routing_ptr + tl.load(ep_ptr + EXPERT_COUNTS) + expert, tl.sum(count))


@triton.jit
def wait_channels(buffer_ptr, ep_ptr, epoch, operation, source_up):
    """Wait for every channel of the scale-up rank ``source_up``, its own tokens and those it forwards. Returns 1, or 0
    after a failure."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up = number(ep_ptr, SCALE_UP)
    kinds = tl.where(number(ep_ptr, SCALE_OUT) > 1, 2, 1)
    signal = tl.load(ep_ptr + ARRIVAL_SIGNALS) + source_up.to(tl.int64) * 8
    base = base_ptr(ep_ptr, signal)
    target = tl.load(base) + kinds * number(ep_ptr, CHANNELS)
    peer = rank // scale_up * scale_up + source_up
    signal_ptr = words_at(buffer_ptr, rank, signal)
    ok = wait_signal(buffer_ptr, signal_ptr, target, epoch, operation, AT_SIGNAL, peer, source_up)
    tl.store(base, target)
    return ok


@triton.jit(do_not_specialize=["tokens", "row_words", "scale_words", "operation", "counts"])
def ep_dispatch_kernel(
    buffer_ptr, ep_ptr, routing_ptr,  # tables, int32 routing
    x_ptr, scales_ptr, topk_idx_ptr, weights_ptr,  # int64 words [T, row_words], int32 words or None, [T, K] twice
    tokens, row_words, scale_words, operation, counts,
    PUT: tl.constexpr, META_LANES: tl.constexpr, SOURCE_LANES: tl.constexpr, UP_LANES: tl.constexpr,
    RANK_LANES: tl.constexpr,
):  # fmt: skip
    payload = (x_ptr, scales_ptr, topk_idx_ptr, weights_ptr, row_words, scale_words)
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    channels = number(ep_ptr, CHANNELS)
    receives = 1 + scale_out * channels
    arrives = tl.where(scale_out > 1, receives + channels, receives)
    epoch = device_epoch(buffer_ptr)

    ok = tl.full((), 1, tl.int32)
    entered = tl.full((), 0, tl.int32)
    task = claim_task(buffer_ptr)
    if task == 0:
        if failure_noticed(buffer_ptr) == 0:
            ok = enter_call(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, counts, PUT)
        else:
            ok = tl.full((), 0, tl.int32)
        task = claim_task(buffer_ptr)
    while (task < arrives + scale_up) & (ok == 1):
        if entered == 0:
            ok = wait_entered(buffer_ptr, ep_ptr, epoch, operation)
            entered = tl.full((), 1, tl.int32)
        if ok == 1:
            if task < receives:
                peer_out = (rank // scale_up + 1 + (task - 1) // channels) % scale_out
                channel = (task - 1) % channels
                if peer_out == rank // scale_up:
                    send_directly(buffer_ptr, ep_ptr, routing_ptr, payload, tokens, channel, META_LANES)
                else:
                    send_channel(
                        buffer_ptr, ep_ptr, routing_ptr, payload, tokens, epoch, peer_out, channel,
                        META_LANES, UP_LANES, PUT,
                    )  # fmt: skip
            elif task < arrives:
                channel = task - receives
                ok = receive_channel(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, SOURCE_LANES)
                if ok == 1:
                    announce_channel(buffer_ptr, ep_ptr)
            else:
                if (task == arrives) & (counts != 0):
                    add_counts(buffer_ptr, ep_ptr, routing_ptr, epoch, RANK_LANES)
                ok = wait_channels(buffer_ptr, ep_ptr, epoch, operation, (rank + task - arrives) % scale_up)
            task = claim_task(buffer_ptr)
    # Nothing is left to be checked: whoever got here has the headers that it needs, or failed.
    if close_call(buffer_ptr, ok, scale_out * scale_up, epoch, 0, 0, 0, operation) != 0:
        advance_epoch(buffer_ptr, epoch)


def launch(
    buffer: Any,
    routing: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    operation: int,
    counts: bool,
) -> None:
    """Send ``x`` [T, hidden] of every rank into the rows of ``buffer``, and fill ``routing``.

    Args:
        buffer: an expert buffer: its tables, layout, network and group.
        scales: [T, ...] of 4-byte items, or None.
        counts: exchange counts; False where ``routing`` holds those of an equal call.
    """
    layout = buffer.layout
    launch_kernel(
        ep_dispatch_kernel,
        buffer.group.backend.num_programs,
        {"num_warps": 8, "num_stages": 1},
        buffer_ptr=buffer.table,
        ep_ptr=buffer.ep_table,
        routing_ptr=routing,
        x_ptr=x.view(torch.int64),
        scales_ptr=None if scales is None else scales.view(torch.int32),
        topk_idx_ptr=topk_idx,
        weights_ptr=topk_weights,
        tokens=x.shape[0],
        row_words=x.shape[1] * x.element_size() // 8,
        scale_words=0 if scales is None else scales.shape[1],
        operation=operation,
        counts=int(counts),
        PUT=buffer.network.put,
        META_LANES=triton.next_power_of_2(layout.meta_words),
        SOURCE_LANES=triton.next_power_of_2(layout.num_scale_out),
        UP_LANES=triton.next_power_of_2(layout.num_scale_up),
        RANK_LANES=triton.next_power_of_2(layout.world_size),
    )
