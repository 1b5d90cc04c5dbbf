"""The ``sim`` backend: one rank of a simulated world. ``triton_overlap.sim.World`` makes one for each rank.

Launches on the default stream have finished when they return; those under :meth:`SimBackend.stream` run beside the
host. What happens-before sees of the default stream is what it would see of a GPU's: a host barrier orders hosts, not
the launches before it, unless the host has synchronised first.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from triton_overlap.comm.backend import Collectives, CopyStream, SymmetricMemory
from triton_overlap.errors import ClosedError

if TYPE_CHECKING:
    from triton_overlap.sim.costs import NetworkUse
    from triton_overlap.sim.machine import Machine
    from triton_overlap.sim.meetings import Meetings
    from triton_overlap.sim.memory import Region
    from triton_overlap.sim.streams import Event, Stream


class SimCopyStream:
    """The simulated copy engine: a stream of its own, whose copies land in pieces, each flag after its bytes."""

    def __init__(self, machine: Machine, stream: Stream) -> None:
        self._machine = machine
        self._stream = stream

    def begin(self) -> None:
        """Later pushes start after everything that the caller's current stream holds now."""
        self._machine.wait_event(self._machine.record_event(), self._stream)

    def push(
        self,
        memory: SymmetricMemory,
        peer: int,
        byte_offset: int,
        source: torch.Tensor,
        flag_byte_offset: int,
        flag_value: int,
    ) -> None:
        """Copy contiguous ``source`` to ``peer``'s copy of ``memory`` at ``byte_offset``, then release the int32
        ``flag_value`` to ``peer``'s copy at ``flag_byte_offset``.

        Raises:
            ValueError: ``source`` is not contiguous, or a range lies outside the memory.
        """
        if not source.is_contiguous():
            raise ValueError("a copy's source must be contiguous")
        num_bytes = source.numel() * source.element_size()
        capacity = memory.local.numel()
        if byte_offset < 0 or byte_offset + num_bytes > capacity:
            raise ValueError(
                f"bytes {byte_offset} to {byte_offset + num_bytes} lie outside the {capacity} of the memory"
            )
        if flag_byte_offset % 4 or not 0 <= flag_byte_offset <= capacity - 4:
            raise ValueError(f"the flag's offset {flag_byte_offset} is no multiple of 4 within {capacity} bytes")
        target: Region = memory.handle[peer]
        self._machine.push(self._stream, source, target, peer, byte_offset, flag_byte_offset, flag_value, _caller())

    def end(self) -> None:
        """Whatever the caller's current stream gets next starts after all pushes; ``source`` may be freed then."""
        self._machine.wait_event(self._machine.record_event_on(self._stream))


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"


class SimBackend:
    """One rank of a simulated world; implements :class:`triton_overlap.comm.backend.Backend`.

    Args:
        machine: what the ranks share.
        meetings: where their hosts meet.
        rank: this rank.
    """

    name = "sim"
    interpreted = True

    def __init__(self, machine: Machine, meetings: Meetings, rank: int) -> None:
        self.rank = rank
        self.world_size = machine.world_size
        self.device = torch.device("cpu")
        self.num_programs = machine.num_programs
        self.clock_address = machine.clock_address
        self._machine = machine
        self._meetings = meetings
        self._closed = False
        self._allocations = 0
        self._copy_stream = machine.new_stream(rank, 1)
        self.copies: CopyStream | None = SimCopyStream(machine, self._copy_stream)
        self.collectives: Collectives | None = None  # the simulated ranks are of no process group
        self._side_stream: Stream | None = None

    @property
    def copy_stream(self) -> Stream:
        """The stream of the copy engine."""
        return self._copy_stream

    def _open(self) -> None:
        if self._closed:
            raise ClosedError(f"the backend of rank {self.rank} is closed")

    def barrier(self, timeout_s: float) -> None:
        """Return once every rank has called it. ``CommTimeoutError`` names the missing ranks."""
        self._open()
        self._meetings.meet("barrier", None, timeout_s)

    def rejoin(self, timeout_s: float) -> None:
        """See the protocol."""
        self._open()
        self._meetings.rejoin(timeout_s)

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        """Every rank's ``value`` (picklable), in rank order. ``CommTimeoutError`` names the missing ranks."""
        self._open()
        # Pickled, as between processes: no rank gets at another's objects.
        return [pickle.loads(content) for content in self._meetings.meet("all-gather", pickle.dumps(value), timeout_s)]

    @torch.inference_mode(False)
    def symmetric_empty(self, num_bytes: int, timeout_s: float) -> SymmetricMemory:
        """Collective; zero-filled; aligned to 1024 bytes. Ranks that ask for different sizes all get a
        ``ValueError`` that lists the sizes."""
        self._open()
        sizes = self._meetings.meet("symmetric allocation", num_bytes, timeout_s)
        if len(set(sizes)) > 1:
            raise ValueError(f"ranks ask for symmetric memory of different sizes: {sizes} bytes, in rank order")
        name = f"symmetric{self._allocations}@rank{self.rank}"
        self._allocations += 1
        own = self._machine.allocate("symmetric", num_bytes, self.rank, name)
        regions: list[Region] = self._meetings.meet("exchange of addresses", own, timeout_s)
        table = self._machine.allocate("local", 8 * self.world_size, self.rank, f"table of {name}").keep
        table.view(torch.int64).copy_(torch.tensor([region.start for region in regions], device=self.device))
        return SymmetricMemory(own.keep, table.view(torch.int64), regions)

    def free(self, memory: SymmetricMemory) -> None:
        """Local; a later access by any kernel is a ``MemoryFaultError``."""
        memory.handle[self.rank].freed = True

    @torch.inference_mode(False)
    def local_zeros(self, num_bytes: int) -> torch.Tensor:
        """uint8 ``[num_bytes]`` on the device, that kernels of this rank reach by address (not as an argument)."""
        self._open()
        return self._machine.allocate("local", num_bytes, self.rank, self._name("local")).keep

    @torch.inference_mode(False)
    def host_words(self, count: int) -> torch.Tensor:
        """int64 ``[count]`` zeros in host memory that kernels write by address."""
        self._open()
        return self._machine.allocate("local", 8 * count, self.rank, self._name("host words")).keep.view(torch.int64)

    def _name(self, kind: str) -> str:
        self._allocations += 1
        return f"{kind} {self._allocations}@rank{self.rank}"

    def record_event(self, again: Event | None = None) -> Event:
        """An event after everything that the current stream holds now."""
        self._open()
        return self._machine.record_event()

    def wait_event(self, event: Event) -> None:
        """What the current stream gets next starts after ``event``."""
        self._open()
        self._machine.wait_event(event)

    @contextlib.contextmanager
    def stream(self, stream: Stream | None = None) -> Iterator[Stream]:
        """Launches inside go to an asynchronous stream: a new one, or ``stream`` from an earlier use.

        Order it with ``record_event`` and ``wait_event``, and end with :meth:`synchronize`. Only launches and copies
        are on the stream; torch operations inside still happen at once.
        """
        self._open()
        host = self._machine.host()
        host.current_stream.append(self._machine.add_stream() if stream is None else stream)
        try:
            yield host.current_stream[-1]
        finally:
            host.current_stream.pop()

    def side_stream(self) -> contextlib.AbstractContextManager[Stream]:
        """:meth:`stream`, with one stream for all uses."""
        if self._side_stream is None:
            self._side_stream = self._machine.add_stream()
        return self.stream(self._side_stream)

    def synchronize(self) -> None:
        """Return once everything this rank launched has finished."""
        self._open()
        self._machine.synchronize()

    def start_network(self, memory: SymmetricMemory, ring: torch.Tensor, entry_words: int) -> None:
        """Put whatever kernels of this rank hand off in ``ring`` (comm/networks/ring.py) into the peers' copies of
        ``memory``, in any order that the network's model allows."""
        self._open()
        self._machine.add_network_interface(self.rank, memory.handle, ring, entry_words)

    def network_use(self) -> NetworkUse:
        """What this rank's network interface has put so far, to all peers. The puts of a call are all in it once every
        rank has ended the call."""
        return self._machine.network_use(self.rank)

    def close(self) -> None:
        """Local. No call is legal afterwards."""
        self._closed = True
