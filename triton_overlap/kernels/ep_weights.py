"""The gradient of a weighted sum over a token's experts, at the rank that has made the terms.

Shapes, R received rows, K experts a token, G rows grouped by expert::

    grad [G, hidden], y [G, hidden], weights [R, K]  ->  weights_grad [R, K], and grad in place

With g = expanded[r, k] of the routing, weights_grad[r, k] = <grad[g], y[g]>, summed in fp32, 0 where the expert is
elsewhere, and grad[g] becomes weights[r, k] * grad[g], the gradient of y[g]. Lower bound: three elements for each row
and column, two read and one written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .ep_slots import EXPANDED, PREFIX, SCALE_OUT, SCALE_UP, TOPK, number, rounded
from .launching import launch_kernel
from .operands import plain

_BLOCK = 4096 if INTERPRETED.value else 1024


@triton.jit(do_not_specialize=["capacity", "hidden"])
def ep_weights_gradient_kernel(
    buffer_ptr, ep_ptr, routing_ptr, grad_ptr, y_ptr, weights_ptr, weights_grad_ptr,
    capacity, hidden, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs take received rows in turn."""
    topk = number(ep_ptr, TOPK)
    prefix_ptr = routing_ptr + tl.load(ep_ptr + PREFIX)
    rows = tl.minimum(tl.load(prefix_ptr + number(ep_ptr, SCALE_OUT) * number(ep_ptr, SCALE_UP)), capacity)
    lane = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        for k in range(topk):
            place = row * topk.to(tl.int64) + k
            index = tl.load(routing_ptr + tl.load(ep_ptr + EXPANDED) + place)
            total = tl.zeros((BLOCK,), tl.float32)
            if index >= 0:
                weight = tl.load(weights_ptr + place)
                first = index.to(tl.int64) * hidden
                for start in range(0, hidden, BLOCK):
                    offset = start + lane
                    grad = tl.load(grad_ptr + first + offset, mask=offset < hidden, other=0.0).to(tl.float32)
                    y = tl.load(y_ptr + first + offset, mask=offset < hidden, other=0.0).to(tl.float32)
                    tl.store(grad_ptr + first + offset, rounded(weight * grad, grad_ptr), mask=offset < hidden)
                    total += grad * y
            tl.store(weights_grad_ptr + place, tl.sum(total))


def launch_gradient(
    buffer: Any, routing: torch.Tensor, grad: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The gradient of ``weights``, fresh; ``grad`` becomes that of ``y``.

    Args:
        buffer: an expert buffer.
        routing: of the dispatch; its first R rows of ``expanded`` count, R at most the rows of ``weights``.
        grad: [G, hidden], contiguous. Rows that belong to nobody are left alone.
        y: [G, hidden].
        weights: fp32 [R, K].
    """
    y, weights = plain(y), plain(weights)
    weights_grad = torch.empty_like(weights)
    launch_kernel(
        ep_weights_gradient_kernel,
        buffer.group.backend.num_programs,
        {"num_warps": 4, "num_stages": 1},
        buffer_ptr=buffer.table,
        ep_ptr=buffer.ep_tables["rows"],
        routing_ptr=routing,
        grad_ptr=grad,
        y_ptr=y,
        weights_ptr=weights,
        weights_grad_ptr=weights_grad,
        capacity=weights.shape[0],
        hidden=y.shape[1],
        BLOCK=min(_BLOCK, triton.next_power_of_2(y.shape[1])),
    )
    return weights_grad
