"""A group of ranks: its backend, its control block, its buffers, and its failures."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..errors import BackendError, ClosedError, CommError, GroupBrokenError
from .agreement import agree_on
from .backend import Backend, SymmetricMemory
from .bootstrap import ranks_in_words
from .layout import RECORD_WORDS, control_bytes
from .rules import check_capacity, check_timeout
from .signals import RecordReader, decode_record, error_for
from .user_buffers import UserBuffer

_RECOVER = "the group is broken: call group.recover() on every rank"
#: How long closing a broken group waits for the other ranks to stop writing to it.
BROKEN_CLOSE_S = 5.0

_T = TypeVar("_T")

_names = itertools.count()
_allocations = itertools.count()
_allocations_made = 0


def symmetric_allocations() -> int:
    """Symmetric allocations this process has made so far, over all groups."""
    return _allocations_made


def _check_check(check: object) -> None:
    """TypeError or ValueError unless ``check`` says when a failed call raises, or is None."""
    allowed = 'check must be "sync", "async" or None'
    if check is not None and not isinstance(check, str):
        raise TypeError(f"{allowed}, got {check!r}")
    if check not in (None, "sync", "async"):
        raise ValueError(f"{allowed}, got {check!r}")


class Group:
    """Ranks that communicate; made by :func:`init_group`, or by ``sim.World`` for its ranks.

    Args:
        backend: where it runs (comm/backend.py).
        timeout_s: seconds after which a wait, on the device or between hosts, gives up.
        check: when a failed call raises: ``"sync"`` in the call itself, after a synchronisation; ``"async"`` at the
            next call into the library, without one. By default ``"sync"`` where kernels are interpreted.

    Attributes:
        broken: the error that broke the group, or None.
        recoveries: how often the group has recovered.
        device_name: of the ranks' devices; where they differ, all names joined by " + ". The same on every rank.
        kept: what layers above keep, under keys of their own, for as long as the group lives.

    Raises:
        TypeError, ValueError: ``timeout_s`` or ``check`` is none of these.
        CommError: ranks did not come in time.
    """

    def __init__(self, backend: Backend, *, timeout_s: float = 300.0, check: str | None = None) -> None:
        check_timeout(timeout_s)
        _check_check(check)
        self.backend = backend
        self.timeout_s = float(timeout_s)
        self._longest_wait_s = self.timeout_s  # of any buffer
        self.check_mode = check or ("sync" if backend.interpreted else "async")
        self.name = f"group{next(_names)}"
        self.broken: CommError | None = None
        self.recoveries = 0
        self.closed = False
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else backend.name
        self.kept: dict[str, Any] = {}
        self._last_call: Any = None
        self._buffers: dict[tuple[Any, ...], Any] = {}  # user buffers, and others that were adopted
        self._closed_buffers: set[str] = set()  # what those were that have been closed on this rank
        self._retired: list[SymmetricMemory] = []  # control blocks that a recovery which failed has replaced
        self._record = RecordReader(backend.host_words(RECORD_WORDS))
        self._control = self.symmetric_empty(control_bytes(self.world_size))

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """Ranks of the group, W."""
        return self.backend.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's buffers and operands are."""
        return self.backend.device

    @property
    def control_table(self) -> torch.Tensor:
        """int64 [world_size], the addresses of the control blocks."""
        return self._control.table

    @property
    def record_words(self) -> torch.Tensor:
        """int64 [RECORD_WORDS] in host memory; kernels write a failure here."""
        return self._record.words

    def barrier(self, purpose: str = "pass a barrier") -> None:
        """Return once every rank's host has called it.

        Args:
            purpose: what for, as an infinitive; for messages.

        Raises:
            CommError: ranks did not come within the group's ``timeout_s``, or came to something else; the message names
                them. The group is broken then, since the others may have passed. So with the methods below.
        """
        with self._meeting(purpose):
            self.backend.barrier(self.timeout_s)

    def all_gather_object(self, value: Any, purpose: str = "exchange values") -> list[Any]:
        """Collective: every rank's picklable ``value``, in rank order. ``purpose`` and errors as of ``barrier``."""
        with self._meeting(purpose):
            return self.backend.all_gather_object(value, self.timeout_s)

    @contextlib.contextmanager
    def _meeting(self, purpose: str, remedy: str = _RECOVER) -> Iterator[None]:
        """Around collectives of the hosts: one that fails breaks the group, and says what it was for."""
        try:
            yield
        except CommError as error:
            text = f"{error}, to {purpose}; {remedy}"
            if self.broken is None:
                self.broken = type(error)(text)
            # Not the kept one: its traceback would keep the frames of the failed call, and their tensors, alive.
            raise type(error)(text) from error

    def symmetric_empty(self, num_bytes: int) -> SymmetricMemory:
        """Collective: ``num_bytes`` of zero-filled symmetric memory on every rank, the same number on each, counted by
        :func:`symmetric_allocations`. Errors as of ``barrier``."""
        global _allocations_made
        with self._meeting(f"allocate {num_bytes} bytes of symmetric memory"):
            memory = self.backend.symmetric_empty(num_bytes, self.timeout_s)
        _allocations_made = next(_allocations) + 1
        return memory

    def user_buffer(
        self, max_tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16, *, device_count: bool = False
    ) -> UserBuffer:
        """The group's buffer of this capacity and dtype; collective the first time, the same object afterwards.

        Args:
            max_tokens: capacity in rows, divisible by the group size.
            hidden: columns.
            dtype: bfloat16, float16 or float32.
            device_count: for calls that take T from the device (:class:`UserBuffer`).

        Raises:
            TypeError: not two ints, a dtype and a bool on some rank; on every rank, as any of these.
            ValueError: the ranks differ, or no buffer can have these (``UserBuffer``).
        """
        key = (max_tokens, hidden, dtype, device_count)
        try:
            buffer = self._buffers.get(key)
        except TypeError:  # no key, which the ranks hear of below
            buffer = None
        if buffer is not None and not buffer.closed:
            # What equals the key may be of another type, 64.0 for instance. Ranks whose buffer is there do not meet.
            check_capacity("user_buffer", self.world_size, *key)
        else:
            self._open_buffers()
            buffer = UserBuffer(self, max_tokens, hidden, dtype, device_count=device_count)
            self._buffers[key] = buffer
        found: UserBuffer = buffer
        return found

    def adopt(self, buffer: Any) -> None:
        """Close and recover ``buffer`` with the group's own. It has ``handle``, ``capacity_shape``, ``dtype``,
        ``epoch``, ``closed``, ``renew(epoch)`` and ``close()`` as a user buffer has them, and a ``timeout_s``."""
        self._longest_wait_s = max(self._longest_wait_s, buffer.timeout_s)
        self._open_buffers()
        self._buffers[(buffer.handle,)] = buffer

    def _open_buffers(self) -> list[Any]:
        """The buffers, in an order that is the same on every rank; those that were closed meanwhile are forgotten."""
        for key, buffer in list(self._buffers.items()):
            if buffer.closed:
                self._closed_buffers.add(_description(buffer))
                del self._buffers[key]
        return sorted(self._buffers.values(), key=_description)

    def agree(self, what: str, value: Any) -> None:
        """Collective: ``ValueError`` on every rank, listing all values, unless every rank passes an equal, picklable
        ``value``; ``what`` it is, for the message."""
        self.agree_on(what, lambda: value)

    def agree_on(self, what: str, judge: Callable[[], _T], compared: Callable[[_T], Any] | None = None) -> _T:
        """Collective: what ``judge`` returns here, once every rank's has returned and the results are equal.

        For arguments of collective constructors; args and errors as of ``comm/agreement.py``, and those of ``barrier``.
        """
        return agree_on(self.all_gather_object, what, judge, compared)

    def before_call(self, *, capturable: bool = False) -> None:
        """Raise what stands in the way of a call (a closed or broken group, a failure since the last call, another
        current device, a stream under capture unless ``capturable``), and make the current stream wait for the group's
        previous call, which a stream under capture has none of.

        Raises:
            ClosedError, GroupBrokenError: the group is closed, or broken.
            CommError: an earlier call failed; this breaks the group.
            ValueError: another device is the current one.
            BackendError: the stream is under capture.
        """
        if self.closed:
            raise ClosedError(f"{self.name} is closed; make a new one with init_group")
        if self.broken is not None:
            raise GroupBrokenError(
                f"{self.name} is broken: {self.broken}. Call group.recover() on every rank", self.broken.record
            )
        self._raise_failure()
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            raise ValueError(
                f"the current device must be the group's {self.device}, got cuda:{torch.cuda.current_device()}; "
                "call torch.cuda.set_device, or use torch.cuda.device around the call"
            )
        if self._capturing():
            if not capturable:
                raise BackendError(
                    "a call whose epoch the host counts cannot be captured in a CUDA graph: a replay would accept the "
                    "flags of an earlier one; use a buffer with device_count=True, or capture what lies between calls"
                )
        elif self._last_call is not None:
            self.backend.wait_event(self._last_call)

    def refuse_capture(self, what: str) -> None:
        """BackendError where the current stream is under capture: ``what`` is for before it."""
        if self._capturing():
            raise BackendError(f"{what} inside a CUDA graph capture; make the same call once before the capture")

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def record_call(self) -> None:
        """What the current stream holds now is part of the group's last call.

        Not in a capture: its calls follow each other on its stream, and a replay is the user's to order with other
        calls of the group, as with any work of a graph.
        """
        if not self._capturing():
            self._last_call = self.backend.record_event(self._last_call)

    def interrupted(self, what: str) -> None:
        """A call ended by an exception after it may have announced something: the group is broken."""
        if self.broken is None:
            self.broken = CommError(f"{what}; the group is broken: call group.recover() on every rank")

    def after_call(self) -> None:
        """With ``check="sync"``, wait for the device and raise the call's own failure, a ``CommError``."""
        if self.check_mode == "sync" and not self._capturing():
            self.backend.synchronize()
            self._raise_failure()

    def _raise_failure(self) -> None:
        words = self._record.read()
        if words is not None:
            self._break(words)

    def _break(self, words: list[int]) -> None:
        record = decode_record(words, self.rank, self.world_size)
        self.broken = error_for(record, self.rank)
        # Not the kept one: its traceback would keep the frames of the failed call, and their tensors, alive.
        raise error_for(record, self.rank)

    def check(self) -> None:
        """Wait for the device and raise the failure of any call so far, this rank's or one that a peer reported.

        Raises:
            ClosedError: the group is closed.
            CommError: a call failed, or the group was broken before; the message and ``record`` say where and why.
        """
        if self.closed:
            raise ClosedError(f"{self.name} is closed")
        if self.broken is not None:
            raise type(self.broken)(str(self.broken), self.broken.record)
        self.backend.synchronize()
        self._raise_failure()
        # A peer may have failed after this rank's last kernel ended: then only its notice is here.
        control = self._control.local.view(torch.int64)[: (self.world_size + 1) * RECORD_WORDS].cpu()
        rows = control.view(self.world_size + 1, RECORD_WORDS)
        notice = int(rows[self.world_size, 0])
        if notice:
            self._break([int(word) for word in rows[notice - 1]])

    def recover(self) -> None:
        """Collective: make a broken group work again.

        Every rank waits for its own device; then all take fresh memory, because writes of the failed calls may have
        landed anywhere in the old, and go on from the highest epoch of any rank. Contents of the buffers are lost. A
        buffer's old memory is released once it has its new one.

        Where it raises, the group is broken, whether or not it was before, and every rank may call it again.

        Raises:
            ClosedError: the group is closed.
            CommError: ranks did not come, or failed on the way.
            ValueError: a buffer is open on some ranks only; names it and them.
        """
        if self.closed:
            raise ClosedError(f"{self.name} is closed")
        before = self.broken
        self.broken = CommError("recover() has not ended")
        try:
            self._renew()
        except BaseException as error:
            cause = "" if before is None else f", after {before}"
            self.broken = CommError(f"recover() failed on rank {self.rank} with {type(error).__name__}: {error}{cause}")
            raise
        self.recoveries += 1
        self.broken = None

    @torch.inference_mode(False)  # calls in training write to what is made here
    def _renew(self) -> None:
        self.backend.synchronize()
        # Hosts may have stopped at different collectives: all begin anew. Also the barrier after which no kernel of any
        # rank touches the old memory. A peer may still be in a wait of the failed call, which lasts up to its timeout,
        # hence twice that.
        with self._meeting("recover"):
            self.backend.rejoin(2 * self._longest_wait_s)
        buffers = self._open_buffers()
        mine = [(_description(buffer), buffer.handle, buffer.epoch) for buffer in buffers]
        found = self.all_gather_object((mine, self._closed_buffers), "recover")
        _check_same_buffers([of_rank for of_rank, _ in found], [closed for _, closed in found])
        self._record.words.zero_()
        control = self.symmetric_empty(control_bytes(self.world_size))
        self._retired.append(self._control)
        self._control = control
        for index, buffer in enumerate(buffers):
            epochs = [of_rank[index][2] for of_rank, _ in found]
            buffer.renew(max(epochs, key=lambda epoch: epoch & 0xFFFFFFFF))
        self.backend.synchronize()
        self.barrier("recover")
        # Not before: until all buffers have been renewed, some have the old addresses.
        self._free_retired()
        self._last_call = None

    def _free_retired(self) -> None:
        for memory in self._retired:
            self.backend.free(memory)
        self._retired.clear()

    def close(self) -> None:
        """Collective: end the group and release its memory. Closing twice is harmless."""
        if self.closed:
            return
        self.backend.synchronize()
        # No peer's kernel may still write here. Of a broken group not every rank need come.
        broken = self.broken is not None
        with contextlib.suppress(*((CommError,) if broken else ())):
            with self._meeting("close the group", f"call close() again, which waits {BROKEN_CLOSE_S:g} s at most"):
                self.backend.barrier(min(self.timeout_s, BROKEN_CLOSE_S) if broken else self.timeout_s)
        for buffer in self._buffers.values():
            buffer.close()
        self.closed = True
        self._buffers.clear()
        self.kept.clear()
        self._free_retired()
        self.backend.free(self._control)
        del self._control
        self.backend.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copied module belongs to the same ranks

    def __reduce__(self) -> Any:
        raise TypeError("a group cannot be pickled; save state_dict() and make the group again with init_group")

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.world_size}, {self.backend.name})"


def _description(buffer: Any) -> str:
    counts = " with device_count" if getattr(buffer, "device_count", False) else ""
    return f"{type(buffer).__name__} {list(buffer.capacity_shape)} {buffer.dtype}{counts}"


def _check_same_buffers(of_ranks: list[list[tuple[str, str, int]]], closed: list[set[str]]) -> None:
    """ValueError unless the buffers of all ranks, (description, handle, epoch) each, have the same descriptions."""
    open_on = [[description for description, _, _ in of_rank] for of_rank in of_ranks]
    for description, handle, _ in itertools.chain(*of_ranks):
        most = max(of_rank.count(description) for of_rank in open_on)
        lacking = [rank for rank, of_rank in enumerate(open_on) if of_rank.count(description) < most]
        if lacking:
            having = [rank for rank in range(len(open_on)) if rank not in lacking]
            missing = "; ".join(
                f"rank {rank} {'closed it' if description in closed[rank] else 'has not registered it'}"
                for rank in lacking
            )
            raise ValueError(
                f"recover() needs the same buffers on every rank: {handle}, {description}, is open on "
                f"{ranks_in_words(having)}, and {missing}; call its close() on {ranks_in_words(having)} too, then "
                "recover() on every rank, and register it again where it is needed"
            )


def init_group(
    process_group: Any = None, *, backend: str = "auto", timeout_s: float = 300.0, check: str | None = None
) -> Group:
    """Collective: a group over the ranks of a torch.distributed process group.

    Args:
        process_group: a ``ProcessGroup``; by default the world, or a group of one rank where torch.distributed is not
            initialised.
        backend: ``"cuda"``, ``"nvshmem"``, ``"shm"`` or ``"auto"``, which takes ``"cuda"`` where torch sees a GPU.
        timeout_s: seconds after which a wait gives up. The default leaves time for another rank's compilation.
        check: see :class:`Group`.

    Raises:
        BackendError: the backend cannot run here; the message says why and what would. Or ``process_group`` is none of
            which this process is a member.
        CommTimeoutError: ranks did not come within ``timeout_s``; names them.
        TypeError: an argument is of another type than its annotation says.
        ValueError: ranks ask for different things, or for what there is not.

    All of these on every rank, also where one rank alone is at fault; but for ``process_group``, by which ranks meet.
    """
    from .backends import create

    def judge() -> dict[str, object]:
        _check_check(check)
        return {"check": check}

    group = Group(create(backend, process_group, timeout_s=timeout_s, judge=judge), timeout_s=timeout_s, check=check)
    group.device_name = " + ".join(sorted(set(group.all_gather_object(group.device_name))))
    return group
