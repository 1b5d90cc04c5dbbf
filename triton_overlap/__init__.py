"""Triton kernels that hide communication behind matrix work, for token counts that change at every step."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

if not torch.cuda.is_available():
    # Triton decides when a kernel is decorated, so this must come before any kernel is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from . import errors, nn, packing
from .comm.communicators import UserBufferQuantizationMode, destroy_ub, get_ub, initialize_ub, set_ub_active_shape
from .comm.group import Group, init_group, symmetric_allocations
from .comm.user_buffers import UserBuffer, user_buffer_by_handle
from .errors import (
    ActiveCountError,
    ActiveShapeError,
    BackendError,
    ClosedError,
    CommError,
    CommMismatchError,
    CommSignalError,
    CommTimeoutError,
    GroupBrokenError,
    RoutingError,
    TritonOverlapError,
)
from .expert_buffer import EpHandle, ExpertBuffer
from .kernels.choose import Explanation
from .kernels.launching import specializations, specializations_by_kernel
from .kernels.methods import Method
from .kernels.tables import Table
from .ops import (
    GemmMethods,
    activation,
    add,
    all_gather,
    all_gather_beside_matmul,
    all_gather_matmul,
    cross_entropy,
    ep_combine,
    ep_dispatch,
    fork,
    gated_activation,
    gelu,
    grouped_matmul,
    layer_norm,
    matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
    reduce_scatter_beside_matmul,
    replicated_matmul,
    rms_norm,
    rotary,
    rotary_qkv,
    swiglu,
)
from .problems import Problem, WrongResult
from .tuning import Effort, explain, load_table, tune, warm_up

if TYPE_CHECKING:
    from . import sim

__version__ = "0.1.0"

__all__ = [
    "ActiveCountError",
    "ActiveShapeError",
    "BackendError",
    "ClosedError",
    "CommError",
    "CommMismatchError",
    "CommSignalError",
    "CommTimeoutError",
    "Effort",
    "EpHandle",
    "ExpertBuffer",
    "Explanation",
    "GemmMethods",
    "Group",
    "GroupBrokenError",
    "Method",
    "Problem",
    "RoutingError",
    "Table",
    "TritonOverlapError",
    "UserBuffer",
    "UserBufferQuantizationMode",
    "WrongResult",
    "activation",
    "add",
    "all_gather",
    "all_gather_beside_matmul",
    "all_gather_matmul",
    "cross_entropy",
    "destroy_ub",
    "ep_combine",
    "ep_dispatch",
    "errors",
    "explain",
    "fork",
    "gated_activation",
    "gelu",
    "get_ub",
    "grouped_matmul",
    "init_group",
    "initialize_ub",
    "layer_norm",
    "load_table",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "nn",
    "packing",
    "reduce_scatter",
    "reduce_scatter_beside_matmul",
    "replicated_matmul",
    "rms_norm",
    "rotary",
    "rotary_qkv",
    "set_ub_active_shape",
    "sim",
    "specializations",
    "specializations_by_kernel",
    "swiglu",
    "symmetric_allocations",
    "tune",
    "user_buffer_by_handle",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    # The simulator patches Triton's interpreter, and most programs never need it.
    if name == "sim":
        return importlib.import_module(".sim", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
