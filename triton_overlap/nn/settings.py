"""Keyword arguments that the layers of a block share, and which of them its column and row layers take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from ..comm.group import Group
from .arguments import check_switches
from .overlap import FLAGS

__all__ = ["LayerSettings", "check_settings", "multiplied_dtype", "settings_of", "shared_by_ranks"]


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


def settings_of(parallel_mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a ``Linear`` in ``parallel_mode``: the settings but those of the other mode."""
    others = {flag for flags in FLAGS.values() for flag in flags} - set(FLAGS[parallel_mode])
    if parallel_mode != "column":
        others.add("save_gathered_input")
    return {"parallel_mode": parallel_mode, **{name: x for name, x in settings.items() if name not in others}}


def shared_by_ranks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that must be the same on every rank: all but the device, which each has one of its own."""
    return {name: x for name, x in settings.items() if name != "device"}


def check_settings(kind: str, settings: Mapping[str, Any]) -> None:
    """TypeError, in the name of the module ``kind``, for a setting that no layer has, or a flag that is no bool.

    Here, since a flag for one of the layers alone would be refused after the other was built.
    """
    unknown = sorted(set(settings) - set(LayerSettings.__annotations__))
    if unknown:
        known = ", ".join(LayerSettings.__annotations__)
        raise TypeError(f"{kind}: unexpected keyword arguments {', '.join(unknown)}; what layers share is {known}")
    flags = sorted({flag for flags in FLAGS.values() for flag in flags})
    check_switches(kind, **{flag: settings[flag] for flag in flags if flag in settings})


def multiplied_dtype(dtype: torch.dtype, group: Group) -> torch.dtype:
    """What parameters of ``dtype`` are multiplied in: under autocast, that one's.

    By the group's device, where it will be, wherever the parameters are while the module is built.
    """
    device_type = group.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype
