"""Where everything in a buffer lies: one object gives sizes and offsets to the host and, as a table, to kernels.

A user buffer of capacity ``[max_tokens, hidden]`` is one symmetric allocation:

    region   type and shape                           written by  meaning
    headers  int64 [2, world_size, 4]                 every peer  opening header of a call, by slot and source
    flags    int32 [2, world_size, flags_per_source]  every peer  epoch of the data that a flag announces
    data     dtype [2, max_tokens, hidden]            every peer  the two slots

A group has one more, its control block: int64 ``[world_size + 1, 8]``, row r a failure that rank r reports, and word 0
of the last row the notice that somebody failed (the failing rank + 1). It is the group's, so that a failure on one
buffer ends waits on every other.

Slot ``epoch % 2`` serves the call with that epoch. Flags and headers have slots of their own for the same reason that
data has (comm/README.md).

Kernels get one pointer, to the int64 table described by :class:`TableWord`: this rank's numbers, the offsets above and
the base address of every rank's copy. This module is plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

#: Bytes to which every region is aligned; a TMA descriptor's base needs 16, a cache line 128.
ALIGNMENT = 1024
#: The smallest tile, in rows and in columns, that may have a flag of its own.
FLAG_TILE = 16
#: int64 words of a header: operation, rows of a chunk, N, K; the epoch is the upper half of each.
HEADER_WORDS = 4
#: int64 words of a failure record, in host memory and in the control block.
RECORD_WORDS = 8
#: int32 words of the local state that a call's programs share: room to grow beyond StateWord within the one aligned
#: block that it takes anyway.
STATE_WORDS = 16


class TableWord(IntEnum):
    """Index into the int64 table that kernels get."""

    RANK = 0
    WORLD_SIZE = 1
    HEADERS = 2  # byte offset in the symmetric allocation
    FLAGS = 3  # byte offset
    DATA = 4  # byte offset
    SLOT_BYTES = 5
    FLAGS_PER_SOURCE = 6
    STATE = 7  # address of int32[STATE_WORDS], this device only
    STAGING = 8  # address of dtype[max_tokens, hidden], this device only
    STAGED = 9  # address of int32[world_size, flags_per_source], this device only
    RECORD = 10  # address of int64[RECORD_WORDS] in host memory
    CLOCK = 11  # address of an int64 word of nanoseconds, or 0 for the hardware timer
    TIMEOUT_NS = 12
    NETWORK = 13  # address of the network's own state (comm/network.py), or 0
    PEERS = 16  # address of rank 0's copy of the buffer; rank r's is word PEERS + r
    # Behind the world_size peers, at PEERS + world_size + r: the address of rank r's control block.


class StateWord(IntEnum):
    """Index into the int32 words that the programs of a call share on one device."""

    TASK = 0  # next task to hand out; back to 0 when the call ends
    DONE = 1  # programs that have finished; back to 0 when the call ends
    EPOCH = 2  # of the next call, for buffers whose epochs live on the device


class Failure(IntEnum):
    """Why a call failed; the lowest byte of a failure record."""

    TIMEOUT = 1
    MISMATCH = 2
    COUNT = 3
    SURPLUS = 4
    ROUTING = 5


class Place(IntEnum):
    """What a failed wait waited for; the value's name is how messages call it."""

    HEADER = 1
    DATA_FLAG = 2
    STAGED_TILE = 3
    SIGNAL = 4
    PARTS_OF_CHANNEL = 5
    ACTIVE_COUNT = 6
    COUNTS = 7
    #: What a peer sends on once it has received something itself.
    FORWARDED_ROWS = 8
    ROUTING = 9


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class BufferLayout:
    """Sizes and byte offsets of a user buffer.

    Args:
        world_size: ranks of the group.
        max_tokens: capacity in rows, a positive multiple of ``world_size``.
        hidden: columns.
        itemsize: bytes of an element.

    Numeric example: world_size 2, max_tokens 64, hidden 32, itemsize 2 gives 128 bytes of headers in a region of 1024,
    ``flags_per_source`` 32, slots of 4096 bytes, and ``num_bytes`` 2 * 1024 + 2 * 4096 = 10240.
    """

    world_size: int
    max_tokens: int
    hidden: int
    itemsize: int

    @property
    def flags_per_source(self) -> int:
        """Flags a source can set in one slot: one a row, or one a FLAG_TILE x FLAG_TILE tile, of its largest chunk."""
        chunk = self.max_tokens // self.world_size
        return max(chunk, -(-chunk // FLAG_TILE) * -(-self.hidden // FLAG_TILE))

    @property
    def slot_bytes(self) -> int:
        """Not rounded up: the chunks of both slots together are one array, [2 * world_size, chunk, hidden]."""
        return self.max_tokens * self.hidden * self.itemsize

    @property
    def headers(self) -> int:
        return 0

    @property
    def flags(self) -> int:
        return self.headers + _aligned(2 * self.world_size * HEADER_WORDS * 8)

    @property
    def data(self) -> int:
        return self.flags + _aligned(2 * self.world_size * self.flags_per_source * 4)

    @property
    def num_bytes(self) -> int:
        """Symmetric bytes a rank registers."""
        return _aligned(self.data + 2 * self.slot_bytes)

    @property
    def local_bytes(self) -> int:
        """Bytes of local device memory beside the symmetric ones: staging, staged flags, state."""
        return self.staging_bytes + self.staged_bytes + _aligned(STATE_WORDS * 4)

    @property
    def staging_bytes(self) -> int:
        return _aligned(self.slot_bytes)

    @property
    def staged_bytes(self) -> int:
        return _aligned(self.world_size * self.flags_per_source * 4)

    def flag_offset(self, slot: int, source: int, index: int) -> int:
        """Byte offset of flag ``index`` of ``source`` in ``slot``."""
        return self.flags + 4 * ((slot * self.world_size + source) * self.flags_per_source + index)

    def data_offset(self, slot: int, row: int) -> int:
        """Byte offset of ``row`` in ``slot``."""
        return self.data + slot * self.slot_bytes + row * self.hidden * self.itemsize


def control_bytes(world_size: int) -> int:
    """Symmetric bytes of a group's control block."""
    return _aligned((world_size + 1) * RECORD_WORDS * 8)
