"""Device functions of the expert-parallel kernels with one mistake each; tests put them in the place of the right ones.

Under the interpreter a kernel looks its device functions up by name, so replacing a module's name plants the fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl

from triton_overlap.comm.device import RANK, device_epoch
from triton_overlap.kernels import ep_combine, ep_dispatch, ep_entry, ep_receive, ep_send
from triton_overlap.kernels.ep_receive import poll_part as right_poll_part
from triton_overlap.kernels.ep_receive import receive_channel as right_receive_channel
from triton_overlap.kernels.ep_reduce import wait_batches as right_wait_batches
from triton_overlap.kernels.ep_send import map_token as right_map_token
from triton_overlap.kernels.ep_slots import (
    BATCH_SIGNALS,
    STAGING,
    base_ptr,
    data_signal,
    header_valid,
    words_at,
)
from triton_overlap.kernels.ep_slots import channel_slot as right_channel_slot


@triton.jit
def headers_first(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES: tl.constexpr):
    """The headers, and then the signal, after a while."""
    _, header = right_poll_part(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES)
    signal = data_signal(ep_ptr, channel, part)
    address = words_at(buffer_ptr, tl.load(buffer_ptr + RANK), signal)
    for _ in range(6):
        tl.atomic_add(address, 0, sem="relaxed", scope="sys")
    counted = tl.atomic_add(address, 0, sem="acquire", scope="sys") - tl.load(base_ptr(ep_ptr, signal))
    return counted, header


@triton.jit
def headers_twice(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES: tl.constexpr):
    """The count is compared with one reading of the headers, and the batches are taken by another."""
    counted, first = right_poll_part(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES)
    _, second = right_poll_part(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES)
    epoch = device_epoch(buffer_ptr)
    visible = tl.sum(header_valid(first, epoch).to(tl.int32))
    return tl.where(counted >= visible, tl.sum(header_valid(second, epoch).to(tl.int32)), -1), second


@triton.jit
def count_ignored(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES: tl.constexpr):
    """A valid header is enough."""
    _, header = right_poll_part(buffer_ptr, ep_ptr, channel, part, SOURCE_LANES)
    return tl.sum(header_valid(header, device_epoch(buffer_ptr)).to(tl.int32)), header


@triton.jit
def base_at_entry(
    buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, partials,
    SOURCE_LANES: tl.constexpr, K_LANES: tl.constexpr,
):  # fmt: skip
    """The base is what the signal holds when the channel is first looked at."""
    signal = data_signal(ep_ptr, channel, 0)
    address = words_at(buffer_ptr, tl.load(buffer_ptr + RANK), signal)
    tl.store(base_ptr(ep_ptr, signal), tl.atomic_add(address, 0, sem="acquire", scope="sys"))
    return right_receive_channel(
        buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel, partials, SOURCE_LANES, K_LANES
    )


@triton.jit
def no_wait(buffer_ptr, ep_ptr, epoch, routed, operation):
    """No entry barrier."""
    return tl.full((), 1, tl.int32)


@triton.jit
def no_hearing(buffer_ptr, ep_ptr, source_out, epoch, operation, header):
    """Nor one in the program that announces the call."""
    base = base_ptr(ep_ptr, ep_entry.hello_signal(ep_ptr, epoch, source_out))
    tl.store(base, tl.load(base) + 1)
    return tl.full((), 1, tl.int32)


@triton.jit
def any_epoch(header, epoch):
    """A header of an earlier call is accepted."""
    return header < 0


@triton.jit
def staging_rewritten(ep_ptr, region, scale_out, channel, slot):
    """Staging has two slots, used in turn within a call."""
    if region == STAGING:
        slot = slot % 2
    return right_channel_slot(ep_ptr, region, scale_out, channel, slot)


@triton.jit
def gate_short_by_one(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel):
    """The reduction starts one batch early."""
    base = base_ptr(ep_ptr, tl.load(ep_ptr + BATCH_SIGNALS) + channel * 8)
    before = tl.load(base)
    tl.store(base, before - 1)
    ok = right_wait_batches(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, channel)
    tl.store(base, tl.load(base) + 1)
    return ok


@triton.jit
def slot_reused(
    ep_ptr, routing_ptr, topk_idx_ptr, token, channel, scale_out, returned, partials, LANES: tl.constexpr
):  # fmt: skip
    """The map gives a token the slot of the one before it."""
    before = tl.maximum(returned - 1, 0)
    return right_map_token(ep_ptr, routing_ptr, topk_idx_ptr, token, channel, scale_out, before, partials, LANES)


#: Each mistake, as what takes the place of which name in which module.
FAULTS: dict[str, dict[tuple[Any, str], Any]] = {
    "headers before the signal": {(ep_receive, "poll_part"): headers_first},
    "headers read twice": {(ep_receive, "poll_part"): headers_twice},
    "count ignored": {(ep_receive, "poll_part"): count_ignored},
    "base sampled at entry": {(ep_dispatch, "receive_channel"): base_at_entry},
    "no entry barrier": {(ep_entry, "wait_entered"): no_wait, (ep_entry, "_hear"): no_hearing},
    "stale iteration accepted": {(ep_receive, "header_valid"): any_epoch},
    "staging rewritten": {(ep_send, "channel_slot"): staging_rewritten},
    "gate short by one": {(ep_combine, "wait_batches"): gate_short_by_one},
    "map slot reused": {(ep_send, "map_token"): slot_reused},
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Kernels make the mistake while it lasts."""
    right = {(module, name): getattr(module, name) for module, name in FAULTS[fault]}
    try:
        for (module, name), replacement in FAULTS[fault].items():
            setattr(module, name, replacement)
        yield
    finally:
        for (module, name), function in right.items():
            setattr(module, name, function)
