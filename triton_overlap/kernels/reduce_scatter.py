"""Reduce-scatter through a user buffer, without a GEMM.

Shapes, T tokens over W ranks, chunk r being rows ``[r*T/W, (r+1)*T/W)``, owned by rank r::

    x [T, hidden]   ->   out [T/W, hidden] = sum over ranks of x[own chunk]

One queue of tasks: the pushes of every other rank's chunk, in pieces, to the ranks 1, 2, .. steps before this one,
then one task for each piece of the own chunk, which waits for it from every peer and adds. All pushes stand before all
waits, and a push waits for nothing, so however few programs are resident, every rank's pieces are pushed.

The sum is taken in fp32, the own rows first, then those of the ranks 1, 2, .. steps after this one.
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
    poison,
    slot_address,
    wait_flags,
    wait_headers,
)
from ..comm.signals import HeaderOperation, operation_code
from ..comm.user_buffers import UserBuffer
from .config import TileConfig, rows_per_piece, tile_config
from .launching import launch_kernel
from .operands import contiguous_rows
from .tiles import push_piece


@triton.jit
def _reduce_piece(buffer_ptr, own_ptr, out_ptr, slot_ptr, first, count, stride_chunk, BLOCK: tl.constexpr):
    """Add elements ``first`` to ``first + count - 1`` of the own chunk over the ranks."""
    rank = tl.load(buffer_ptr + RANK)
    world_size = tl.load(buffer_ptr + WORLD_SIZE)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    for start in range(0, count, BLOCK):
        within = start + lane
        offset = first + within
        mask = within < count
        value = tl.load(own_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        for step in range(1, world_size):
            source_ptr = slot_ptr + (rank + step) % world_size * stride_chunk
            value += tl.load(source_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens_ptr", "epoch", "rows", "slot_rows", "rows_per_flag", "operation"])
def reduce_scatter_kernel(
    buffer_ptr, tokens_ptr,  # int64 table of the user buffer; int32 T on the device, or None: T is W * rows
    x_ptr, out_ptr,  # [T, K], [rows, K]
    epoch, rows, slot_rows, rows_per_flag, operation, K,
    ALIGNED: tl.constexpr, COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
    capacity = tl.full((), 1, tl.int64) * rows * K
    epoch, rows = active_call(buffer_ptr, tokens_ptr, epoch, rows, operation)
    chunk = tl.full((), 1, tl.int64) * rows * K
    slot_ptr = slot_address(buffer_ptr, rank, epoch).to(x_ptr.dtype)
    if ALIGNED:
        slot_ptr = tl.multiple_of(slot_ptr, 16)
    pieces = tl.cdiv(rows, rows_per_flag)
    pushes = (world_size - 1) * pieces
    total = pushes + pieces

    checked = tl.full((), 1, tl.int32)  # the headers of ranks 1 .. checked-1 steps away agree
    task = claim_task(buffer_ptr)
    ok = open_call(buffer_ptr, task, epoch, rows, 0, K, operation)
    while (task < total) & (ok == 1):
        piece = task % pieces
        if task < pushes:
            owner = (rank + world_size - 1 - task // pieces) % world_size
            source_ptr = x_ptr + owner * chunk
            push_piece(
                buffer_ptr, source_ptr, owner, piece, rows_per_flag, rows, slot_rows, K, epoch, ALIGNED, COPY_BLOCK
            )
        else:
            ok = wait_headers(buffer_ptr, checked, world_size, epoch, rows, 0, K, operation)
            checked = world_size
            for step in range(1, world_size):
                if ok == 1:
                    source = (rank + step) % world_size
                    own_flags = flags_ptr(buffer_ptr, rank, source, epoch)
                    ok = wait_flags(buffer_ptr, own_flags, piece, 1, epoch, operation, AT_DATA, source, 1)
            if ok == 1:
                first_row = (piece * rows_per_flag).to(tl.int64)
                count = (tl.minimum(first_row + rows_per_flag, rows) - first_row) * K
                own_ptr = x_ptr + rank * chunk
                stride = tl.full((), 1, tl.int64) * slot_rows * K
                _reduce_piece(buffer_ptr, own_ptr, out_ptr, slot_ptr, first_row * K, count, stride, COPY_BLOCK)
        task = claim_task(buffer_ptr)
    if end_call(buffer_ptr, tokens_ptr, ok, checked, epoch, rows, 0, K, operation) == 2:
        poison(out_ptr, capacity, COPY_BLOCK)


def launch(
    buffer: UserBuffer,
    x: torch.Tensor,
    *,
    active_tokens: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """This rank's chunk of the sum of ``x`` [T, hidden] over the ranks, as a fresh [T/W, hidden] tensor.
    ``active_tokens`` as in ``matmul_reduce_scatter``."""
    group = buffer.group
    x = contiguous_rows(x)
    tokens, k = x.shape
    rows = tokens // group.world_size
    config = config or tile_config(x.dtype, k, k, interpreted=group.backend.interpreted)
    out = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    with buffer.call() as call:
        _, slot_rows = buffer.slot_chunks(rows)
        launch_kernel(
            reduce_scatter_kernel,
            group.backend.num_programs,
            {"num_warps": config.num_warps, "num_stages": 1},
            buffer_ptr=buffer.table,
            tokens_ptr=active_tokens,
            x_ptr=x,
            out_ptr=out,
            epoch=call.epoch,
            rows=rows,
            slot_rows=slot_rows,
            rows_per_flag=rows_per_piece(config.BLOCK_M, k * x.element_size()),
            operation=operation_code(HeaderOperation.REDUCE_SCATTER, x.dtype),
            K=k,
            ALIGNED=k * x.element_size() % 16 == 0,
            COPY_BLOCK=config.COPY_BLOCK,
        )
    return out
