"""The ``nvshmem`` network: NVSHMEM's puts with signals, issued by the kernels themselves.

It needs the ``nvshmem`` backend, whose memory lies in NVSHMEM's symmetric heap; the rank of a group is its PE there. A
put is ``nvshmemx_putmem_signal_block``: all threads of a program call it, and the signal is added once the block of
bytes has been delivered. NVSHMEM orders no two puts, so its signals are not strong; any aligned word of the heap may be
one.

A kernel with such puts is linked with NVSHMEM's device library (``compile_options``), and its module is initialised
after it was loaded: torch has both, in a private module, and every use of it is in this file; written for torch 2.11 to
2.13. Kernels of other networks are compiled without either.

All arguments of the device function are runtime values: a constexpr has no type that the library's functions take.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton import knobs
from triton.language import core

from ..device import RANK, peer_address
from ..network import NetworkProperties, refuse

if TYPE_CHECKING:
    import torch

    from ..backend import SymmetricMemory
    from ..group import Group

#: ``NVSHMEM_SIGNAL_ADD`` of NVSHMEM 3.
_SIGNAL_ADD = tl.constexpr(10)
#: Under which the device library is linked.
LIBRARY = "libnvshmem_device"


@core.extern
def _putmem_signal_block(target, source, num_bytes, signal, value, operation, pe, _semantic=None):
    types = tuple(core.dtype(name) for name in ("int64", "int64", "int64", "int64", "uint64", "int32", "int32"))
    return core.extern_elementwise(
        "",
        "",
        [target, source, num_bytes, signal, value, operation, pe],
        {types: ("nvshmemx_putmem_signal_block", core.dtype("int32"))},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def put(buffer_ptr, peer, source, target, num_bytes, signal):
    """See ``comm/network.py``."""
    # NVSHMEM takes addresses in the own copy, also for what is the peer's.
    own = peer_address(buffer_ptr, tl.load(buffer_ptr + RANK))
    # Other threads of this program wrote parts of the block.
    tl.debug_barrier()
    one = tl.full((), 1, tl.uint64)
    add = tl.full((), _SIGNAL_ADD, tl.int32)
    _putmem_signal_block(
        own + target, own + source, num_bytes.to(tl.int64), own + signal, one, add, peer.to(tl.int32)
    )  # fmt: skip


class NvshmemNetwork:
    """See the module's page."""

    name = "nvshmem"
    properties = NetworkProperties(strong_signals=False, signals_anywhere=True)
    put = staticmethod(put)
    num_programs = 0

    def __init__(self) -> None:
        self.compile_options: Mapping[str, Any] = {}

    def attach(self, group: Group, memory: SymmetricMemory, max_puts: int) -> int:
        """Nothing to keep but how kernels are compiled. ``BackendError`` without the ``nvshmem`` backend."""
        if group.backend.name != self.name:
            raise refuse(
                self.name,
                f"memory must come from NVSHMEM, and the backend is {group.backend.name!r}; make the group with "
                f'init_group(backend="nvshmem")',
            )
        self.compile_options = linked_with(_device_library(self.name))
        _initialise_modules()
        return 0

    def beside(self, table: torch.Tensor) -> AbstractContextManager[None]:
        """Nothing: NVSHMEM delivers puts by itself."""
        return nullcontext()


def linked_with(path: str) -> dict[str, Any]:
    """Triton's options for kernels that are linked with the library of device functions at ``path``."""
    return {"extern_libs": ((LIBRARY, path),)}


def _device_library(name: str) -> str:
    """Path of NVSHMEM's library of device functions."""
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    try:
        return NvshmemLibFinder.find_device_library()
    except RuntimeError as error:
        raise refuse(name, f"{error}; install NVSHMEM's package, or set NVSHMEM_LIB_DIR") from error


def _initialise_modules() -> None:
    """From now on every module that is linked with NVSHMEM's device library is initialised after its compilation."""
    earlier = knobs.runtime.jit_post_compile_hook
    if earlier is not _after_compilation:
        _earlier_hooks[:] = [earlier] if earlier is not None else []
        knobs.runtime.jit_post_compile_hook = _after_compilation


#: What was there before ``_after_compilation``, and is called by it.
_earlier_hooks: list[Any] = []


def _after_compilation(**given: Any) -> Any:
    """Triton's hook."""
    from torch._C._distributed_c10d import _nvshmemx_cumodule_init

    results = [hook(**given) for hook in _earlier_hooks]
    function = given["fn"].jit_function
    kernel = function.device_caches[given["compile"]["device"]][0].get(given["key"])
    if kernel is not None and LIBRARY in dict(kernel.metadata.extern_libs):
        _ = kernel.run  # loads the module
        _nvshmemx_cumodule_init(kernel.module)
    return results[0] if results else None
