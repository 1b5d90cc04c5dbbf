"""Checks of plain arguments, each in the name of ``what`` was called.

A value of the wrong type is a ``TypeError``, one that is not allowed a ``ValueError``; both name what was given and
what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["check_choice", "check_int", "check_not_negative", "check_real", "check_switch", "described"]


def check_switch(what: str, name: str, value: object) -> None:
    """TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{what}: {name} must be True or False, got {described(value)}; bool() makes it one")


def check_int(what: str, name: str, value: object, least: int | None = None) -> None:
    """TypeError unless ``value`` is an int and no bool, ValueError where it is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what}: {name} must be an int, got {described(value)}; int() makes it one")
    if least is not None and value < least:
        raise ValueError(f"{what}: {name} must be at least {least}, got {value}")


def check_real(what: str, name: str, value: object) -> None:
    """TypeError unless ``value`` is an int or a float. A compiler may trace this, with a symbol for the value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what}: {name} must be a number, got {described(value)}; float() makes it one")


def check_not_negative(what: str, name: str, value: float) -> None:
    """ValueError unless ``value`` is finite and not negative."""
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{what}: {name} must be finite and not negative, got {value}")


def check_choice(what: str, name: str, value: object, allowed: Iterable[str]) -> None:
    """TypeError unless ``value`` is a string, ValueError unless it is one of those ``allowed``."""
    known = ", ".join(allowed)
    if not isinstance(value, str):
        raise TypeError(f"{what}: {name} must be one of {known}, got {described(value)}")
    if value not in allowed:
        raise ValueError(f"{what}: {name} must be one of {known}, got {described(value)}")


def described(value: object) -> str:
    """What was given: short values themselves, others by their type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an object of type {name}"
