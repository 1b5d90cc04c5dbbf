"""All-gather and GEMM in one persistent kernel.

Shapes, T tokens over W ranks, chunk r being rows ``[r*T/W, (r+1)*T/W)``::

    x [T/W, K] (this rank's chunk)   b [K, N]   ->   out [T, N] = concat(x of every rank) @ b

The kernel's programs share one queue of numbered tasks, handed out by an atomic counter. Tasks stand in phases
0 .. W-1. Phase p multiplies the chunk of rank ``rank + p`` (its own straight from ``x`` in phase 0, the others from the
slot), and, merged evenly among those tiles, pushes this rank's chunk, in pieces, to rank ``rank - (p+1)``, which
multiplies it in its own phase p+1. With ``gather``, phase W-1 copies the own chunk into the own slot.

Example, W 2, two tiles a chunk, two pieces a chunk::

    task    0       1      2       3      4       5
    rank 0  push 0  tile   push 1  tile   tile*   tile*      * waits for rank 1's pieces

Progress, with however few programs resident: a tile of phase p waits only for pieces that stand, in the queue of their
sender, before every tile of phase p; a push waits for nothing, and every program works off its tasks in queue order. So
by induction over p all pieces for phase p are pushed. Where the copy engine sends (``use_ce``), there
are no pushes in the queue, and the copies wait for no program at all.

Lower bound: the larger of the GEMM alone and of (W-1)/W * T * K elements over the link.
"""

import torch
import triton
import triton.language as tl

from ..comm.backend import CopyStream
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
    wait_flags,
    wait_headers,
)
from ..comm.signals import HeaderOperation, operation_code
from ..comm.user_buffers import Call, UserBuffer
from . import config as _config
from .config import TileConfig, rows_per_piece, tile_config
from .copy_engine import sending_copies
from .epilogue import Epilogue, finish_gated_tile, finish_tile
from .launching import launch_kernel
from .operands import StoredB, chunk_descriptor, contiguous_rows, gemm_arguments, use_descriptors
from .tiles import matmul_tile, matmul_tile_pair, push_piece, slot_chunks, tile_position
from .timeline import OWN_TILE, PEER_TILE, PUSH, moment, record_task, task_rows

FLAG_LANES = tl.constexpr(_config.FLAG_LANES)

#: Bytes that the copy engine moves before it sets a flag: about 85 us at the 390 GB/s of an H200's link, so that tiles
#: start long before a large chunk is whole, while each hand-over costs about 10 us.
COPY_ENGINE_BYTES = 32 * 1024 * 1024


@triton.jit(
    do_not_specialize=[
        "tokens_ptr", "epoch", "rows", "slot_rows", "rows_per_flag", "pushes", "operation", "timeline_ptr",
    ]
)  # fmt: skip
def all_gather_matmul_kernel(
    buffer_ptr, tokens_ptr,  # int64 table of the user buffer; int32 T on the device, or None: T is W * rows
    x_ptr, x_desc, slot_desc,  # own chunk [1, rows, K], and the slot [W, slot_rows, K], or with tokens_ptr both
    b_ptr, b_desc, stride_b,  # [K, N], or [N, K] with B_K_MAJOR
    out_ptr, out_desc,  # [W, rows, N] row-major, or with tokens_ptr [1, W * rows, N]; with GATED [.., N / 2]
    product_ptr, bias_ptr,  # [T, N], the product before the activation, and [N], or None
    epoch, rows, slot_rows, rows_per_flag,
    pushes,  # peers to push to, plus 1 for the own slot, or 0
    operation, timeline_ptr, N, K,  # rows of timeline.py, or None
    PRECISION: tl.constexpr, B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    COPY_BLOCK: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
    capacity = rows
    epoch, rows = active_call(buffer_ptr, tokens_ptr, epoch, capacity, operation)
    slot_start, first_chunk = slot_chunks(buffer_ptr, tokens_ptr, epoch)
    slot_ptr = slot_start.to(x_ptr.dtype)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of the output, in a tile
    out_columns = N // 2 if GATED else N
    tiles_n = tl.cdiv(out_columns, COLUMNS)
    tiles = tiles_m * tiles_n
    pieces = tl.cdiv(rows, rows_per_flag)
    total = world_size * tiles + pushes * pieces

    checked = tl.full((), 1, tl.int32)  # the headers of ranks 1 .. checked-1 steps away agree
    arrived = tl.full((), -1, tl.int32)  # the flag this program saw last: one may cover many tiles
    task = claim_task(buffer_ptr)
    ok = open_call(buffer_ptr, task, epoch, rows, N, K, operation)
    while (task < total) & (ok == 1):
        began = moment(timeline_ptr, buffer_ptr)
        waited = began
        went_on = began
        kind = tl.full((), PUSH, tl.int32)
        phase = tl.minimum(task // (tiles + pieces), pushes)
        index = task - phase * (tiles + pieces)
        pieces_here = pieces
        if phase == pushes:  # from here on nothing is left to push
            phase += index // tiles
            index = index % tiles
            pieces_here = pieces * 0
        # Merge the phase's pieces evenly among its tiles, a piece first.
        span = tiles + pieces_here
        piece = ((index.to(tl.int64) * pieces_here + span - 1) // span).to(tl.int32)
        next_piece = (((index + 1).to(tl.int64) * pieces_here + span - 1) // span).to(tl.int32)
        if next_piece > piece:
            peer = (rank + world_size - 1 - phase) % world_size
            push_piece(
                buffer_ptr, x_ptr, peer, piece, rows_per_flag, rows, slot_rows, K, epoch,
                x_desc is not None, COPY_BLOCK,
            )  # fmt: skip
        else:
            kind = tl.where(phase == 0, OWN_TILE, PEER_TILE)
            tile_m, tile_n = tile_position(index - piece, tiles_m, tiles_n, GROUP_M)
            row = tile_m * BLOCK_M
            col = tile_n * COLUMNS
            source = (rank + phase) % world_size
            if phase > 0:
                waited = moment(timeline_ptr, buffer_ptr)
                # Agreement on T first: it says which flags there are to wait for.
                ok = wait_headers(buffer_ptr, checked, phase + 1, epoch, rows, N, K, operation)
                checked = tl.maximum(checked, phase + 1)
                first = row // rows_per_flag
                count = (tl.minimum(row + BLOCK_M, rows) - 1) // rows_per_flag - first + 1
                flag = phase * pieces + first
                if (ok == 1) & ((count > 1) | (flag != arrived)):
                    own_flags = flags_ptr(buffer_ptr, rank, source, epoch)
                    ok = wait_flags(buffer_ptr, own_flags, first, count, epoch, operation, AT_DATA, source, FLAG_LANES)
                arrived = flag
                went_on = moment(timeline_ptr, buffer_ptr)
            if ok == 1:
                # Select the operand, not the loop: two loops would each take shared memory.
                if phase == 0:
                    a_desc, a_ptr, chunk, chunk_rows = x_desc, x_ptr, source * 0, capacity
                else:
                    a_desc, a_ptr, chunk, chunk_rows = slot_desc, slot_ptr, first_chunk + source, slot_rows
                if GATED:
                    gate, up = matmul_tile_pair(
                        a_desc, a_ptr, b_desc, b_ptr, stride_b, chunk, row, chunk_rows, col, out_columns + col, N, K,
                        PRECISION, B_K_MAJOR, BLOCK_M, COLUMNS, BLOCK_K,
                    )  # fmt: skip
                    finish_gated_tile(
                        out_desc, out_ptr, product_ptr, bias_ptr, gate, up, source, row, rows, col, N,
                        FUNCTION, tokens_ptr is None, BLOCK_M, COLUMNS,
                    )  # fmt: skip
                else:
                    acc = matmul_tile(
                        a_desc, a_ptr, b_desc, b_ptr, stride_b, chunk, row, chunk_rows, col, N, K,
                        PRECISION, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
                    finish_tile(
                        out_desc, out_ptr, product_ptr, bias_ptr, acc, source, row, rows, col, N,
                        FUNCTION, tokens_ptr is None, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
        record_task(timeline_ptr, buffer_ptr, task, kind, began, waited, went_on)
        task = claim_task(buffer_ptr)
    if end_call(buffer_ptr, tokens_ptr, ok, checked, epoch, rows, N, K, operation) == 2:
        poison(out_ptr, capacity.to(tl.int64) * world_size * out_columns, COPY_BLOCK)
        if product_ptr is not None:
            poison(product_ptr, capacity.to(tl.int64) * world_size * N, COPY_BLOCK)


def _send_by_copy_engine(copies: CopyStream, buffer: UserBuffer, call: Call, x: torch.Tensor, block_m: int) -> int:
    """Enqueue this rank's chunk for every peer, nearest consumer first; returns the rows of a flag."""
    rank, world_size = buffer.group.rank, buffer.group.world_size
    rows, k = x.shape
    rows_per_flag = max(1, COPY_ENGINE_BYTES // (k * x.element_size() * block_m)) * block_m
    copies.begin()
    for first in range(0, rows, rows_per_flag):
        for step in range(1, world_size):
            copies.push(
                buffer.memory,
                (rank - step) % world_size,
                buffer.layout.data_offset(call.slot, rank * rows + first),
                x[first : first + rows_per_flag],
                buffer.layout.flag_offset(call.slot, rank, first // rows_per_flag),
                call.epoch,
            )
    return rows_per_flag


def launch(
    buffer: UserBuffer,
    x: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    active_tokens: torch.Tensor | None = None,
    gather: bool = False,
    epilogue: Epilogue | None = None,
    use_ce: bool | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """``concat(x of every rank) @ b + bias``, or its activation, as a fresh [T, N] tensor, [T, N/2] where it is gated.

    Args:
        buffer: symmetric memory with hidden size K and the dtype of ``x``.
        x: [T/W, K].
        b: [K, N].
        bias: [N] or None.
        active_tokens: int32 scalar on the device, for a buffer that counts there: T, up to the rows of ``x`` times W.
            Rows past the active ones are neither read, with any effect, nor written.
        gather: leave the gathered rows, the own ones included, in ``buffer.gathered(T)`` until the buffer's next call.
        epilogue: an activation of the product.
        use_ce: the copy engine sends beside the kernel, or programs push from inside it (False). None takes the copy
            engine of a GPU where the chunk is long enough to pay for its hand-over.
        config: tile sizes; by default those for N, K and the dtype.
    """
    group = buffer.group
    rank, world_size = group.rank, group.world_size
    x = contiguous_rows(x)
    rows, k = x.shape
    tokens = rows * world_size
    stored_b = StoredB.of(b)
    # Those that nobody chose follow from what the header has anyway; a difference in N is to be called that.
    tile = None if config is None else config.tile
    config = config or tile_config(x.dtype, b.shape[1], k, interpreted=group.backend.interpreted)
    gated = epilogue is not None and epilogue.gated
    out = torch.empty(tokens, b.shape[1] // 2 if gated else b.shape[1], dtype=x.dtype, device=x.device)
    # The copy engine's sizes are the host's.
    copies = sending_copies(buffer, rows, use_ce) if active_tokens is None else None
    by = "fused" if copies is None else "fused by copy engine"
    with buffer.call() as call:
        slot, slot_rows = buffer.slot_chunks(rows)
        if copies is None:
            rows_per_flag = rows_per_piece(config.BLOCK_M, k * x.element_size())
            pushes = world_size if gather else world_size - 1
        else:
            # Before the kernel: where two streams share a hardware queue, a copy behind it would wait for it.
            rows_per_flag = _send_by_copy_engine(copies, buffer, call, x, config.BLOCK_M)
            pushes = 0
            if gather:
                slot[rank * rows : (rank + 1) * rows].copy_(x)
        out_rows = rows if active_tokens is None else tokens

        def tasks() -> int:
            columns = config.BLOCK_N // 2 if gated else config.BLOCK_N
            tiles = triton.cdiv(rows, config.BLOCK_M) * triton.cdiv(out.shape[1], columns)
            return int(world_size * tiles + pushes * triton.cdiv(rows, rows_per_flag))

        descriptors = use_descriptors(config, x, stored_b.matrix, out)  # the slot is aligned, and has the rows of x
        try:
            launch_kernel(
                all_gather_matmul_kernel,
                group.backend.num_programs,
                {"num_warps": config.num_warps, "num_stages": config.num_stages},
                buffer_ptr=buffer.table,
                tokens_ptr=active_tokens,
                x_ptr=x,
                x_desc=chunk_descriptor(x, rows, [config.BLOCK_M, config.BLOCK_K], descriptors),
                slot_desc=chunk_descriptor(slot, slot_rows, [config.BLOCK_M, config.BLOCK_K], descriptors),
                product_ptr=None if epilogue is None else epilogue.product,
                bias_ptr=None if bias is None else bias.contiguous(),
                epoch=call.epoch,
                rows=rows,
                slot_rows=slot_rows,
                rows_per_flag=rows_per_flag,
                pushes=pushes,
                operation=operation_code(HeaderOperation.ALL_GATHER_MATMUL, x.dtype, by, tile),
                timeline_ptr=task_rows(buffer, "all_gather_matmul", tasks),
                FUNCTION=None if epilogue is None else epilogue.function,
                GATED=gated,
                **gemm_arguments(config, stored_b, out, out_rows, descriptors, paired=gated),
            )
        finally:
            if copies is not None:  # also where the launch raised: the copies still read x
                copies.end()
    return out
