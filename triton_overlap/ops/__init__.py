"""Differentiable operations, as functions and as ``torch.ops.triton_overlap.*``; one file an operation.

Each file opens with its shape ledger: what goes in, what forward and backward compute, and what is saved between them.
"""

from .all_gather import all_gather
from .all_gather_matmul import all_gather_matmul
from .bulk import all_gather_beside_matmul, reduce_scatter_beside_matmul
from .matmul_all_reduce import matmul_all_reduce, replicated_matmul
from .matmul_reduce_scatter import matmul_reduce_scatter
from .reduce_scatter import reduce_scatter

__all__ = [
    "all_gather",
    "all_gather_beside_matmul",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "reduce_scatter_beside_matmul",
    "replicated_matmul",
]
