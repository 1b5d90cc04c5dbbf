"""Sending of a dispatch: slots, sub-parts by puts to scale-out peers, and rows stored at scale-up peers."""

import triton
import triton.language as tl

from ..comm.device import RANK
from .ep_layout import FIXED_WORDS as _FIXED_WORDS
from .ep_partials import find_partials, partials_before
from .ep_parts import part_size, part_start, sub_part_count, sub_part_start
from .ep_slots import (
    ARRIVAL_SIGNALS,
    CHANNELS,
    COUNT_LANES,
    CUT,
    EXPERTS,
    INCOMING,
    MAP,
    MAX_TOKENS,
    POSITIONS,
    RETURNED,
    ROW_OFFSET,
    SCALE_OFFSET,
    SCALE_OUT,
    SCALE_UP,
    SLOT_BYTES,
    STAGING,
    TOPK,
    batch_header,
    channel_slot,
    copy_words,
    data_signal,
    number,
    return_index,
    row_slot,
    tail_signal,
    words_at,
)

FIXED_WORDS = tl.constexpr(_FIXED_WORDS)


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
def map_token(ep_ptr, routing_ptr, topk_idx_ptr, token, channel, scale_out, returned, partials, LANES: tl.constexpr):
    """Note where the partial results of ``token`` will come back from ``scale_out``, after ``returned`` others of its
    channel. Returns their number."""
    topk = number(ep_ptr, TOPK)
    k = tl.arange(0, LANES)
    expert = tl.load(topk_idx_ptr + token * topk.to(tl.int64) + k, mask=k < topk, other=-1).to(tl.int32)
    inside, stands, own = find_partials(ep_ptr, expert, scale_out, partials, LANES)
    slot = returned + partials_before(stands, own, LANES)
    map_ptr = routing_ptr + tl.load(ep_ptr + MAP) + token * topk + k
    tl.store(map_ptr, return_index(ep_ptr, scale_out, channel, slot), mask=inside == 1)
    return tl.sum(own)


@triton.jit
def map_own(ep_ptr, routing_ptr, topk_idx_ptr, token, channel, own_out, partials, LANES: tl.constexpr):
    """The same for the own scale-out rank, and for what has no expert."""
    topk = number(ep_ptr, TOPK)
    k = tl.arange(0, LANES)
    experts = number(ep_ptr, EXPERTS) * number(ep_ptr, SCALE_UP) * number(ep_ptr, SCALE_OUT)
    expert = tl.load(topk_idx_ptr + token * topk.to(tl.int64) + k, mask=k < topk, other=-1).to(tl.int32)
    inside, stands, _ = find_partials(ep_ptr, expert, own_out, partials, LANES)
    value = tl.where(inside == 1, return_index(ep_ptr, own_out, channel, stands), -1)
    mask = (k < topk) & ((inside == 1) | (expert < 0) | (expert >= experts))
    tl.store(routing_ptr + tl.load(ep_ptr + MAP) + token * topk + k, value, mask=mask)


@triton.jit
def send_sub_part(
    buffer_ptr, ep_ptr, epoch, peer_out, channel, part, first, count, more, PUT: tl.constexpr, ORDERED: tl.constexpr
):  # fmt: skip
    """Header of the sub-part at slot ``first``, then one put of its ``count`` slots; of its header alone if empty."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up = number(ep_ptr, SCALE_UP)
    source = channel_slot(ep_ptr, STAGING, peer_out, channel, first)
    target = channel_slot(ep_ptr, INCOMING, rank // scale_up, channel, first)
    tl.store(words_at(buffer_ptr, rank, source), batch_header(epoch, count, more))
    num_bytes = tl.where(count == 0, 32, count * tl.load(ep_ptr + SLOT_BYTES))
    peer = peer_out * scale_up + rank % scale_up
    if ORDERED:
        signal = tail_signal(ep_ptr, rank // scale_up, channel)
    else:
        signal = data_signal(ep_ptr, channel, part)
    PUT(buffer_ptr, peer, source, target, num_bytes, signal)


@triton.jit
def send_channel(
    buffer_ptr, ep_ptr, routing_ptr, payload, tokens, epoch, peer_out, channel, partials,
    META_LANES: tl.constexpr, UP_LANES: tl.constexpr, K_LANES: tl.constexpr, PUT: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """The tokens of ``channel`` for scale-out rank ``peer_out``: sub-parts as they fill, then the end of the input."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    channels = number(ep_ptr, CHANNELS)
    cut_ptr = tl.load(ep_ptr + CUT).to(tl.pointer_type(tl.int32))
    parts = tl.load(cut_ptr)
    sent = tl.full((), 0, tl.int32)
    returned = tl.full((), 0, tl.int32)
    part = tl.full((), 0, tl.int32)
    sub_part = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    size = part_size(cut_ptr, part)
    end = sub_part_start(size, sub_part_count(cut_ptr, size), 1)
    more = tl.full((), 1, tl.int32)
    for token in range(channel, tokens, channels):
        goes = needs(ep_ptr, routing_ptr, token, peer_out, UP_LANES)
        if goes:
            returned += map_token(
                ep_ptr, routing_ptr, payload[2], token, channel, peer_out, returned, partials, K_LANES
            )
            slot_ptr = words_at(buffer_ptr, rank, channel_slot(ep_ptr, STAGING, peer_out, channel, sent))
            write_slot(ep_ptr, routing_ptr, payload, slot_ptr, token, peer_out, META_LANES)
            sent += 1
            if sent == end:
                count = sub_part_count(cut_ptr, size)
                last = (part == parts - 1) & (sub_part == count - 1)
                more = tl.where(last, 0, 1).to(tl.int32)
                send_sub_part(
                    buffer_ptr, ep_ptr, epoch, peer_out, channel, part, first, sent - first, more, PUT, ORDERED
                )
                first = sent
                ends_part = sub_part == count - 1
                part = tl.where(ends_part & (more == 1), part + 1, part).to(tl.int32)
                sub_part = tl.where(ends_part, 0, sub_part + 1).to(tl.int32)
                size = part_size(cut_ptr, part)
                count = sub_part_count(cut_ptr, size)
                end = part_start(cut_ptr, part) + sub_part_start(size, count, sub_part + 1)
    if more == 1:
        send_sub_part(buffer_ptr, ep_ptr, epoch, peer_out, channel, part, first, sent - first, more * 0, PUT, ORDERED)
    tl.store(routing_ptr + tl.load(ep_ptr + RETURNED) + peer_out * channels + channel, returned)


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
def send_directly(
    buffer_ptr, ep_ptr, routing_ptr, payload, tokens, channel, partials,
    META_LANES: tl.constexpr, K_LANES: tl.constexpr,
):  # fmt: skip
    """The tokens of ``channel`` for the ranks of the own scale-out rank, each into the row where it stays."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up, max_tokens = number(ep_ptr, SCALE_UP), number(ep_ptr, MAX_TOKENS)
    own_out = rank // scale_up
    for token in range(channel, tokens, number(ep_ptr, CHANNELS)):
        map_own(ep_ptr, routing_ptr, payload[2], token, channel, own_out, partials, K_LANES)
        for step in range(scale_up):
            peer = own_out * scale_up + (rank + step) % scale_up
            position = tl.load(routing_ptr + tl.load(ep_ptr + POSITIONS) + peer * max_tokens + token)
            if position >= 0:
                slot_ptr = words_at(buffer_ptr, peer, row_slot(ep_ptr, rank * max_tokens + position))
                write_slot(ep_ptr, routing_ptr, payload, slot_ptr, token, own_out, META_LANES)
    announce_channel(buffer_ptr, ep_ptr)
