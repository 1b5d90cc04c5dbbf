"""Problems that are checked and timed: an operation at one size, fresh inputs for it, and the reference of its result.

Letters: W ranks, T tokens of all ranks, K and N of a rank's GEMM.

    all_gather_matmul      a [T/W, K], b [K, N]   ->   [T, N]
    matmul_reduce_scatter  a [T, K],   b [K, N]   ->   [T/W, N]
    matmul_all_reduce      a [T, K],   b [K, N]   ->   [T, N]

Each is 2 T K N operations a rank. ``b`` is the transpose of a contiguous weight, as in ``torch.nn.Linear``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

#: Largest relative Frobenius error against float64 that a result may have to be worth timing.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


class WrongResult(RuntimeError):
    """A result is not the reference; it is not timed."""


class OverlappedOperation(str, Enum):
    """Which of the overlapped operations."""

    ALL_GATHER_MATMUL = "all_gather_matmul"
    MATMUL_REDUCE_SCATTER = "matmul_reduce_scatter"
    MATMUL_ALL_REDUCE = "matmul_all_reduce"


@dataclass(frozen=True)
class Inputs:
    """One rank's operands of one call, and what others than this library may need beside them.

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
        operation: an ``OverlappedOperation``, or its name; kept as its name.
        tokens: T, a multiple of ``world_size``.
        n: N, columns of a rank's GEMM.
        k: K, its contracted size.
        world_size: W.
        dtype: of operands and results.

    Raises:
        TypeError: a size that is no int.
        ValueError: an unknown operation, a size below 1, or a T that the ranks do not divide.
    """

    operation: str
    tokens: int
    n: int
    k: int
    world_size: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        known = [operation.value for operation in OverlappedOperation]
        if self.operation not in known:
            raise ValueError(f"operation must be one of {', '.join(known)}, got {self.operation!r}")
        object.__setattr__(self, "operation", OverlappedOperation(self.operation).value)
        for name in ("tokens", "n", "k", "world_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"Problem: {name} must be an int, got {size!r}; int() makes it one")
        if self.dtype not in TOLERANCE:
            raise ValueError(f"dtype must be one of {', '.join(map(str, TOLERANCE))}, got {self.dtype}")
        if min(self.tokens, self.n, self.k, self.world_size) < 1:
            raise ValueError(
                f"sizes must be at least 1, got tokens {self.tokens}, n {self.n}, k {self.k}, "
                f"world_size {self.world_size}"
            )
        if self.tokens % self.world_size:
            raise ValueError(f"tokens must be a multiple of the {self.world_size} ranks, got {self.tokens}")

    @property
    def gathers(self) -> bool:
        """Whether rows are gathered before the GEMM; else its results are summed over the ranks."""
        return self.operation == OverlappedOperation.ALL_GATHER_MATMUL

    @property
    def a_shape(self) -> tuple[int, int]:
        """Of a rank's left operand: [T/W, K] where rows are gathered, else [T, K]."""
        return self.tokens // self.world_size if self.gathers else self.tokens, self.k

    @property
    def b_shape(self) -> tuple[int, int]:
        """Of a rank's right operand: [K, N]."""
        return self.k, self.n

    @property
    def out_shape(self) -> tuple[int, int]:
        """Of a rank's result: [T/W, N] where it is scattered, else [T, N]."""
        scatters = self.operation == OverlappedOperation.MATMUL_REDUCE_SCATTER
        return self.tokens // self.world_size if scatters else self.tokens, self.n

    @property
    def hidden(self) -> int:
        """Columns of what travels, and of the user buffer: K of the gathered rows, or N of the summed ones."""
        return self.k if self.gathers else self.n

    @property
    def link_bytes(self) -> int:
        """Bytes a rank has to send: its rows to every peer, or every peer's rows of its partial sums, or both."""
        chunk = self.tokens // self.world_size
        passes = 2 if self.operation == OverlappedOperation.MATMUL_ALL_REDUCE else 1
        return passes * (self.world_size - 1) * chunk * self.hidden * self.dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of a rank's operands."""
        rows, k = self.a_shape
        return (rows * k + k * self.n) * self.dtype.itemsize

    def operands(self, rank: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """``rank``'s a and b of input set ``seed``, normal, on ``device``; any rank can make them."""
        generator = torch.Generator(device).manual_seed(seed * self.world_size + rank)
        a = torch.randn(self.a_shape, generator=generator, device=device, dtype=torch.float32).to(self.dtype)
        weight = torch.randn(self.b_shape[::-1], generator=generator, device=device, dtype=torch.float32)
        return a, weight.to(self.dtype).t()

    def inputs(self, rank: int, seed: int, device: torch.device) -> Inputs:
        """Fresh ``operands`` of ``rank``, and what its GEMM multiplies."""
        a, b = self.operands(rank, seed, device)
        if not self.gathers:
            return Inputs(a, b, a)
        return Inputs(a, b, torch.cat([self.operands(other, seed, device)[0] for other in range(self.world_size)]))

    def reference(self, rank: int, seed: int, device: torch.device, *, communicates: bool = True) -> Tensor:
        """``rank``'s result on the ``operands`` of input set ``seed``, in float64 on ``device``; unless it
        ``communicates``, the product of its own operands alone."""
        if not communicates or self.gathers:
            inputs = self.inputs(rank, seed, device)
            return inputs.gathered.double() @ inputs.b.double()
        first = rank * self.out_shape[0] if self.operation == OverlappedOperation.MATMUL_REDUCE_SCATTER else 0
        rows = slice(first, first + self.out_shape[0])
        out = torch.zeros(self.out_shape, dtype=torch.float64, device=device)
        for other in range(self.world_size):
            a, b = self.operands(other, seed, device)
            out += a[rows].double() @ b.double()
        return out

    def num_input_sets(self, cache_bytes: int) -> int:
        """Input sets to rotate over, so that a call never finds its operands in a cache of ``cache_bytes``."""
        return max(2, -(-2 * cache_bytes // self.input_bytes) + 1)


def cache_bytes_of(device: torch.device) -> int:
    """L2 cache of a GPU; 0 elsewhere, where times mean nothing."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def leave_nan(shape: tuple[int, int], like: Tensor) -> None:
    """Leave NaN in the memory that the next result of ``shape`` will probably get from the allocator."""
    like.new_full(shape, float("nan"))
