"""Where every row will lie, computed from the experts of this rank's tokens before anything is sent.

Shapes, T tokens, K experts each, E experts a rank, W ranks::

    topk_idx [T, K]  ->  positions [W, T], sent_counts [W, 1 + E]

``positions[d, t]`` is the number of earlier tokens that rank d receives from this one, or -1 where d hosts none of the
experts of t. Rows at a rank are in the order of source rank and token, so results do not depend on arrival, and no
counter hands out slots.

Numeric example: two ranks of one expert, topk_idx [[0], [1], [0]] gives positions [[0, -1, 1], [-1, 0, -1]].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .ep_layout import EpLayout
from .ep_slots import EXPERTS, MAX_TOKENS, POSITIONS, SENT_COUNTS, number
from .launching import launch_kernel

#: Tokens that a program looks at at a time.
_BLOCK = 16 if INTERPRETED.value else 512


@triton.jit(do_not_specialize=["tokens", "topk"])
def ep_route_kernel(ep_ptr, routing_ptr, topk_idx_ptr, tokens, topk, BLOCK: tl.constexpr, K_LANES: tl.constexpr):
    """One program for each destination rank."""
    target = tl.program_id(0)
    experts = number(ep_ptr, EXPERTS)
    positions_ptr = routing_ptr + tl.load(ep_ptr + POSITIONS) + target * number(ep_ptr, MAX_TOKENS)
    counts_ptr = routing_ptr + tl.load(ep_ptr + SENT_COUNTS) + target * (experts + 1)
    token_lane = tl.arange(0, BLOCK)
    k_lane = tl.arange(0, K_LANES)
    total = tl.full((), 0, tl.int32)
    for start in range(0, tokens, BLOCK):
        token = start + token_lane
        mask = (token < tokens)[:, None] & (k_lane < topk)[None, :]
        expert = tl.load(topk_idx_ptr + token.to(tl.int64)[:, None] * topk + k_lane[None, :], mask=mask, other=-1)
        here = mask & (expert >= target * experts) & (expert < (target + 1) * experts)
        goes = tl.max(here.to(tl.int32), 1)
        position = total + tl.cumsum(goes, 0) - 1
        tl.store(positions_ptr + token, tl.where(goes > 0, position, -1), mask=token < tokens)
        total += tl.sum(goes)
    tl.store(counts_ptr, total)
    for expert_index in range(experts):
        count = tl.full((), 0, tl.int32)
        for start in range(0, tokens, BLOCK):
            token = start + token_lane
            mask = (token < tokens)[:, None] & (k_lane < topk)[None, :]
            expert = tl.load(topk_idx_ptr + token.to(tl.int64)[:, None] * topk + k_lane[None, :], mask=mask, other=-1)
            count += tl.sum(tl.sum((expert == target * experts + expert_index).to(tl.int32), 1), 0)
        tl.store(counts_ptr + 1 + expert_index, count)


def launch(layout: EpLayout, table: torch.Tensor, routing: torch.Tensor, topk_idx: torch.Tensor) -> None:
    """Fill ``positions`` and ``sent_counts`` of ``routing`` for ``topk_idx`` int64 [T, K]."""
    launch_kernel(
        ep_route_kernel,
        layout.world_size,
        {"num_warps": 4, "num_stages": 1},
        ep_ptr=table,
        routing_ptr=routing,
        topk_idx_ptr=topk_idx,
        tokens=topk_idx.shape[0],
        topk=topk_idx.shape[1],
        BLOCK=_BLOCK,
        K_LANES=triton.next_power_of_2(layout.topk),
    )
