"""Backend choice and the shared-memory backend, on real processes."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.word_kernels import add_kernel, put_kernel, wait_and_sum_kernel
from tests.distributed import Ranks, run_ranks
from triton_overlap.comm import backends
from triton_overlap.comm.backend import CopyStream
from triton_overlap.comm.backends import cuda, shm
from triton_overlap.errors import BackendError, ClosedError, CommTimeoutError

TIMEOUT_S = 30.0
SEGMENT_PREFIX = "triton_overlap-"


def _segments(token: str) -> list[str]:
    """Names of the segments of the group with this token; other processes have theirs in the same place."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"{SEGMENT_PREFIX}{token}-")]


def _mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(SEGMENT_PREFIX in line for line in maps)


def _shm() -> Any:
    return backends.create("shm", timeout_s=TIMEOUT_S)


def _auto() -> Any:
    return backends.create("auto", timeout_s=TIMEOUT_S)


# ---- choice -----------------------------------------------------------------------------------------------------


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown backend 'mpi'; known are 'auto', 'cuda', 'nvshmem', 'shm'"):
        backends.create("mpi")
    with pytest.raises(ValueError, match="World"):
        backends.create("sim")


def test_failed_import_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_overlap.comm.backends.cuda", None)
    with pytest.raises(BackendError, match=r"cuda backend cannot be loaded: ModuleNotFoundError: .*halted"):
        backends.create("cuda")


def _chosen() -> str:
    backend = _auto()
    backend.close()
    return backend.name


def test_auto_is_shm_without_gpus() -> None:
    assert run_ranks(2, _chosen) == ["shm", "shm"]


def test_kernels_that_are_not_interpreted_are_refused() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = "import triton; from triton_overlap.comm import backends; backends.create('shm')"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S * 2
    )
    assert "BackendError: the shm backend cannot run here" in result.stderr
    assert "set TRITON_INTERPRET=1" in result.stderr


def _refused(entry: str, value: Any, match: str) -> None:
    facts = shm._facts()
    if dist.get_rank() == 1:
        facts[entry] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm, "_facts", lambda: facts)
        with pytest.raises(BackendError, match=match):
            _shm()


@pytest.mark.parametrize(
    "entry, value, match",
    [
        ("host", "another", "ranks 0 and 1 do not share one /dev/shm .* start all ranks .* on one host"),
        ("mount", -1, "ranks 0 and 1 do not share one /dev/shm"),
        ("directory", "gone", r"on rank 1 there is no usable /dev/shm \(gone\); mount a tmpfs"),
    ],
)
def test_ranks_without_common_memory_are_refused_on_every_rank(entry: str, value: Any, match: str) -> None:
    run_ranks(2, _refused, entry, value, match)


# ---- shared memory ----------------------------------------------------------------------------------------------


def _tables() -> None:
    backend = _shm()
    rank, world_size = backend.rank, backend.world_size
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    assert isinstance(backend.copies, CopyStream)
    memory = backend.symmetric_empty(5000, TIMEOUT_S)
    assert memory.local.dtype == torch.uint8
    assert memory.local.shape == (5000,)
    assert not memory.local.any()
    assert memory.table.dtype == torch.int64
    assert memory.table.shape == (world_size,)
    assert memory.table[rank] == memory.local.data_ptr()
    assert not (memory.table % 1024).any()
    assert len(set(memory.table.tolist())) == world_size
    memory.local.fill_(rank + 1)
    backend.barrier(TIMEOUT_S)
    for peer, address in enumerate(memory.table.tolist()):
        assert set(ctypes.string_at(address, 5000)) == {peer + 1}
    backend.barrier(TIMEOUT_S)
    # Each peer stores to its own word of everybody's copy; words of other ranks keep what they had.
    for peer in range(world_size):
        put_kernel[(1,)](memory.table, peer, 1000 + rank, rank - 5, 16 * rank, 100 * rank + peer, N=16)
    backend.barrier(TIMEOUT_S)
    words = memory.local.view(torch.int32)
    for source in range(world_size):
        assert words[16 * source : 16 * source + 16].tolist() == [100 * source + rank] * 16
        assert words[1000 + source] == source - 5
    assert words[16 * world_size] == (rank + 1) * 0x01010101
    backend.barrier(TIMEOUT_S)
    gc.collect()  # earlier tests of these processes may have left groups in reference cycles
    assert _mappings() == world_size
    backend.free(memory)
    del memory, words
    gc.collect()
    assert _mappings() == 0
    backend.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_reaches_every_copy(world_size: int) -> None:
    run_ranks(world_size, _tables)


def test_shm_without_torch_distributed() -> None:
    backend = backends.create("shm")
    memory = backend.symmetric_empty(64, 1.0)
    add_kernel[(1,)](memory.table, 0, 3, 7)
    assert memory.local.view(torch.int32)[3] == 7
    backend.close()


def _count(count: int) -> int:
    backend = _auto()
    memory = backend.symmetric_empty(64, TIMEOUT_S)
    add_kernel[(1,)](memory.table, 0, 3, count)
    backend.synchronize()
    backend.barrier(TIMEOUT_S)
    total = int(memory.local.view(torch.int32)[3])
    backend.close()
    return total


def test_atomics_of_several_processes_lose_nothing() -> None:
    assert run_ranks(3, _count, 400) == [1200, 0, 0]


def _hand_over(rounds: int) -> None:
    """A token goes round the ranks; every hand-over carries 64 words, by kernel and by copy in turn."""
    backend = _auto()
    rank, world_size = backend.rank, backend.world_size
    memory = backend.symmetric_empty(4096, TIMEOUT_S)
    total = torch.zeros(1, dtype=torch.int32, device=backend.device)
    following = (rank + 1) % world_size
    for epoch in range(1, rounds + 1):
        first = 64 * (epoch % 2)
        if rank > 0 or epoch > 1:
            expected = epoch if rank > 0 else epoch - 1
            place = first if rank > 0 else 64 - first
            wait_and_sum_kernel[(1,)](memory.table, rank, 1000, expected, place, total, N=64)
            assert total.item() == 64 * expected
        if epoch % 2:
            put_kernel[(1,)](memory.table, following, 1000, epoch, first, epoch, N=64)
        else:
            source = torch.full((8, 8), epoch, dtype=torch.int32, device=backend.device)
            backend.copies.begin()  # covers what the stream holds by now, so the source comes first
            backend.copies.push(memory, following, 4 * first, source, 4000, epoch)
            backend.copies.end()
    backend.synchronize()
    backend.barrier(TIMEOUT_S)
    backend.free(memory)
    backend.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_data_is_there_when_its_flag_is(world_size: int) -> None:
    run_ranks(world_size, _hand_over, 40)


# ---- cuda -------------------------------------------------------------------------------------------------------

GPU = {"local": None, "hostname": "a", "host": "1", "index": 0, "device": "uuid-0", "overlap": False}
SHARED = {**GPU, "overlap": True}


@pytest.mark.parametrize(
    "second, match",
    [
        ({**GPU, "local": "torch sees no GPU"}, "on rank 1: torch sees no GPU"),
        (
            {**GPU, "host": "2", "hostname": "b"},
            r"ranks 0 and 1 are on different hosts \(a and b\).*make a group of each",
        ),
        (GPU, r"ranks 0 and 1 use one GPU; call torch.cuda.set_device\(local_rank\).*OVERLAPPING_DEVICES=1.* gloo"),
        (SHARED, r"ranks 0 and 1 use one GPU"),  # set on one rank only
        ({**GPU, "device": "uuid-1"}, r"both call theirs cuda:0.*let every rank see all GPUs"),
    ],
)
def test_what_cuda_refuses(second: dict[str, Any], match: str) -> None:
    problem = cuda._problem([GPU, second])
    assert problem is not None
    assert re.search(match, problem)


def test_what_cuda_accepts() -> None:
    assert cuda._problem([GPU]) is None
    assert cuda._problem([GPU, {**GPU, "index": 1, "device": "uuid-1"}]) is None
    assert cuda._problem([SHARED, SHARED]) is None


def test_what_nvshmem_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use(name: str) -> None:
        raise RuntimeError("memory was allocated")

    memory = importlib.import_module("torch.distributed._symmetric_memory")
    answers: list[tuple[Any, str, Any, str | None]] = [
        (memory, "is_nvshmem_available", lambda: False, "finds no NVSHMEM; install nvidia-nvshmem-cu"),
        (memory, "is_nvshmem_available", lambda: True, "call init_process_group first"),
        (dist, "is_initialized", lambda: True, None),
        (memory, "get_backend", lambda device: "CUDA", None),
        (memory, "set_backend", in_use, r"from NVSHMEM \(memory was allocated\); make the first group of this process"),
        (memory, "get_backend", lambda device: "NVSHMEM", None),
    ]
    for module, name, answer, match in answers:
        monkeypatch.setattr(module, name, answer)
        if match is not None:
            assert re.search(match, cuda._nvshmem_problem() or "") is not None
    assert cuda._nvshmem_problem() is None


def test_nccl_of_another_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "nvidia-nccl-cu12":
            return "2.27.3"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    problem = cuda._nccl_conflict("13.0")
    assert problem is not None
    assert "nvidia-nccl-cu12 2.27.3" in problem
    assert "pip uninstall nvidia-nccl-cu12" in problem
    assert "--force-reinstall nvidia-nccl-cu13" in problem
    assert cuda._nccl_conflict("12.8") is None


def test_cuda_without_gpus_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    with pytest.raises(BackendError, match=r"on rank 0: torch .*(without CUDA|sees no GPU).* use the shm backend"):
        backends.create("cuda")


def _on_gpus() -> None:
    backend = _auto()
    rank, world_size = backend.rank, backend.world_size
    assert backend.name == "cuda"
    assert isinstance(backend.copies, CopyStream)
    properties = torch.cuda.get_device_properties(backend.device)
    assert backend.num_programs == properties.multi_processor_count
    with pytest.raises(ValueError, match=r"different sizes of one .* by rank: "):
        backend.symmetric_empty(100 + rank, TIMEOUT_S)
    memory = backend.symmetric_empty(5000, TIMEOUT_S)
    assert memory.local.shape == (5000,)
    assert memory.local.device == memory.table.device == backend.device
    assert not memory.local.any()
    assert memory.table[rank] == memory.local.data_ptr()
    assert not (memory.table % 1024).any()
    backend.barrier(TIMEOUT_S)
    for peer in range(world_size):
        put_kernel[(1,)](memory.table, peer, 1000 + rank, rank - 5, 16 * rank, 100 * rank + peer, N=16)
    backend.synchronize()
    backend.barrier(TIMEOUT_S)
    words = memory.local.view(torch.int32).tolist()
    for source in range(world_size):
        assert words[16 * source : 16 * source + 16] == [100 * source + rank] * 16
        assert words[1000 + source] == source - 5
    assert not any(words[16 * world_size : 1000])
    # Epochs wrap to negative numbers; an empty chunk is announced all the same.
    backend.barrier(TIMEOUT_S)
    following = (rank + 1) % world_size
    source = torch.arange(6, dtype=torch.bfloat16, device=backend.device) + 10 * rank
    backend.copies.begin()
    backend.copies.push(memory, following, 2048, source, 4000, -(2**31))
    backend.copies.push(memory, following, 0, source[:0], 4004, -1)
    backend.copies.end()
    backend.synchronize()
    backend.barrier(TIMEOUT_S)
    before = (rank - 1) % world_size
    assert memory.local[2048:2060].view(torch.bfloat16).tolist() == [10 * before + i for i in range(6)]
    assert memory.local[4000:4008].view(torch.int32).tolist() == [-(2**31), -1]
    # Host words: written by a kernel by address, read without a copy.
    host = backend.host_words(16)
    assert host.is_pinned()
    address = torch.tensor([host.data_ptr()], device=backend.device)
    put_kernel[(1,)](address, 0, 20, 7, 0, 3, N=16)
    backend.synchronize()
    assert host.view(torch.int32)[:21].tolist() == [3] * 16 + [0] * 4 + [7]
    assert not backend.local_zeros(100).any()
    backend.wait_event(backend.record_event())
    backend.barrier(TIMEOUT_S)
    backend.free(memory)
    backend.close()


def test_cuda_memory_copies_and_host_words(gpu_ranks: Ranks) -> None:
    gpu_ranks.run(_on_gpus)


def test_cuda_atomics_of_several_processes_lose_nothing(gpu_ranks: Ranks) -> None:
    total, *others = gpu_ranks.run(_count, 400)
    assert total == 400 * gpu_ranks.world_size
    assert not any(others)


def test_cuda_data_is_there_when_its_flag_is(gpu_ranks: Ranks) -> None:
    gpu_ranks.run(_hand_over, 40)


# ---- shared memory, again: allocation and its failures ----------------------------------------------------------


def _push_types() -> list[Any]:
    backend = _shm()
    memory = backend.symmetric_empty(1024, TIMEOUT_S)
    peer = 1 - backend.rank
    source = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) + 10 * backend.rank
    with pytest.raises(ValueError, match=r"contiguous, got shape \[3, 2\]"):
        backend.copies.push(memory, peer, 0, source.t(), 512, 1)
    backend.copies.push(memory, peer, 32, source, 512, -(2**31))
    backend.copies.push(memory, peer, 0, source[:0], 516, 5)  # an empty chunk is announced all the same
    backend.barrier(TIMEOUT_S)
    received = memory.local[32:44].view(torch.bfloat16).tolist()
    flags = memory.local[512:520].view(torch.int32).tolist()
    assert not memory.local[:32].any()
    assert not memory.local[44:512].any()
    backend.close()
    return [received, flags]


def test_push_of_other_types_and_of_nothing() -> None:
    flags = [-(2**31), 5]
    assert run_ranks(2, _push_types) == [[[10, 11, 12, 13, 14, 15], flags], [[0, 1, 2, 3, 4, 5], flags]]


def _different_sizes() -> str:
    backend = _shm()
    with pytest.raises(ValueError, match=r"different sizes of one .* by rank: \[100, 101, 102\]"):
        backend.symmetric_empty(100 + backend.rank, TIMEOUT_S)
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        backend.symmetric_empty(0, TIMEOUT_S)
    backend.symmetric_empty(100, TIMEOUT_S)
    backend.close()
    return backend._token


def test_different_sizes_are_an_error_on_every_rank() -> None:
    token, *_ = run_ranks(3, _different_sizes)
    assert _segments(token) == []


def _too_large(num_bytes: int) -> str:
    backend = _shm()
    with pytest.raises(BackendError, match=f"cannot reserve {num_bytes} bytes in /dev/shm .*No space left"):
        backend.symmetric_empty(num_bytes, TIMEOUT_S)
    backend.symmetric_empty(100, TIMEOUT_S)
    backend.close()
    return backend._token


def test_more_than_the_file_system_holds_is_an_error() -> None:
    statistics = os.statvfs("/dev/shm")
    size = statistics.f_blocks * statistics.f_frsize
    if size == 0:
        pytest.skip("/dev/shm is unlimited here")
    token, _ = run_ranks(2, _too_large, size + 4096)
    assert _segments(token) == []


def _full_on_one_rank() -> str:
    backend = _shm()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if backend.rank == 1:
            patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(BackendError, match=r"failed on rank 1: cannot reserve 4096 bytes .* make it larger"):
            backend.symmetric_empty(4096, TIMEOUT_S)
    backend.symmetric_empty(4096, TIMEOUT_S)
    backend.close()
    return backend._token


def test_one_rank_without_room_is_an_error_on_every_rank() -> None:
    token, *_ = run_ranks(3, _full_on_one_rank)
    assert _segments(token) == []


def _no_names_left() -> tuple[str, list[str]]:
    backend = _shm()
    memory = backend.symmetric_empty(4096, TIMEOUT_S)
    backend.barrier(TIMEOUT_S)
    names = _segments(backend._token)
    backend.barrier(TIMEOUT_S)
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    memory.local.fill_(1)
    backend.close()
    return backend._token, names


def test_killed_rank_leaves_no_segment() -> None:
    (token, names), killed = run_ranks(2, _no_names_left, killed=[1])
    assert killed is None
    assert names == _segments(token) == []


def _killed_while_allocating() -> tuple[str, str]:
    backend = _shm()
    if backend.rank == 1:
        shm._map = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommTimeoutError) as raised:
        backend.symmetric_empty(4096, 1.0)
    backend.close()
    return backend._token, str(raised.value)


def test_rank_killed_while_allocating_leaves_no_segment() -> None:
    (token, message), _ = run_ranks(2, _killed_while_allocating, killed=[1])
    assert "waited 1 s for rank 1" in message
    assert _segments(token) == []


def _clock() -> None:
    def ticking() -> bool:
        return any(thread.name == "shm clock" for thread in threading.enumerate())

    def now() -> int:
        return ctypes.c_int64.from_address(first.clock_address).value

    def comes_true(condition: Callable[[], bool]) -> bool:
        """Soon; a loaded machine may keep the clock's thread waiting."""
        deadline = time.monotonic() + 5
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        return condition()

    first, second = _shm(), _shm()
    assert first.clock_address == second.clock_address
    assert comes_true(lambda: abs(now() - time.monotonic_ns()) < 50_000_000)
    before = now()
    assert comes_true(lambda: now() - before > 50_000_000)
    first.close()
    first.close()
    assert ticking()
    second.close()
    assert comes_true(lambda: not ticking())
    with pytest.raises(ClosedError):
        second.barrier(1.0)
    third = _shm()
    before = now()
    assert comes_true(lambda: now() > before)
    third.close()


def test_clock_ticks_while_a_backend_is_open() -> None:
    run_ranks(1, _clock)


def _local_memory() -> None:
    backend = _shm()
    assert not backend.local_zeros(100).any()
    words = backend.host_words(4)
    assert words.dtype == torch.int64
    assert words.tolist() == [0, 0, 0, 0]
    backend.wait_event(backend.record_event())
    backend.synchronize()
    backend.close()


def test_local_memory_is_zero_and_events_order_nothing() -> None:
    run_ranks(1, _local_memory)
