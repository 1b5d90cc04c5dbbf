"""What happens to a tile of a product on its way to memory: bias, activation, and the store.

Shapes, F features, the product [T, N] being ``a @ b + bias``::

    plain     out [T, N] = product
    function  out [T, N] = f(product)
    gated     out [T, F] = f(product[:, :F]) * product[:, F:]      N = 2 F; a tile has both of a column's two parts

With a function the product is rounded to the output's dtype first, and can be stored too: its gradient is then taken at
the very point where the function was. So the result has the bits of ``activation.launch`` on the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .activation import value_and_slope
from .tiles import MAX_STORE_COLUMNS, split_columns, store_block


@dataclass(frozen=True)
class Epilogue:
    """An activation of a product.

    Attributes:
        function: as in ``kernels.activation``.
        gated: whether the product's left half is a gate for its right half.
        product: [T, N], to which the product is stored too, or None.
    """

    function: str
    gated: bool
    product: torch.Tensor | None = None


@triton.jit
def _rounded_product(
    product_ptr, bias_ptr, value, dtype: tl.constexpr, chunk, row, rows, cols, last_col, N, BLOCK_M: tl.constexpr
):
    """``value`` plus the bias, rounded, in fp32; columns ``cols`` up to ``last_col`` are stored where asked for."""
    mask = cols < last_col
    if bias_ptr is not None:
        value += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    value = value.to(dtype)
    if product_ptr is not None:
        lanes = row + tl.arange(0, BLOCK_M)
        pointers = product_ptr + (chunk * rows + lanes).to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(pointers, value, mask=(lanes < rows)[:, None] & mask[None, :])
    return value.to(tl.float32)


@triton.jit
def _finish_block(
    out_desc, out_ptr, product_ptr, bias_ptr, value, chunk, row, rows, col, N,
    FUNCTION: tl.constexpr, HOST_COUNT: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if FUNCTION is None:
        store_block(out_desc, out_ptr, bias_ptr, None, value, chunk, row, rows, col, N, HOST_COUNT, BLOCK_M, COLUMNS)
    else:
        cols = col + tl.arange(0, COLUMNS)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        value = _rounded_product(product_ptr, bias_ptr, value, dtype, chunk, row, rows, cols, N, N, BLOCK_M)
        value, _ = value_and_slope(value, FUNCTION)
        store_block(out_desc, out_ptr, None, None, value, chunk, row, rows, col, N, HOST_COUNT, BLOCK_M, COLUMNS)


@triton.jit
def finish_tile(
    out_desc, out_ptr, product_ptr, bias_ptr, acc, chunk, row, rows, col, N,
    FUNCTION: tl.constexpr, HOST_COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a [BLOCK_M, BLOCK_N] tile of the output, plain or through a function."""
    if BLOCK_N > MAX_STORE_COLUMNS:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = split_columns(acc, BLOCK_M, BLOCK_N)
        _finish_block(
            out_desc, out_ptr, product_ptr, bias_ptr, left, chunk, row, rows, col, N,
            FUNCTION, HOST_COUNT, BLOCK_M, HALF,
        )  # fmt: skip
        _finish_block(
            out_desc, out_ptr, product_ptr, bias_ptr, right, chunk, row, rows, col + HALF, N,
            FUNCTION, HOST_COUNT, BLOCK_M, HALF,
        )  # fmt: skip
    else:
        _finish_block(
            out_desc, out_ptr, product_ptr, bias_ptr, acc, chunk, row, rows, col, N,
            FUNCTION, HOST_COUNT, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def finish_gated_tile(
    out_desc, out_ptr, product_ptr, bias_ptr, gate, up, chunk, row, rows, col, N,
    FUNCTION: tl.constexpr, HOST_COUNT: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a [BLOCK_M, COLUMNS] tile of the gated output, from both parts of its columns."""
    features = N // 2
    cols = col + tl.arange(0, COLUMNS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = _rounded_product(product_ptr, bias_ptr, gate, dtype, chunk, row, rows, cols, features, N, BLOCK_M)
    up = _rounded_product(product_ptr, bias_ptr, up, dtype, chunk, row, rows, features + cols, N, N, BLOCK_M)
    value, _ = value_and_slope(gate, FUNCTION)
    value *= up
    store_block(out_desc, out_ptr, None, None, value, chunk, row, rows, col, features, HOST_COUNT, BLOCK_M, COLUMNS)
