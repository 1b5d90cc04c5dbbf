"""The ``simulated`` network: a hand-off ring (ring.py), emptied by whoever lands puts in any allowed order: in the
simulator a task of its own, on GPUs a kernel beside each call (mover.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..network import NetworkProperties, refuse
from .ring import ENTRY_WORDS, prepare_ring, put, ring_bytes

if TYPE_CHECKING:
    import torch

    from ..backend import SymmetricMemory
    from ..group import Group
    from .mover import Mover


class SimulatedNetwork:
    """See the module's page. Its signals lie anywhere.

    Args:
        strong_signals: a put signals after all earlier puts to the peer have landed.
        seed: of the order in which a mover lands puts; the simulator has a seed of its own.
    """

    put = staticmethod(put)
    compile_options: Mapping[str, Any] = {}

    def __init__(self, strong_signals: bool = False, seed: int = 0) -> None:
        self.name = "simulated_strong" if strong_signals else "simulated"
        self.properties = NetworkProperties(strong_signals=strong_signals, signals_anywhere=True)
        self.num_programs = 0
        self._seed = seed
        self._mover: Mover | None = None

    def attach(self, group: Group, memory: SymmetricMemory, max_puts: int) -> int:
        """A ring of ``max_puts`` entries, and who empties it. ``BackendError`` without the simulator or a GPU."""
        start_network = getattr(group.backend, "start_network", None)
        if start_network is None and group.device.type != "cuda":
            raise refuse(
                self.name,
                f"it needs the simulator or GPUs, and the backend is {group.backend.name!r}; use triton_overlap.sim",
            )
        self._ring = group.backend.local_zeros(ring_bytes(max_puts))
        prepare_ring(self._ring, max_puts, strong=self.properties.strong_signals, seed=self._seed + group.rank)
        if start_network is not None:
            start_network(memory, self._ring, ENTRY_WORDS)
        else:
            from .mover import NUM_PROGRAMS, Mover

            self._mover = Mover(group.device, in_order=self.properties.strong_signals)
            self.num_programs = NUM_PROGRAMS
        return self._ring.data_ptr()

    def beside(self, table: torch.Tensor) -> AbstractContextManager[None]:
        """On GPUs the mover."""
        return nullcontext() if self._mover is None else self._mover.beside(table)
