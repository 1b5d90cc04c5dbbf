"""Modules: tensor-parallel replacements of ``torch.nn`` layers whose token count may change at every call."""

from .linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]
