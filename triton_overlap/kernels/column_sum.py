"""Sums over the active rows, for the gradients of biases and of other parameters that every row shares.

Shapes: x [rows, columns] -> fp32 [columns].

PARTIALS programs share a block of columns, each sums every PARTIALS-th block of rows, and what they found is added in a
second pass. Which rows a program sums, and in which order, follows from the active rows alone: results are bitwise
reproducible, and the same whatever the capacity. Lower bound: each element of an active row read once.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .rows import COUNTS, RowConfig, Rows, active_rows, block_columns, block_rows, row_major

#: Partial sums of a column. The same on every GPU, so that results are.
PARTIALS = 2 if INTERPRETED.value else 64


def column_config(columns: int) -> RowConfig:
    """Blocks of few columns and many rows: 256 bytes of a row in 2-byte dtypes, and 32 elements for each thread."""
    if INTERPRETED.value:
        return RowConfig(BLOCK_M=64, BLOCK_N=min(triton.next_power_of_2(columns), 4096), num_warps=1)
    return RowConfig(BLOCK_M=32, BLOCK_N=128, num_warps=4)


@triton.jit
def store_partial(partial_ptr, total, part, cols, columns):
    """Store the sum over the rows of ``total`` as row ``part`` of fp32 [PARTIALS, columns]."""
    tl.store(partial_ptr + part * columns + cols, tl.sum(total, axis=0), mask=cols < columns)


@triton.jit(do_not_specialize=COUNTS)
def column_sum_kernel(
    x_ptr, stride_x, partial_ptr,
    tokens_ptr, shards, rows, columns,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    part = tl.program_id(0) % PARTS
    cols, in_columns = block_columns(tl.program_id(0) // PARTS * BLOCK_N, columns, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(part, tl.cdiv(rows, BLOCK_M), PARTS):
        lanes, in_rows = block_rows(block, rows, BLOCK_M)
        mask = in_rows[:, None] & in_columns[None, :]
        total += tl.load(x_ptr + lanes[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    store_partial(partial_ptr, total, part, cols, columns)


def partial_sums(columns: int, device: torch.device) -> torch.Tensor:
    """fp32 [PARTIALS, columns], all of which a kernel on ``summing_programs`` programs fills."""
    return torch.empty(PARTIALS, columns, dtype=torch.float32, device=device)


def summing_programs(columns: int, config: RowConfig) -> int:
    """PARTIALS programs for each block of columns."""
    return PARTIALS * triton.cdiv(columns, config.BLOCK_N)


def launch(x: torch.Tensor, active_tokens: torch.Tensor | None = None, shards: int = 1) -> torch.Tensor:
    """The sum over the active rows of ``x`` [rows, columns], in fp32: [columns]."""
    x = row_major(x)
    columns = x.shape[1]
    config = column_config(columns)
    partial = partial_sums(columns, x.device)
    Rows.of(x, active_tokens, shards).launch(
        column_sum_kernel,
        config,
        summing_programs(columns, config),
        x_ptr=x,
        stride_x=x.stride(0),
        partial_ptr=partial,
        columns=columns,
        PARTS=PARTIALS,
    )
    return partial.sum(dim=0)
