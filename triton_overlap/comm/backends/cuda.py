"""The ``cuda`` backend: NVIDIA GPUs of one host, through ``torch.distributed._symmetric_memory``; and ``nvshmem``, the
same with memory of NVSHMEM's symmetric heap, which the network of that name needs.

That module is private to torch, so every use of it is in this file; written for torch 2.11 to 2.13.

A process has one kind of symmetric memory for all its life. NVSHMEM starts with the first allocation, and every
allocation is collective over all ranks of the job: so a group of ``nvshmem`` is the whole world of torch.distributed,
and torch gives its memory back only when the process ends. ``NVSHMEM_REMOTE_TRANSPORT=none`` keeps it from looking for
a network where none is needed. That is set here, and ``NVSHMEM_DISABLE_NVLS=1``, unless the environment has them.

More ranks than GPUs: set ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`` on every rank and use a gloo process group,
since nccl refuses to share a GPU. Kernels of different processes on one GPU run by turns of milliseconds: good for
tests at larger world sizes, of no use for speed.

Multicast objects are neither made nor used.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton.language as tl
from torch._C._distributed_c10d import _SymmetricMemory
from triton import knobs
from triton.runtime.jit import JITFunction

from triton_overlap.comm.backend import SymmetricMemory
from triton_overlap.comm.bootstrap import Bootstrap
from triton_overlap.comm.processes import ProcessBackend, pushed_bytes
from triton_overlap.errors import BackendError

_ALIGNMENT = 1024
_OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_NO_MULTICAST_VARIABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class _Mapping:
    """What keeps one symmetric allocation alive, and its copies as tensors on this rank's device."""

    def __init__(self, allocation: torch.Tensor, handle: Any, copies: list[torch.Tensor]) -> None:
        self.allocation: torch.Tensor | None = allocation
        self.handle = handle
        self.copies = copies
        # The primitive that writes flags wants flat uint32.
        self.words = [copy.view(torch.uint32) for copy in copies]

    def release(self) -> None:
        self.words.clear()
        self.copies.clear()
        self.handle = None
        self.allocation = None


class _CopyEngine:
    """Pushes by the copy engine, on a stream of its own.

    Callers enqueue the pushes of a call before the kernel that waits for the peers' pushes. Streams are multiplexed on
    a few hardware queues (one, with ``CUDA_DEVICE_MAX_CONNECTIONS=1``): a copy enqueued later may stand in a queue
    behind the kernel that spins, and if that is so on two ranks they wait for each other for ever.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority, so that a push starts although the calling stream's kernels fill the GPU.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def begin(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "copy-engine pushes cannot be captured in a CUDA graph, since a replay would write the flags of the "
                "capture's epoch again; captured calls push from inside their kernels"
            )
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

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
        with torch.cuda.stream(self._stream):
            if data.numel():
                # Both sides are contiguous bytes on what torch takes for one device, so this is a plain asynchronous
                # memory copy: the copy engine's, and not a kernel that would need a place on a full GPU.
                target = memory.handle.copies[peer][byte_offset : byte_offset + data.numel()]
                target.copy_(data, non_blocking=True)
            # In stream order after the copy, with a fence of system scope before the write: a release. Epochs are
            # int32 that wrap; the primitive takes the same 32 bits as an unsigned number.
            words = memory.handle.words[peer]
            _SymmetricMemory.stream_write_value32(words, flag_byte_offset // 4, flag_value & 0xFFFFFFFF)

    def end(self) -> None:
        # This also keeps `source`: whoever gets its memory from torch's allocator uses it on the current stream, after
        # this point.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _Event(torch.cuda.Event):
    """An event that knows the stream it was last recorded on."""

    recorded_on: Any = None

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.recorded_on = stream


class CudaBackend(ProcessBackend):
    """See :class:`triton_overlap.comm.backend.Backend` and the module's page. Collective.

    The device is torch's current one: call ``torch.cuda.set_device`` first.

    Args:
        bootstrap: how the hosts of the ranks meet.
        timeout_s: how long construction waits for the other ranks, in seconds.
        process_group: the same ranks; None for a group of one.

    Raises:
        BackendError: on every rank, with what is missing on which of them and what would help.
        CommTimeoutError: ranks that did not come.
    """

    name = "cuda"
    #: torch's name of where symmetric memory comes from.
    heap = "CUDA"
    interpreted = False
    clock_address = 0

    def __init__(self, bootstrap: Bootstrap, timeout_s: float, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(bootstrap, process_group)
        self._process_group = process_group
        entries = bootstrap.all_gather_object(_facts(self.heap), timeout_s)
        _refuse(self.name, _problem(entries) or self._group_problem())
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Who reaches whom differs from rank to rank; all must refuse alike.
        for problem in bootstrap.all_gather_object(_unreachable_peer(self.rank, entries), timeout_s):
            _refuse(self.name, problem)
        self.num_programs: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.copies = _CopyEngine(self.device)
        # High priority, so that a few programs that communicate get their places beside a GEMM that fills the GPU.
        self._side_stream = torch.cuda.Stream(self.device, priority=-1)
        self._streams: dict[tuple[int, ...], torch.cuda.Stream] = {}

    def _group_problem(self) -> str | None:
        """What is wrong with these ranks, alike on all of them."""
        return None

    @torch.inference_mode(False)
    def symmetric_empty(self, num_bytes: int, timeout_s: float) -> SymmetricMemory:
        """See the protocol. ``BackendError`` on every rank where one rank's GPU has no memory left."""
        self._check_allocation(num_bytes)
        padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        allocation, problem = None, None
        try:
            allocation = self._allocate(padded)
        except RuntimeError as failure:  # torch's out-of-memory error and the driver's are both of this class
            problem = f"cannot allocate {padded} bytes on {self.device} ({failure})"
        self._agree_on_allocation(num_bytes, problem, timeout_s)
        assert allocation is not None
        mapping, addresses = self._map(allocation)
        local = mapping.copies[self.rank][:num_bytes]
        allocation.zero_()
        table = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        # No rank's kernel may store here before every copy is zero.
        self._bootstrap.barrier(timeout_s)
        return SymmetricMemory(local, table, mapping)

    def free(self, memory: SymmetricMemory) -> None:
        # The memory itself goes with the last tensor that views it, after a wait for the device.
        memory.handle.release()

    @torch.inference_mode(False)
    def local_zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    @torch.inference_mode(False)
    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)

    def record_event(self, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = _Event() if again is None else again
        event.record(self._current_stream())
        return event

    def wait_event(self, event: torch.cuda.Event) -> None:
        stream = self._current_stream()
        if getattr(event, "recorded_on", None) is not stream:  # a stream's own order is enough
            stream.wait_event(event)

    def _current_stream(self) -> torch.cuda.Stream:
        # torch.cuda.current_stream makes a new object at each use, which costs more than what it is used for here.
        key = torch._C._cuda_getCurrentStream(self.device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(self.device)
        return stream

    def side_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._side_stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self._closed = True

    def _allocate(self, padded: int) -> torch.Tensor:
        """Uninitialised uint8 ``[padded]``, aligned, that peers can map."""
        if self.world_size == 1:
            spare = torch.empty(padded + _ALIGNMENT, dtype=torch.uint8, device=self.device)
            start = -spare.data_ptr() % _ALIGNMENT
            return spare[start : start + padded]
        # Not symm_mem.empty: that may take a part of a block which an earlier allocation left in torch's pool. After a
        # failure late writes of peers may still land in such a block, and ranks whose pools differ would disagree on
        # whether a block must still be mapped, which is collective.
        return _SymmetricMemory.empty_strided_p2p((padded,), (1,), torch.uint8, self.device)

    def _map(self, allocation: torch.Tensor) -> tuple[_Mapping, list[int]]:
        """Map every rank's copy; collective. Returns it with the address of each copy."""
        if self.world_size == 1:
            return _Mapping(allocation, None, [allocation]), [allocation.data_ptr()]
        assert self._process_group is not None
        with _without_multicast():
            handle: Any = symm_mem.rendezvous(allocation, self._process_group)
        addresses = [pointer + handle.offset for pointer in handle.buffer_ptrs]
        sizes = (allocation.numel(),)
        copies = [handle.get_buffer(peer, sizes, torch.uint8, handle.offset) for peer in range(self.world_size)]
        # What buffer_ptrs and get_buffer say of the offset is not documented: better an error than a wild store.
        if [copy.data_ptr() for copy in copies] != addresses or addresses[self.rank] != allocation.data_ptr():
            raise BackendError(
                f"torch {torch.__version__} lays symmetric memory out in a way that this library does not know "
                f"(offset {handle.offset}); use torch 2.11 to 2.13"
            )
        if any(address % _ALIGNMENT for address in addresses):
            raise BackendError(
                f"torch {torch.__version__} aligns symmetric memory to less than {_ALIGNMENT} bytes; use torch 2.11 "
                f"to 2.13"
            )
        return _Mapping(allocation, handle, copies), addresses


class NvshmemBackend(CudaBackend):
    """The same with memory of NVSHMEM's symmetric heap; see the module's page.

    Raises:
        BackendError: besides what ``CudaBackend`` does, where torch has no NVSHMEM, where this process has allocated
            symmetric memory of another kind, or where the ranks are not the whole world.
    """

    name = "nvshmem"
    heap = "NVSHMEM"

    def __init__(self, bootstrap: Bootstrap, timeout_s: float, process_group: dist.ProcessGroup | None) -> None:
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")  # all ranks are on one host
        super().__init__(bootstrap, timeout_s, process_group)

    def _group_problem(self) -> str | None:
        world_size = dist.get_world_size()
        if self.world_size != world_size:
            return (
                f"its allocations are collective over all {world_size} ranks of the job, and the group has "
                f"{self.world_size}; make the group of the whole world, or use the cuda backend"
            )
        return None


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Keep torch from making a multicast object, which nothing here uses and not every machine survives."""
    before = os.environ.get(_NO_MULTICAST_VARIABLE)
    os.environ[_NO_MULTICAST_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST_VARIABLE]
        else:
            os.environ[_NO_MULTICAST_VARIABLE] = before


def _refuse(name: str, problem: str | None) -> None:
    if problem is not None:
        raise BackendError(f"the {name} backend cannot run here: {problem}")


def _facts(heap: str) -> dict[str, Any]:
    """What this rank's peers must know to decide, all alike, whether the backend can run."""
    facts: dict[str, Any] = {"local": _local_problem(heap), "hostname": os.uname().nodename}
    if facts["local"] is None:
        with open("/proc/sys/kernel/random/boot_id") as file:
            facts["host"] = file.read().strip()
        facts["index"] = torch.cuda.current_device()
        facts["device"] = str(torch.cuda.get_device_properties(facts["index"]).uuid)
        facts["overlap"] = os.environ.get(_OVERLAP_VARIABLE) == "1"
    return facts


def _local_problem(heap: str) -> str | None:
    """What is missing on this rank alone, with a remedy; None if nothing is."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build, or use the shm backend"
    if not torch.cuda.is_available():
        return "torch sees no GPU; check the driver and CUDA_VISIBLE_DEVICES, or use the shm backend"
    if knobs.runtime.interpret or not isinstance(tl.cdiv, JITFunction):
        return "kernels are interpreted; unset TRITON_INTERPRET before triton is imported, or use the shm backend"
    conflict = _nccl_conflict(torch.version.cuda)
    if conflict is not None:
        return conflict
    return _nvshmem_problem() if heap == "NVSHMEM" else _allocator_problem()


def _allocator_problem() -> str | None:
    allocator = symm_mem.get_backend(torch.device("cuda", torch.cuda.current_device()))
    if allocator != "CUDA":
        return (
            f"torch's symmetric memory comes from {allocator}; leave TORCH_SYMMMEM unset, do not call "
            f"torch.distributed._symmetric_memory.set_backend in this process, and make no group of the nvshmem backend"
        )
    return None


def _nvshmem_problem() -> str | None:
    """Have torch take symmetric memory from NVSHMEM. Returns why it cannot, with a remedy."""
    if not symm_mem.is_nvshmem_available():
        return (
            f"torch {torch.__version__} finds no NVSHMEM; install nvidia-nvshmem-cu{str(torch.version.cuda)[:2]}, or "
            f"use the cuda backend"
        )
    if not dist.is_initialized():
        return "NVSHMEM starts through torch.distributed; call init_process_group first, or use the cuda backend"
    if symm_mem.get_backend(torch.device("cuda")) == "NVSHMEM":
        return None
    try:
        symm_mem.set_backend("NVSHMEM")
    except RuntimeError as failure:
        return (
            f"torch cannot take symmetric memory from NVSHMEM ({failure}); make the first group of this process one of "
            f"the nvshmem backend"
        )
    return None


def _nccl_conflict(cuda: str) -> str | None:
    """NCCL packages for another CUDA than torch's own overwrite its ``libnccl.so.2``."""
    major = cuda.split(".")[0]
    for other in ("12", "13"):
        if other == major:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(f"nvidia-nccl-cu{other}")
            return (
                f"nvidia-nccl-cu{other} {version} is installed beside a torch for CUDA {cuda} and replaces the "
                f"libnccl.so.2 that this torch needs: pip uninstall nvidia-nccl-cu{other}, then "
                f"pip install --force-reinstall nvidia-nccl-cu{major}"
            )
    return None


def _problem(entries: list[dict[str, Any]]) -> str | None:
    """Why ranks with these facts cannot use the backend, with a remedy; None if they can."""
    for rank, entry in enumerate(entries):
        if entry["local"] is not None:
            return f"on rank {rank}: {entry['local']}"
    for rank, entry in enumerate(entries):
        if entry["host"] != entries[0]["host"]:
            return (
                f"ranks 0 and {rank} are on different hosts ({entries[0]['hostname']} and {entry['hostname']}), and "
                f"memory is mapped within a host; make a group of each host's ranks"
            )
    if all(entry["overlap"] for entry in entries):
        return None
    for rank, entry in enumerate(entries):
        for other in range(rank):
            if entry["device"] == entries[other]["device"]:
                return (
                    f"ranks {other} and {rank} use one GPU; call torch.cuda.set_device(local_rank) first, or, to share "
                    f"GPUs on purpose, set {_OVERLAP_VARIABLE}=1 on every rank and use a gloo process group"
                )
            if entry["index"] == entries[other]["index"]:
                return (
                    f"ranks {other} and {rank} use different GPUs, but both call theirs cuda:{entry['index']}, which "
                    f"torch takes for one; let every rank see all GPUs (one CUDA_VISIBLE_DEVICES for all), or set "
                    f"{_OVERLAP_VARIABLE}=1 on every rank"
                )
    return None


def _unreachable_peer(rank: int, entries: list[dict[str, Any]]) -> str | None:
    """A peer's GPU, visible here, whose memory ``rank``'s GPU cannot map; None if there is none."""
    own = entries[rank]["device"]
    indices = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    for peer, entry in enumerate(entries):
        index = indices.get(entry["device"])
        if index is None or entry["device"] == own:
            continue
        if not torch.cuda.can_device_access_peer(indices[own], index):
            return (
                f"the GPU of rank {rank} (cuda:{indices[own]}) has no peer access to that of rank {peer} "
                f"(cuda:{index}); use GPUs that NVLink or a common PCIe switch connects (nvidia-smi topo -p2p r)"
            )
    return None
