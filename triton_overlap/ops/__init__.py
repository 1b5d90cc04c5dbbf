"""Differentiable operations, as functions and as ``torch.ops.triton_overlap.*``; one file an operation.

Each file opens with its shape ledger: what goes in, what forward and backward compute, and what is saved between them.
"""

from .activation import activation, gated_activation, gelu, swiglu
from .add import add, fork
from .all_gather import all_gather
from .all_gather_matmul import all_gather_matmul
from .bulk import all_gather_beside_matmul, reduce_scatter_beside_matmul
from .cross_entropy import cross_entropy
from .ep_combine import ep_combine
from .ep_dispatch import ep_dispatch
from .gemm_methods import GemmMethods
from .grouped_matmul import grouped_matmul
from .matmul import matmul
from .matmul_all_reduce import matmul_all_reduce, replicated_matmul
from .matmul_reduce_scatter import matmul_reduce_scatter
from .normalization import layer_norm, rms_norm
from .reduce_scatter import reduce_scatter
from .rotary import rotary, rotary_qkv

__all__ = [
    "GemmMethods",
    "activation",
    "add",
    "all_gather",
    "all_gather_beside_matmul",
    "all_gather_matmul",
    "cross_entropy",
    "ep_combine",
    "ep_dispatch",
    "fork",
    "gated_activation",
    "gelu",
    "grouped_matmul",
    "layer_norm",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "reduce_scatter_beside_matmul",
    "replicated_matmul",
    "rms_norm",
    "rotary",
    "rotary_qkv",
    "swiglu",
]
