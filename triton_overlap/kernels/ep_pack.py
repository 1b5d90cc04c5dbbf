"""First half of a combine: rows pushed to the rank that forwarded them, packed there, and put back to the source."""

import triton
import triton.language as tl

from ..comm.device import AT_SIGNAL, RANK, wait_signal
from .ep_layout import BATCH as _BATCH
from .ep_slots import (
    BATCH_SIGNALS,
    CHANNELS,
    EXPANDED,
    EXPERTS,
    FIRST_K,
    FORWARDED,
    FORWARDED_COUNTS,
    FORWARDED_ROWS,
    INCOMING,
    MAX_TOKENS,
    ORIGINS,
    PREFIX,
    PUSH_SIGNALS,
    ROW_OFFSET,
    SCALE_OUT,
    SCALE_UP,
    SENT_COUNTS,
    SLOT_BYTES,
    SLOTS,
    STAGING,
    TOPK,
    base_ptr,
    number,
    return_index,
    return_slot,
    rounded,
    row_slot,
    words_at,
)

BATCH = tl.constexpr(_BATCH)


@triton.jit
def payload_at(buffer_ptr, ep_ptr, peer, offset, like_ptr):
    """Pointer to the row of the slot at byte ``offset`` in ``peer``'s copy, of the element type of ``like_ptr``."""
    return (words_at(buffer_ptr, peer, offset) + tl.load(ep_ptr + ROW_OFFSET) // 8).to(like_ptr.dtype)


@triton.jit
def _expert_sum(ep_ptr, routing_ptr, y_ptr, weights_ptr, row, hidden, offset, EXPAND: tl.constexpr):
    """fp32 elements ``offset`` of what the local experts made of received row ``row``."""
    if EXPAND:
        value = tl.zeros_like(offset).to(tl.float32)
        topk = number(ep_ptr, TOPK)
        for k in range(topk):
            index = tl.load(routing_ptr + tl.load(ep_ptr + EXPANDED) + row * topk + k)
            if index >= 0:
                part = tl.load(y_ptr + index.to(tl.int64) * hidden + offset, mask=offset < hidden, other=0.0)
                part = part.to(tl.float32)
                if weights_ptr is not None:
                    part *= tl.load(weights_ptr + row * topk.to(tl.int64) + k)
                value += part
    else:
        value = tl.load(y_ptr + row * hidden.to(tl.int64) + offset, mask=offset < hidden, other=0.0).to(tl.float32)
    return value


@triton.jit
def copy_row(source_ptr, target_ptr, hidden, BLOCK: tl.constexpr):
    """``hidden`` elements, as they are."""
    for start in range(0, hidden, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        tl.store(target_ptr + offset, tl.load(source_ptr + offset, mask=offset < hidden), mask=offset < hidden)


@triton.jit
def push_apart(
    buffer_ptr, ep_ptr, routing_ptr, y_ptr, row, peer, place, hidden, EXPAND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What each expert, or, where rows are not expanded, this rank made of received row ``row``, to its slots among the
    K of ``place`` at ``peer``."""
    topk = number(ep_ptr, TOPK)
    for k in range(topk):
        if EXPAND:
            index = tl.load(routing_ptr + tl.load(ep_ptr + EXPANDED) + row * topk + k)
        else:
            index = tl.where(tl.load(routing_ptr + tl.load(ep_ptr + FIRST_K) + row) == k, row, -1)
        if index >= 0:
            target_ptr = payload_at(buffer_ptr, ep_ptr, peer, row_slot(ep_ptr, place * topk + k), y_ptr)
            copy_row(y_ptr + index.to(tl.int64) * hidden, target_ptr, hidden, BLOCK)


@triton.jit
def push_rows(
    buffer_ptr, ep_ptr, routing_ptr, y_ptr, weights_ptr, first, last, hidden,
    EXPAND: tl.constexpr, SEPARATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``last - 1`` to the scale-up rank that combines them; then add their number to its signals."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up, max_tokens = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP), number(ep_ptr, MAX_TOKENS)
    lane = tl.arange(0, BLOCK)
    for row in range(first, last):
        origin = tl.load(routing_ptr + tl.load(ep_ptr + ORIGINS) + row)
        source, token = origin // max_tokens, origin % max_tokens
        peer = rank // scale_up * scale_up + source % scale_up
        place = source // scale_up * max_tokens + token
        if SEPARATE:
            push_apart(buffer_ptr, ep_ptr, routing_ptr, y_ptr, row, peer, place, hidden, EXPAND, BLOCK)
        else:
            index = place * scale_up + rank % scale_up
            target_ptr = payload_at(buffer_ptr, ep_ptr, peer, row_slot(ep_ptr, index), y_ptr)
            for start in range(0, hidden, BLOCK):
                offset = start + lane
                value = _expert_sum(ep_ptr, routing_ptr, y_ptr, weights_ptr, row, hidden, offset, EXPAND)
                tl.store(target_ptr + offset, rounded(value, y_ptr), mask=offset < hidden)
    tl.debug_barrier()
    for source in range(scale_out * scale_up):
        prefix_ptr = routing_ptr + tl.load(ep_ptr + PREFIX) + source
        count = tl.minimum(last, tl.load(prefix_ptr + 1)) - tl.maximum(first, tl.load(prefix_ptr))
        if count > 0:
            peer = rank // scale_up * scale_up + source % scale_up
            signal = tl.load(ep_ptr + PUSH_SIGNALS) + (source // scale_up).to(tl.int64) * 8
            tl.atomic_add(words_at(buffer_ptr, peer, signal), count.to(tl.int64), sem="release", scope="sys")


@triton.jit
def pushed_rows(buffer_ptr, ep_ptr, routing_ptr, source_out, LANES: tl.constexpr):
    """Rows that scale-up peers push here for tokens of ``source_out`` in this call."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up, channels = number(ep_ptr, SCALE_UP), number(ep_ptr, CHANNELS)
    total = tl.full((), 0, tl.int32)
    if source_out == rank // scale_up:
        for up in range(scale_up):
            row = (source_out * scale_up + up) * (number(ep_ptr, EXPERTS) + 1)
            total += tl.load(routing_ptr + tl.load(ep_ptr + SENT_COUNTS) + row)
    else:
        first = routing_ptr + tl.load(ep_ptr + FORWARDED_ROWS) + source_out * channels
        for start in range(0, channels, LANES):
            lane = start + tl.arange(0, LANES)
            total += tl.sum(tl.load(first + lane, mask=lane < channels, other=0))
    return total


@triton.jit
def wait_pushed(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, source_out, LANES: tl.constexpr):
    """Wait for all rows that scale-up peers push here for ``source_out``. Returns 1, or 0 after a failure."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    signal = tl.load(ep_ptr + PUSH_SIGNALS) + source_out.to(tl.int64) * 8
    target = tl.load(base_ptr(ep_ptr, signal)) + pushed_rows(buffer_ptr, ep_ptr, routing_ptr, source_out, LANES)
    signal_ptr = words_at(buffer_ptr, rank, signal)
    return wait_signal(buffer_ptr, signal_ptr, target, epoch, operation, AT_SIGNAL, rank, source_out)


@triton.jit
def put_batch(buffer_ptr, ep_ptr, peer_out, channel, first, count, PUT: tl.constexpr):
    """Put ``count`` packed partials, from slot ``first`` of a channel, back to ``peer_out``."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up = number(ep_ptr, SCALE_UP)
    source = return_slot(ep_ptr, STAGING, return_index(ep_ptr, peer_out, channel, first))
    target = return_slot(ep_ptr, INCOMING, return_index(ep_ptr, rank // scale_up, channel, first))
    signal = tl.load(ep_ptr + BATCH_SIGNALS) + channel.to(tl.int64) * 8
    peer = peer_out * scale_up + rank % scale_up
    PUT(buffer_ptr, peer, source, target, count * tl.load(ep_ptr + SLOT_BYTES), signal)


@triton.jit
def pack_channel(
    buffer_ptr, ep_ptr, routing_ptr, like_ptr, peer_out, channel, hidden,
    PUT: tl.constexpr, SEPARATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack the partial results of the slots that came in from ``peer_out``, in their order, and put them back: the sum
    of each slot, or, ``SEPARATE``, each by itself with k ascending."""
    scale_up, channels = number(ep_ptr, SCALE_UP), number(ep_ptr, CHANNELS)
    tokens = tl.load(routing_ptr + tl.load(ep_ptr + FORWARDED_COUNTS) + peer_out * channels + channel)
    partials = number(ep_ptr, TOPK) if SEPARATE else tl.full((), 1, tl.int32)
    first = tl.full((), 0, tl.int32)
    packed = tl.full((), 0, tl.int32)
    for slot in range(tokens):
        index = (peer_out * channels + channel) * number(ep_ptr, SLOTS) + slot
        kept_ptr = routing_ptr + tl.load(ep_ptr + FORWARDED) + index * (scale_up + 2)
        token = tl.load(kept_ptr)
        chosen = tl.load(kept_ptr + 1 + scale_up) if SEPARATE else tl.full((), 1, tl.int32)
        for k in range(partials):
            if (chosen >> k) & 1 == 1:
                staged = return_slot(ep_ptr, STAGING, return_index(ep_ptr, peer_out, channel, packed))
                stage_partial(
                    buffer_ptr, ep_ptr, kept_ptr + 1, like_ptr, peer_out, token, k, staged, hidden, SEPARATE, BLOCK
                )
                packed += 1
                if packed - first == BATCH:
                    put_batch(buffer_ptr, ep_ptr, peer_out, channel, first, packed - first, PUT)
                    first = packed
    if packed > first:
        put_batch(buffer_ptr, ep_ptr, peer_out, channel, first, packed - first, PUT)


@triton.jit
def stage_partial(
    buffer_ptr, ep_ptr, links_ptr, like_ptr, peer_out, token, k, staged, hidden,
    SEPARATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A partial result of ``token`` of ``peer_out`` into the staging slot at byte ``staged``."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    target_ptr = payload_at(buffer_ptr, ep_ptr, rank, staged, like_ptr)
    if SEPARATE:
        place = (peer_out * number(ep_ptr, MAX_TOKENS) + token) * number(ep_ptr, TOPK) + k
        copy_row(payload_at(buffer_ptr, ep_ptr, rank, row_slot(ep_ptr, place), like_ptr), target_ptr, hidden, BLOCK)
    else:
        for start in range(0, hidden, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            value = sum_pushed(buffer_ptr, ep_ptr, links_ptr, 1, like_ptr, peer_out, token, hidden, offset)
            tl.store(target_ptr + offset, rounded(value, like_ptr), mask=offset < hidden)


@triton.jit
def sum_pushed(buffer_ptr, ep_ptr, links_ptr, stride, like_ptr, source_out, token, hidden, offset):
    """fp32 elements ``offset`` of the rows pushed here for ``token`` of ``source_out``, summed over the scale-up ranks
    whose entry of ``links`` is not -1, ascending."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up = number(ep_ptr, SCALE_UP)
    value = tl.zeros_like(offset).to(tl.float32)
    for up in range(scale_up):
        if tl.load(links_ptr + up * stride) >= 0:
            index = (source_out * number(ep_ptr, MAX_TOKENS) + token) * scale_up + up
            source_ptr = payload_at(buffer_ptr, ep_ptr, rank, row_slot(ep_ptr, index), like_ptr)
            value += tl.load(source_ptr + offset, mask=offset < hidden, other=0.0).to(tl.float32)
    return value
