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
from .ep_slots import EXPERTS, MAX_TOKENS, POSITIONS, SCALE_OUT, SCALE_UP, SENT_COUNTS, number
from .launching import launch_kernel

#: Tokens that a program looks at at a time.
_BLOCK = 16 if INTERPRETED.value else 512


@triton.jit
def _experts_of(topk_idx_ptr, start, tokens, topk, BLOCK: tl.constexpr, K_LANES: tl.constexpr):
    """Experts [BLOCK, K_LANES] of the tokens from ``start``, -1 past the tokens and their experts."""
    token = start + tl.arange(0, BLOCK)
    k = tl.arange(0, K_LANES)
    offset = token.to(tl.int64)[:, None] * topk + k[None, :]
    return tl.load(topk_idx_ptr + offset, mask=(token < tokens)[:, None] & (k < topk)[None, :], other=-1)


@triton.jit(do_not_specialize=["tokens", "topk"])
def ep_route_kernel(ep_ptr, routing_ptr, topk_idx_ptr, tokens, topk, BLOCK: tl.constexpr, K_LANES: tl.constexpr):
    """One program for each destination rank, which numbers its tokens, and one for each expert, which counts them."""
    experts = number(ep_ptr, EXPERTS)
    world_size = number(ep_ptr, SCALE_OUT) * number(ep_ptr, SCALE_UP)
    program = tl.program_id(0)
    counts_ptr = routing_ptr + tl.load(ep_ptr + SENT_COUNTS)
    total = tl.full((), 0, tl.int32)
    if program < world_size:
        positions_ptr = routing_ptr + tl.load(ep_ptr + POSITIONS) + program * number(ep_ptr, MAX_TOKENS)
        for start in range(0, tokens, BLOCK):
            expert = _experts_of(topk_idx_ptr, start, tokens, topk, BLOCK, K_LANES)
            here = (expert >= program * experts) & (expert < (program + 1) * experts)
            goes = tl.max(here.to(tl.int32), 1)
            position = total + tl.cumsum(goes, 0) - 1
            token = start + tl.arange(0, BLOCK)
            tl.store(positions_ptr + token, tl.where(goes > 0, position, -1), mask=token < tokens)
            total += tl.sum(goes)
        tl.store(counts_ptr + program * (experts + 1), total)
    else:
        own = program - world_size
        for start in range(0, tokens, BLOCK):
            expert = _experts_of(topk_idx_ptr, start, tokens, topk, BLOCK, K_LANES)
            total += tl.sum(tl.sum((expert == own).to(tl.int32), 1), 0)
        tl.store(counts_ptr + own // experts * (experts + 1) + 1 + own % experts, total)


def launch(layout: EpLayout, table: torch.Tensor, routing: torch.Tensor, topk_idx: torch.Tensor) -> None:
    """Fill ``positions`` and ``sent_counts`` of ``routing`` for ``topk_idx`` int64 [T, K]."""
    launch_kernel(
        ep_route_kernel,
        layout.world_size * (1 + layout.experts_per_rank),
        {"num_warps": 4, "num_stages": 1},
        ep_ptr=table,
        routing_ptr=routing,
        topk_idx_ptr=topk_idx,
        tokens=topk_idx.shape[0],
        topk=topk_idx.shape[1],
        BLOCK=_BLOCK,
        K_LANES=triton.next_power_of_2(layout.topk),
    )
