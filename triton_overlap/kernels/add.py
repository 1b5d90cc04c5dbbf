"""Sum of two matrices over the active rows.

Shapes: x, y and out [rows, columns]. Lower bound: two elements read and one written for each of an active row.
"""

import torch
import triton
import triton.language as tl

from .rows import COUNTS, Rows, active_rows, row_config, row_major, tile, tiles


@triton.jit(do_not_specialize=COUNTS)
def add_kernel(
    x_ptr, stride_x, y_ptr, stride_y, out_ptr,
    tokens_ptr, shards, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    for index in range(tl.program_id(0), tiles(rows, columns, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        lanes, cols, mask = tile(index, rows, columns, BLOCK_M, BLOCK_N)
        x = tl.load(x_ptr + lanes * stride_x + cols, mask=mask).to(tl.float32)
        y = tl.load(y_ptr + lanes * stride_y + cols, mask=mask).to(tl.float32)
        tl.store(out_ptr + lanes * columns + cols, (x + y).to(out_ptr.dtype.element_ty), mask=mask)


def launch(
    x: torch.Tensor, y: torch.Tensor, active_tokens: torch.Tensor | None = None, shards: int = 1
) -> torch.Tensor:
    """``x + y`` [rows, columns], rounded once, in the active rows of a fresh tensor."""
    x, y = row_major(x), row_major(y)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    Rows.of(x, active_tokens, shards).launch(
        add_kernel,
        row_config(x.shape[1]),
        x_ptr=x,
        stride_x=x.stride(0),
        y_ptr=y,
        stride_y=y.stride(0),
        out_ptr=out,
        columns=x.shape[1],
    )
    return out
