"""On which stream a call runs, and who may reuse the memory of its tensors when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.backend import Backend


class CallingStream:
    """The stream of a call. ``None`` among tensors is ignored.

    torch's allocator hands freed memory out again in the order of the stream that it was allocated on. So tensors that
    another stream uses are recorded on that one.
    """

    def __init__(self, beside: bool) -> None:
        self._beside = beside

    def share(self, *tensors: torch.Tensor | None) -> None:
        """Within the call: it uses tensors of the caller's stream."""
        self._record(tensors)

    def give(self, *tensors: torch.Tensor | None) -> None:
        """After the call: the caller's stream uses tensors that the call made."""
        self._record(tensors)

    def _record(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        if not self._beside:
            return
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextmanager
def calling_stream(backend: Backend, previous_event: Any, beside: bool) -> Iterator[CallingStream]:
    """Make the stream of a call the current one: the caller's, or, ``beside``, the backend's own.

    The call starts after ``previous_event``. Beside the caller's stream it starts, where there is none, after what the
    caller's stream holds now.
    """
    if not beside:
        if previous_event is not None:
            backend.wait_event(previous_event)
        yield CallingStream(False)
        return
    start = backend.record_event() if previous_event is None else previous_event
    with backend.side_stream():
        backend.wait_event(start)
        yield CallingStream(True)
