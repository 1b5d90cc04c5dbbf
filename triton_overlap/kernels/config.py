"""Tile sizes and rows of a flag: planning without Triton, of torch only the names of dtypes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

#: Columns that one epilogue store covers at most: a wider tile is stored in two halves, which frees the shared memory
#: that a third pipeline stage needs.
MAX_STORE_COLUMNS = 128
#: Flags a tile of BLOCK_M rows may wait for, so rows of a flag are at least BLOCK_M / FLAG_LANES.
FLAG_LANES = 16
#: Bytes of a piece that one program pushes and announces at a time: about 9 us on an H200, a tenth of a tile's time.
PIECE_BYTES = 128 * 1024
#: Sizes that a tile may be given by name; a TMA descriptor's block has at most 256 in each direction.
TILE_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is cut into tiles; every field is part of its compilation key.

    Unless a method names others, one configuration serves every token count, so that a new count never compiles.

    Attributes:
        BLOCK_M, BLOCK_N, BLOCK_K: a tile of the output, and a step of the contraction.
        GROUP_M: tiles of one column taken one after the other, so that they find B's columns in the L2 cache.
        COPY_BLOCK: elements that a program copies or sums at a time; on a GPU 32 for each thread, so that each has
            four (2-byte dtypes) or eight 16-byte loads in flight.
        num_stages, num_warps: Triton's.
        descriptors: read operands through TMA where they allow it.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    COPY_BLOCK: int
    num_stages: int
    num_warps: int
    descriptors: bool

    def __post_init__(self) -> None:
        for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "COPY_BLOCK"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {value}")

    @property
    def store_columns(self) -> int:
        return min(self.BLOCK_N, MAX_STORE_COLUMNS)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile of the output. Ranks must agree on them, since flags are set by tiles."""
        return self.BLOCK_M, self.BLOCK_N

    @classmethod
    @functools.cache
    def named(cls, text: str) -> TileConfig:
        """The configuration that ``text`` names: BLOCK_M x BLOCK_N x BLOCK_K x num_warps x num_stages.

        Raises:
            ValueError: another form, or sizes out of range.

        Example::

            >>> TileConfig.named("128x128x64x4x4").num_warps
            4
        """
        numbers = text.split("x")
        if len(numbers) != 5 or not all(number.isdecimal() for number in numbers):
            raise ValueError(
                f"tiles must be BLOCK_M x BLOCK_N x BLOCK_K x num_warps x num_stages, such as '128x256x64x8x3', "
                f"got {text!r}"
            )
        block_m, block_n, block_k, num_warps, num_stages = map(int, numbers)
        sizes = block_m, block_n, block_k
        if any(size not in TILE_SIZES for size in sizes):
            raise ValueError(f"sizes of tiles must be one of {', '.join(map(str, TILE_SIZES))}, got {text!r}")
        if num_warps not in (1, 2, 4, 8, 16) or not 1 <= num_stages <= 8:
            raise ValueError(f"tiles must have 1, 2, 4, 8 or 16 warps and 1 to 8 stages, got {text!r}")
        return cls(*sizes, 8, 1024 * num_warps, num_stages=num_stages, num_warps=num_warps, descriptors=True)


def _power_of_two(value: int, low: int, high: int) -> int:
    """The smallest power of two that is at least ``value``, within ``low`` and ``high``."""
    return max(low, min(high, 1 << (value - 1).bit_length()))


@functools.cache
def tile_config(dtype: torch.dtype, n: int, k: int, *, interpreted: bool) -> TileConfig:
    """The configuration for a GEMM with N ``n`` and K ``k`` in ``dtype``, whatever its token count.

    Source of the GPU sizes: a persistent bf16 GEMM of 128 x 256 x 64 tiles in groups of 8, three stages and eight warps
    ran at 0.97 to 1.04 of cuBLAS on an H200; four stages overflow its shared memory. Tiles under the interpreter are as
    large as the matrix, because its cost is by the statement and not by the element.
    """
    if interpreted:
        return TileConfig(
            BLOCK_M=256,
            BLOCK_N=_power_of_two(n, 16, 256),
            BLOCK_K=_power_of_two(k, 16, 512),
            GROUP_M=8,
            COPY_BLOCK=16384,
            num_stages=1,
            num_warps=1,
            descriptors=True,
        )
    if dtype == torch.float32:
        # True fp32 runs on the plain cores: smaller tiles fit its registers.
        return TileConfig(64, 64, 32, 8, 4096, num_stages=3, num_warps=4, descriptors=True)
    return TileConfig(128, 256, 64, 8, 8192, num_stages=3, num_warps=8, descriptors=True)


def rows_per_piece(block_m: int, row_bytes: int) -> int:
    """Rows of a pushed piece: a power of two near PIECE_BYTES, at most a tile's rows, at least 1/FLAG_LANES of them.

    Numeric example: block_m 128, rows of 16384 bytes -> 8 rows; rows of 128 bytes -> 128 rows.
    """
    rows = max(1, PIECE_BYTES // row_bytes)
    return max(block_m // FLAG_LANES, min(block_m, 1 << (rows.bit_length() - 1)))
