"""Compile the kernels for a GPU without having one, from the very arguments of a launch.

The interpreter accepts much that the compiler does not, and never specialises. So :func:`compiled` has a fresh process,
without TRITON_INTERPRET, drive the launchers at many token counts; a :class:`Compiler` in place of ``launch_kernel``
binds the arguments as Triton's own launcher would, compiles for compute capability 9.0, and reports what was compiled
for how many keys.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as triton_compile
from triton.runtime.jit import create_function_from_signature

from triton_overlap.comm.backend import Collectives, CopyStream, SymmetricMemory
from triton_overlap.kernels import launching

TARGET = GPUTarget("cuda", 90, 32)
#: Of one multiprocessor of the target, in bytes.
SHARED_MEMORY = 232448
SPILL = "st.local"
TENSOR_CORES = "wgmma"
DESCRIPTORS = "cp.async.bulk.tensor"
PROXY_FENCE = "fence.proxy.async;"
VECTOR_LOAD = "ld.global.v4"


@dataclass(frozen=True)
class Compiled:
    """What a child process compiled.

    Attributes:
        keys: compilations of each kernel, as Triton counts them.
        own_keys: the same as ``specializations()`` counts them.
        shared_memory: the most that a kernel takes, in bytes.
        instructions: of those named above, the kernels whose code has them.
    """

    keys: dict[str, int]
    own_keys: dict[str, int]
    shared_memory: int
    instructions: dict[str, list[str]]

    def having(self, instruction: str) -> set[str]:
        """The kernels whose code has ``instruction``."""
        return set(self.instructions[instruction])

    def check(self, expected: dict[str, int], *, stack: Collection[str] = ()) -> None:
        """``expected`` compilations of each kernel, by both counts, that fit the target and spill no registers.

        Only the kernels in ``stack`` may have local memory.
        """
        assert self.keys == expected
        assert self.own_keys == expected, "what specializations() counts is what Triton compiles"
        assert self.shared_memory <= SHARED_MEMORY
        assert self.having(SPILL) == set(stack)


def compiled(drive: Callable[..., None], *args: Any) -> Compiled:
    """What the launches of ``drive(*args)``, a top-level function of a test module, compile.

    ``args`` must survive JSON.
    """
    child = subprocess.run(
        [sys.executable, "-m", __name__, drive.__module__, drive.__name__, json.dumps(args)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return Compiled(**json.loads(child.stdout.splitlines()[-1]))


def main(module: str, name: str, args: str) -> None:
    """The child process: import ``module``, call its function ``name``, and print what was compiled."""
    drive = getattr(importlib.import_module(module), name)
    compiler = Compiler()
    compiler.take_over()
    drive(*json.loads(args))
    print(json.dumps(asdict(compiler.report())))


class Compiler:
    """Stands in for ``launch_kernel``: compiles each new specialisation."""

    def __init__(self) -> None:
        self._backend = make_backend(TARGET)
        self._keys: dict[str, set[str]] = {}
        self._own_keys: dict[str, set[Any]] = {}
        self._binaries: list[tuple[str, Any]] = []

    def __call__(self, kernel: Any, num_programs: int, options: dict[str, int], **arguments: Any) -> None:
        binder = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        bound, specialization, packed = binder(**arguments, **options, debug=False)
        name = kernel.fn.__name__
        self._own_keys.setdefault(name, set()).add(launching.compilation_key(kernel, options, arguments))
        key = repr(specialization) + repr(sorted(options.items()))
        if key in self._keys.setdefault(name, set()):
            return
        self._keys[name].add(key)
        packed, signature, constexprs, attrs = kernel._pack_args(
            self._backend, dict(options), bound, specialization, packed
        )
        source = ASTSource(kernel, signature, constexprs, attrs)
        self._binaries.append((name, triton_compile(source, target=TARGET, options=packed.__dict__)))

    def take_over(self) -> None:
        """Stand in for ``launch_kernel``, in modules of launchers that are imported already and in those to come."""
        for name, module in list(sys.modules.items()):
            if name.startswith("triton_overlap.kernels.") and hasattr(module, "launch_kernel"):
                module.launch_kernel = self  # type: ignore[attr-defined]  # what launch_kernel_on calls, too

    def report(self) -> Compiled:
        return Compiled(
            keys={name: len(keys) for name, keys in self._keys.items()},
            own_keys={name: len(keys) for name, keys in self._own_keys.items()},
            shared_memory=max(binary.metadata.shared for _, binary in self._binaries),
            instructions={
                instruction: sorted({name for name, binary in self._binaries if instruction in binary.asm["ptx"]})
                for instruction in (SPILL, TENSOR_CORES, DESCRIPTORS, PROXY_FENCE, VECTOR_LOAD)
            },
        )


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

    def rejoin(self, timeout_s: float) -> None:
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

    def record_event(self, again: None = None) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        pass

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
