"""A product of this rank alone over the active rows: what lies between collectives where the count is on the device.

Shapes, C rows of room::

    a [C, K]   b [K, N]   ->   out [C, N] = a @ b + bias, in the active rows

Programs take the tiles of the active rows in turn, so a launch costs in proportion to the count. Lower bound: a
library's GEMM of the active rows.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .config import TileConfig, tile_config
from .epilogue import finish_tile
from .launching import launch_kernel_on
from .operands import StoredB, chunk_descriptor, contiguous_rows, gemm_arguments, use_descriptors
from .rows import active_rows, num_programs
from .tiles import matmul_tile, tile_position


@triton.jit(do_not_specialize=["tokens_ptr", "shards", "rows"])
def matmul_kernel(
    a_ptr, a_desc,  # [C, K], as [1, C, K]
    b_ptr, b_desc, stride_b,  # [K, N], or [N, K] with B_K_MAJOR
    out_ptr, out_desc, bias_ptr,  # [C, N] row-major, as [1, C, N]; [N] or None
    tokens_ptr, shards, rows,  # C; active are the device's count over shards, or all
    N, K,
    PRECISION: tl.constexpr, B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    room = rows
    rows = active_rows(tokens_ptr, shards, rows)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # Flattened, the loads of the next tile start while this one is stored: 1 to 3 % on an H200.
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_position(index, tiles_m, tiles_n, GROUP_M)
        acc = matmul_tile(
            a_desc, a_ptr, b_desc, b_ptr, stride_b, 0, tile_m * BLOCK_M, room, tile_n * BLOCK_N, N, K,
            PRECISION, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        finish_tile(
            out_desc, out_ptr, None, bias_ptr, acc, 0, tile_m * BLOCK_M, rows, tile_n * BLOCK_N, N,
            None, tokens_ptr is None, BLOCK_M, BLOCK_N,
        )  # fmt: skip


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    active_tokens: torch.Tensor | None = None,
    shards: int = 1,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """``a @ b + bias`` in the active rows of a fresh [C, N] tensor.

    Args:
        a: [C, K].
        b: [K, N].
        bias: [N] or None.
        active_tokens: see ``Rows``.
        shards: see ``Rows``.
        config: tile sizes; by default those for N, K and the dtype.
    """
    a = contiguous_rows(a)
    rows, k = a.shape
    stored_b = StoredB.of(b)
    config = config or tile_config(a.dtype, b.shape[1], k, interpreted=INTERPRETED.value)
    out = torch.empty(rows, b.shape[1], dtype=a.dtype, device=a.device)
    descriptors = use_descriptors(config, a, stored_b.matrix, out)
    launch_kernel_on(
        a.device,
        matmul_kernel,
        num_programs(a.device, 1),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        a_ptr=a,
        a_desc=chunk_descriptor(a, rows, [config.BLOCK_M, config.BLOCK_K], descriptors),
        bias_ptr=None if bias is None else bias.contiguous(),
        tokens_ptr=active_tokens,
        shards=shards,
        rows=rows,
        **gemm_arguments(config, stored_b, out, rows, descriptors),
    )
    return out
