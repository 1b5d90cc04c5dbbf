"""Autocast for operations whose matrix products autocast would run in a lower precision."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["autocast_operands", "without_autocast"]


def autocast_operands(first: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The operands as ``torch.matmul`` would see them: in the autocast dtype where autocast is on for the device of
    ``first``, else unchanged.

    Only floating-point tensors other than float64 are cast, as autocast itself does. The casts are differentiable.
    """
    # One question for all operands: reading a device's type costs as much as everything else here.
    device_type = first.device.type
    if not torch.is_autocast_enabled(device_type):
        return [first, *others]
    dtype = torch.get_autocast_dtype(device_type)
    return [None if x is None else _cast(x, dtype) for x in (first, *others)]


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which products keep their operands' dtype, for code inside an operation."""
    return torch.autocast(device.type, enabled=False)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
