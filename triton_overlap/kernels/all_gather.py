"""All-gather into a user buffer's slot, without a GEMM.

Shapes, T tokens over W ranks::

    x [T/W, hidden]   ->   slot [T, hidden], the chunk of rank r at rows [r*T/W, (r+1)*T/W)

One queue of tasks: the pushes of this rank's chunk, in pieces, to the ranks 1, 2, .. steps before it and to its own
slot, then the waits for everybody else's pieces, FLAG_LANES flags a task. All pushes stand before all waits, and a
push waits for nothing, so however few programs are resident, every rank's pieces are pushed.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import (
    AT_DATA,
    RANK,
    WORLD_SIZE,
    active_call,
    claim_task,
    end_call,
    flags_ptr,
    open_call,
    wait_flags,
    wait_headers,
)
from ..comm.signals import HeaderOperation, operation_code
from ..comm.user_buffers import UserBuffer
from .config import FLAG_LANES as _FLAG_LANES
from .config import TileConfig, rows_per_piece, tile_config
from .launching import launch_kernel
from .operands import contiguous_rows
from .tiles import push_piece

FLAG_LANES = tl.constexpr(_FLAG_LANES)


@triton.jit(do_not_specialize=["tokens_ptr", "epoch", "rows", "slot_rows", "rows_per_flag", "operation"])
def all_gather_kernel(
    buffer_ptr, tokens_ptr,  # int64 table of the user buffer; int32 T on the device, or None: T is W * rows
    x_ptr,  # [rows, K]
    epoch, rows, slot_rows, rows_per_flag, operation, K,
    ALIGNED: tl.constexpr, COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
    epoch, rows = active_call(buffer_ptr, tokens_ptr, epoch, rows, operation)
    pieces = tl.cdiv(rows, rows_per_flag)
    waits = tl.cdiv(pieces, FLAG_LANES)
    pushes = world_size * pieces
    total = pushes + (world_size - 1) * waits

    checked = tl.full((), 1, tl.int32)  # the headers of ranks 1 .. checked-1 steps away agree
    task = claim_task(buffer_ptr)
    ok = open_call(buffer_ptr, task, epoch, rows, 0, K, operation)
    while (task < total) & (ok == 1):
        if task < pushes:
            peer = (rank + world_size - 1 - task // pieces) % world_size
            piece = task % pieces
            push_piece(buffer_ptr, x_ptr, peer, piece, rows_per_flag, rows, slot_rows, K, epoch, ALIGNED, COPY_BLOCK)
        else:
            ok = wait_headers(buffer_ptr, checked, world_size, epoch, rows, 0, K, operation)
            checked = world_size
            if ok == 1:
                source = (rank + 1 + (task - pushes) // waits) % world_size
                first = (task - pushes) % waits * FLAG_LANES
                count = tl.minimum(pieces - first, FLAG_LANES)
                own_flags = flags_ptr(buffer_ptr, rank, source, epoch)
                ok = wait_flags(buffer_ptr, own_flags, first, count, epoch, operation, AT_DATA, source, FLAG_LANES)
        task = claim_task(buffer_ptr)
    # After a failure the slot holds anything; gathered.py, by which rows leave it, hands out NaN then.
    end_call(buffer_ptr, tokens_ptr, ok, checked, epoch, rows, 0, K, operation)


def launch(
    buffer: UserBuffer,
    x: torch.Tensor,
    *,
    active_tokens: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> None:
    """Gather ``x`` [T/W, hidden] of every rank into the buffer's slot, until its next call; ``gathered.launch`` copies
    the rows out. ``active_tokens`` as in ``all_gather_matmul``."""
    group = buffer.group
    x = contiguous_rows(x)
    rows, k = x.shape
    config = config or tile_config(x.dtype, k, k, interpreted=group.backend.interpreted)
    with buffer.call() as call:
        _, slot_rows = buffer.slot_chunks(rows)
        launch_kernel(
            all_gather_kernel,
            group.backend.num_programs,
            {"num_warps": config.num_warps, "num_stages": 1},
            buffer_ptr=buffer.table,
            tokens_ptr=active_tokens,
            x_ptr=x,
            epoch=call.epoch,
            rows=rows,
            slot_rows=slot_rows,
            rows_per_flag=rows_per_piece(config.BLOCK_M, k * x.element_size()),
            operation=operation_code(HeaderOperation.ALL_GATHER, x.dtype),
            K=k,
            ALIGNED=k * x.element_size() % 16 == 0,
            COPY_BLOCK=config.COPY_BLOCK,
        )
