"""User buffers: symmetric memory of a fixed capacity, used on an active prefix whose length changes at every call.

:class:`UserBuffer` is the plain object, :class:`Communicator` one user of it with an active shape of its own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import ActiveShapeError, ClosedError
from .gemm_configs import GemmConfig
from .layout import STATE_WORDS, BufferLayout, StateWord, TableWord
from .rules import check_active_shape, check_capacity, check_count_scalar

if TYPE_CHECKING:
    from .group import Group

_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[str, UserBuffer | Communicator] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Call:
    """One collective call on a buffer.

    Attributes:
        epoch: int32; grows by one a call, wraps, and is never reset.
        slot: ``epoch % 2``.
    """

    epoch: int

    @property
    def slot(self) -> int:
        return self.epoch & 1


def _next_epoch(epoch: int) -> int:
    # Never 0, which is what memory holds that no call has written; 2 has its parity.
    return (epoch + 1 + 2**31) % 2**32 - 2**31 or 2


def _next_device_epoch(epoch: int) -> int:
    # As comm.device.advance_epoch: 1 .. 2^31 - 2, so that the parity alternates when it wraps too.
    return 1 if epoch in (0, 0x7FFFFFFE) else epoch + 1


class CallScope:
    """The context of one call on a buffer. A class, since a generator's context costs twice the host time."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: UserBuffer) -> None:
        self._buffer = buffer

    def __enter__(self) -> Call:
        return self._buffer.begin_call()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._buffer.end_call(error)


class UserBuffer:
    """Symmetric memory ``[max_tokens, hidden]``, twice, with its flags and epochs; made by ``group.user_buffer``.

    Args:
        group: the ranks that share it. Construction is collective.
        max_tokens: capacity in rows, divisible by the group size.
        hidden: columns.
        dtype: bfloat16, float16 or float32.
        device_count: calls take T from a scalar on the device and their epochs live there too, so that calls can be
            captured in a CUDA graph and replayed at any T. A buffer is for such calls or for others, not for both.

    Attributes:
        handle: a string that names this buffer in the process, for ``torch.ops``.
        memory: the symmetric allocation; ``layout`` says what lies where.
        table: int64 on the device, what kernels get (``layout.TableWord``).

    Raises:
        TypeError, ValueError: no buffer can have these (``rules.check_capacity``), or the ranks differ; on every rank.
        BackendError: the current stream is under capture.
    """

    def __init__(
        self, group: Group, max_tokens: int, hidden: int, dtype: torch.dtype, *, device_count: bool = False
    ) -> None:
        group.refuse_capture("a user buffer cannot be registered")
        group.before_call()
        group.agree_on(
            "capacity and dtype of a user buffer",
            lambda: check_capacity("user_buffer", group.world_size, max_tokens, hidden, dtype, device_count),
        )
        self.group = group
        self.dtype = dtype
        self.capacity_shape = (max_tokens, hidden)
        self.layout = BufferLayout(group.world_size, max_tokens, hidden, dtype.itemsize)
        self.handle = f"user_buffer_{next(_handles)}"
        self.closed = False
        self.device_count = device_count
        self._epoch = 0
        self._explicit_shape: tuple[int, int] | None = None
        self._in_use = threading.Lock()
        self._allocate()
        _by_handle[self.handle] = self

    @torch.inference_mode(False)  # the group's recovery, in training perhaps, writes to these tensors
    def _allocate(self) -> None:
        group, layout = self.group, self.layout
        self.local = group.backend.local_zeros(layout.local_bytes)
        self._state = self.local[layout.staging_bytes + layout.staged_bytes :].view(torch.int32)[:STATE_WORDS]
        self.memory = group.symmetric_empty(layout.num_bytes)
        self.table = self._addresses()
        self._write_epoch()
        self._view_slots()

    def _view_slots(self) -> None:
        layout = self.layout
        data = self.memory.local[layout.data : layout.data + 2 * layout.slot_bytes].view(self.dtype)
        self._both_slots = data.view(2 * self.capacity_shape[0], self.capacity_shape[1])
        self._slots = self._both_slots.chunk(2)

    def _addresses(self) -> torch.Tensor:
        """The table that kernels get."""
        group, layout = self.group, self.layout
        staging = self.local.data_ptr()
        words = [0] * int(TableWord.PEERS)
        words[TableWord.RANK] = group.rank
        words[TableWord.WORLD_SIZE] = group.world_size
        words[TableWord.HEADERS] = layout.headers
        words[TableWord.FLAGS] = layout.flags
        words[TableWord.DATA] = layout.data
        words[TableWord.SLOT_BYTES] = layout.slot_bytes
        words[TableWord.FLAGS_PER_SOURCE] = layout.flags_per_source
        words[TableWord.STAGING] = staging
        words[TableWord.STAGED] = staging + layout.staging_bytes
        words[TableWord.STATE] = staging + layout.staging_bytes + layout.staged_bytes
        words[TableWord.RECORD] = group.record_words.data_ptr()
        words[TableWord.CLOCK] = group.backend.clock_address
        words[TableWord.TIMEOUT_NS] = int(group.timeout_s * 1e9)
        head = torch.tensor(words, dtype=torch.int64, device=group.device)
        return torch.cat([head, self.memory.table, group.control_table])

    def _write_epoch(self) -> None:
        """Counters at zero, and the next epoch where calls find it. It is one that no flag or header carries yet."""
        state = [0] * STATE_WORDS
        state[StateWord.EPOCH] = _next_device_epoch(self._epoch)
        self._state.copy_(torch.tensor(state, dtype=torch.int32, device=self._state.device))

    @property
    def epoch(self) -> int:
        """Of the last call; 0 before the first. Waits for the device where epochs live there."""
        if self.device_count:
            self._epoch = int(self._state[StateWord.EPOCH]) - 1
        return self._epoch

    def renew(self, epoch: int) -> None:
        """Collective, for ``group.recover``: go on from ``epoch``, on fresh memory where stores of a failed call may
        still land in the old.

        They cannot where kernels alone store, and those of all ranks have ended: a buffer with ``device_count`` keeps
        its memory, and graphs that have captured its addresses stay good.
        """
        group, layout = self.group, self.layout
        old = None
        if self.device_count:
            self.memory.local[: layout.data].zero_()
        else:
            old, self.memory = self.memory, group.symmetric_empty(layout.num_bytes)
            self._view_slots()
        self._epoch = epoch
        self.table.copy_(self._addresses())  # the control blocks have moved, too
        self.local[layout.staging_bytes : layout.staging_bytes + layout.staged_bytes].zero_()
        self._write_epoch()
        group.backend.synchronize()  # before the barrier after which peers set flags here
        if old is not None:
            group.backend.free(old)

    @property
    def timeout_s(self) -> float:
        """Bound of a wait of its calls: the group's."""
        return self.group.timeout_s

    @property
    def active_shape(self) -> tuple[int, int]:
        """What ``set_active_shape`` set, else the capacity."""
        return self._explicit_shape or self.capacity_shape

    def set_active_shape(self, shape: Sequence[int] | None) -> None:
        """Declare the shape that forward calls will have, so that another one is an error; None lifts it.

        Calls take their token count from the tensor they are given; nothing needs this but code that wants to be told
        when the two disagree. Local, no communication, no allocation.

        Raises:
            ActiveShapeError: a rule is broken; the state stays as it was.
        """
        self._check_open()
        if shape is not None:
            shape = check_active_shape(shape, self.capacity_shape, self.group.world_size)
        self._explicit_shape = shape

    def validate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, forward: bool = True) -> None:
        """Raise unless rows of ``shape`` [T, hidden] may go through this buffer. Local, before any communication.

        Args:
            shape: of all rows of a call, on every rank the same.
            dtype, device: of the tensor.
            forward: compare with an explicitly set active shape too. Backward and recomputation keep the count of their
                own forward, whatever is set by then.

        Raises:
            ActiveShapeError: a rule of the active shape is broken.
            ClosedError: the buffer was closed.
            ValueError: dtype or device differ from the buffer's.
        """
        self.check_rules(shape, dtype, device, self._explicit_shape if forward else None)

    def check_rules(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, explicit: tuple[int, int] | None
    ) -> None:
        """``validate`` against the active shape ``explicit``, or, where it is None, against the capacity alone."""
        self._check_open()
        if dtype != self.dtype:
            raise ValueError(f"dtype must be the buffer's {self.dtype}, got {dtype}; cast, or register another buffer")
        if device.type != self.group.device.type:
            raise ValueError(f"tensor must be on {self.group.device}, got {device}")
        dims = check_active_shape(shape, self.capacity_shape, self.group.world_size)
        if explicit is not None and dims != explicit:
            raise ActiveShapeError(
                f"the active shape was set to {explicit}, got a tensor for {dims}; set the new shape first with "
                "set_active_shape (set_ub_active_shape for communicators); None takes it from each tensor"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise _closed_error(f"{self.handle} {list(self.capacity_shape)}")

    def check_count(self, active_tokens: torch.Tensor | None) -> None:
        """ValueError unless ``active_tokens`` is given where, and only where, this buffer's calls want it, and is as
        ``check_count_scalar`` wants it."""
        if active_tokens is None:
            if self.device_count:
                raise ValueError(
                    f"{self.handle} was registered with device_count=True, for operations that take active_tokens, an "
                    f"int32 scalar on {self.group.device}: give it, or register another buffer for calls without"
                )
            return
        if not self.device_count:
            raise ValueError(
                f"active_tokens needs a buffer with device_count=True, and {self.handle} has none: register one with "
                "group.user_buffer(..., device_count=True)"
            )
        check_count_scalar(active_tokens, self.group.device)

    def call(self) -> CallScope:
        """Everything that one collective call launches goes inside ``with buffer.call() as call:``.

        The body may count on the group's previous call having ended on this device, on whatever stream and buffer it
        ran. For this buffer, that is what makes the slots safe (comm/README.md); for the others, it keeps two
        persistent kernels from holding each other's multiprocessors, in one order here and in the other on a peer.

        An exception in the body breaks the group: something may have been announced already, so the epoch stays used.
        """
        return CallScope(self)

    def begin_call(self) -> Call:
        """For :class:`CallScope`: the call's epoch and slot."""
        self._check_open()
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(f"{self.handle} is in use by another thread; calls on a buffer come one after another")
        try:
            self.group.before_call(capturable=self.device_count)
        except BaseException:
            self._in_use.release()
            raise
        if not self.device_count:
            self._epoch = _next_epoch(self._epoch)
        return Call(self._epoch)

    def end_call(self, error: BaseException | None) -> None:
        """For :class:`CallScope`: everything is launched, or ``error`` was raised before it was."""
        try:
            if error is not None:
                self.group.interrupted(f"a call on {self.handle} raised {error!r} on rank {self.group.rank}")
                return
            self.group.record_call()
            self.group.after_call()
        finally:
            self._in_use.release()

    def slot(self, index: int) -> torch.Tensor:
        """View [max_tokens, hidden] of slot ``index``, this rank's copy."""
        self._check_open()
        return self._slots[index]

    def gathered(self, tokens: int) -> torch.Tensor:
        """View [tokens, hidden] of the last call's slot. It never leaves the library: copy what must outlive it."""
        assert not self.device_count
        return self.slot(self._epoch & 1)[:tokens]

    def slot_chunks(self, rows: int) -> tuple[torch.Tensor, int]:
        """What a kernel sees of the slots, and how many of its rows apart chunks of ``rows`` rows begin.

        The host knows the slot of a call whose epoch it counts: rows of the slot, chunk after chunk. Otherwise both
        slots, whose chunks begin where those of the full capacity do, so that the view is the same at every T.
        """
        self._check_open()
        if self.device_count:
            return self._both_slots, self.capacity_shape[0] // self.group.world_size
        return self._slots[self._epoch & 1][: rows * self.group.world_size], rows

    def extend_call(self) -> None:
        """What the current stream holds now, reads of ``gathered`` for instance, belongs to the last call too: the next
        one, on whatever stream, starts after it."""
        self.group.record_call()

    def __deepcopy__(self, memo: dict[int, Any]) -> UserBuffer:
        # A copied module uses the same buffer: it is memory that ranks share, not the module's state.
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a user buffer cannot be pickled; save state_dict() and register the buffer again on loading")

    def close(self) -> None:
        """Release the memory, once no rank uses it any more (``Group.close`` sees to that). Idempotent."""
        if not self.closed:
            self.closed = True
            self.group.backend.free(self.memory)
            del (
                self.memory,
                self.local,
                self.table,
                self._slots,
                self._both_slots,
                self._state,
            )  # a closed buffer that somebody still holds holds no memory

    @property
    def registered_bytes(self) -> int:
        """Symmetric bytes on each rank."""
        return self.layout.num_bytes

    def __repr__(self) -> str:
        return f"UserBuffer({self.handle}, capacity {list(self.capacity_shape)}, {self.dtype}, {self.group})"


def user_buffer_by_handle(handle: str) -> UserBuffer:
    """The live buffer, or communicator of one, with this handle; the buffer alone where its communicator is gone, as
    after ``destroy_ub``.

    Raises:
        ClosedError: the buffer was closed, or there never was one.
    """
    if not isinstance(handle, str):
        raise TypeError(f"handle must be a str, such as buffer.handle, got {handle!r}")
    # A backward pass knows the handle alone. That it can run must not depend on whether somebody on this rank still
    # holds the communicator.
    found = _by_handle.get(handle) or _by_handle.get(handle.partition(".")[0])
    if found is None:
        raise _closed_error(handle)
    buffer = cast(UserBuffer, found)
    buffer._check_open()
    return buffer


def inside_backward() -> bool:
    """Whether this thread evaluates an autograd graph: in a backward pass, or recomputes a forward for one."""
    # What torch.utils.checkpoint asks, too.
    return torch._C._current_graph_task_id() != -1


def _closed_error(name: str) -> ClosedError:
    """Of a call on the buffer ``name``, which is closed or was never there."""
    if inside_backward():
        return ClosedError(
            f"{name} is closed: this backward pass runs after destroy_ub() or close() of its buffer or group; run "
            "backward() on every rank before that"
        )
    return ClosedError(
        f"{name} is closed, or was never there; register it with group.user_buffer or initialize_ub, and build modules "
        "that used it anew"
    )


class Communicator:
    """A named user of a buffer, with an active shape of its own; what ``get_ub`` returns.

    Operations take it wherever they take a :class:`UserBuffer`: everything but the active shape is the buffer's. Once a
    shape is set, a forward call with a tensor of another one is an ``ActiveShapeError``.

    Attributes:
        name: of the GEMM.
        buffer: the memory.
        config: what ``ub_cfgs`` says of the GEMM, with defaults.
    """

    def __init__(self, name: str, buffer: UserBuffer, config: GemmConfig) -> None:
        self.name = name
        self.buffer = buffer
        self.config = config
        # Not the buffer's alone: a later communicator of this name may stand for the same buffer.
        self.handle = f"{buffer.handle}.{name}.{next(_handles)}"
        self._shape: tuple[int, int] | None = None
        _by_handle[self.handle] = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    @property
    def capacity_shape(self) -> tuple[int, int]:
        return self.buffer.capacity_shape

    @property
    def active_shape(self) -> tuple[int, int]:
        return self._shape or self.capacity_shape

    def set_buffer_active_shape(self, shape: Sequence[int] | None) -> None:
        """As ``UserBuffer.set_active_shape``, for this communicator alone."""
        self.buffer._check_open()
        if shape is not None:
            shape = check_active_shape(shape, self.capacity_shape, self.buffer.group.world_size)
        self._shape = shape

    def set_active_shape(self, shape: Sequence[int] | None) -> None:
        """``set_buffer_active_shape`` by a buffer's name of it."""
        self.set_buffer_active_shape(shape)

    def validate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, forward: bool = True) -> None:
        """As ``UserBuffer.validate``, with this communicator's active shape."""
        self.buffer.check_rules(shape, dtype, device, self._shape if forward else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self  # for the reason given at UserBuffer

    def __reduce__(self) -> Any:
        raise TypeError("a communicator cannot be pickled; save state_dict() and call initialize_ub again on loading")

    def __repr__(self) -> str:
        return f"Communicator({self.name}, method {self.config.method}, {self.buffer})"
