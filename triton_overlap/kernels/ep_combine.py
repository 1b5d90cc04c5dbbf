"""Combine: what the experts made of each token, back at its source, summed in a fixed order in fp32.

Shapes, R received rows, T tokens::

    y [R, hidden]  ->  out [T, hidden]

out[t] = bias_0[t] + bias_1[t] + the sum over scale-out ranks s, ascending, of the partial result of s, where a partial
is the sum over its scale-up ranks, ascending, of their y. Partials of other scale-out ranks are rounded to the dtype of
y on their way. Where partials come back *separate*, nothing is summed or weighted before it is sent, and out[t] is the
biases and then the sum, over k ascending, of what expert k made of the token, times its weight; or of what the rank of
expert k made of it, once a rank. The protocol and its ordering argument are in ``docs/expert_parallel.md``. Tasks:

    enter     1            tell every rank that this one is in the call
    push      R / 8        rows to the scale-up rank that received them from outside, or whose tokens they are
    pack      (S - 1) * C  sum or collect a channel's partials for one scale-out rank, put them back in batches of 12
    reduce    C            sum the own tokens of a channel
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED, RANK, claim_task, close_call, device_epoch, poison
from .ep_entry import open_expert_call, settle_call
from .ep_pack import pack_channel, push_rows, pushed_rows, wait_pushed
from .ep_reduce import reduce_channel, wait_batches
from .ep_slots import CHANNELS, PREFIX, PUSH_SIGNALS, SCALE_OUT, SCALE_UP, base_ptr, number
from .launching import launch_kernel
from .operands import plain

#: Rows that a push task sends before it announces them.
PUSH_ROWS = tl.constexpr(8)
_BLOCK = 4096 if INTERPRETED.value else 2048


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
    PUT: tl.constexpr, EXPAND: tl.constexpr, SEPARATE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    K_LANES: tl.constexpr,
):  # fmt: skip
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    channels = number(ep_ptr, CHANNELS)
    rows = tl.load(routing_ptr + tl.load(ep_ptr + PREFIX) + scale_out * scale_up)
    packs = 1 + tl.cdiv(rows, PUSH_ROWS)
    reduces = packs + (scale_out - 1) * channels
    epoch = device_epoch(buffer_ptr)

    tasks = reduces + channels
    ok, task = open_expert_call(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, 0, tasks, PUT)
    while (task < tasks) & (ok == 1):
        if task < packs:
            first = (task - 1) * PUSH_ROWS
            last = tl.minimum(first + PUSH_ROWS, rows)
            push_rows(buffer_ptr, ep_ptr, routing_ptr, y_ptr, weights_ptr, first, last, hidden, EXPAND, SEPARATE, BLOCK)
        elif task < reduces:
            peer_out = (rank // scale_up + 1 + (task - packs) // channels) % scale_out
            channel = (task - packs) % channels
            ok = wait_pushed(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, peer_out, LANES)
            if ok == 1:
                pack_channel(buffer_ptr, ep_ptr, routing_ptr, out_ptr, peer_out, channel, hidden, PUT, SEPARATE, BLOCK)
        else:
            channel = task - reduces
            ok = wait_pushed(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, rank // scale_up, LANES)
            if (ok == 1) & (scale_out > 1):
                ok = wait_batches(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel)
            if ok == 1:
                reduce_channel(
                    buffer_ptr, ep_ptr, routing_ptr, weights_ptr, bias_0_ptr, bias_1_ptr, out_ptr, tokens, hidden,
                    channel, SEPARATE, BLOCK, K_LANES,
                )  # fmt: skip
        task = claim_task(buffer_ptr)
    # Nothing is left to be checked: whoever got here has the headers that it needs, or failed.
    last_program = close_call(buffer_ptr, ok, scale_out * scale_up, epoch, 0, 0, 0, operation)
    if last_program == 1:
        advance_pushed(buffer_ptr, ep_ptr, routing_ptr, LANES)
    if settle_call(buffer_ptr, ep_ptr, epoch, operation, last_program) == 2:
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
    form: str = "rows",
) -> None:
    """Fill ``out`` [T, hidden] from every rank's ``y`` [R, hidden], or expanded rows.

    ``weights`` are of expanded rows: [R, K] where they are summed before they are sent, [T, K] where they come back
    separate. ``form`` is the format that ``y`` travels in: ``"rows"``, or ``"weights"`` with K columns for hidden.
    """
    layout = buffer.layout
    launch_kernel(
        ep_combine_kernel,
        buffer.num_programs,
        {"num_warps": 8, "num_stages": 1, **buffer.network.compile_options},
        buffer_ptr=buffer.table,
        ep_ptr=buffer.ep_tables[form],
        routing_ptr=routing,
        y_ptr=plain(y),
        weights_ptr=None if weights is None else plain(weights),
        bias_0_ptr=plain(biases[0]) if biases else None,
        bias_1_ptr=plain(biases[1]) if len(biases) > 1 else None,
        out_ptr=out,
        tokens=out.shape[0],
        hidden=out.shape[1],
        operation=operation,
        PUT=buffer.network.put,
        EXPAND=expand,
        SEPARATE=layout.separate,
        BLOCK=min(_BLOCK, triton.next_power_of_2(out.shape[1])),
        LANES=16 if buffer.group.backend.interpreted else 128,
        K_LANES=triton.next_power_of_2(layout.topk),
    )
