"""The one place that launches kernels: it counts compilation keys, under the interpreter too.

Triton compiles a kernel anew for each combination of constexprs, argument types, and, unless told not to specialise, of
"is 1" and "divisible by 16" for integers and "aligned to 16 bytes" for pointers. Where kernels are compiled its own
caches are counted. Where they are interpreted a key with the same parts is computed here, so a token count that would
compile on a GPU is seen on a machine without one; tests compare the two.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..comm.device import INTERPRETED

#: Run-time arguments that are written in capitals all the same, as in the field; every other name in capitals is a
#: constexpr.
_RUNTIME_SIZES = ("N", "K", "T")

_keys: set[tuple[Any, ...]] = set()
_compiled_kernels: set[Any] = set()


def specializations() -> int:
    """Distinct kernel compilation keys this process has used so far."""
    return sum(specializations_by_kernel().values())


def specializations_by_kernel() -> dict[str, int]:
    """The same for each kernel by its name, to see which of them compiles anew."""
    found = Counter(key[0] for key in _keys)
    for kernel in _compiled_kernels:
        found[kernel.fn.__name__] += sum(len(caches[0]) for caches in kernel.device_caches.values())
    return dict(found)


def _argument_key(name: str, value: Any, specialise: bool) -> Any:
    if name.isupper() and name not in _RUNTIME_SIZES:  # a constexpr
        return value
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.data_ptr() % 16 == 0) if specialise else (value.dtype,)
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, TensorDescriptor):
        return ("descriptor", value.base.dtype, tuple(value.block_shape))
    if isinstance(value, int) and not isinstance(value, bool):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        return (width, value == 1, value % 16 == 0) if specialise else (width,)
    return value


def _unspecialised(kernel: Any) -> frozenset[str]:
    # A compiled function keeps the list as an attribute, an interpreted one among the decorator's arguments.
    names = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize")
    return frozenset(names or ())


def compilation_key(kernel: Any, options: dict[str, int], arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton would compile ``kernel`` for, given these arguments by name."""
    unspecialised = _unspecialised(kernel)
    parts = tuple((name, _argument_key(name, value, name not in unspecialised)) for name, value in arguments.items())
    return (kernel.fn.__name__, tuple(sorted(options.items())), parts)


def launch_kernel_on(
    device: torch.device, kernel: Any, num_programs: int, options: dict[str, int], **arguments: Any
) -> None:
    """``launch_kernel`` on ``device``: Triton launches on the current one, which, without a group, may be another than
    that of the tensors."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        launch_kernel(kernel, num_programs, options, **arguments)


def launch_kernel(kernel: Any, num_programs: int, options: dict[str, int], **arguments: Any) -> None:
    """Launch ``kernel`` on a one-dimensional grid."""
    if INTERPRETED.value:
        _keys.add(compilation_key(kernel, options, arguments))
    else:
        _compiled_kernels.add(kernel)
    kernel[(num_programs,)](**arguments, **options)
