"""The ``direct`` network: stores into the peer's memory and an addition at system scope, over NVLink or shared memory.

The program that puts does the copy itself, and the addition releases all that it has stored: so its signals are strong
for the puts of one program. Another program's are not ordered by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ..device import INTERPRETED, RANK, peer_address
from ..network import NetworkProperties

if TYPE_CHECKING:
    import torch

    from ..backend import SymmetricMemory
    from ..group import Group

#: Words that a program moves at a time.
_BLOCK = tl.constexpr(256 if INTERPRETED.value else 1024)


@triton.jit
def put(buffer_ptr, peer, source, target, num_bytes, signal):
    """See ``comm/network.py``."""
    own = peer_address(buffer_ptr, tl.load(buffer_ptr + RANK))
    there = peer_address(buffer_ptr, peer)
    source_ptr = (own + source).to(tl.pointer_type(tl.int64))
    target_ptr = (there + target).to(tl.pointer_type(tl.int64))
    # Other threads of this program wrote parts of what this one copies.
    tl.debug_barrier()
    lane = tl.arange(0, _BLOCK)
    words = num_bytes // 8
    for start in range(0, words, _BLOCK):
        offset = start + lane
        # Word 0 is stored below: it may be polled meanwhile.
        mask = (offset < words) & (offset > 0)
        tl.store(target_ptr + offset, tl.load(source_ptr + offset, mask=mask), mask=mask)
    tl.atomic_xchg(target_ptr, tl.load(source_ptr), sem="relaxed", scope="sys")
    # The addition is one thread's: the others' stores must be behind it.
    tl.debug_barrier()
    tl.atomic_add((there + signal).to(tl.pointer_type(tl.int64)), 1, sem="release", scope="sys")


class DirectNetwork:
    """See the module's page."""

    name = "direct"
    properties = NetworkProperties(strong_signals=True, signals_anywhere=True)
    put = staticmethod(put)
    num_programs = 0
    compile_options: Mapping[str, Any] = {}

    def attach(self, group: Group, memory: SymmetricMemory, max_puts: int) -> int:
        """Nothing to keep: every peer's memory is within reach of a store."""
        return 0

    def beside(self, table: torch.Tensor) -> AbstractContextManager[None]:
        """Nothing: the program that puts does the copy."""
        return nullcontext()
