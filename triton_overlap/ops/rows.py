"""What the token-wise operations check before they launch, all of it without reading device memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.rules import DTYPES, check_count_scalar
from .validation import check_dense

__all__ = ["check_active_tokens", "check_device", "check_integers", "check_matrix", "check_same", "check_vector"]


def check_active_tokens(operation: str, x: Tensor, active_tokens: Tensor | None, shards: int) -> None:
    """ValueError unless ``shards`` is positive, and the count is None or one int32 element on the device of ``x``."""
    if shards < 1:
        raise ValueError(f"{operation}: shards, the ranks that tokens are split over, must be at least 1, got {shards}")
    if active_tokens is None:
        return
    try:
        check_count_scalar(active_tokens, x.device)
    except ValueError as error:
        raise ValueError(f"{operation}: {error}") from None


def check_matrix(
    operation: str, name: str, x: Tensor, dimensions: Sequence[str] = ("rows", "columns"), *, may_be_empty: bool = False
) -> None:
    """ValueError unless ``x`` has the named dimensions and a dtype that kernels take. None of the dimensions is empty,
    but for the first where it ``may_be_empty``."""
    if x.dim() != len(dimensions):
        raise ValueError(
            f"{operation}: {name} must be [{', '.join(dimensions)}], got {list(x.shape)}; flatten or unflatten it"
        )
    check_dense(operation, name, x)
    if 0 in x.shape[1 if may_be_empty else 0 :]:
        raise ValueError(f"{operation}: {name} must not be empty, got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{operation}: {name} must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}; cast it")


def check_vector(operation: str, name: str, vector: Tensor, x: Tensor) -> None:
    """ValueError unless ``vector`` has an element for each column of ``x``, on its device, in a dtype kernels take."""
    check_matrix(operation, name, vector, ("columns",))
    _check_shape(operation, name, vector, x.shape[1:])
    check_device(operation, name, vector, x)


def check_same(operation: str, name: str, y: Tensor, x: Tensor, shape: Sequence[int] | None = None) -> None:
    """ValueError unless ``y`` has the dtype and the device of ``x``, and its shape or ``shape``."""
    _check_shape(operation, name, y, x.shape if shape is None else shape)
    if y.dtype != x.dtype:
        raise ValueError(f"{operation}: {name} is {y.dtype}, the other operand is {x.dtype}; cast one of them")
    check_device(operation, name, y, x)


def check_integers(
    operation: str, name: str, y: Tensor, x: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None
) -> None:
    """ValueError unless ``y`` has one of ``dtypes``, the device of ``x``, and ``shape`` where given."""
    if shape is not None:
        _check_shape(operation, name, y, shape)
    if y.dtype not in dtypes:
        raise ValueError(f"{operation}: {name} must be {' or '.join(map(str, dtypes))}, got {y.dtype}")
    check_device(operation, name, y, x)


def _check_shape(operation: str, name: str, y: Tensor, shape: Sequence[int]) -> None:
    if list(y.shape) != list(shape):
        raise ValueError(f"{operation}: {name} must have shape {list(shape)}, got {list(y.shape)}")


def check_device(operation: str, name: str, y: Tensor, x: Tensor) -> None:
    """ValueError unless ``y`` is on the device of ``x``."""
    if y.device != x.device:
        raise ValueError(f"{operation}: {name} is on {y.device}, the other operands are on {x.device}; move it there")
