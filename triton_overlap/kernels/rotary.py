"""Rotary embedding of packed heads over the active tokens, which also moves them to where the attention wants them.

Shapes, R rotated features of a head of D, the pair of feature i being i + R/2::

    x [rows, groups, heads, D], any strides but for the last  ->  out, the same, of other strides
    angles fp32 [positions, R]      for each position the features' angles, the two halves alike
    cu_seqlens [documents + 1]      where each document starts; positions start there at 0

The gradient turns by minus the angles. A document that is longer than the table gets NaN in the rows beyond it, since a
kernel reads neither past the table nor back to the host. Lower bound: each element of an active row read and written
once.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .rows import COUNTS, RowConfig, Rows, active_rows, block_rows

#: Elements of a block on a GPU, and under the interpreter.
_ELEMENTS, _INTERPRETED_ELEMENTS = 2048, 16384


@triton.jit
def document_positions(lanes, cu_seqlens_ptr, documents, halvings):
    """Position of each row of ``lanes`` in its document: a search for the last start that is not past the row.

    Example: starts 0, 3, end 5 -> rows 0 to 4 are at positions 0 1 2 0 1.
    """
    low = lanes * 0
    high = low + documents + 1
    for _ in range(halvings):  # the start at ``low`` is not past the row, the one at ``high`` is
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_ptr + middle) <= lanes
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return lanes - tl.load(cu_seqlens_ptr + low)


@triton.jit
def _copy(x_pointers, out_pointers, mask):
    tl.store(out_pointers, tl.load(x_pointers, mask=mask), mask=mask)


@triton.jit(do_not_specialize=(*COUNTS, "documents", "halvings", "positions"))
def rotary_kernel(
    x_ptr, stride_x_row, stride_x_group, stride_x_head,
    out_ptr, stride_out_row, stride_out_group, stride_out_head,
    angles_ptr, positions, cu_seqlens_ptr, documents, halvings,
    tokens_ptr, shards, rows, groups, heads,
    HEAD_SIZE: tl.constexpr, ROTATED: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    across = tl.cdiv(groups * heads, BLOCK_N)
    for index in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * across, tl.num_programs(0)):
        lanes, in_rows = block_rows(index // across, rows, BLOCK_M)
        head = (index % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)  # strides may be large
        x_heads = lanes[:, None] * stride_x_row + (head // heads * stride_x_group + head % heads * stride_x_head)
        out_heads = lanes[:, None] * stride_out_row + (
            head // heads * stride_out_group + head % heads * stride_out_head
        )
        x_heads = x_ptr + x_heads[:, :, None]
        out_heads = out_ptr + out_heads[:, :, None]
        in_heads = (in_rows[:, None] & (head < groups * heads))[:, :, None]
        feature = tl.arange(0, BLOCK_FEATURES)
        if ROTATED > 0:
            HALF: tl.constexpr = ROTATED // 2
            at = lanes
            if cu_seqlens_ptr is not None:
                at = document_positions(lanes, cu_seqlens_ptr, documents, halvings)
            known = (in_rows & (at < positions))[:, None] & (feature < HALF)[None, :]
            angles = tl.load(angles_ptr + at[:, None] * ROTATED + feature[None, :], mask=known, other=float("nan"))
            cos, sin = tl.cos(angles)[:, None, :], tl.sin(angles)[:, None, :]
            if INVERSE:
                sin = -sin
            pair = feature[None, None, :]
            mask = in_heads & (pair < HALF)
            first = tl.load(x_heads + pair, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(x_heads + pair + HALF, mask=mask, other=0.0).to(tl.float32)
            dtype: tl.constexpr = out_ptr.dtype.element_ty
            tl.store(out_heads + pair, (first * cos - second * sin).to(dtype), mask=mask)
            tl.store(out_heads + pair + HALF, (second * cos + first * sin).to(dtype), mask=mask)
        for start in tl.static_range(ROTATED, HEAD_SIZE, BLOCK_FEATURES):
            rest = (start + feature)[None, None, :]
            _copy(x_heads + rest, out_heads + rest, in_heads & (rest < HEAD_SIZE))


def _config(heads: int, features: int) -> RowConfig:
    elements = _INTERPRETED_ELEMENTS if INTERPRETED.value else _ELEMENTS
    together = max(1, min(triton.next_power_of_2(heads), elements // features))
    return RowConfig(
        BLOCK_M=max(1, elements // (features * together)), BLOCK_N=together, num_warps=1 if INTERPRETED.value else 4
    )


def launch_into(
    out: torch.Tensor,
    x: torch.Tensor,
    angles: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *,
    inverse: bool,
    active_tokens: torch.Tensor | None = None,
) -> None:
    """Turn the active rows of ``x`` and store them in ``out``.

    Args:
        out: [rows, groups, heads, D], not the memory of ``x``.
        x: of the same shape.
        angles: float32 [positions, R], contiguous; heads are copied as they are where it is None.
        cu_seqlens: [documents + 1], contiguous, int32 or int64; one document where it is None.
        inverse: turn the other way.
        active_tokens: see ``Rows``.
    """
    _, groups, heads, size = x.shape
    rotated = 0 if angles is None else angles.shape[1]
    features = triton.next_power_of_2(rotated // 2 if rotated else size)
    documents = 1 if cu_seqlens is None else cu_seqlens.numel() - 1
    Rows.of(x, active_tokens, 1).launch(
        rotary_kernel,
        _config(groups * heads, features),
        x_ptr=x,
        stride_x_row=x.stride(0),
        stride_x_group=x.stride(1),
        stride_x_head=x.stride(2),
        out_ptr=out,
        stride_out_row=out.stride(0),
        stride_out_group=out.stride(1),
        stride_out_head=out.stride(2),
        angles_ptr=angles,
        positions=0 if angles is None else angles.shape[0],
        cu_seqlens_ptr=cu_seqlens if rotated else None,
        documents=documents,
        halvings=documents.bit_length(),
        groups=groups,
        heads=heads,
        HEAD_SIZE=size,
        ROTATED=rotated,
        INVERSE=inverse,
        BLOCK_FEATURES=features,
    )
