"""The hand-off ring of the ``simulated`` network: where programs leave their puts for whoever lands them.

int64 words in local memory: a head of HEAD_WORDS, then an entry of ENTRY_WORDS for each put that can be under way. The
entry of ticket i is entry ``i % depth``: i + 1, peer, source, target, num_bytes, signal. Its first word is written
last, with release. A ring as deep as the puts that can be under way needs no check for room: before the entry of ticket
i is written again, the put of ticket i has raised its signal, and whoever starts the next call knows that.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl

from ..layout import TableWord

#: int64 words of the head, and of an entry.
HEAD_WORDS = ENTRY_WORDS = 8


class RingWord(IntEnum):
    """Words of the head."""

    TICKETS = 0  # handed out
    DEPTH = 1  # entries
    STRONG = 2  # 1 where a put signals after all earlier puts to the peer have landed
    OPENED = 3  # calls; this word and the others are the mover's (mover.py)
    CLOSED = 4  # calls
    TAKEN = 5  # tickets
    SIGNALLED = 6  # puts, where signals are strong
    SEED = 7


_ENTRY_WORDS = tl.constexpr(ENTRY_WORDS)
_HEAD_WORDS = tl.constexpr(HEAD_WORDS)
_NETWORK = tl.constexpr(int(TableWord.NETWORK))
_TICKETS = tl.constexpr(int(RingWord.TICKETS))
DEPTH = tl.constexpr(int(RingWord.DEPTH))


def ring_bytes(depth: int) -> int:
    """Bytes of a ring of that many entries."""
    return 8 * (HEAD_WORDS + ENTRY_WORDS * depth)


def prepare_ring(ring: torch.Tensor, depth: int, *, strong: bool, seed: int = 0) -> None:
    """Write the head of a zero-filled ring, uint8 ``[ring_bytes(depth)]``."""
    words = ring.view(torch.int64)
    for word, value in ((RingWord.DEPTH, depth), (RingWord.STRONG, int(strong)), (RingWord.SEED, seed)):
        words[word] = value


@triton.jit
def ring_of(buffer_ptr):
    """The ring of a buffer."""
    return tl.load(buffer_ptr + _NETWORK).to(tl.pointer_type(tl.int64))


@triton.jit
def ring_entry(ring, depth, ticket):
    """The entry of a ticket."""
    return ring + _HEAD_WORDS + _ENTRY_WORDS * (ticket % depth)


@triton.jit
def put(buffer_ptr, peer, source, target, num_bytes, signal):
    """See ``comm/network.py``."""
    ring = ring_of(buffer_ptr)
    depth = tl.load(ring + DEPTH)
    ticket = tl.atomic_add(ring + _TICKETS, 1, sem="relaxed", scope="gpu")
    entry = ring_entry(ring, depth, ticket)
    lane = tl.arange(0, _ENTRY_WORDS)
    value = tl.where(lane == 1, peer, tl.where(lane == 2, source, tl.where(lane == 3, target, 0)))
    value = tl.where(lane == 4, num_bytes, tl.where(lane == 5, signal, value.to(tl.int64)))
    tl.store(entry + lane, value, mask=(lane > 0) & (lane < 6))
    tl.debug_barrier()
    tl.atomic_xchg(entry, ticket + 1, sem="release", scope="gpu")
