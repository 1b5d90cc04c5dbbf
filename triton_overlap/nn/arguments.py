"""Checks of arguments, each in the name ``kind`` of the module that was given them, and the ranks' agreement on those
of a constructor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.group import Group
from ..comm.rules import DTYPES

__all__ = [
    "agree",
    "check_choice",
    "check_group",
    "check_input",
    "check_input_of",
    "check_module",
    "check_number",
    "check_parameters_dtype",
    "check_size",
    "check_switches",
    "device_of",
    "main_grad_of",
]


def agree(kind: str, group: Group, judge: Callable[[], Mapping[str, Any]]) -> None:
    """Collective: an error on every rank unless ``judge`` passes on all and they return equal values.

    Before the group is used otherwise, and before anything is allocated.

    Args:
        kind: of the module.
        group: the ranks.
        judge: checks the arguments of the constructor; returns those that must be the same on every rank. Local.

    Raises:
        ClosedError, GroupBrokenError: of the group.
        NotImplementedError, TypeError, ValueError: what ``judge`` raised on some rank; or the ranks differ.
    """
    group.before_call()
    group.agree_on(f"arguments of {kind}", judge, dict)


def check_group(kind: str, group: object) -> None:
    """TypeError unless ``group`` is a group of this library."""
    if not isinstance(group, Group):
        remedy = "init_group(process_group) makes one of a torch.distributed process group"
        raise TypeError(f"{kind}: group must be a triton_overlap.Group, got {type(group).__name__}; {remedy}")


def check_module(kind: str, module: object) -> None:
    """TypeError unless ``module`` is one."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{kind}: module must be a torch.nn.Module, got {type(module).__name__}")


def check_input(kind: str, name: str, x: object) -> None:
    """TypeError unless the argument ``name`` is a tensor, ValueError unless it is a dense one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{kind}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        layout = "it is nested" if x.is_nested else f"its layout is {x.layout}"
        raise ValueError(f"{kind}: {name} must be a dense tensor, and {layout}; give its rows one after another")


def check_input_of(kind: str, x: object, features: int, weight: Tensor) -> None:
    """TypeError or ValueError unless ``x`` is a tensor [.., features] that can be multiplied by ``weight`` here."""
    check_input(kind, "the input", x)
    assert isinstance(x, Tensor)
    if x.dim() < 1 or x.shape[-1] != features:
        raise ValueError(f"{kind}: the input must be [.., {features}], got {list(x.shape)}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{kind}: the input is {x.dtype}, the parameters are {weight.dtype}; cast one of them")
    if x.device != weight.device:
        raise ValueError(f"{kind}: the input is on {x.device}, the parameters are on {weight.device}; move one of them")


def check_size(kind: str, name: str, value: object, least: int = 1) -> None:
    """TypeError unless ``value`` is an int, ValueError where it is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{kind}: {name} must be an int, got {value!r}; int() makes it one")
    if value < least:
        raise ValueError(f"{kind}: {name} must be at least {least}, got {value}")


def check_number(kind: str, name: str, value: object, *, positive: bool = False) -> None:
    """TypeError unless ``value`` is a number, ValueError unless it is finite and not negative; not 0 with
    ``positive``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{kind}: {name} must be a number, got {value!r}; float() makes it one")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{kind}: {name} must be finite and {'positive' if positive else 'not negative'}, got {value}")


def check_switches(kind: str, **switches: object) -> None:
    """TypeError unless all of them are bools."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{kind}: {name} must be True or False, got {value!r}; bool() makes it one")


def check_choice(kind: str, name: str, value: object, allowed: Iterable[str]) -> None:
    """TypeError unless ``value`` is a string, ValueError unless it is one of those ``allowed``."""
    known = ", ".join(allowed)
    if not isinstance(value, str):
        raise TypeError(f"{kind}: {name} must be one of {known}, got {value!r}")
    if value not in allowed:
        raise ValueError(f"{kind}: {name} must be one of {known}, got {value!r}")


def check_parameters_dtype(kind: str, dtype: object) -> None:
    """TypeError or ValueError unless parameters can have ``dtype``."""
    allowed = ", ".join(map(str, DTYPES))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{kind}: dtype must be a torch.dtype, got {dtype!r}; allowed: {allowed}")
    if dtype not in DTYPES:
        raise ValueError(f"{kind}: dtype must be one of {allowed}, got {dtype}")


def device_of(kind: str, device: object, group: Group) -> torch.device:
    """The device of the parameters: the group's, also where ``device`` is None or names its type alone, or meta, also
    where that is torch's default device."""
    if device is None:
        default = torch.get_default_device()
        return default if default.type == "meta" else group.device
    remedy = f"{kind}: device must be the group's, {group.device}, or meta, got {device!r}; leave it out"
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(remedy)
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(remedy) from None
    if found.type == "meta":
        return found
    if found != group.device and found != torch.device(group.device.type):
        raise ValueError(remedy)
    return group.device


def main_grad_of(kind: str, weight: Any) -> Tensor | None:
    """``weight.main_grad`` with its last two dimensions exchanged, as operations take it, or None where there is none.
    TypeError or ValueError unless it is a tensor of the weight's shape; operations say the rest."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    check_input(kind, "main_grad of the weight", main_grad)
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"{kind}: main_grad of the weight must have its shape {list(weight.shape)}, got {list(main_grad.shape)}"
        )
    return main_grad.transpose(-2, -1)
