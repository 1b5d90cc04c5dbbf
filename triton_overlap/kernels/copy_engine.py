"""Who sends the rows of a call: the copy engine, or the programs of its kernel."""

from __future__ import annotations

from ..comm.backend import CopyStream
from ..comm.user_buffers import UserBuffer

#: Rows of a chunk from which the copy engine sends where the caller does not say: below, its hand-over costs more.
COPY_ENGINE_ROWS = 512


def sending_copies(buffer: UserBuffer, rows: int, use_ce: bool | None) -> CopyStream | None:
    """The copy engine where it is to send chunks of ``rows`` rows, the same on every rank; None where programs do.

    Args:
        buffer: of the call.
        rows: of a chunk, T/W.
        use_ce: what the method says; None leaves it to the size of a chunk.
    """
    backend = buffer.group.backend
    if buffer.group.world_size == 1 or use_ce is False:
        return None
    if use_ce is None and (backend.interpreted or rows < COPY_ENGINE_ROWS):
        return None
    return backend.copies
