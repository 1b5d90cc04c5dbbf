"""Calls made of several launches: what stands between ordinary GEMMs.

One call on a buffer (comm/README.md) has one epoch, however many launches it is made of::

    open      headers to every peer                                     1 program
    push      rows of this rank to peers' slots, flags after them       a few programs, on a side stream, or
    copies    the same by the copy engine
    arrival   wait for the flags of some ranks                          1 program
    GEMM      torch.matmul on rows of the slot                          a library's kernel
    reduce    wait for rows from every peer and add them                some programs
    close     wait for every header; after a failure fill the outputs   1 program

Order. Launches on a stream follow each other, so a GEMM after ``arrival`` reads what the flags announced: the program
that saw them acquired at system scope, and the end of its launch orders every later launch on the stream after it.
What runs on the side stream starts after an event of the calling stream, and ``close`` starts after an event of the
side stream and after the copies. So ``close`` is the end of the call in the sense of comm/README.md: all that this rank
sends has been issued, all readers of its slot stand before it on the stream or have been joined to it, and it sees the
header of every peer. The next call on the buffer starts after it, on whatever stream, and the proof that two slots are
enough applies as it stands.

Progress. ``push`` waits for nothing, and stands before every wait of its call on the same rank: before ``arrival`` in
the order in which the host enqueues, and before ``reduce`` in stream order. So a wait ends once all ranks have got as
far in their own streams, whatever hardware queue those share, and however few programs are resident. ``arrival`` is one
program, and ``reduce`` beside a GEMM has few, so they leave room for other work. Calls of a group follow each other on
each device, in the order of its host, which is the same on every rank; so they may share the side stream.

Failure. A wait that fails stops the call by the state word that ``stop_tasks`` sets; later launches of the call find
it, announce nothing and wait for nothing. GEMMs in between run on whatever the slot holds. ``close`` then tells the
host and fills the outputs with NaN. Gathered rows are an output like others, copied out of the slot within the call:
the slot itself cannot be filled, since peers may still store there. Copies by the copy engine announce only what a rank
computed or was given itself, so they need not be stopped. An exception of the host between ``open`` and ``close``
(no memory for a GEMM, say) breaks the group on this rank (``UserBuffer.call``), and its peers' waits expire.

World size 1: there is nothing to send or to wait for, and nothing is launched but GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..comm.backend import CopyStream
from ..comm.device import (
    AT_DATA,
    RANK,
    STATE,
    STOPPED,
    TASK,
    WORLD_SIZE,
    close_call,
    flags_ptr,
    open_call,
    poison,
    slot_address,
    stop_tasks,
    wait_flags,
    wait_header,
    wait_headers,
)
from ..comm.signals import HeaderOperation, operation_code
from ..comm.user_buffers import Call, UserBuffer
from .config import PIECE_BYTES
from .copy_engine import sending_copies
from .launching import launch_kernel
from .methods import Method
from .tiles import push_piece

#: Flags that one wait looks at together.
LANES = tl.constexpr(64)
#: Rows of a piece under the interpreter, so that small tests have several.
INTERPRETED_PIECE_ROWS = 4
#: Programs that move data beside a GEMM: 16 reach three quarters of what all can over NVLink (309 of 362 GB/s).
NUM_SM = 16


@triton.jit
def call_stopped(buffer_ptr):
    """Whether an earlier launch of this call has failed."""
    state = tl.load(buffer_ptr + STATE).to(tl.pointer_type(tl.int32))
    return tl.atomic_add(state + TASK, 0, sem="relaxed", scope="gpu") >= STOPPED


@triton.jit(do_not_specialize=["epoch", "rows", "operation", "N", "K"])
def open_kernel(buffer_ptr, epoch, rows, operation, N, K):
    """One program: open the call, unless a failure is known."""
    if open_call(buffer_ptr, tl.program_id(0), epoch, rows, N, K, operation) == 0:
        stop_tasks(buffer_ptr)


@triton.jit(do_not_specialize=["epoch", "rows", "rows_per_flag", "first_step", "steps", "first_piece", "pieces"])
def push_kernel(
    buffer_ptr,
    x_ptr,  # [rows, K] for every peer, or with CHUNKED [W, rows, K], the chunk of its owner for each
    epoch, rows, rows_per_flag, K,
    first_step, steps,  # to the ranks first_step, first_step + 1, .. before this one
    first_piece, pieces,
    CHUNKED: tl.constexpr, ALIGNED: tl.constexpr, COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Push pieces of ``rows_per_flag`` rows, each with its flag, peer after peer. Waits for nothing."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
    if not call_stopped(buffer_ptr):
        for task in range(tl.program_id(0), steps * pieces, tl.num_programs(0)):
            peer = (rank + world_size - first_step - task // pieces) % world_size
            source_ptr = x_ptr
            if CHUNKED:
                source_ptr += peer.to(tl.int64) * rows * K
            piece = first_piece + task % pieces
            push_piece(buffer_ptr, source_ptr, peer, piece, rows_per_flag, rows, rows, K, epoch, ALIGNED, COPY_BLOCK)


@triton.jit(do_not_specialize=["epoch", "rows", "operation", "N", "K", "first", "last", "flags"])
def arrival_kernel(buffer_ptr, epoch, rows, operation, N, K, first, last, flags):
    """One program: wait for the headers of the ranks ``first`` to ``last - 1`` but this one, and for all flags of
    each."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    ok = tl.full((), 1, tl.int32)
    if call_stopped(buffer_ptr):
        ok = tl.full((), 0, tl.int32)
    for source in range(first, last):
        if (ok == 1) & (source != rank):
            ok = wait_header(buffer_ptr, source, epoch, rows, N, K, operation)
            own_flags = flags_ptr(buffer_ptr, rank, source, epoch)
            for start in range(0, flags, LANES):
                if ok == 1:
                    count = tl.minimum(flags - start, LANES)
                    ok = wait_flags(buffer_ptr, own_flags, start, count, epoch, operation, AT_DATA, source, LANES)
    if ok == 0:
        stop_tasks(buffer_ptr)


@triton.jit
def _reduce_rows(
    buffer_ptr, own_ptr, slot_ptr, out_ptr, bias_ptr, row, last_row, rows, columns, COPY_BLOCK: tl.constexpr
):
    """Add rows ``row`` to ``last_row - 1`` of this rank's chunk over the ranks, in fp32: the own ones first, then those
    of the ranks 1, 2, .. steps after this one; then the bias."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
    chunk = tl.full((), 1, tl.int64) * rows * columns
    lane = tl.arange(0, COPY_BLOCK).to(tl.int64)
    end = tl.full((), 1, tl.int64) * last_row * columns
    for start in range(tl.full((), 1, tl.int64) * row * columns, end, COPY_BLOCK):
        offset = start + lane
        mask = offset < end
        value = tl.load(own_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        for step in range(1, world_size):
            source_ptr = slot_ptr + (rank + step) % world_size * chunk
            value += tl.load(source_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            value += tl.load(bias_ptr + offset % columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "epoch",
        "rows",
        "operation",
        "N",
        "K",
        "rows_per_reduction",
        "first_reduction",
        "reductions",
        "all_flags",
    ]
)
def reduce_kernel(
    buffer_ptr,
    x_ptr, out_ptr, bias_ptr,  # [W, rows, columns], of which the own chunk is read; [rows, columns]; [columns] or None
    epoch, rows, operation, N, K, columns,
    rows_per_reduction, first_reduction, reductions,
    all_flags,  # 1 where one flag covers all rows of a rank, 0 where each piece of rows_per_reduction has its own
    ALIGNED: tl.constexpr, COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait for pieces from every peer and add them. No program waits for another of this rank."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
    slot_ptr = slot_address(buffer_ptr, rank, epoch).to(x_ptr.dtype)
    if ALIGNED:
        slot_ptr = tl.multiple_of(slot_ptr, 16)
    own_ptr = x_ptr + rank.to(tl.int64) * rows * columns
    ok = tl.full((), 1, tl.int32)
    if call_stopped(buffer_ptr):
        ok = tl.full((), 0, tl.int32)
    else:
        # Agreement on T first: it says which flags there are to wait for.
        ok = wait_headers(buffer_ptr, 1, world_size, epoch, rows, N, K, operation)
    for index in range(tl.program_id(0), reductions, tl.num_programs(0)):
        piece = first_reduction + index
        for step in range(1, world_size):
            if ok == 1:
                source = (rank + step) % world_size
                own_flags = flags_ptr(buffer_ptr, rank, source, epoch)
                flag = tl.where(all_flags == 1, 0, piece)
                ok = wait_flags(buffer_ptr, own_flags, flag, 1, epoch, operation, AT_DATA, source, 1)
        if ok == 1:
            row = piece * rows_per_reduction
            last_row = tl.minimum(row + rows_per_reduction, rows)
            _reduce_rows(buffer_ptr, own_ptr, slot_ptr, out_ptr, bias_ptr, row, last_row, rows, columns, COPY_BLOCK)
    if ok == 0:
        stop_tasks(buffer_ptr)


@triton.jit(do_not_specialize=["rows", "columns"])
def fill_kernel(buffer_ptr, out_ptr, rows, columns, COPY_BLOCK: tl.constexpr):
    """One program: after a failure of this call, fill [rows, columns] with NaN."""
    if call_stopped(buffer_ptr):
        poison(out_ptr, rows.to(tl.int64) * columns, COPY_BLOCK)


@triton.jit(do_not_specialize=["epoch", "rows", "operation", "N", "K", "out_rows", "columns"])
def close_kernel(
    buffer_ptr, out_ptr, epoch, rows, operation, N, K, out_rows, columns, COPY_BLOCK: tl.constexpr
):  # fmt: skip
    """One program: end the call; report its failure, and fill [out_rows, columns] with NaN."""
    ok = tl.full((), 1, tl.int32)
    if call_stopped(buffer_ptr):
        ok = tl.full((), 0, tl.int32)
    if close_call(buffer_ptr, ok, 1, epoch, rows, N, K, operation) == 2:
        poison(out_ptr, out_rows.to(tl.int64) * columns, COPY_BLOCK)


_prepared: set[tuple[torch.device, torch.dtype, int, bool]] = set()


@dataclass
class Steps:
    """The launches of one call, in the order in which the caller asks for them; made by :func:`stepped_call`.

    Attributes:
        buffer: of the call.
        call: its epoch and slot.
        rows: of a chunk, T/W.
        header: the arguments that every kernel of the call shares.
        num_sm: programs that move data beside a GEMM.
    """

    buffer: UserBuffer
    call: Call
    rows: int
    header: dict[str, Any]
    num_sm: int
    copies: CopyStream | None
    _side: Any = None

    @property
    def rank(self) -> int:
        return self.buffer.group.rank

    @property
    def world_size(self) -> int:
        return self.buffer.group.world_size

    @property
    def rows_per_flag(self) -> int:
        """Rows of a piece that programs push."""
        if self.buffer.group.backend.interpreted:
            return INTERPRETED_PIECE_ROWS
        rows = max(1, PIECE_BYTES // (self.buffer.capacity_shape[1] * self.buffer.dtype.itemsize))
        return 1 << (rows.bit_length() - 1)

    @property
    def pieces(self) -> int:
        """Pieces of a chunk that programs push."""
        return -(-self.rows // self.rows_per_flag)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Launches inside run on the side stream, after what the calling stream holds now."""
        backend = self.buffer.group.backend
        start = backend.record_event()
        with backend.side_stream():
            backend.wait_event(start)
            yield
            self._side = backend.record_event()

    def join(self) -> None:
        """What the calling stream gets next starts after all that was launched aside or sent by the copy engine."""
        if self._side is not None:
            self.buffer.group.backend.wait_event(self._side)
            self._side = None
        if self.copies is not None:
            self.copies.end()

    def send(
        self, x: torch.Tensor, first_step: int, steps: int, *, chunked: bool, part: tuple[int, int] | None = None
    ) -> None:
        """Send rows to the ranks ``first_step``, ``first_step + 1``, .. ``first_step + steps - 1`` before this one.

        By the copy engine or on the side stream, after what the calling stream holds now.

        Args:
            x: [rows, hidden] for every one of them, or ``chunked`` [W * rows, hidden], from which each gets its chunk.
            part: pieces ``[first, last)`` of the chunk; all by default. Programs alone send parts.
        """
        if steps <= 0 or self.world_size == 1:
            return
        if self.copies is not None:
            assert part is None
            self._copy(self.copies, x, first_step, steps, chunked)
            self._prepare_push(x, chunked)
            return
        first, last = part or (0, self.pieces)
        with self.aside():
            self.push(x, first_step, steps, chunked=chunked, part=(first, last))

    def _prepare_push(self, x: torch.Tensor, chunked: bool) -> None:
        """Have the kernel compiled that sends fewer rows than the copy engine is good for, so that no later count does
        it: a launch that pushes to no rank."""
        key = (x.device, x.dtype, x.shape[1], chunked)
        if key not in _prepared:
            _prepared.add(key)
            self.push(x, 1, 0, chunked=chunked, part=(0, 0))

    def push(self, x: torch.Tensor, first_step: int, steps: int, *, chunked: bool, part: tuple[int, int]) -> None:
        """As ``send``, by programs on the current stream."""
        columns = x.shape[1]
        self._launch(
            push_kernel,
            self.num_sm,
            x_ptr=x,
            epoch=self.call.epoch,
            rows=self.rows,
            rows_per_flag=self.rows_per_flag,
            K=columns,
            first_step=first_step,
            steps=steps,
            first_piece=part[0],
            pieces=part[1] - part[0],
            CHUNKED=chunked,
            ALIGNED=columns * x.element_size() % 16 == 0,
            COPY_BLOCK=self._copy_block,
        )

    def _copy(self, copies: CopyStream, x: torch.Tensor, first_step: int, steps: int, chunked: bool) -> None:
        buffer, layout, rows = self.buffer, self.buffer.layout, self.rows
        copies.begin()
        for step in range(first_step, first_step + steps):
            peer = (self.rank - step) % self.world_size
            copies.push(
                buffer.memory,
                peer,
                layout.data_offset(self.call.slot, self.rank * rows),
                x[peer * rows : (peer + 1) * rows] if chunked else x,
                layout.flag_offset(self.call.slot, self.rank, 0),
                self.call.epoch,
            )

    def wait_for(self, first: int, last: int) -> None:
        """What the calling stream gets next finds the chunks of the ranks ``first`` to ``last - 1`` in the slot, where
        they are not this rank's own."""
        flags = self.pieces if self.copies is None else 1
        self._arrival(first, last, flags)

    def agree(self) -> None:
        """Compare every peer's header before going on; with ``check="sync"``, raise where one differs."""
        self._arrival(0, self.world_size, 0)
        group = self.buffer.group
        if self.world_size > 1 and group.check_mode == "sync":
            # Where a peer found the difference first, this rank holds its notice alone until the call is closed.
            group.check()

    def _arrival(self, first: int, last: int, flags: int) -> None:
        if self.world_size > 1 and (first, last) != (self.rank, self.rank + 1):
            self._launch(arrival_kernel, 1, **self.header, first=first, last=last, flags=flags)

    def reduce(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        part: tuple[int, int] | None = None,
        num_programs: int | None = None,
    ) -> None:
        """Add what every peer sent to the own chunk of ``x``, on the current stream.

        Args:
            x: [W * rows, hidden].
            out: [rows, hidden].
            bias: [hidden], added once, or None.
            part: pieces ``[first, last)``; all by default.
            num_programs: by default all.
        """
        first, last = part or (0, self.pieces)
        columns = x.shape[1]
        self._launch(
            reduce_kernel,
            num_programs or self.buffer.group.backend.num_programs,
            **self.header,
            x_ptr=x,
            out_ptr=out,
            bias_ptr=None if bias is None else bias.contiguous(),
            columns=columns,
            rows_per_reduction=self.rows_per_flag,
            first_reduction=first,
            reductions=last - first,
            all_flags=int(self.copies is not None),
            ALIGNED=columns * x.element_size() % 16 == 0,
            COPY_BLOCK=self._copy_block,
        )

    def open(self) -> None:
        if self.world_size > 1:
            self._launch(open_kernel, 1, **self.header)

    def close(self, outs: Sequence[torch.Tensor]) -> None:
        self.join()
        if self.world_size == 1:
            return
        for out in outs[1:]:
            self._launch(
                fill_kernel, 1, out_ptr=out, rows=out.shape[0], columns=out.shape[1], COPY_BLOCK=self._copy_block
            )
        self._launch(
            close_kernel,
            1,
            **self.header,
            out_ptr=outs[0],
            out_rows=outs[0].shape[0],
            columns=outs[0].shape[1],
            COPY_BLOCK=self._copy_block,
        )

    @property
    def _copy_block(self) -> int:
        return 16384 if self.buffer.group.backend.interpreted else 8192

    def _launch(self, kernel: Any, num_programs: int, **arguments: Any) -> None:
        num_warps = 1 if self.buffer.group.backend.interpreted else 8
        launch_kernel(
            kernel, num_programs, {"num_warps": num_warps, "num_stages": 1}, buffer_ptr=self.buffer.table, **arguments
        )


@contextmanager
def stepped_call(
    buffer: UserBuffer,
    rows: int,
    opening: tuple[HeaderOperation, int, int],
    method: Method,
    outs: Sequence[torch.Tensor],
) -> Iterator[Steps]:
    """One call on ``buffer``, opened before the body and closed after it.

    Args:
        buffer: of the call.
        rows: of a chunk, T/W.
        opening: the operation, N and K, on which the ranks must agree.
        method: with its options.
        outs: contiguous matrices that are filled with NaN after a failure. Where there are several, the body waits for
            every peer's header, so that no failure is left to be found by the last launch.
    """
    group = buffer.group
    operation, n, k = opening
    sends_by_engine = method.name in ("ring_exchange", "bulk")
    copies = sending_copies(buffer, rows, method.use_ce) if sends_by_engine else None
    by = method.name + (" by copy engine" if copies is not None else "")
    with buffer.call() as call:
        header = {
            "epoch": call.epoch,
            "rows": rows,
            "operation": operation_code(operation, buffer.dtype, by),
            "N": n,
            "K": k,
        }
        num_sm = min(method.num_sm or NUM_SM, group.backend.num_programs)
        steps = Steps(buffer, call, rows, header, num_sm, copies)
        steps.open()
        try:
            yield steps
            steps.close(outs)
        except BaseException:
            steps.join()  # transfers still read their sources
            raise


def staging(buffer: UserBuffer, tokens: int) -> torch.Tensor:
    """[tokens, hidden] of this device's own memory beside the slots, for partial sums. Free between calls."""
    hidden = buffer.capacity_shape[1]
    return buffer.local[: tokens * hidden * buffer.dtype.itemsize].view(buffer.dtype).view(tokens, hidden)


def multiply_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """``out[...] = a @ b + bias``, by torch, in the operands' dtype also under autocast."""
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        if bias is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(bias, a, b, out=out)
