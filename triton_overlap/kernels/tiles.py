"""Device functions of a GEMM tile: its place, its product, its store, and the copy of rows to a peer."""

import triton
import triton.language as tl

from ..comm.device import INTERPRETED, RANK, WORLD_SIZE, flags_ptr, release_flag, slot_address
from .config import MAX_STORE_COLUMNS as _MAX_STORE_COLUMNS

MAX_STORE_COLUMNS = tl.constexpr(_MAX_STORE_COLUMNS)


@triton.jit
def tile_position(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile ``index``: columns are walked in groups of GROUP_M rows, so that operands stay in L2.

    Example, 3 x 2 tiles, GROUP_M 2: (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    width = GROUP_M * tiles_n
    first = index // width * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = index % width
    return first + within % height, within // height


@triton.jit
def slot_chunks(buffer_ptr, tokens_ptr, epoch):
    """Address (int64) of what a kernel's view of the slot begins with, and the number there of this call's chunk 0.

    Where the host knows the epoch, the view is the call's slot; where it does not, both slots, chunk after chunk.
    """
    rank = tl.load(buffer_ptr + RANK)
    if tokens_ptr is not None:
        world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
        return slot_address(buffer_ptr, rank, epoch * 0), (epoch & 1) * world_size
    else:
        return slot_address(buffer_ptr, rank, epoch), epoch * 0


@triton.jit
def _rows_of_a(
    a_desc, a_ptr, chunk, row, chunk_rows, start, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """[BLOCK_M, BLOCK_K] of A, from (``row``, ``start``) of a chunk."""
    if a_desc is not None:
        return a_desc.load([chunk, row, start]).reshape(BLOCK_M, BLOCK_K)
    else:
        lanes = row + tl.arange(0, BLOCK_M)
        ks = start + tl.arange(0, BLOCK_K).to(tl.int64)
        pointers = a_ptr + (chunk * chunk_rows + lanes).to(tl.int64)[:, None] * K + ks[None, :]
        return tl.load(pointers, mask=(lanes < chunk_rows)[:, None] & (ks < K)[None, :], other=0.0)


@triton.jit
def _columns_of_b(
    b_desc, b_ptr, stride_b, start, col, N, K,
    B_K_MAJOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of B, from (``start``, ``col``)."""
    if b_desc is not None:
        if B_K_MAJOR:
            return b_desc.load([col, start]).T
        else:
            return b_desc.load([start, col])
    else:
        cols = col + tl.arange(0, BLOCK_N)
        ks = start + tl.arange(0, BLOCK_K).to(tl.int64)
        stride_bk, stride_bn = stride_b, 1
        if B_K_MAJOR:
            stride_bk, stride_bn = 1, stride_b
        pointers = b_ptr + cols.to(tl.int64)[None, :] * stride_bn + ks[:, None] * stride_bk
        return tl.load(pointers, mask=(cols < N)[None, :] & (ks < K)[:, None], other=0.0)


@triton.jit
def matmul_tile(
    a_desc, a_ptr, b_desc, b_ptr, stride_b, chunk, row, chunk_rows, col, N, K,
    PRECISION: tl.constexpr, B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 product of the [BLOCK_M, BLOCK_N] tile at (``row``, ``col``) of a chunk of A @ B.

    A is row-major [chunks, chunk_rows, K], and no load reaches into the next chunk, where a peer may be writing; B is
    [K, N], or stored [N, K] with ``B_K_MAJOR``. Through descriptors where given, else through pointers.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        start = step * BLOCK_K
        a = _rows_of_a(a_desc, a_ptr, chunk, row, chunk_rows, start, K, BLOCK_M, BLOCK_K)
        b = _columns_of_b(b_desc, b_ptr, stride_b, start, col, N, K, B_K_MAJOR, BLOCK_N, BLOCK_K)
        acc = dot(a, b, acc, PRECISION)
    return acc


@triton.jit
def matmul_tile_pair(
    a_desc, a_ptr, b_desc, b_ptr, stride_b, chunk, row, chunk_rows, col, second_col, N, K,
    PRECISION: tl.constexpr, B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As ``matmul_tile``, of the two tiles at ``col`` and ``second_col``, with one pass over A."""
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        start = step * BLOCK_K
        a = _rows_of_a(a_desc, a_ptr, chunk, row, chunk_rows, start, K, BLOCK_M, BLOCK_K)
        b = _columns_of_b(b_desc, b_ptr, stride_b, start, col, N, K, B_K_MAJOR, BLOCK_N, BLOCK_K)
        first = dot(a, b, first, PRECISION)
        b = _columns_of_b(b_desc, b_ptr, stride_b, start, second_col, N, K, B_K_MAJOR, BLOCK_N, BLOCK_K)
        second = dot(a, b, second, PRECISION)
    return first, second


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in fp32."""
    if INTERPRETED:
        # The interpreter multiplies bf16 wrongly.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def split_columns(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile's columns."""
    halves = tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    return tl.split(halves)


@triton.jit
def store_block(
    out_desc, out_ptr, bias_ptr, residual_ptr, value, chunk, row, rows, col, N,
    HOST_COUNT: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add bias and residual, and store a [BLOCK_M, COLUMNS] block of a row-major [chunks, rows, N] output.

    Nothing is stored at or past ``rows``: those rows belong to the next chunk, and to another program. Where the host
    knew ``rows`` (``HOST_COUNT``), the descriptor's bounds see to that; else it covers the output as one chunk, and a
    block that reaches past its own is stored without it.
    """
    cols = col + tl.arange(0, COLUMNS)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:
        lanes = row + tl.arange(0, BLOCK_M)
        pointers = residual_ptr + (chunk * rows + lanes).to(tl.int64)[:, None] * N + cols[None, :]
        value += tl.load(pointers, mask=(lanes < rows)[:, None] & (cols < N)[None, :], other=0.0).to(tl.float32)
    value = value.to(out_ptr.dtype.element_ty)
    if out_desc is not None:
        if HOST_COUNT:
            out_desc.store([chunk, row, col], value.reshape(1, BLOCK_M, COLUMNS))
        elif row + BLOCK_M <= rows:
            out_desc.store([0, chunk * rows + row, col], value.reshape(1, BLOCK_M, COLUMNS))
        else:
            store_masked(out_ptr, value, chunk, row, rows, cols, N, BLOCK_M)
    else:
        store_masked(out_ptr, value, chunk, row, rows, cols, N, BLOCK_M)


@triton.jit
def store_masked(out_ptr, value, chunk, row, rows, cols, N, BLOCK_M: tl.constexpr):
    """Store columns ``cols`` of BLOCK_M rows from ``row`` of a row-major [chunks, rows, N] matrix, by plain stores."""
    lanes = row + tl.arange(0, BLOCK_M)
    pointers = out_ptr + (chunk * rows + lanes).to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(pointers, value, mask=(lanes < rows)[:, None] & (cols < N)[None, :])


@triton.jit
def copy_elements(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """Copy ``count`` (int64) contiguous elements."""
    lane = tl.arange(0, BLOCK).to(tl.int64)
    for start in range(0, count, BLOCK):
        offset = start + lane
        tl.store(target_ptr + offset, tl.load(source_ptr + offset, mask=offset < count), mask=offset < count)


@triton.jit
def copy_block(
    source_ptr, target_ptr, row, rows, col, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the [BLOCK_M, BLOCK_N] block at (``row``, ``col``) between row-major [rows, N] matrices.

    COPY_BLOCK elements at a time: that many loads in flight, and no more registers than a tile's accumulator needs.
    """
    STEP: tl.constexpr = COPY_BLOCK // BLOCK_N if COPY_BLOCK < BLOCK_M * BLOCK_N else BLOCK_M
    cols = col + tl.arange(0, BLOCK_N)
    for first in range(0, BLOCK_M, STEP):
        lanes = row + first + tl.arange(0, STEP)
        offsets = lanes.to(tl.int64)[:, None] * N + cols[None, :]
        mask = (lanes < rows)[:, None] & (cols < N)[None, :]
        tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def push_piece(
    buffer_ptr, x_ptr, peer, piece, rows_per_flag, rows, slot_rows, K, epoch,
    ALIGNED: tl.constexpr, COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy piece ``piece`` of the own chunk ``x`` [rows, K] to its place in ``peer``'s slot, where chunks begin
    ``slot_rows`` rows apart, then set its flag there.

    Rows are pushed, not pulled: stores over the link need no answer, loads wait a round trip.
    """
    rank = tl.load(buffer_ptr + RANK)
    first = (piece * rows_per_flag).to(tl.int64)
    count = (tl.minimum(first + rows_per_flag, rows) - first) * K
    target_ptr = slot_address(buffer_ptr, peer, epoch).to(x_ptr.dtype)
    if ALIGNED:
        target_ptr = tl.multiple_of(target_ptr, 16)
    copy_elements(x_ptr + first * K, target_ptr + (rank * slot_rows + first) * K, count, COPY_BLOCK)
    release_flag(flags_ptr(buffer_ptr, peer, rank, epoch) + piece, epoch)
