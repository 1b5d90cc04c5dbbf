"""Keyword arguments that the layers of a block share, and which of them its column and row layers take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from ..comm.group import Group
from .overlap import FLAGS

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LayerSettings", "check_group", "check_input", "settings_of"]


class LayerSettings(TypedDict, total=False):
    """Keyword arguments of :class:`Linear` that every module of several layers takes and hands on to those of them that
    they are meant for."""

    max_tokens: int | None
    sequence_parallel: bool
    save_gathered_input: bool | None
    device_count: bool
    params_dtype: torch.dtype | None
    device: torch.device | str | None
    ub_overlap_ag: bool
    ub_overlap_rs: bool
    ub_overlap_rs_dgrad: bool
    ub_bulk_dgrad: bool
    ub_bulk_wgrad: bool


def settings_of(parallel_mode: str, **settings: Unpack[LayerSettings]) -> dict[str, Any]:
    """Keyword arguments of a ``Linear`` in ``parallel_mode``: the settings but those of the other mode.

    Raises:
        TypeError: a setting that no layer has.
    """
    unknown = sorted(set(settings) - set(LayerSettings.__annotations__))
    if unknown:
        known = ", ".join(LayerSettings.__annotations__)
        raise TypeError(f"unexpected keyword arguments {', '.join(unknown)}; what layers share is {known}")
    others = {flag for flags in FLAGS.values() for flag in flags} - set(FLAGS[parallel_mode])
    if parallel_mode != "column":
        others.add("save_gathered_input")
    return {"parallel_mode": parallel_mode, **{name: x for name, x in settings.items() if name not in others}}


def check_group(kind: str, group: object) -> None:
    """TypeError, in the name of the module ``kind``, unless ``group`` is a group of this library."""
    if not isinstance(group, Group):
        remedy = "init_group(process_group) makes one of a torch.distributed process group"
        raise TypeError(f"{kind}: group must be a triton_overlap.Group, got {type(group).__name__}; {remedy}")


def check_input(kind: str, name: str, x: object) -> None:
    """TypeError, in the name of the module ``kind``, unless the argument ``name`` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{kind}: {name} must be a torch.Tensor, got {type(x).__name__}")
