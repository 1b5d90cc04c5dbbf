"""Rank processes for tests: ``run_ranks(world_size, fn, *args)`` calls ``fn(*args)`` once in each of them.

The processes of one world size and device are started once and reused by every test, since importing torch takes longer
than most tests. Each call gets a process group of its own as the default group of ``torch.distributed``, so that a test
which leaves ranks out of step does not disturb the next one. After a failure, a hang or a death the processes are
replaced.

``fn`` must be importable: a function at the top level of a test module. What it returns must be picklable.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # what torch.distributed re-exports, typed

#: How long a whole call may take, in seconds.
DEFAULT_TIMEOUT_S = 120.0
#: How long the other ranks may still run after one has failed, in seconds: it may be all they wait for.
_GRACE_S = 5.0
#: What ``faulthandler`` writes above the stack of the thread that got the signal, its last.
_LAST_STACK = b"Current thread"
_PR_SET_PDEATHSIG = 1
#: What CPU ranks have imported when they start; inductor's settings are loaded by torch's deterministic mode.
_PRELOADED = [
    "pytest",
    "torch",
    "torch._inductor.config",
    "torch.distributed",
    "triton",
    "triton.runtime.interpreter",
    "tests.distributed",
]


class RankError(AssertionError):
    """Ranks failed; the message holds every rank's traceback and output."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    killed: Sequence[int] = (),
) -> list[Any]:
    """Call ``fn(*args)`` on every rank and return the results in rank order.

    Args:
        world_size: number of processes.
        fn: a top-level function of an importable module.
        device: ``"cpu"``: kernels are interpreted and the default group is gloo. ``"cuda"``: rank r uses device
            ``r % device_count``; the default group is nccl and gloo where every rank has its own device, else gloo.
        timeout_s: for the whole call, in seconds.
        killed: ranks that ``fn`` kills; their results are None.

    Raises:
        RankError: a rank raised, died, or did not finish in time; then with every rank's Python stack.
    """
    key = (world_size, device)
    pool = _pools.get(key)
    if pool is None or not pool.sound:
        pool = _pools[key] = _Pool(world_size, device)
    return pool.run(fn, args, timeout_s, frozenset(killed))


@dataclass(frozen=True)
class Ranks:
    """``run_ranks`` with the world size and the device fixed."""

    world_size: int
    device: str = "cpu"

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, killed: Sequence[int] = ()
    ) -> list[Any]:
        return run_ranks(self.world_size, fn, *args, device=self.device, timeout_s=timeout_s, killed=killed)


def close_pools() -> None:
    """End all rank processes."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def fill_uninitialized_memory() -> None:
    """Make torch fill what ``torch.empty`` and its kin return with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@dataclass
class _Rank:
    process: BaseProcess
    connection: Connection
    output: Path
    printed: int = 0

    def new_output(self) -> str:
        data = self.output.read_bytes()[self.printed :]
        self.printed += len(data)
        return data.decode(errors="replace")


@dataclass
class _Outcome:
    """How a call ended on one rank: ``value`` if ``problem`` is None."""

    value: Any = None
    problem: str | None = None


@dataclass
class _Pool:
    world_size: int
    device: str
    sound: bool = True
    _calls: int = 0
    _ranks: list[_Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The store lives here rather than on rank 0, so that killing any rank leaves the others their store.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="triton_overlap_ranks_")
        # CPU ranks are forked from a server that has imported what takes long, which makes it cheap to replace them.
        # CUDA does not survive a fork, so GPU ranks start from nothing.
        context: Any = multiprocessing.get_context("forkserver" if self.device == "cpu" else "spawn")
        with _environment(self.world_size, self.device):
            if self.device == "cpu":
                multiprocessing.forkserver.set_forkserver_preload(_PRELOADED)
                multiprocessing.forkserver.ensure_running()
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                output = Path(self._folder.name) / f"{rank}.txt"
                output.touch()
                arguments = (theirs, output, rank, self.world_size, self.device, self._store.port)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours, output))

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, killed: frozenset[int]) -> list[Any]:
        self._calls += 1
        message = pickle.dumps((self._calls, fn, args))
        outcomes: dict[int, _Outcome] = {}
        for rank, process in enumerate(self._ranks):
            try:
                process.connection.send_bytes(message)
            except OSError:
                outcomes[rank] = _Outcome(problem=self._death(rank))
        self._collect(outcomes, time.monotonic() + timeout_s, killed)
        late = sorted(set(range(self.world_size)) - set(outcomes))
        for rank in late:
            outcomes[rank] = _Outcome(problem=f"did not finish within {timeout_s:g} s, or after another rank failed")
        if late:
            self._print_stacks(late)
        for rank in killed:
            if outcomes[rank].problem is None:
                outcomes[rank].problem = "was to be killed, but finished"
            elif self._ranks[rank].process.exitcode is not None:
                outcomes[rank] = _Outcome()
        output = [rank.new_output() for rank in self._ranks]
        failed = any(outcome.problem is not None for outcome in outcomes.values())
        if failed or killed:
            self.close()
        if failed:
            raise RankError(_report(self.device, outcomes, output))
        for rank, text in enumerate(output):
            if text:
                print(f"[rank {rank}] {text}", end="" if text.endswith("\n") else "\n")
        return [outcomes[rank].value for rank in range(self.world_size)]

    def close(self) -> None:
        self.sound = False
        for rank in self._ranks:
            rank.connection.close()
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
        self._folder.cleanup()

    def _collect(self, outcomes: dict[int, _Outcome], deadline: float, killed: frozenset[int]) -> None:
        """Receive outcomes until all are there or ``deadline``, which a failure moves forward, has passed."""
        waiting = {rank.connection: number for number, rank in enumerate(self._ranks) if number not in outcomes}
        while waiting:
            if any(outcome.problem is not None and rank not in killed for rank, outcome in outcomes.items()):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    outcomes[rank] = _Outcome(problem=self._death(rank))

    def _print_stacks(self, ranks: list[int]) -> None:
        """Have ``ranks`` print the stacks of all their threads, whatever they are doing."""
        for rank in ranks:
            pid = self._ranks[rank].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)  # whose handler every rank has installed
        deadline = time.monotonic() + _GRACE_S
        while ranks and time.monotonic() < deadline:
            time.sleep(0.2)
            ranks = [rank for rank in ranks if _LAST_STACK not in self._ranks[rank].output.read_bytes()]
        time.sleep(0.2)  # the last stack's own lines

    def _death(self, rank: int) -> str:
        process = self._ranks[rank].process
        process.join(_GRACE_S)
        code = process.exitcode
        if code is not None and code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"ended with exit status {code}"


_pools: dict[tuple[int, str], _Pool] = {}


@contextlib.contextmanager
def _environment(world_size: int, device: str) -> Iterator[None]:
    """What rank processes are started with: the caller's environment, but for what decides how kernels run."""
    before = dict(os.environ)
    try:
        for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[threads] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        else:
            os.environ.pop("TRITON_INTERPRET", None)
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            if world_size > torch.cuda.device_count():
                os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _report(device: str, outcomes: dict[int, _Outcome], output: list[str]) -> str:
    parts = []
    for rank in sorted(outcomes):
        parts.append(f"--- rank {rank} of {len(outcomes)} on {device}: {outcomes[rank].problem or 'finished'}")
        if output[rank]:
            parts.append(f"output:\n{output[rank].rstrip()}")
    return "\n".join(parts)


def _serve(connection: Connection, output: Path, rank: int, world_size: int, device: str, port: int) -> None:
    """The life of a rank process: take calls and answer them until the other end is closed."""
    # A rank that spins when its parent is killed would spin for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    fill_uninitialized_memory()
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if world_size <= torch.cuda.device_count():
            backend = "cpu:gloo,cuda:nccl"
    store = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        connection.send_bytes(pickle.dumps(_call(message, rank, world_size, backend, store)))


def _call(message: bytes, rank: int, world_size: int, backend: str, store: Store) -> _Outcome:
    try:
        number, fn, args = pickle.loads(message)
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(backend, store=PrefixStore(f"call{number}", store), rank=rank, world_size=world_size)
        torch.manual_seed(0)
        outcome = _Outcome(fn(*args))
        pickle.dumps(outcome)
    except BaseException:  # noqa: BLE001 - reported to the test; pytest's own failures derive from BaseException
        outcome = _Outcome(problem=f"raised\n{traceback.format_exc()}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # a test may have closed it
            stream.flush()
    return outcome
