"""Dispatch: every token once to each scale-out rank that needs it, and from there to the ranks of its experts.

The protocol, its ordering argument and the induction of progress are in ``docs/expert_parallel.md``. Tasks, in the
order in which programs claim them; each class waits only for classes before it:

    enter      1          tell every rank that this one is in the call, with what it will send
    send       S * C      a channel's tokens to one scale-out rank, the own one last: straight to the ranks there
    receive    C          a channel's parts from all scale-out peers, forwarded to scale-up ranks; none where S = 1
    arrive     U          wait for the channels of one scale-up rank; the first one also adds up the counts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..comm.device import (
    AT_COUNTS,
    AT_FORWARDED,
    RANK,
    SURPLUS,
    claim_task,
    close_call,
    device_epoch,
    fail,
    wait_signal,
)
from .ep_entry import open_expert_call, settle_call
from .ep_partials import Partials
from .ep_receive import receive_channel, receive_in_order
from .ep_send import announce_channel, send_channel, send_directly
from .ep_slots import (
    ARRIVAL_SIGNALS,
    CHANNELS,
    COUNT_LANES,
    COUNTS,
    DISPATCH_EPOCH,
    EXPERT_COUNTS,
    EXPERTS,
    PREFIX,
    SCALE_OUT,
    SCALE_UP,
    base_ptr,
    number,
    words_at,
)
from .launching import launch_kernel
from .operands import plain


@triton.jit
def add_counts(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, RANK_LANES: tl.constexpr):
    """Rows from each rank before those of the next, and rows for each local expert, from the exchanged counts. Returns
    1, or 0 after a failure: a count that was announced and is not there."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = number(ep_ptr, SCALE_OUT) * number(ep_ptr, SCALE_UP)
    experts = number(ep_ptr, EXPERTS)
    first = tl.load(ep_ptr + COUNTS) + ((epoch & 1) * world_size).to(tl.int64) * (experts + 1) * 8
    counts_ptr = words_at(buffer_ptr, rank, first)
    source = tl.arange(0, RANK_LANES)
    mask = source < world_size
    word = tl.load(counts_ptr + source * (experts + 1), mask=mask, other=0)
    late = tl.where(mask & (word >> 32 != epoch), source, RANK_LANES)
    count = word.to(tl.int32)
    prefix_ptr = routing_ptr + tl.load(ep_ptr + PREFIX)
    tl.store(prefix_ptr, 0)
    tl.store(prefix_ptr + 1 + source, tl.cumsum(count, 0), mask=mask)
    expert_counts_ptr = routing_ptr + tl.load(ep_ptr + EXPERT_COUNTS)
    for start in range(0, experts, COUNT_LANES):
        expert = start + tl.arange(0, COUNT_LANES)
        there = mask[:, None] & (expert < experts)[None, :]
        words = tl.load(counts_ptr + (source * (experts + 1) + 1)[:, None] + expert[None, :], mask=there, other=0)
        late_here = tl.where(there & (words >> 32 != epoch), source[:, None], RANK_LANES)
        late = tl.minimum(late, tl.min(late_here, 1))
        tl.store(expert_counts_ptr + expert, tl.sum(words.to(tl.int32), 0), mask=expert < experts)
    ok = tl.full((), 1, tl.int32)
    if tl.min(late) < RANK_LANES:
        fail(buffer_ptr, SURPLUS, operation, AT_COUNTS, tl.min(late), epoch, tl.min(late), epoch, epoch - 2)
        ok = tl.full((), 0, tl.int32)
    return ok


@triton.jit
def settle_routing(ep_ptr, routing_ptr, epoch, counts, last, RANK_LANES: tl.constexpr):
    """In the last program, for which ``settle_call`` returned ``last``: note which call made the routing; none after a
    failure, which may have left it half written, so that nobody follows it: it then has no row either."""
    dispatched_ptr = routing_ptr + tl.load(ep_ptr + DISPATCH_EPOCH)
    if last == 2:
        tl.store(dispatched_ptr, 0)
        source = tl.arange(0, RANK_LANES)
        mask = source < number(ep_ptr, SCALE_OUT) * number(ep_ptr, SCALE_UP)
        zero = tl.zeros((RANK_LANES,), tl.int32)
        prefix_ptr = routing_ptr + tl.load(ep_ptr + PREFIX)
        tl.store(prefix_ptr, 0)
        tl.store(prefix_ptr + 1 + source, zero, mask=mask)
        for expert in range(number(ep_ptr, EXPERTS)):
            tl.store(routing_ptr + tl.load(ep_ptr + EXPERT_COUNTS) + expert, 0)
    elif (last == 1) & (counts != 0):
        tl.store(dispatched_ptr, epoch)


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
    ok = wait_signal(buffer_ptr, signal_ptr, target, epoch, operation, AT_FORWARDED, peer, source_up)
    tl.store(base, target)
    return ok


@triton.jit(do_not_specialize=["tokens", "row_words", "scale_words", "operation", "counts", "partials"])
def ep_dispatch_kernel(
    buffer_ptr, ep_ptr, routing_ptr,  # tables, int32 routing
    x_ptr, scales_ptr, topk_idx_ptr, weights_ptr,  # int64 words [T, row_words], int32 words or None, [T, K] twice
    tokens, row_words, scale_words, operation, counts, partials,
    PUT: tl.constexpr, ORDERED: tl.constexpr, META_LANES: tl.constexpr, SOURCE_LANES: tl.constexpr,
    UP_LANES: tl.constexpr, RANK_LANES: tl.constexpr, K_LANES: tl.constexpr,
):  # fmt: skip
    payload = (x_ptr, scales_ptr, topk_idx_ptr, weights_ptr, row_words, scale_words)
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    channels = number(ep_ptr, CHANNELS)
    receives = 1 + scale_out * channels
    arrives = tl.where(scale_out > 1, receives + channels, receives)
    epoch = device_epoch(buffer_ptr)

    tasks = arrives + scale_up
    ok, task = open_expert_call(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, counts, tasks, PUT)
    while (task < tasks) & (ok == 1):
        if task < receives:
            peer_out = (rank // scale_up + 1 + (task - 1) // channels) % scale_out
            channel = (task - 1) % channels
            if peer_out == rank // scale_up:
                send_directly(buffer_ptr, ep_ptr, routing_ptr, payload, tokens, channel, partials, META_LANES, K_LANES)
            else:
                send_channel(
                    buffer_ptr, ep_ptr, routing_ptr, payload, tokens, epoch, peer_out, channel, partials,
                    META_LANES, UP_LANES, K_LANES, PUT, ORDERED,
                )  # fmt: skip
        elif task < arrives:
            channel = task - receives
            if ORDERED:
                ok = receive_in_order(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, partials, K_LANES)
            else:
                ok = receive_channel(
                    buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, partials, SOURCE_LANES, K_LANES
                )
            if ok == 1:
                announce_channel(buffer_ptr, ep_ptr)
        else:
            if (task == arrives) & (counts != 0):
                ok = add_counts(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, RANK_LANES)
            if ok == 1:
                ok = wait_channels(buffer_ptr, ep_ptr, epoch, operation, (rank + task - arrives) % scale_up)
        task = claim_task(buffer_ptr)
    # Nothing is left to be checked: whoever got here has the headers that it needs, or failed.
    last_program = close_call(buffer_ptr, ok, scale_out * scale_up, epoch, 0, 0, 0, operation)
    last_program = settle_call(buffer_ptr, ep_ptr, epoch, operation, last_program)
    settle_routing(ep_ptr, routing_ptr, epoch, counts, last_program, RANK_LANES)


@dataclass(frozen=True)
class Payload:
    """What a rank dispatches.

    Attributes:
        rows: [T, hidden].
        scales: [T, ...] of 4-byte items, or None.
        topk_idx: int64 [T, K].
        topk_weights: float32 [T, K] or None.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None


def launch(
    buffer: Any, routing: torch.Tensor, payload: Payload, *, operation: int, counts: bool, partials: Partials
) -> None:
    """Send ``payload`` of every rank into the rows of ``buffer``, and fill ``routing``.

    Args:
        buffer: an expert buffer: its tables, layout, network and group.
        counts: exchange counts; False where ``routing`` holds those of an equal call.
        partials: how the combines of this routing send back.
    """
    layout = buffer.layout
    rows, topk_idx = plain(payload.rows), plain(payload.topk_idx)
    scales = None if payload.scales is None else plain(payload.scales)
    weights = None if payload.topk_weights is None else plain(payload.topk_weights)
    launch_kernel(
        ep_dispatch_kernel,
        buffer.num_programs,
        {"num_warps": 8, "num_stages": 1, **buffer.network.compile_options},
        buffer_ptr=buffer.table,
        ep_ptr=buffer.ep_tables["rows" if scales is None else "fp8"],
        routing_ptr=routing,
        x_ptr=rows.view(torch.int64),
        scales_ptr=None if scales is None else scales.view(torch.int32),
        topk_idx_ptr=topk_idx,
        weights_ptr=weights,
        tokens=rows.shape[0],
        row_words=rows.shape[1] * rows.element_size() // 8,
        scale_words=0 if scales is None else scales.shape[1],
        operation=operation,
        counts=int(counts),
        partials=int(partials),
        PUT=buffer.network.put,
        ORDERED=layout.ordered,
        META_LANES=triton.next_power_of_2(layout.meta_words),
        SOURCE_LANES=triton.next_power_of_2(layout.num_scale_out),
        UP_LANES=triton.next_power_of_2(layout.num_scale_up),
        RANK_LANES=triton.next_power_of_2(layout.world_size),
        K_LANES=triton.next_power_of_2(layout.topk),
    )
