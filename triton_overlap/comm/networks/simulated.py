"""The ``simulated`` network: a hand-off ring that a task of the simulator empties, landing puts in any allowed order.

The ring is int64 words in local memory: word 0 counts tickets, word 1 is the depth, word 2 is 1 where signals are
strong: then a put adds to its signal after all earlier puts to the peer have landed. The entry of ticket i is the
ENTRY_WORDS words from ``ENTRY_WORDS * (1 + i % depth)``: i + 1, peer, source, target, num_bytes, signal. The first word
is written last, with release. A ring as deep as the puts that can be under way needs no check for room: before the
entry of ticket i is written again, the put of ticket i has raised its signal, and whoever starts the next call knows
that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..layout import TableWord
from ..network import NetworkProperties, refuse

if TYPE_CHECKING:
    from ..backend import SymmetricMemory
    from ..group import Group

ENTRY_WORDS = 8
_ENTRY_WORDS = tl.constexpr(ENTRY_WORDS)
_NETWORK = tl.constexpr(int(TableWord.NETWORK))


@triton.jit
def put(buffer_ptr, peer, source, target, num_bytes, signal):
    """See ``comm/network.py``."""
    ring = tl.load(buffer_ptr + _NETWORK).to(tl.pointer_type(tl.int64))
    depth = tl.load(ring + 1)
    ticket = tl.atomic_add(ring, 1, sem="relaxed", scope="gpu")
    entry = ring + _ENTRY_WORDS * (1 + ticket % depth)
    lane = tl.arange(0, _ENTRY_WORDS)
    value = tl.where(lane == 1, peer, tl.where(lane == 2, source, tl.where(lane == 3, target, 0)))
    value = tl.where(lane == 4, num_bytes, tl.where(lane == 5, signal, value.to(tl.int64)))
    tl.store(entry + lane, value, mask=(lane > 0) & (lane < 6))
    tl.debug_barrier()
    tl.atomic_xchg(entry, ticket + 1, sem="release", scope="gpu")


class SimulatedNetwork:
    """See the module's page. Its signals lie anywhere."""

    put = staticmethod(put)

    def __init__(self, strong_signals: bool = False) -> None:
        self.name = "simulated_strong" if strong_signals else "simulated"
        self.properties = NetworkProperties(strong_signals=strong_signals, signals_anywhere=True)

    def attach(self, group: Group, memory: SymmetricMemory, max_puts: int) -> int:
        """A ring of ``max_puts`` entries, and the task that empties it. ``BackendError`` outside the simulator."""
        start_network = getattr(group.backend, "start_network", None)
        if start_network is None:
            raise refuse(
                self.name, f"it needs the simulator, and the backend is {group.backend.name!r}; use triton_overlap.sim"
            )
        self._ring = group.backend.local_zeros((1 + max_puts) * ENTRY_WORDS * 8)
        ring = self._ring.view(torch.int64)
        ring[1], ring[2] = max_puts, int(self.properties.strong_signals)
        start_network(memory, self._ring, ENTRY_WORDS)
        return self._ring.data_ptr()
