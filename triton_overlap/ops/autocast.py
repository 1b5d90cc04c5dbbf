"""Autocast for operations whose matrix products autocast would run in a lower precision."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["autocast_operands", "without_autocast"]


def autocast_operands(*operands: Tensor | None) -> list[Tensor | None]:
    """``operands`` as ``torch.matmul`` would see them: in the autocast dtype where autocast is on, else unchanged.

    Only floating-point tensors other than float64 are cast, as autocast itself does. The casts are differentiable.
    """
    return [None if x is None else _cast(x) for x in operands]


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which products keep their operands' dtype, for code inside an operation."""
    return torch.autocast(device.type, enabled=False)


def _cast(x: Tensor) -> Tensor:
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device_type))
