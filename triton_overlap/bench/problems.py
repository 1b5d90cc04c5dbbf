"""Problems of the tensor-parallel benchmark: shapes, fresh inputs, and the reference that results are checked against.

Letters: W ranks, T gathered tokens, K and N of the whole layer.

    all_gather_matmul      a [T/W, K], b [K, N]        -> [T, N]        a column-parallel layer
    matmul_reduce_scatter  a [T, K/W], b [K/W, N * W]  -> [T/W, N * W]  a row-parallel layer of the same work

Both are 2 T K N operations a rank. ``b`` is the transpose of a contiguous weight, as in ``torch.nn.Linear``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

#: Largest relative Frobenius error against float64 that a result may have to be worth timing.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


class Operation(str, Enum):
    """Which of the two overlapped operations."""

    ALL_GATHER_MATMUL = "all_gather_matmul"
    MATMUL_REDUCE_SCATTER = "matmul_reduce_scatter"


@dataclass(frozen=True)
class Inputs:
    """One rank's operands of one call, and what rivals may need beside them.

    Attributes:
        a: this rank's left operand.
        b: this rank's right operand.
        gathered: what a GEMM without communication multiplies: all ranks' rows for an all-gather, else ``a`` itself.
    """

    a: Tensor
    b: Tensor
    gathered: Tensor


@dataclass(frozen=True)
class Problem:
    """One operation at one size.

    Args:
        operation: which operation.
        tokens: T, a multiple of ``world_size``.
        k: K of the whole layer.
        n: N of a rank's all-gather GEMM.
        world_size: W.
        dtype: of operands and results.
    """

    operation: Operation
    tokens: int
    k: int
    n: int
    world_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.tokens % self.world_size or self.k % self.world_size:
            raise ValueError(
                f"tokens and k must be multiples of the {self.world_size} ranks, got {self.tokens} and {self.k}"
            )

    @property
    def a_shape(self) -> tuple[int, int]:
        if self.operation is Operation.ALL_GATHER_MATMUL:
            return self.tokens // self.world_size, self.k
        return self.tokens, self.k // self.world_size

    @property
    def b_shape(self) -> tuple[int, int]:
        if self.operation is Operation.ALL_GATHER_MATMUL:
            return self.k, self.n
        return self.k // self.world_size, self.n * self.world_size

    @property
    def out_shape(self) -> tuple[int, int]:
        if self.operation is Operation.ALL_GATHER_MATMUL:
            return self.tokens, self.n
        return self.tokens // self.world_size, self.n * self.world_size

    @property
    def buffer_hidden(self) -> int:
        """Columns of what travels: K of the gathered rows, or N of the scattered ones."""
        return self.k if self.operation is Operation.ALL_GATHER_MATMUL else self.n * self.world_size

    @property
    def link_bytes(self) -> int:
        """Bytes a rank has to send: its rows to every peer, or every peer's rows of its partial sums."""
        chunk = self.tokens // self.world_size
        return (self.world_size - 1) * chunk * self.buffer_hidden * self.dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of a rank's operands."""
        rows, k = self.a_shape
        return (rows * k + k * self.b_shape[1]) * self.dtype.itemsize

    def operands(self, rank: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """``rank``'s a and b of input set ``seed``; any rank can make them."""
        generator = torch.Generator(device).manual_seed(seed * self.world_size + rank)
        a = torch.randn(self.a_shape, generator=generator, device=device, dtype=torch.float32).to(self.dtype)
        weight = torch.randn(self.b_shape[::-1], generator=generator, device=device, dtype=torch.float32)
        return a, weight.to(self.dtype).t()

    def inputs(self, rank: int, seed: int, device: torch.device) -> Inputs:
        """Fresh random operands of ``rank``."""
        a, b = self.operands(rank, seed, device)
        if self.operation is Operation.MATMUL_REDUCE_SCATTER:
            return Inputs(a, b, a)
        return Inputs(a, b, torch.cat([self.operands(other, seed, device)[0] for other in range(self.world_size)]))

    def reference(self, rank: int, seed: int, device: torch.device, *, communicates: bool = True) -> Tensor:
        """``rank``'s result in float64; without communication the product of its own operands alone."""
        if not communicates or self.operation is Operation.ALL_GATHER_MATMUL:
            inputs = self.inputs(rank, seed, device)
            return inputs.gathered.double() @ inputs.b.double()
        rows = slice(rank * self.out_shape[0], (rank + 1) * self.out_shape[0])
        out = torch.zeros(self.out_shape, dtype=torch.float64, device=device)
        for other in range(self.world_size):
            a, b = self.operands(other, seed, device)
            out += a[rows].double() @ b.double()
        return out

    def num_input_sets(self, cache_bytes: int) -> int:
        """Input sets to rotate over, so that a call never finds its operands in a cache of ``cache_bytes``."""
        return max(2, -(-2 * cache_bytes // self.input_bytes) + 1)


def tensor_parallel_problems(tokens: list[int], k: int, n: int, world_size: int, dtype: torch.dtype) -> list[Problem]:
    """Both operations at every token count."""
    return [Problem(operation, t, k, n, world_size, dtype) for operation in Operation for t in tokens]
