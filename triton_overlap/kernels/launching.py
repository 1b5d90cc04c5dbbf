"""The one place that launches kernels: it counts compilation keys, under the interpreter too.

Triton compiles a kernel anew for each combination of constexprs, argument types, and, unless told not to specialise, of
"is 1" and "divisible by 16" for integers and "aligned to 16 bytes" for pointers. A key with the same parts is computed
here. Where kernels are compiled, it finds the compiled kernel, and Triton's own caches are counted. Where they are
interpreted, keys are counted, so a token count that would compile on a GPU is seen on a machine without one. Tests
compare the two.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..comm.device import INTERPRETED

#: Run-time arguments that are written in capitals all the same, as in the field; every other name in capitals is a
#: constexpr.
_RUNTIME_SIZES = ("N", "K", "T")
_INT32 = 2**31

_launchers: dict[Any, _Launcher] = {}


def specializations() -> int:
    """Distinct kernel compilation keys this process has used so far."""
    return sum(specializations_by_kernel().values())


def specializations_by_kernel() -> dict[str, int]:
    """The same for each kernel by its name, to see which of them compiles anew."""
    return {kernel.fn.__name__: launcher.specializations() for kernel, launcher in _launchers.items()}


def compilation_key(kernel: Any, options: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton would compile ``kernel`` for, given these arguments by name."""
    launcher = _Launcher(kernel)
    return launcher.key(options, [arguments[name] for name in launcher.names])


class _Launcher:
    """Launches of one kernel: its compilation keys, and the compiled kernel of each, which is launched directly.

    Triton binds, specialises and looks up at every launch, and compares each global that the kernel names: as much host
    time again as the launch. The arguments come by name here, in any order, so the names' positions are looked up once.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # A compiled function keeps the list as an attribute, an interpreted one among the decorator's arguments.
        unspecialised = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get(
            "do_not_specialize", ()
        )
        self.names = tuple(kernel.arg_names)
        constexprs = [name.isupper() and name not in _RUNTIME_SIZES for name in self.names]
        self._constexprs = [index for index, constexpr in enumerate(constexprs) if constexpr]
        self._runtime = [
            (index, name not in unspecialised) for index, name in enumerate(self.names) if not constexprs[index]
        ]
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def specializations(self) -> int:
        if INTERPRETED.value:
            return len(self._compiled)
        return sum(len(caches[0]) for caches in self.kernel.device_caches.values())

    def key(self, options: dict[str, Any], values: list[Any]) -> tuple[Any, ...]:
        """What Triton would compile the kernel for, given its arguments in order."""
        parts: list[Any] = [*options.values(), *[values[index] for index in self._constexprs]]
        for index, specialised in self._runtime:
            value = values[index]
            kind = type(value)
            if value is None:
                parts.append(None)
            elif kind is int:
                parts.append(-_INT32 <= value < _INT32)
                if specialised:
                    parts.append("one" if value == 1 else value % 16 == 0)
            elif kind is TensorDescriptor:
                parts.append((value.base.dtype, *value.block_shape))
            elif kind is float:
                parts.append(kind)
            else:
                parts.append(value.dtype)
                if specialised:
                    parts.append(value.data_ptr() % 16 == 0)
        return tuple(parts)

    def __call__(self, num_programs: int, options: dict[str, Any], arguments: dict[str, Any]) -> None:
        values = [arguments[name] for name in self.names]
        if INTERPRETED.value:
            self._compiled.setdefault(self.key(options, values))
            self.kernel[(num_programs,)](*values, **options)
            return
        key = (torch.cuda.current_device(), *self.key(options, values))
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self.kernel[(num_programs,)](*values, **options)
        else:
            compiled[(num_programs, 1, 1)](*values)


def launch_kernel_on(
    device: torch.device, kernel: Any, num_programs: int, options: dict[str, Any], **arguments: Any
) -> None:
    """``launch_kernel`` on ``device``: Triton launches on the current one, which, without a group, may be another than
    that of the tensors."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        launch_kernel(kernel, num_programs, options, **arguments)


def launch_kernel(kernel: Any, num_programs: int, options: dict[str, Any], **arguments: Any) -> None:
    """Launch ``kernel`` on a one-dimensional grid.

    Args:
        kernel: to launch.
        num_programs: of the grid.
        options: Triton's, in the same order at every launch of the kernel.
        arguments: all of the kernel's, by name.
    """
    launcher = _launchers.get(kernel)
    if launcher is None:
        launcher = _launchers[kernel] = _Launcher(kernel)
    launcher(num_programs, options, arguments)
