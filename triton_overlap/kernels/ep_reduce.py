"""Second half of a combine: the partial results of each token, summed at its source in a fixed order in fp32."""

import triton
import triton.language as tl

from ..comm.device import AT_FORWARDED, RANK, wait_signal
from .ep_layout import BATCH as _BATCH
from .ep_pack import payload_at, sum_pushed
from .ep_slots import (
    BATCH_SIGNALS,
    CHANNELS,
    INCOMING,
    MAP,
    MAX_TOKENS,
    POSITIONS,
    RETURN_SLOTS,
    RETURNED,
    SCALE_OUT,
    SCALE_UP,
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
def wait_batches(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel):
    """Wait for exactly the batches that scale-out peers put back for ``channel``: how many partial results
    each sends is known from the routing, 12 a put. Returns 1, or 0 after a failure."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, channels = number(ep_ptr, SCALE_OUT), number(ep_ptr, CHANNELS)
    batches = tl.full((), 0, tl.int32)
    for peer_out in range(scale_out):
        if peer_out != rank // number(ep_ptr, SCALE_UP):
            returned = tl.load(routing_ptr + tl.load(ep_ptr + RETURNED) + peer_out * channels + channel)
            batches += tl.cdiv(returned, BATCH)
    signal = tl.load(ep_ptr + BATCH_SIGNALS) + channel.to(tl.int64) * 8
    base = base_ptr(ep_ptr, signal)
    target = tl.load(base) + batches
    signal_ptr = words_at(buffer_ptr, rank, signal)
    ok = wait_signal(buffer_ptr, signal_ptr, target, epoch, operation, AT_FORWARDED, rank, scale_out + channel)
    tl.store(base, target)
    return ok


@triton.jit
def partial_at(buffer_ptr, ep_ptr, like_ptr, token, entry):
    """Pointer to the row of the partial result that ``entry`` of a map says, where partials come back separate."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    slots = number(ep_ptr, RETURN_SLOTS)
    own_out = rank // number(ep_ptr, SCALE_UP)
    offset = return_slot(ep_ptr, INCOMING, entry)
    if entry // (number(ep_ptr, CHANNELS) * slots) == own_out:
        place = (own_out * number(ep_ptr, MAX_TOKENS) + token) * number(ep_ptr, TOPK) + entry % slots
        offset = row_slot(ep_ptr, place)
    return payload_at(buffer_ptr, ep_ptr, rank, offset, like_ptr)


@triton.jit
def add_apart(
    value, buffer_ptr, ep_ptr, routing_ptr, weights_ptr, like_ptr, token, hidden, offset, K_LANES: tl.constexpr
):  # fmt: skip
    """To fp32 ``value``, elements ``offset`` of a token's partials, k ascending, each times its weight."""
    topk = number(ep_ptr, TOPK)
    map_ptr = routing_ptr + tl.load(ep_ptr + MAP) + token * topk
    k_lane = tl.arange(0, K_LANES)
    entries = tl.load(map_ptr + k_lane, mask=k_lane < topk, other=-1)
    for k in range(topk):
        entry = tl.load(map_ptr + k)
        shared = tl.sum(((entries == entry) & (k_lane < k)).to(tl.int32))
        if (entry >= 0) & (shared == 0):
            source_ptr = partial_at(buffer_ptr, ep_ptr, like_ptr, token, entry)
            part = tl.load(source_ptr + offset, mask=offset < hidden, other=0.0).to(tl.float32)
            if weights_ptr is not None:
                part *= tl.load(weights_ptr + token * topk.to(tl.int64) + k)
            value += part
    return value


@triton.jit
def add_by_scale_out(
    value, buffer_ptr, ep_ptr, routing_ptr, like_ptr, token, channel, hidden, offset, K_LANES: tl.constexpr
):  # fmt: skip
    """To fp32 ``value``, elements ``offset`` of a token's partials, scale-out ranks ascending."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up, max_tokens = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP), number(ep_ptr, MAX_TOKENS)
    own_out = rank // scale_up
    k_lane = tl.arange(0, K_LANES)
    map_ptr = routing_ptr + tl.load(ep_ptr + MAP) + token * number(ep_ptr, TOPK)
    entries = tl.load(map_ptr + k_lane, mask=k_lane < number(ep_ptr, TOPK), other=-1)
    for peer_out in range(scale_out):
        if peer_out == own_out:
            links_ptr = routing_ptr + tl.load(ep_ptr + POSITIONS) + own_out * scale_up * max_tokens + token
            value += sum_pushed(buffer_ptr, ep_ptr, links_ptr, max_tokens, like_ptr, own_out, token, hidden, offset)
        else:
            first = return_index(ep_ptr, peer_out, channel, 0)
            there = (entries >= first) & (entries < first + number(ep_ptr, RETURN_SLOTS))
            entry = tl.max(tl.where(there, entries, -1))
            if entry >= 0:
                source_ptr = payload_at(buffer_ptr, ep_ptr, rank, return_slot(ep_ptr, INCOMING, entry), like_ptr)
                value += tl.load(source_ptr + offset, mask=offset < hidden, other=0.0).to(tl.float32)
    return value


@triton.jit
def reduce_channel(
    buffer_ptr, ep_ptr, routing_ptr, weights_ptr, bias_0_ptr, bias_1_ptr, out_ptr, tokens, hidden, channel,
    SEPARATE: tl.constexpr, BLOCK: tl.constexpr, K_LANES: tl.constexpr,
):  # fmt: skip
    """out of the own tokens of ``channel``: biases, and then their partial results."""
    for token in range(channel, tokens, number(ep_ptr, CHANNELS)):
        for start in range(0, hidden, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            element = token * hidden.to(tl.int64) + offset
            value = tl.zeros((BLOCK,), tl.float32)
            if bias_0_ptr is not None:
                value += tl.load(bias_0_ptr + element, mask=offset < hidden, other=0.0).to(tl.float32)
            if bias_1_ptr is not None:
                value += tl.load(bias_1_ptr + element, mask=offset < hidden, other=0.0).to(tl.float32)
            if SEPARATE:
                value = add_apart(
                    value, buffer_ptr, ep_ptr, routing_ptr, weights_ptr, out_ptr, token, hidden, offset, K_LANES
                )
            else:
                value = add_by_scale_out(
                    value, buffer_ptr, ep_ptr, routing_ptr, out_ptr, token, channel, hidden, offset, K_LANES
                )
            tl.store(out_ptr + element, rounded(value, out_ptr), mask=offset < hidden)
