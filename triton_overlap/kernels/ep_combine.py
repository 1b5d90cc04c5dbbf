"""Combine: what the experts made of each token, back at its source, summed in a fixed order in fp32.

Shapes, R received rows, T tokens::

    y [R, hidden]  ->  out [T, hidden]

out[t] = bias_0[t] + bias_1[t] + the sum over scale-out ranks s, ascending, of the partial result of s, where a partial
is the sum over its scale-up ranks, ascending, of their y. Partials of other scale-out ranks are rounded to the dtype of
y on their way. The protocol and its ordering argument are in ``docs/expert_parallel.md``. Tasks, in order:

    enter     1            tell every rank that this one is in the call
    push      R / 8        rows to the scale-up rank that received them from outside, or whose tokens they are
    pack      (S - 1) * C  sum a channel's partials for one scale-out rank, and put them back in batches of 12
    reduce    C            sum the own tokens of a channel
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..comm.device import (
    AT_SIGNAL,
    INTERPRETED,
    RANK,
    advance_epoch,
    claim_task,
    close_call,
    device_epoch,
    failure_noticed,
    poison,
    wait_signal,
)
from .ep_layout import BATCH as _BATCH
from .ep_slots import (
    BATCH_SIGNALS,
    CHANNELS,
    EXPANDED,
    EXPERTS,
    FORWARDED,
    FORWARDED_COUNTS,
    FORWARDED_ROWS,
    INCOMING,
    MAP,
    MAX_TOKENS,
    ORIGINS,
    POSITIONS,
    PREFIX,
    PUSH_SIGNALS,
    ROW_OFFSET,
    SCALE_OUT,
    SCALE_UP,
    SENT,
    SENT_COUNTS,
    SLOT_BYTES,
    SLOTS,
    STAGING,
    TOPK,
    base_ptr,
    channel_slot,
    enter_call,
    number,
    rounded,
    row_slot,
    wait_entered,
    words_at,
)
from .launching import launch_kernel

BATCH = tl.constexpr(_BATCH)
#: Rows that a push task sends before it announces them.
PUSH_ROWS = tl.constexpr(8)
_BLOCK = 4096 if INTERPRETED.value else 2048


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
def push_rows(
    buffer_ptr, ep_ptr, routing_ptr, y_ptr, weights_ptr, first, last, hidden, EXPAND: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows ``first`` to ``last - 1`` to the scale-up rank that combines them; then add their number to its signals."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up, max_tokens = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP), number(ep_ptr, MAX_TOKENS)
    lane = tl.arange(0, BLOCK)
    for row in range(first, last):
        origin = tl.load(routing_ptr + tl.load(ep_ptr + ORIGINS) + row)
        source, token = origin // max_tokens, origin % max_tokens
        peer = rank // scale_up * scale_up + source % scale_up
        index = (source // scale_up * max_tokens + token) * scale_up + rank % scale_up
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
def pack_channel(
    buffer_ptr, ep_ptr, routing_ptr, like_ptr, peer_out, channel, hidden, PUT: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the partial results of the slots that came in from ``peer_out``, in their order, and put them back."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up, channels = number(ep_ptr, SCALE_UP), number(ep_ptr, CHANNELS)
    tokens = tl.load(routing_ptr + tl.load(ep_ptr + FORWARDED_COUNTS) + peer_out * channels + channel)
    for first in range(0, tokens, BATCH):
        count = tl.minimum(tokens - first, BATCH)
        for slot in range(first, first + count):
            index = (peer_out * channels + channel) * number(ep_ptr, SLOTS) + slot
            kept_ptr = routing_ptr + tl.load(ep_ptr + FORWARDED) + index * (scale_up + 1)
            token = tl.load(kept_ptr)
            staged = channel_slot(ep_ptr, STAGING, peer_out, channel, slot)
            target_ptr = payload_at(buffer_ptr, ep_ptr, rank, staged, like_ptr)
            for start in range(0, hidden, BLOCK):
                offset = start + tl.arange(0, BLOCK)
                value = sum_pushed(buffer_ptr, ep_ptr, kept_ptr + 1, 1, like_ptr, peer_out, token, hidden, offset)
                tl.store(target_ptr + offset, rounded(value, like_ptr), mask=offset < hidden)
        source = channel_slot(ep_ptr, STAGING, peer_out, channel, first)
        target = channel_slot(ep_ptr, INCOMING, rank // scale_up, channel, first)
        signal = tl.load(ep_ptr + BATCH_SIGNALS) + channel.to(tl.int64) * 8
        peer = peer_out * scale_up + rank % scale_up
        PUT(buffer_ptr, peer, source, target, count * tl.load(ep_ptr + SLOT_BYTES), signal)


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


@triton.jit
def wait_batches(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel):
    """Wait for exactly the batches that scale-out peers put back for ``channel``: what each sends is known from what
    was sent to it, 12 slots a put. Returns 1, or 0 after a failure."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, channels = number(ep_ptr, SCALE_OUT), number(ep_ptr, CHANNELS)
    batches = tl.full((), 0, tl.int32)
    for peer_out in range(scale_out):
        if peer_out != rank // number(ep_ptr, SCALE_UP):
            sent = tl.load(routing_ptr + tl.load(ep_ptr + SENT) + peer_out * channels + channel)
            batches += tl.cdiv(sent, BATCH)
    signal = tl.load(ep_ptr + BATCH_SIGNALS) + channel.to(tl.int64) * 8
    base = base_ptr(ep_ptr, signal)
    target = tl.load(base) + batches
    signal_ptr = words_at(buffer_ptr, rank, signal)
    ok = wait_signal(buffer_ptr, signal_ptr, target, epoch, operation, AT_SIGNAL, rank, scale_out + channel)
    tl.store(base, target)
    return ok


@triton.jit
def reduce_channel(
    buffer_ptr, ep_ptr, routing_ptr, bias_0_ptr, bias_1_ptr, out_ptr, tokens, hidden, channel, BLOCK: tl.constexpr
):
    """out of the own tokens of ``channel``: biases, then scale-out ranks in ascending order."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up, max_tokens = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP), number(ep_ptr, MAX_TOKENS)
    own_out = rank // scale_up
    for token in range(channel, tokens, number(ep_ptr, CHANNELS)):
        for start in range(0, hidden, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            element = token * hidden.to(tl.int64) + offset
            value = tl.zeros((BLOCK,), tl.float32)
            if bias_0_ptr is not None:
                value += tl.load(bias_0_ptr + element, mask=offset < hidden, other=0.0).to(tl.float32)
            if bias_1_ptr is not None:
                value += tl.load(bias_1_ptr + element, mask=offset < hidden, other=0.0).to(tl.float32)
            for peer_out in range(scale_out):
                if peer_out == own_out:
                    links_ptr = routing_ptr + tl.load(ep_ptr + POSITIONS) + own_out * scale_up * max_tokens + token
                    value += sum_pushed(
                        buffer_ptr, ep_ptr, links_ptr, max_tokens, out_ptr, own_out, token, hidden, offset
                    )
                else:
                    slot = tl.load(routing_ptr + tl.load(ep_ptr + MAP) + token * scale_out + peer_out)
                    if slot >= 0:
                        incoming = channel_slot(ep_ptr, INCOMING, peer_out, channel, slot)
                        source_ptr = payload_at(buffer_ptr, ep_ptr, rank, incoming, out_ptr)
                        value += tl.load(source_ptr + offset, mask=offset < hidden, other=0.0).to(tl.float32)
            tl.store(out_ptr + element, rounded(value, out_ptr), mask=offset < hidden)


@triton.jit
def advance_pushed(buffer_ptr, ep_ptr, routing_ptr, LANES: tl.constexpr):
    """For the last program of a call: the signals of pushed rows have counted this call's."""
    for source_out in range(number(ep_ptr, SCALE_OUT)):
        base = base_ptr(ep_ptr, tl.load(ep_ptr + PUSH_SIGNALS) + source_out * 8)
        tl.store(base, tl.load(base) + pushed_rows(buffer_ptr, ep_ptr, routing_ptr, source_out, LANES))


@triton.jit(do_not_specialize=["tokens", "hidden", "operation"])
def ep_combine_kernel(
    buffer_ptr, ep_ptr, routing_ptr,  # tables, int32 routing
    y_ptr, weights_ptr, bias_0_ptr, bias_1_ptr, out_ptr,  # [R, hidden] or expanded; fp32 [R, K] or None; [T, hidden]
    tokens, hidden, operation,
    PUT: tl.constexpr, EXPAND: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    channels = number(ep_ptr, CHANNELS)
    rows = tl.load(routing_ptr + tl.load(ep_ptr + PREFIX) + scale_out * scale_up)
    packs = 1 + tl.cdiv(rows, PUSH_ROWS)
    reduces = packs + (scale_out - 1) * channels
    epoch = device_epoch(buffer_ptr)

    ok = tl.full((), 1, tl.int32)
    entered = tl.full((), 0, tl.int32)
    task = claim_task(buffer_ptr)
    if task == 0:
        if failure_noticed(buffer_ptr) == 0:
            ok = enter_call(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, 0, PUT)
        else:
            ok = tl.full((), 0, tl.int32)
        task = claim_task(buffer_ptr)
    while (task < reduces + channels) & (ok == 1):
        if entered == 0:
            ok = wait_entered(buffer_ptr, ep_ptr, epoch, operation)
            entered = tl.full((), 1, tl.int32)
        if ok == 1:
            if task < packs:
                first = (task - 1) * PUSH_ROWS
                last = tl.minimum(first + PUSH_ROWS, rows)
                push_rows(buffer_ptr, ep_ptr, routing_ptr, y_ptr, weights_ptr, first, last, hidden, EXPAND, BLOCK)
            elif task < reduces:
                peer_out = (rank // scale_up + 1 + (task - packs) // channels) % scale_out
                channel = (task - packs) % channels
                ok = wait_pushed(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, peer_out, LANES)
                if ok == 1:
                    pack_channel(buffer_ptr, ep_ptr, routing_ptr, out_ptr, peer_out, channel, hidden, PUT, BLOCK)
            else:
                channel = task - reduces
                ok = wait_pushed(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, rank // scale_up, LANES)
                if (ok == 1) & (scale_out > 1):
                    ok = wait_batches(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel)
                if ok == 1:
                    reduce_channel(
                        buffer_ptr, ep_ptr, routing_ptr, bias_0_ptr, bias_1_ptr, out_ptr, tokens, hidden, channel, BLOCK
                    )
            task = claim_task(buffer_ptr)
    # Nothing is left to be checked: whoever got here has the headers that it needs, or failed.
    last_program = close_call(buffer_ptr, ok, scale_out * scale_up, epoch, 0, 0, 0, operation)
    if last_program == 1:
        advance_pushed(buffer_ptr, ep_ptr, routing_ptr, LANES)
    if last_program != 0:
        advance_epoch(buffer_ptr, epoch)
    if last_program == 2:
        poison(out_ptr, tokens.to(tl.int64) * hidden, BLOCK)


def launch(
    buffer: Any,
    routing: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    biases: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    *,
    operation: int,
    expand: bool,
) -> None:
    """Fill ``out`` [T, hidden] from every rank's ``y`` [R, hidden], or expanded rows and their ``weights`` [R, K]."""
    launch_kernel(
        ep_combine_kernel,
        buffer.group.backend.num_programs,
        {"num_warps": 8, "num_stages": 1},
        buffer_ptr=buffer.table,
        ep_ptr=buffer.ep_table,
        routing_ptr=routing,
        y_ptr=y,
        weights_ptr=weights,
        bias_0_ptr=biases[0] if biases else None,
        bias_1_ptr=biases[1] if len(biases) > 1 else None,
        out_ptr=out,
        tokens=out.shape[0],
        hidden=out.shape[1],
        operation=operation,
        PUT=buffer.network.put,
        EXPAND=expand,
        BLOCK=min(_BLOCK, triton.next_power_of_2(out.shape[1])),
        LANES=16 if buffer.group.backend.interpreted else 128,
    )
