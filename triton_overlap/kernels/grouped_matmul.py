"""Grouped GEMM: each group of rows has a right operand of its own, and how many rows it has is on the device.

Shapes, E groups of ``counts[e]`` rows, each group padded to a multiple of ``alignment``, R rows of room::

    forward   a [R, K], b [E, K, N]  ->  out [R, N], rows of e: a rows of e @ b[e]
    gradient  a [R, K], g [R, N]     ->  out [E, K, N], out[e]: (a rows of e)^T @ (g rows of e)

Rows of padding, and rows past the last group, are neither read nor written. The grid follows from the shapes alone:
programs take the tiles of all groups in turn, group after group, so one compilation and one captured graph serve every
routing. In the gradient the rows are the contracted dimension, masked at each group's end.

Numeric example: counts [3, 0, 2], alignment 4: groups begin at rows 0, 4 and 4; row 3 is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .config import TileConfig, tile_config
from .launching import launch_kernel_on
from .operands import contiguous_rows, input_precision
from .rows import num_programs
from .tiles import dot, matmul_tile, store_masked, tile_position
from .weight_gradient import load_rows, store_gradient


@triton.jit
def group_sizes(counts_ptr, groups, alignment, rows, LANES: tl.constexpr):
    """First row of each group and the end of its last one, for all groups. They are within ``rows`` whatever the
    counts are, as those of a failed call may be."""
    lane = tl.arange(0, LANES)
    count = tl.load(counts_ptr + lane, mask=lane < groups, other=0)
    count = tl.minimum(tl.maximum(count, 0), rows)
    room = tl.cdiv(count, alignment) * alignment
    first = tl.minimum(tl.cumsum(room, 0) - room, rows)
    return first, tl.minimum(first + count, rows)


@triton.jit
def pick(values, index, LANES: tl.constexpr):
    """Element ``index`` of a vector of LANES."""
    return tl.sum(tl.where(tl.arange(0, LANES) == index, values, 0))


@triton.jit(do_not_specialize=["groups", "alignment", "rows"])
def grouped_matmul_kernel(
    counts_ptr, groups, alignment, rows,
    a_ptr, b_ptr, stride_b, out_ptr,  # [rows, K], [groups, K, N] or stored [groups, N, K], [rows, N]
    N, K,
    B_K_MAJOR: tl.constexpr, PRECISION: tl.constexpr, LANES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    first, end = group_sizes(counts_ptr, groups, alignment, rows, LANES)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(end - first, BLOCK_M) * tiles_n
    tiles_end = tl.cumsum(tiles, 0)
    for index in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        group = tl.sum((tiles_end <= index).to(tl.int32))
        own_tiles = pick(tiles, group, LANES)
        within = index - (pick(tiles_end, group, LANES) - own_tiles)
        tile_m, tile_n = tile_position(within, own_tiles // tiles_n, tiles_n, GROUP_M)
        row, col = pick(first, group, LANES) + tile_m * BLOCK_M, tile_n * BLOCK_N
        last = pick(end, group, LANES)
        own_b_ptr = b_ptr + group.to(tl.int64) * N * K
        # One chunk that ends with the group: what follows it is neither read nor written.
        acc = matmul_tile(
            None, a_ptr, None, own_b_ptr, stride_b, 0, row, last, col, N, K,
            PRECISION, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        cols = col + tl.arange(0, BLOCK_N)
        store_masked(out_ptr, acc.to(out_ptr.dtype.element_ty), 0, row, last, cols, N, BLOCK_M)


@triton.jit(do_not_specialize=["groups", "alignment", "rows"])
def grouped_gradient_kernel(
    counts_ptr, groups, alignment, rows,
    a_ptr, g_ptr, out_ptr, stride_oe, stride_ok, stride_on,  # [rows, K], [rows, N], [groups, K, N]
    N, K,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, LANES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One program for each tile of each group, BLOCK_M over K, BLOCK_N over N and BLOCK_K over rows. A group without
    rows gets zeros, or nothing added."""
    tiles_m, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = tile_position(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    firsts, ends = group_sizes(counts_ptr, groups, alignment, rows, LANES)
    first, end = pick(firsts, group, LANES), pick(ends, group, LANES)
    ks = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    ns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(end - first, BLOCK_K)):
        ts = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        a = load_rows(a_ptr, K, ts, end, ks, K)
        g = load_rows(g_ptr, N, ts, end, ns, N)
        acc = dot(a.T, g, acc, PRECISION)
    own_out_ptr = out_ptr + group.to(tl.int64) * stride_oe
    store_gradient(own_out_ptr, stride_ok, stride_on, acc, ks, ns, K, N, ACCUMULATE)


@dataclass(frozen=True)
class Groups:
    """Which rows belong to which group.

    Attributes:
        counts: int32 [E], on the device.
        alignment: each group is padded to a multiple of it.
    """

    counts: torch.Tensor
    alignment: int = 1

    def ends(self, rows: int) -> torch.Tensor:
        """int32 [E], the row behind each group and its padding, at most ``rows``."""
        room = (self.counts.clamp(0, rows) + (self.alignment - 1)) // self.alignment * self.alignment
        return room.cumsum(0).clamp_(max=rows).to(torch.int32)

    def arguments(self, rows: int, config: TileConfig) -> dict[str, object]:
        """Kernel arguments that both kernels share."""
        return {
            "counts_ptr": self.counts,
            "groups": self.counts.shape[0],
            "alignment": self.alignment,
            "rows": rows,
            "LANES": triton.next_power_of_2(self.counts.shape[0]),
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "BLOCK_K": config.BLOCK_K,
            "GROUP_M": config.GROUP_M,
        }


def stored_by_columns(b: torch.Tensor) -> bool:
    """Whether ``b`` [E, K, N] is the transposed view of [E, N, K], such as a weight's."""
    return b.stride(1) == 1 and b.stride(2) != 1


def launch(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``a`` [R, K] by ``b`` [E, K, N], group by group: a fresh [R, N], uninitialised outside the groups."""
    a = contiguous_rows(a)
    k_major = stored_by_columns(b)
    stored = (b.transpose(1, 2) if k_major else b).contiguous()
    k, n = b.shape[1:]
    config = _config(a.dtype, n, k)
    out = torch.empty(a.shape[0], n, dtype=a.dtype, device=a.device)
    launch_kernel_on(
        a.device,
        grouped_matmul_kernel,
        num_programs(a.device, 1),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        a_ptr=a,
        b_ptr=stored,
        stride_b=stored.shape[2],
        out_ptr=out,
        N=n,
        K=k,
        B_K_MAJOR=k_major,
        PRECISION=input_precision(a.dtype),
        **groups.arguments(a.shape[0], config),
    )
    return out


def launch_gradient(
    a: torch.Tensor, g: torch.Tensor, groups: Groups, *, by_columns: bool, accumulate_into: torch.Tensor | None = None
) -> torch.Tensor:
    """``a^T @ g`` of each group.

    Args:
        a: [R, K].
        g: [R, N].
        groups: the rows that are contracted together.
        by_columns: return the transposed view of a contiguous [E, N, K], as is the gradient of such a ``b``.
        accumulate_into: fp32 [E, K, N] of any strides, to which the products are added; returned.
    """
    a, g = contiguous_rows(a), contiguous_rows(g)
    k, n, count = a.shape[1], g.shape[1], groups.counts.shape[0]
    # The contracted length changes from call to call; no tile size may follow it.
    config = _config(a.dtype, n, 512)
    out = accumulate_into
    if out is None:
        shape = (count, n, k) if by_columns else (count, k, n)
        out = torch.empty(shape, dtype=a.dtype, device=a.device)
        out = out.transpose(1, 2) if by_columns else out
    launch_kernel_on(
        a.device,
        grouped_gradient_kernel,
        count * triton.cdiv(k, config.BLOCK_M) * triton.cdiv(n, config.BLOCK_N),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        a_ptr=a,
        g_ptr=g,
        out_ptr=out,
        stride_oe=out.stride(0),
        stride_ok=out.stride(1),
        stride_on=out.stride(2),
        N=n,
        K=k,
        ACCUMULATE=accumulate_into is not None,
        PRECISION=input_precision(a.dtype),
        **groups.arguments(a.shape[0], config),
    )
    return out


def _config(dtype: torch.dtype, n: int, k: int) -> TileConfig:
    config = tile_config(dtype, n, k, interpreted=INTERPRETED.value)
    if config.num_warps < 8:
        return config
    # Without descriptors the addresses take registers, which leaves them for an accumulator of half the columns.
    return TileConfig(128, 128, 64, config.GROUP_M, config.COPY_BLOCK, num_stages=3, num_warps=8, descriptors=False)
