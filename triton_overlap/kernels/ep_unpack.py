"""From the rows of an expert buffer to fresh tensors, grouped by source rank or by local expert.

Shapes, R received rows, K experts a token, E local experts::

    rows [W, max_tokens]  ->  x [R, hidden], topk_idx [R, K], topk_weights [R, K]
                              or, expanded, x [sum of each expert's rows rounded up, hidden]

Received rows stand in the order of source rank and token. Expanded, row (r, k) goes to its expert's group, in the order
of r and then k; ``expanded [R, K]`` of the routing says where.

Numeric example: rows for local experts [[0, 1], [1, -1]], alignment 4: groups start at 0 and 4, expanded is
[[0, 4], [5, -1]].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED, RANK
from .ep_layout import FIXED_WORDS as _FIXED_WORDS
from .ep_slots import (
    COPY_WORDS,
    COUNT_LANES,
    DISPATCH_EPOCH,
    EXPANDED,
    EXPERT_COUNTS,
    EXPERTS,
    FIRST_K,
    MAX_TOKENS,
    ORIGINS,
    PREFIX,
    ROW_OFFSET,
    SCALE_OFFSET,
    SCALE_OUT,
    SCALE_UP,
    TOPK,
    copy_words,
    number,
    row_slot,
    words_at,
)
from .launching import launch_kernel

FIXED_WORDS = tl.constexpr(_FIXED_WORDS)
_BLOCK = 16 if INTERPRETED.value else 256
#: Programs for each multiprocessor: a row is a chain of loads, and only other rows hide it.
_PROGRAMS_EACH = 4


@triton.jit
def _copy_scales(slot_ptr, ep_ptr, target_ptr, scale_words):
    source_ptr = slot_ptr.to(tl.pointer_type(tl.int32)) + tl.load(ep_ptr + SCALE_OFFSET) // 4
    for start in range(0, scale_words, COUNT_LANES):
        offset = start + tl.arange(0, COUNT_LANES)
        value = tl.load(source_ptr + offset, mask=offset < scale_words)
        tl.store(target_ptr + offset, value, mask=offset < scale_words)


@triton.jit
def _unpack_meta(buffer_ptr, ep_ptr, routing_ptr, idx_ptr, weights_ptr, slot_ptr, source, row, K_LANES: tl.constexpr):
    """Where row ``row`` came from, its local experts, and their weights; -1 and 0 for experts elsewhere."""
    topk, experts = number(ep_ptr, TOPK), number(ep_ptr, EXPERTS)
    meta_ptr = slot_ptr.to(tl.pointer_type(tl.int32))
    token = tl.load(meta_ptr + 2)
    tl.store(routing_ptr + tl.load(ep_ptr + ORIGINS) + row, source * number(ep_ptr, MAX_TOKENS) + token)
    k = tl.arange(0, K_LANES)
    expert_ptr = meta_ptr + FIXED_WORDS + number(ep_ptr, SCALE_UP)
    expert = tl.load(expert_ptr + k, mask=k < topk, other=-1) - tl.load(buffer_ptr + RANK).to(tl.int32) * experts
    here = (k < topk) & (expert >= 0) & (expert < experts)
    tl.store(routing_ptr + tl.load(ep_ptr + FIRST_K) + row, tl.min(tl.where(here, k, K_LANES)))
    tl.store(idx_ptr + row * topk.to(tl.int64) + k, tl.where(here, expert, -1).to(tl.int64), mask=k < topk)
    if weights_ptr is not None:
        bits = tl.load(expert_ptr + topk + k, mask=k < topk, other=0)
        weight = tl.where(here, bits.to(tl.float32, bitcast=True), 0.0)
        tl.store(weights_ptr + row * topk.to(tl.int64) + k, weight, mask=k < topk)


@triton.jit
def _unpack_row(ep_ptr, routing_ptr, x_ptr, scales_ptr, slot_ptr, row, row_words, scale_words, EXPAND: tl.constexpr):
    """The row and its scale factors, once, or once for each local expert."""
    source_ptr = slot_ptr + tl.load(ep_ptr + ROW_OFFSET) // 8
    if EXPAND:
        topk = number(ep_ptr, TOPK)
        for k in range(topk):
            target = tl.load(routing_ptr + tl.load(ep_ptr + EXPANDED) + row * topk + k)
            if target >= 0:
                copy_words(source_ptr, x_ptr + target.to(tl.int64) * row_words, row_words)
                if scales_ptr is not None:
                    _copy_scales(slot_ptr, ep_ptr, scales_ptr + target.to(tl.int64) * scale_words, scale_words)
    else:
        copy_words(source_ptr, x_ptr + row * row_words.to(tl.int64), row_words)
        if scales_ptr is not None:
            _copy_scales(slot_ptr, ep_ptr, scales_ptr + row * scale_words.to(tl.int64), scale_words)


@triton.jit
def _fill_ones(words_ptr, rows, columns):
    """All bits set: NaN in every dtype that rows, scale factors and weights have, and -1 for an expert."""
    lane = tl.arange(0, COPY_WORDS).to(tl.int64)
    count = rows.to(tl.int64) * columns
    ones = tl.full((COPY_WORDS,), -1, words_ptr.dtype.element_ty)
    for start in range(0, count, COPY_WORDS):
        tl.store(words_ptr + start + lane, ones, mask=start + lane < count)


@triton.jit(do_not_specialize=["num_rows", "capacity", "row_words", "scale_words"])
def ep_unpack_kernel(
    buffer_ptr, ep_ptr, routing_ptr, x_ptr, scales_ptr, idx_ptr, weights_ptr,
    num_rows, capacity, row_words, scale_words,  # rows of idx and weights, of x and scales
    META: tl.constexpr, ROW: tl.constexpr, EXPAND: tl.constexpr, K_LANES: tl.constexpr, RANK_LANES: tl.constexpr,
):  # fmt: skip
    """Programs take rows in turn; nobody waits. After a failed call, whose routing has no row, everything is NaN, and
    no expert is here."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = number(ep_ptr, SCALE_OUT) * number(ep_ptr, SCALE_UP)
    prefix_ptr = routing_ptr + tl.load(ep_ptr + PREFIX)
    lane = tl.arange(0, RANK_LANES)
    ends = tl.load(prefix_ptr + 1 + lane, mask=lane < world_size, other=0x7FFFFFFF)
    rows = tl.load(prefix_ptr + world_size)
    if (tl.load(routing_ptr + tl.load(ep_ptr + DISPATCH_EPOCH)) == 0) & (tl.program_id(0) == 0):
        if META:
            _fill_ones(idx_ptr, num_rows, number(ep_ptr, TOPK))
            if weights_ptr is not None:
                _fill_ones(weights_ptr.to(tl.pointer_type(tl.int32)), num_rows, number(ep_ptr, TOPK))
        if ROW:
            _fill_ones(x_ptr, capacity, row_words)
            if scales_ptr is not None:
                _fill_ones(scales_ptr, capacity, scale_words)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        source = tl.sum((ends <= row).to(tl.int32))
        position = row - tl.load(prefix_ptr + source)
        slot_ptr = words_at(buffer_ptr, rank, row_slot(ep_ptr, source * number(ep_ptr, MAX_TOKENS) + position))
        if META:
            _unpack_meta(buffer_ptr, ep_ptr, routing_ptr, idx_ptr, weights_ptr, slot_ptr, source, row, K_LANES)
        if ROW:
            _unpack_row(ep_ptr, routing_ptr, x_ptr, scales_ptr, slot_ptr, row, row_words, scale_words, EXPAND)


@triton.jit(do_not_specialize=["alignment", "topk"])
def ep_expand_kernel(
    ep_ptr, routing_ptr, idx_ptr, alignment, topk,
    BLOCK: tl.constexpr, K_LANES: tl.constexpr, EXPERT_LANES: tl.constexpr,
):  # fmt: skip
    """One program a local expert: number its (row, k), from the start of its group."""
    own = tl.program_id(0)
    world_size = number(ep_ptr, SCALE_OUT) * number(ep_ptr, SCALE_UP)
    rows = tl.load(routing_ptr + tl.load(ep_ptr + PREFIX) + world_size)
    expert = tl.arange(0, EXPERT_LANES)
    count = tl.load(routing_ptr + tl.load(ep_ptr + EXPERT_COUNTS) + expert, mask=expert < own, other=0)
    total = tl.sum(tl.cdiv(count, alignment) * alignment)
    k = tl.arange(0, K_LANES)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (k < topk)[None, :]
        offset = row[:, None] * topk + k[None, :]
        local = tl.load(idx_ptr + offset, mask=mask, other=-2)
        here = (local == own).to(tl.int32)
        before = tl.cumsum(tl.sum(here, 1), 0) - tl.sum(here, 1)
        place = total + before[:, None] + tl.cumsum(here, 1) - 1
        expanded_ptr = routing_ptr + tl.load(ep_ptr + EXPANDED) + offset
        # The first expert's program also marks what no expert here has.
        nowhere = local == tl.where(own == 0, -1, -3)
        tl.store(expanded_ptr, tl.where(here > 0, place, -1), mask=(here > 0) | nowhere)
        total += tl.sum(tl.sum(here, 1), 0)


@dataclass(frozen=True)
class Received:
    """Fresh tensors that :func:`launch` fills.

    Attributes:
        x: [rows, hidden].
        scales: [rows, scale words] or None.
        topk_idx: int64 [R, K], local experts.
        topk_weights: float32 [R, K] or None.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None


def launch(buffer: Any, routing: torch.Tensor, out: Received, *, expand: bool, alignment: int) -> None:
    """Fill ``out`` from the rows of ``buffer``, grouped by expert where ``expand`` is set."""
    layout = buffer.layout
    k_lanes = triton.next_power_of_2(layout.topk)
    arguments = {
        "buffer_ptr": buffer.table,
        "ep_ptr": buffer.ep_tables["rows" if out.scales is None else "fp8"],
        "routing_ptr": routing,
        "x_ptr": out.x.view(torch.int64),
        "scales_ptr": None if out.scales is None else out.scales.view(torch.int32),
        "idx_ptr": out.topk_idx,
        "weights_ptr": out.topk_weights,
        "num_rows": out.topk_idx.shape[0],
        "capacity": out.x.shape[0],
        "row_words": out.x.shape[1] * out.x.element_size() // 8,
        "scale_words": 0 if out.scales is None else out.scales.shape[1],
        "K_LANES": k_lanes,
        "RANK_LANES": triton.next_power_of_2(layout.world_size),
    }
    options = {"num_warps": 8, "num_stages": 1}
    backend = buffer.group.backend
    programs = backend.num_programs * (1 if backend.interpreted else _PROGRAMS_EACH)
    launch_kernel(ep_unpack_kernel, programs, options, META=True, ROW=not expand, EXPAND=False, **arguments)
    if expand:
        launch_kernel(
            ep_expand_kernel,
            layout.experts_per_rank,
            options,
            ep_ptr=buffer.ep_tables["rows"],
            routing_ptr=routing,
            idx_ptr=out.topk_idx,
            alignment=alignment,
            topk=layout.topk,
            BLOCK=_BLOCK,
            K_LANES=k_lanes,
            EXPERT_LANES=triton.next_power_of_2(layout.experts_per_rank),
        )
        launch_kernel(ep_unpack_kernel, programs, options, META=False, ROW=True, EXPAND=True, **arguments)
