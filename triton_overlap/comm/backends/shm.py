"""The ``shm`` backend: one process a rank on one host, POSIX shared memory, kernels under Triton's interpreter.

Real concurrency without a GPU. A rank's launch runs its programs one after another, so ``num_programs`` is 1, and
whatever was launched has finished when the launch returns, so streams and events have nothing to do.

Life of a segment: every rank creates a file of its own in ``/dev/shm`` with all its space reserved (a full file system
is then an error here, and not a SIGBUS at the first store), maps everybody's, and removes the name of its own once
everybody has. From then on the kernel frees the memory with the last mapping, however the processes end. Only a process
killed between creation and the next meeting leaves a name behind, and its peers remove that when they give up on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from triton_overlap.comm import interpreter
from triton_overlap.comm.backend import SymmetricMemory
from triton_overlap.comm.bootstrap import Bootstrap
from triton_overlap.comm.processes import ProcessBackend, pushed_bytes
from triton_overlap.errors import BackendError, CommError

_DIRECTORY = "/dev/shm"
#: Seconds between two ticks of the clock word. Kernels measure timeouts of a second and more with it.
_TICK_S = 0.002


@triton.jit
def _release_kernel(flag_ptr: Any, value: Any) -> None:
    """Store int32 ``value`` at ``flag_ptr``, after everything this process stored before."""
    tl.atomic_xchg(flag_ptr, value, sem="release", scope="sys")


class _Process:
    """What the shm backends of one process share while any of them is open.

    A clock: an int64 word that holds ``time.monotonic_ns()``, kept up to date by a daemon thread, since kernels under
    the interpreter cannot read a timer. And polite polling: a rank that polls a peer's flag gives its processor away,
    which the peer may need.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._pollers = 0
        self._word = ctypes.c_int64(0)
        self._stop = threading.Event()
        self._hooks: interpreter.SpinYield | None = None

    @property
    def clock_address(self) -> int:
        return ctypes.addressof(self._word)

    def enter(self, polls: bool) -> None:
        """One more backend; ``polls`` where it has peers. ``BackendError`` while a simulation has the interpreter."""
        with self._lock:
            if polls and self._pollers == 0:
                self._hooks = interpreter.yield_on_spin()
            self._pollers += polls
            self._users += 1
            if self._users == 1:
                self._word.value = time.monotonic_ns()
                self._stop = threading.Event()
                threading.Thread(target=self._tick, args=(self._stop,), name="shm clock", daemon=True).start()

    def leave(self, polls: bool) -> None:
        """One backend less."""
        with self._lock:
            self._pollers -= polls
            self._users -= 1
            if polls and self._pollers == 0 and self._hooks is not None:
                interpreter.uninstall(self._hooks)
                self._hooks = None
            if self._users == 0:
                self._stop.set()

    def _tick(self, stop: threading.Event) -> None:
        while not stop.wait(_TICK_S):
            self._word.value = time.monotonic_ns()


_process = _Process()


@dataclass(eq=False)
class _Segments:
    """Every rank's copy of one symmetric allocation, mapped here; each tensor keeps its mapping alive."""

    copies: list[torch.Tensor] = field(default_factory=list)


class _Copies:
    """Transfers beside the kernels: a plain copy and a flag, finished when ``push`` returns."""

    def begin(self) -> None:
        """Nothing to order: whatever was launched has finished."""

    def push(
        self,
        memory: SymmetricMemory,
        peer: int,
        byte_offset: int,
        source: torch.Tensor,
        flag_byte_offset: int,
        flag_value: int,
    ) -> None:
        data = pushed_bytes(source)
        target = memory.handle.copies[peer]
        target[byte_offset : byte_offset + data.numel()].copy_(data)
        # A release by an atomic, since nothing else here promises to keep the order of the copy and the flag: neither
        # torch nor Python does, and not every CPU.
        _release_kernel[(1,)](target[flag_byte_offset : flag_byte_offset + 4].view(torch.int32), flag_value)

    def end(self) -> None:
        """Nothing to wait for."""


class ShmBackend(ProcessBackend):
    """See :class:`triton_overlap.comm.backend.Backend` and the module's page. Collective.

    Args:
        bootstrap: how the ranks meet.
        timeout_s: how long construction waits for the other ranks, in seconds.
        process_group: the same ranks, for collectives; None for none.

    Raises:
        BackendError: on every rank, where kernels of any rank are not interpreted, or ranks do not share one
            ``/dev/shm``, or two ranks are one process.
        CommTimeoutError: ranks that did not come.
    """

    name = "shm"
    interpreted = True
    num_programs = 1

    def __init__(self, bootstrap: Bootstrap, timeout_s: float, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(bootstrap, process_group)
        self.device = torch.device("cpu")
        self.copies = _Copies()
        self._serial = 0
        entries = bootstrap.all_gather_object(_facts(), timeout_s)
        problem = _problem(entries)
        if problem is not None:
            raise BackendError(f"the shm backend cannot run here: {problem}")
        # Rank 0's token names this group's segments.
        self._token: str = entries[0]["token"]
        _process.enter(polls=self.world_size > 1)
        self.clock_address = _process.clock_address

    @torch.inference_mode(False)
    def symmetric_empty(self, num_bytes: int, timeout_s: float) -> SymmetricMemory:
        """See the protocol. ``BackendError`` on every rank where one rank's ``/dev/shm`` has no room."""
        self._check_allocation(num_bytes)
        serial, self._serial = self._serial, self._serial + 1
        name = f"triton_overlap-{self._token}-{self._generation}-{serial}"
        paths = [os.path.join(_DIRECTORY, f"{name}-{rank}") for rank in range(self.world_size)]
        try:
            # Every rank goes to both meetings whatever happened to it, so that all get the same error.
            self._agree_on_allocation(num_bytes, _create(paths[self.rank], num_bytes), timeout_s)
            segments = _Segments()
            self._agree_on_allocation(num_bytes, _map(paths, num_bytes, segments), timeout_s)
        except CommError:
            # Somebody is missing, perhaps for good: its name goes too.
            for path in paths:
                _unlink(path)
            raise
        finally:
            _unlink(paths[self.rank])
        addresses = [copy.data_ptr() for copy in segments.copies]
        table = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return SymmetricMemory(segments.copies[self.rank], table, segments)

    def rejoin(self, timeout_s: float) -> None:
        super().rejoin(timeout_s)
        self._serial = 0  # ranks may have failed at different allocations

    def free(self, memory: SymmetricMemory) -> None:
        # The mappings of peers' copies go now; the own one goes with the last tensor that views it.
        memory.handle.copies.clear()

    @torch.inference_mode(False)
    def local_zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    @torch.inference_mode(False)
    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def record_event(self, again: None = None) -> None:
        """None: whatever was launched has finished."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to switch: whatever was launched has finished."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _process.leave(polls=self.world_size > 1)


def _facts() -> dict[str, Any]:
    """What this rank's peers must know to decide, all alike, whether the backend can run."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read().strip()
        # Two containers on one host have the same boot id, but each its own file system here.
        mount = os.stat(_DIRECTORY).st_dev
        directory = None
    except OSError as failure:
        host, mount, directory = "", 0, str(failure)
    return {
        "host": host,
        "mount": mount,
        "directory": directory,
        "hostname": os.uname().nodename,
        # The same number may be given in another process namespace.
        "process": (os.getpid(), os.stat("/proc/self/ns/pid").st_ino),
        "interpreter": _interpreter_problem(),
        "token": uuid.uuid4().hex[:16],
    }


def _interpreter_problem() -> str | None:
    """Why kernels cannot run under the interpreter in this process, with a remedy; None if they can."""
    try:
        interpreter.prepare()
    except BackendError as error:
        return str(error)
    if isinstance(_release_kernel, JITFunction):
        return "TRITON_INTERPRET was unset after triton had been imported; leave it set to 1"
    return None


def _problem(entries: list[dict[str, Any]]) -> str | None:
    """Why ranks with these facts cannot use the backend, with a remedy; None if they can."""
    for rank, entry in enumerate(entries):
        if entry["interpreter"] is not None:
            return f"on rank {rank}: {entry['interpreter']}"
        if entry["directory"] is not None:
            return f"on rank {rank} there is no usable {_DIRECTORY} ({entry['directory']}); mount a tmpfs there"
        if (entry["host"], entry["mount"]) != (entries[0]["host"], entries[0]["mount"]):
            return (
                f"ranks 0 and {rank} do not share one {_DIRECTORY} (hosts {entries[0]['hostname']} and "
                f"{entry['hostname']}); start all ranks of the group on one host, in one container"
            )
        for other in range(rank):
            if entry["process"] == entries[other]["process"]:
                return f"ranks {other} and {rank} are one process; start one process a rank, or use the simulator"
    return None


def _create(path: str, num_bytes: int) -> str | None:
    """Create the file with all its bytes reserved and zero. Returns what went wrong, or None."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Memory that is only promised (ftruncate) would kill the process at the store that finds none left.
            os.posix_fallocate(descriptor, 0, num_bytes)
        finally:
            os.close(descriptor)
    except OSError as failure:
        return f"cannot reserve {num_bytes} bytes in {_DIRECTORY} ({failure.strerror}); make it larger or ask for less"
    return None


def _map(paths: list[str], num_bytes: int, segments: _Segments) -> str | None:
    """Map every rank's file into ``segments``. Returns what went wrong, or None."""
    try:
        for path in paths:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
            # The tensor's storage holds the mapping, which is undone when the last view is gone. It is never closed
            # by hand: torch would not notice, and a store through a view left over would end the process.
            segments.copies.append(torch.frombuffer(mapping, dtype=torch.uint8))
    except OSError as failure:
        segments.copies.clear()
        return f"cannot map {num_bytes} bytes of shared memory ({failure.strerror})"
    return None


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
