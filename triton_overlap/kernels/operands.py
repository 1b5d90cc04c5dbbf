"""Operands of a GEMM kernel: how B lies in memory, what goes through descriptors, and the arguments all share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import MAX_STORE_COLUMNS, TileConfig


def input_precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: truly, unless torch allows tf32. Without effect on the 2-byte dtypes."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def is_row_major(matrix: torch.Tensor) -> bool:
    """Unit stride along the columns, rows that do not overlap."""
    return matrix.stride(1) == 1 and (matrix.shape[0] == 1 or matrix.stride(0) >= matrix.shape[1])


def fits_descriptor(matrix: torch.Tensor) -> bool:
    """Whether TMA can read ``matrix`` row-major: base and row stride on 16 bytes."""
    return (
        is_row_major(matrix)
        and matrix.data_ptr() % 16 == 0
        and matrix.stride(0) * matrix.element_size() % 16 == 0
        and matrix.shape[1] * matrix.element_size() % 16 == 0
    )


def contiguous_rows(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` itself where its rows follow each other without a gap, else a copy."""
    matrix = matrix.contiguous()
    if matrix.shape[0] == 1:
        # torch lets the stride of a single row be anything; a descriptor, and with it the compiled kernel, does not.
        matrix = matrix.view(-1).view(matrix.shape)
    return matrix


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself where its memory is its values one after another, from an address on 16 bytes, so that one
    compiled kernel can read it as words; else a copy. For tensors that have not come through torch's dispatcher, which
    carries out a negation that torch has put off (``torch.Tensor.resolve_neg``)."""
    tensor = tensor.resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@dataclass(frozen=True)
class StoredB:
    """B [K, N] as it lies in memory.

    Attributes:
        matrix: row-major [K, N], or [N, K] when ``k_major`` (the transpose of a weight [N, K], for instance).
    """

    matrix: torch.Tensor
    k_major: bool

    @classmethod
    def of(cls, b: torch.Tensor) -> StoredB:
        """Without a copy for every layout that torch.matmul takes without one: unit stride in either dimension."""
        if is_row_major(b):
            return cls(b, False)
        if is_row_major(b.t()):
            return cls(b.t(), True)
        return cls(b.contiguous(), False)

    def block(self, config: TileConfig, columns: int) -> list[int]:
        """A block of ``columns`` columns, as ``matrix`` has them."""
        return [columns, config.BLOCK_K] if self.k_major else [config.BLOCK_K, columns]


def use_descriptors(config: TileConfig, *matrices: torch.Tensor) -> bool:
    """All operands or none: a kernel has two paths, not one for each combination."""
    return config.descriptors and all(fits_descriptor(matrix) for matrix in matrices)


#: Fields of a descriptor beside the four that are given, with their defaults; they differ between versions of Triton.
_DESCRIPTOR_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(TensorDescriptor)
    if field.default is not dataclasses.MISSING
}


def _new_descriptor(base: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    # The constructor checks all that fits_descriptor and TileConfig have checked already, for 5 us a descriptor.
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_DESCRIPTOR_DEFAULTS, base=base, shape=shape, strides=strides, block_shape=block)
    return made


def descriptor(matrix: torch.Tensor, block: list[int], wanted: bool) -> TensorDescriptor | None:
    """A descriptor of row-major ``matrix``, or None where none is wanted."""
    return _new_descriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], block) if wanted else None


def chunk_descriptor(matrix: torch.Tensor, rows: int, block: list[int], wanted: bool) -> TensorDescriptor | None:
    """A descriptor of contiguous [chunks * rows, columns] as [chunks, rows, columns], whose bounds end every chunk."""
    if not wanted:
        return None
    columns = matrix.shape[1]
    shape = [matrix.shape[0] // rows, rows, columns]
    return _new_descriptor(matrix, shape, [rows * columns, columns, 1], [1, *block])


def gemm_arguments(
    config: TileConfig, b: StoredB, out: torch.Tensor, rows: int, descriptors: bool, *, paired: bool = False
) -> dict[str, Any]:
    """The kernel arguments for B, the output as chunks of ``rows``, and the tile sizes.

    ``paired``: a tile takes half as many columns in each of two places of B, and stores as many.
    """
    k, n = b.matrix.shape[::-1] if b.k_major else b.matrix.shape
    columns = config.BLOCK_N // 2 if paired else config.BLOCK_N
    return {
        "b_ptr": b.matrix,
        "b_desc": descriptor(b.matrix, b.block(config, columns), descriptors),
        "stride_b": b.matrix.stride(0),
        "out_ptr": out,
        "out_desc": chunk_descriptor(out, rows, [config.BLOCK_M, min(columns, MAX_STORE_COLUMNS)], descriptors),
        "N": n,
        "K": k,
        "PRECISION": input_precision(out.dtype),
        "B_K_MAJOR": b.k_major,
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "BLOCK_K": config.BLOCK_K,
        "GROUP_M": config.GROUP_M,
        "COPY_BLOCK": config.COPY_BLOCK,
    }
