"""What Triton's interpreter asks while hooks are installed, and how it describes accesses and launches to them.

``interpreter.py`` installs hooks. The simulator implements them, and so do processes that share processors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

#: Read-modify-write operations that leave memory as it is when their operand is zero.
_NEUTRAL_ZERO = ("add", "fadd", "or", "xor")


@dataclass(frozen=True)
class AtomicAccess:
    """One atomic operation, of a block of lanes or of one.

    Attributes:
        op: ``"add"``, ``"xchg"``, ``"cas"``, ``"load"``, ``"store"``, and so on.
        addresses: uint64 ``[lanes]``, the lanes whose mask is set.
        values: the operand of each lane, ``[lanes]``; for a load zeros of the dtype.
        dtype: NumPy dtype of the words.
        acquire, release: what the memory semantics ask for.
        scope: ``"cta"``, ``"gpu"`` or ``"sys"``.
        block: True for a block of lanes, whose threads each perform their own; False for a scalar, which one thread
            performs for the whole program.
    """

    op: str
    addresses: np.ndarray
    values: np.ndarray
    dtype: np.dtype
    acquire: bool
    release: bool
    scope: str
    block: bool

    @property
    def only_reads(self) -> bool:
        """True for what cannot change memory whatever it finds: a load, or the addition of zero."""
        return self.op == "load" or (self.op in _NEUTRAL_ZERO and not self.values.any())


@dataclass(frozen=True)
class KernelLaunch:
    """One launch, arguments already converted for the interpreter.

    Attributes:
        function: call it with ``arguments`` to run one program.
        name: of the kernel.
        arguments: by name.
        grid: three extents.
        tensors: every tensor among the arguments with the argument's name, also inside tuples and host descriptors.
    """

    function: Callable[..., Any]
    name: str
    arguments: dict[str, Any]
    grid: tuple[int, int, int]
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def program_ids(self) -> Iterator[tuple[int, int, int]]:
        """Every program's position, in the stock interpreter's order."""
        x, y, z = self.grid
        return itertools.product(range(x), range(y), range(z))


class InterpreterHooks(Protocol):
    """What the interpreter asks while hooks are installed. Arrays hold addresses (uint64), values and masks (bool)."""

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The values at ``addresses``, ``other`` where masked off."""

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, asynchronous: bool) -> None:
        """Store; ``asynchronous`` marks a descriptor's store, which a release does not cover."""

    def atomic(self, access: AtomicAccess, perform: Callable[[], Any]) -> Any:
        """Call ``perform`` once, at the moment the operation happens, and return what it returned."""

    def barrier(self) -> None:
        """The program met ``tl.debug_barrier``."""

    def wait_descriptors(self) -> None:
        """The program waited until its descriptor stores were complete."""

    def launch(self, launch: KernelLaunch) -> None:
        """Run every program of ``launch``, now or later."""

    def program(self) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
        """Position and extents of the grid of the running program; None where no program of the hooks' runs."""

    def time_ns(self) -> int:
        """The time by which ``tl.atomic_poll`` bounds its wait, in nanoseconds."""
