"""Where in the source an access stands: the kernel's line, past all frames of Triton and of the simulator."""

from __future__ import annotations

import os
from types import CodeType, FrameType

import triton

from triton_overlap.sim.scheduler import FiberTask

_TRITON = os.path.dirname(os.path.abspath(triton.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PLUMBING = (os.path.join("comm", "interpreter.py"), os.path.join("comm", "backends", "sim.py"))
_foreign: dict[CodeType, bool] = {}
_names: dict[tuple[CodeType, int, CodeType, int], str] = {}


def _is_plumbing(code: CodeType) -> bool:
    known = _foreign.get(code)
    if known is None:
        name = os.path.abspath(code.co_filename)
        known = _foreign[code] = (
            name.startswith((_TRITON, _HERE)) or name.endswith(_PLUMBING) or code.co_filename.endswith("threading.py")
        )
    return known


def source(frame: FrameType | None, *, hosts_too: bool = False) -> str:
    """file:line of the innermost frame that is a kernel's, and of the kernel itself where that is another function."""
    while frame is not None and _is_plumbing(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return "?"
    inner = outer = frame
    if not hosts_too:
        step = frame.f_back
        while step is not None and step.f_code is not _PROGRAM_BODY:
            if not _is_plumbing(step.f_code):
                outer = step
            step = step.f_back
    key = (inner.f_code, inner.f_lineno, outer.f_code, outer.f_lineno)
    text = _names.get(key)
    if text is None:
        text = _name(inner)
        if outer is not inner:
            text += f" (in {outer.f_code.co_name}, {_name(outer)})"
        _names[key] = text
    return text


def _name(frame: FrameType) -> str:
    return f"{os.sep.join(frame.f_code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno}"


_PROGRAM_BODY = FiberTask._main.__code__
