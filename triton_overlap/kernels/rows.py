"""What the token-wise kernels share: how many rows are active, how a matrix is cut, and how a kernel is launched on it.

A matrix [rows, columns] has room for ``rows`` rows, of which a prefix is active. The count of tokens is read from
device memory by every program, so the grid is fixed: programs take the blocks of the active rows in turn, and a launch
costs in proportion to the count. A row past the prefix belongs to no block or is masked; it is neither read nor
written. Which block a row falls in, and so the order of every sum, follows from the count and never from the capacity.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .launching import launch_kernel_on
from .operands import is_row_major

#: Arguments that follow the token count or say where it is: a new one must never compile.
COUNTS = ("tokens_ptr", "shards", "rows")
#: Programs for each multiprocessor: enough loads in flight to fill the memory's bandwidth.
PROGRAMS_EACH = 8
#: Programs under the interpreter, which runs them one after another.
_INTERPRETED_PROGRAMS = 2
#: Elements of a block under the interpreter, whose cost is by the statement and not by the element.
_INTERPRETED_ELEMENTS = 16384
#: Columns of a block at most. Wider matrices are taken in several blocks, so that none needs more registers.
_MAX_COLUMNS = 4096


@triton.jit
def active_rows(tokens_ptr, shards, rows):
    """Active rows of a matrix with room for ``rows``: the device's count over ``shards``; all where there is none."""
    if tokens_ptr is not None:
        rows = tl.maximum(0, tl.minimum(tl.load(tokens_ptr) // shards, rows))
    return rows


@triton.jit
def block_rows(block, rows, BLOCK_M: tl.constexpr):
    """The rows of block ``block`` as int64, and which of them there are."""
    lanes = block * BLOCK_M + tl.arange(0, BLOCK_M)
    return lanes.to(tl.int64), lanes < rows


@triton.jit
def block_columns(start, columns, BLOCK_N: tl.constexpr):
    """The BLOCK_N columns from ``start``, and which of them there are."""
    cols = start + tl.arange(0, BLOCK_N)
    return cols, cols < columns


@triton.jit
def tile(index, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows [BLOCK_M, 1] and columns [1, BLOCK_N] of tile ``index``, row by row, and the tile's mask."""
    across = tl.cdiv(columns, BLOCK_N)
    lanes, in_rows = block_rows(index // across, rows, BLOCK_M)
    cols, in_columns = block_columns(index % across * BLOCK_N, columns, BLOCK_N)
    return lanes[:, None], cols[None, :], in_rows[:, None] & in_columns[None, :]


@triton.jit
def tiles(rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Number of tiles of a [rows, columns] matrix."""
    return tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N)


@dataclass(frozen=True)
class RowConfig:
    """How a kernel cuts a matrix; every field is part of its compilation key, and none follows the number of rows.

    Attributes:
        BLOCK_M: rows of a block.
        BLOCK_N: columns of a block.
        num_warps: Triton's.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int


@functools.cache
def row_config(columns: int, elements: int = 2048) -> RowConfig:
    """Blocks as wide as the matrix, up to ``_MAX_COLUMNS``, and as high as ``elements`` of a block allow.

    Args:
        columns: of the matrix.
        elements: of a block on a GPU, 16 for each thread.

    Numeric example: 8192 columns, 2048 elements -> blocks of 1 x 2048; 96 columns -> 16 x 128.
    """
    if INTERPRETED.value:
        elements, warps = _INTERPRETED_ELEMENTS, 1
    else:
        warps = max(1, elements // 512)
    width = min(triton.next_power_of_2(columns), elements, _MAX_COLUMNS)
    return RowConfig(BLOCK_M=elements // width, BLOCK_N=width, num_warps=warps)


@functools.cache
def num_programs(device: torch.device, each: int = PROGRAMS_EACH) -> int:
    """Programs of a launch on ``device``, ``each`` for every multiprocessor, whatever the number of rows."""
    if INTERPRETED.value or device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def row_major(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` [rows, columns] itself where its columns follow each other, else a copy."""
    if matrix.shape[0] == 1 or not is_row_major(matrix):
        # torch lets the stride of a single row be anything, and kernels are specialised on it.
        return matrix.contiguous().view(-1).view(matrix.shape)
    return matrix


@dataclass(frozen=True)
class Rows:
    """The rows that a launch works on.

    Attributes:
        capacity: rows there is room for.
        device: where they are.
        tokens: int32, one element on ``device``: the count of tokens, of which ``1 / shards`` are rows here; all rows
            are active where it is None.
        shards: ranks that the tokens are split over; 1 where every rank has all of them.
    """

    capacity: int
    device: torch.device
    tokens: torch.Tensor | None = None
    shards: int = 1

    @classmethod
    def of(cls, x: torch.Tensor, active_tokens: torch.Tensor | None, shards: int) -> Rows:
        return cls(x.shape[0], x.device, active_tokens, shards)

    def launch(self, kernel: Any, config: RowConfig, programs: int | None = None, **arguments: Any) -> None:
        """Launch ``kernel``, which takes the arguments in ``COUNTS`` and the blocks of ``config``.

        Args:
            kernel: to launch.
            config: its blocks and warps.
            programs: by default ``PROGRAMS_EACH`` for each multiprocessor.
            arguments: the kernel's other arguments.
        """
        launch_kernel_on(
            self.device,
            kernel,
            programs or num_programs(self.device),
            {"num_warps": config.num_warps, "num_stages": 1},
            **arguments,
            tokens_ptr=self.tokens,
            shards=self.shards,
            rows=self.capacity,
            BLOCK_M=config.BLOCK_M,
            BLOCK_N=config.BLOCK_N,
        )
