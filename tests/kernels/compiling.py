"""Compile the kernels for a GPU without having one, from the very arguments of a launch.

For a process without TRITON_INTERPRET. A :class:`Compiler` takes the place of ``launch_kernel`` in the launchers'
modules and binds the arguments as Triton's own launcher does.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as triton_compile
from triton.runtime.jit import create_function_from_signature

from triton_overlap.comm.backend import Collectives, CopyStream, SymmetricMemory
from triton_overlap.kernels.launching import compilation_key

TARGET = GPUTarget("cuda", 90, 32)


class Compiler:
    """Stands in for ``launch_kernel``: compiles each new specialisation, counts them by kernel."""

    def __init__(self) -> None:
        self.backend = make_backend(TARGET)
        self.keys: dict[str, set[str]] = {}
        self.own_keys: dict[str, set[Any]] = {}
        self.binaries: list[tuple[str, Any]] = []

    def __call__(self, kernel: Any, num_programs: int, options: dict[str, int], **arguments: Any) -> None:
        binder = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialization, packed = binder(**arguments, **options, debug=False)
        name = kernel.fn.__name__
        self.own_keys.setdefault(name, set()).add(compilation_key(kernel, options, arguments))
        key = repr(specialization) + repr(sorted(options.items()))
        if key in self.keys.setdefault(name, set()):
            return
        self.keys[name].add(key)
        packed, signature, constexprs, attrs = kernel._pack_args(
            self.backend, dict(options), bound, specialization, packed
        )
        source = ASTSource(kernel, signature, constexprs, attrs)
        self.binaries.append((name, triton_compile(source, target=TARGET, options=packed.__dict__)))


class OneRankOfMany:
    """A backend that allocates plain memory and never launches, to drive launchers at any world size."""

    name = "none"
    interpreted = False
    num_programs = 132
    clock_address = 0
    copies: CopyStream | None = None
    collectives: Collectives | None = None

    def __init__(self, world_size: int) -> None:
        self.rank = 0
        self.world_size = world_size
        self.device = torch.device("cpu")

    def barrier(self, timeout_s: float) -> None:
        pass

    def rejoin(self, generation: int) -> None:
        pass

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        return [value] * self.world_size

    def symmetric_empty(self, num_bytes: int, timeout_s: float) -> SymmetricMemory:
        local = torch.zeros(num_bytes, dtype=torch.uint8)
        return SymmetricMemory(local, torch.full((self.world_size,), local.data_ptr(), dtype=torch.int64))

    def free(self, memory: Any) -> None:
        pass

    def local_zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def record_event(self) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        pass

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass
