"""GEMM and reduce-scatter in one persistent kernel.

Shapes, T tokens over W ranks, chunk r being rows ``[r*T/W, (r+1)*T/W)``, owned by rank r::

    a [T, K]   b [K, N]   ->   out [T/W, N] = sum over ranks of (a @ b)[own chunk]

The kernel's programs share one queue of numbered tasks, handed out by an atomic counter:

* a *peer tile* multiplies one tile of another rank's chunk into local staging, and flags it on this device;
* a *push* copies one such tile from staging to its owner's slot, and flags it there;
* an *own tile* multiplies one tile of the own chunk, then waits for that tile from every peer, adds, and stores.

Staging keeps the stores over the link, which are slow and come in bursts when every tile ends by one, off the programs
that multiply: a push starts ``delay`` tasks after its tile and few programs push at any time. The queue is, for n peer
tiles (W-1 chunks), d = min(delay, tiles of a chunk) and k = PUSHES_PER_OWN_TILE::

    d peer tiles | push, peer tile, push, peer tile, ... | k pushes, own tile, k pushes, own tile, ... | other own tiles

Example, W 2, three tiles a chunk, d 2, k 2: P0 P1 | >0 P2 | >1 >2 O0 | O1 O2.

Pushes go in small batches before own tiles because they are short: done first, they leave the programs level for the
last wave of tiles. Large batches would queue for the link.

Progress, with however few programs resident, since each works off its tasks in queue order: a push waits for a tile
that stands before it in the queue, claimed by a program that waits for nothing until the tile is staged. An own tile j
waits for the pushes of tile j at its peers; there the last of them is push n - tiles + j, the (j - (tiles - d))th of
those that stand among the own tiles, and since d <= tiles at least j + 1 of them, or all, stand before own tile j. So
by induction over j, all own tiles end.

Every partial sum crosses the link in the buffer's dtype; the owner adds in fp32, its own product first, then the ranks
1, 2, .. steps after it, so that the result is bitwise reproducible.

Lower bound: the larger of the GEMM alone and of (W-1)/W * T * N elements over the link.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import (
    AT_DATA,
    AT_STAGING,
    RANK,
    STAGING,
    WORLD_SIZE,
    active_call,
    claim_task,
    end_call,
    flags_ptr,
    open_call,
    poison,
    release_flag,
    release_staged,
    slot_address,
    staged_ptr,
    wait_flags,
    wait_headers,
)
from ..comm.signals import HeaderOperation, operation_code
from ..comm.user_buffers import UserBuffer
from .config import TileConfig, tile_config
from .launching import launch_kernel
from .operands import StoredB, chunk_descriptor, contiguous_rows, gemm_arguments, use_descriptors
from .tiles import (
    MAX_STORE_COLUMNS,
    copy_block,
    matmul_tile,
    slot_chunks,
    split_columns,
    store_block,
    store_masked,
    tile_position,
)
from .timeline import OWN_TILE, PEER_TILE, PUSH, moment, record_task, task_rows

#: Tasks between a tile and its push, for each program. Every other task is a push, so half a tile's time; more let
#: pushes pile up, and they share one link.
DELAY_PER_PROGRAM = 1
#: Pushes that stand together before an own tile.
PUSHES_PER_OWN_TILE = tl.constexpr(4)


@triton.jit
def _queue_entry(task, peer_tiles, delay):
    """What stands at position ``task`` of the queue, and its number among its kind."""
    at_merged = task - delay
    at_own = at_merged - 2 * (peer_tiles - delay)
    kind = tl.full((), PEER_TILE, tl.int32)
    index = task
    if at_own >= 0:
        batches = delay // PUSHES_PER_OWN_TILE  # full ones
        batch = tl.minimum(at_own // (PUSHES_PER_OWN_TILE + 1), batches)
        within = at_own - batch * (PUSHES_PER_OWN_TILE + 1)
        pushes = tl.minimum(delay - batch * PUSHES_PER_OWN_TILE, PUSHES_PER_OWN_TILE)
        if within < pushes:
            kind = tl.full((), PUSH, tl.int32)
            index = peer_tiles - delay + batch * PUSHES_PER_OWN_TILE + within
        else:
            kind = tl.full((), OWN_TILE, tl.int32)
            index = batch + within - pushes
    elif at_merged >= 0:
        kind = PUSH - at_merged % 2
        index = at_merged // 2 + at_merged % 2 * delay
    return kind, index


@triton.jit
def _add_partials(
    value, slot_desc, slot_ptr, first_chunk, slot_rows, buffer_ptr, row, rows, col, N,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add what every peer put into this rank's slot for a block, in the fixed order of the module's page."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
    block_rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, COLUMNS)
    mask = (block_rows < rows)[:, None] & (cols < N)[None, :]
    for step in range(1, world_size):
        source = (rank + step) % world_size
        if slot_desc is not None:
            value += slot_desc.load([first_chunk + source, row, col]).reshape(BLOCK_M, COLUMNS).to(tl.float32)
        else:
            from_row = (first_chunk + source) * slot_rows
            pointers = slot_ptr + (from_row + block_rows).to(tl.int64)[:, None] * N + cols[None, :]
            value += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _store_own(
    out_desc, out_ptr, bias_ptr, residual_ptr, slot_desc, slot_ptr, first_chunk, slot_rows, buffer_ptr,
    acc, row, rows, col, N,
    HOST_COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if BLOCK_N > MAX_STORE_COLUMNS:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = split_columns(acc, BLOCK_M, BLOCK_N)
        left = _add_partials(
            left, slot_desc, slot_ptr, first_chunk, slot_rows, buffer_ptr, row, rows, col, N, BLOCK_M, HALF
        )
        store_block(out_desc, out_ptr, bias_ptr, residual_ptr, left, 0, row, rows, col, N, HOST_COUNT, BLOCK_M, HALF)
        right = _add_partials(
            right, slot_desc, slot_ptr, first_chunk, slot_rows, buffer_ptr, row, rows, col + HALF, N, BLOCK_M, HALF
        )
        store_block(
            out_desc, out_ptr, bias_ptr, residual_ptr, right, 0, row, rows, col + HALF, N, HOST_COUNT, BLOCK_M, HALF
        )
    else:
        acc = _add_partials(
            acc, slot_desc, slot_ptr, first_chunk, slot_rows, buffer_ptr, row, rows, col, N, BLOCK_M, BLOCK_N
        )
        store_block(out_desc, out_ptr, bias_ptr, residual_ptr, acc, 0, row, rows, col, N, HOST_COUNT, BLOCK_M, BLOCK_N)


@triton.jit
def _stage_tile(staging_ptr, acc, owner, row, rows, col, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Plain stores: a descriptor's would not be covered by the release that follows."""
    if BLOCK_N > MAX_STORE_COLUMNS:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = split_columns(acc, BLOCK_M, BLOCK_N)
        cols = col + tl.arange(0, HALF)
        store_masked(staging_ptr, left.to(staging_ptr.dtype.element_ty), owner, row, rows, cols, N, BLOCK_M)
        store_masked(staging_ptr, right.to(staging_ptr.dtype.element_ty), owner, row, rows, cols + HALF, N, BLOCK_M)
    else:
        cols = col + tl.arange(0, BLOCK_N)
        store_masked(staging_ptr, acc.to(staging_ptr.dtype.element_ty), owner, row, rows, cols, N, BLOCK_M)


@triton.jit(do_not_specialize=["tokens_ptr", "epoch", "rows", "slot_rows", "delay", "operation", "timeline_ptr"])
def matmul_reduce_scatter_kernel(
    buffer_ptr, tokens_ptr,  # int64 table of the user buffer; int32 T on the device, or None: T is W * rows
    slot_desc,  # the slot [W, slot_rows, N], or with tokens_ptr both
    a_ptr, a_desc,  # [1, T, K]
    b_ptr, b_desc, stride_b,  # [K, N], or [N, K] with B_K_MAJOR
    out_ptr, out_desc, bias_ptr, residual_ptr,  # [rows, N] row-major; [N], or None; [rows, N], or None
    epoch, rows, slot_rows, delay, operation, timeline_ptr, N, K,  # rows of timeline.py, or None
    PRECISION: tl.constexpr, B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    world_size = tl.load(buffer_ptr + WORLD_SIZE).to(tl.int32)
    capacity = rows
    epoch, rows = active_call(buffer_ptr, tokens_ptr, epoch, capacity, operation)
    slot_start, first_chunk = slot_chunks(buffer_ptr, tokens_ptr, epoch)
    slot_ptr = slot_start.to(out_ptr.dtype)
    staging_ptr = tl.load(buffer_ptr + STAGING).to(out_ptr.dtype)
    if out_desc is not None:  # rows are whole multiples of 16 bytes
        slot_ptr = tl.multiple_of(slot_ptr, 16)
        staging_ptr = tl.multiple_of(staging_ptr, 16)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    peer_tiles = (world_size - 1) * tiles
    delay = tl.minimum(tl.minimum(delay, tiles), peer_tiles)
    total = 2 * peer_tiles + tiles

    checked = tl.full((), 1, tl.int32)  # the headers of ranks 1 .. checked-1 steps away agree
    task = claim_task(buffer_ptr)
    ok = open_call(buffer_ptr, task, epoch, rows, N, K, operation)
    while (task < total) & (ok == 1):
        began = moment(timeline_ptr, buffer_ptr)
        waited = began
        went_on = began
        kind, index = _queue_entry(task, peer_tiles, delay)
        # Peers are served in the order 1, 2, .. steps before this rank, so that no owner gets from all at once.
        owner = (rank + world_size - 1 - index // tiles) % world_size
        tile = index % tiles
        if kind == OWN_TILE:
            owner = rank
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        if kind == PUSH:
            staged = staged_ptr(buffer_ptr, owner)
            waited = moment(timeline_ptr, buffer_ptr)
            ok = wait_flags(buffer_ptr, staged, tile, 1, epoch, operation, AT_STAGING, rank, 1)
            went_on = moment(timeline_ptr, buffer_ptr)
            if ok == 1:
                target_ptr = slot_address(buffer_ptr, owner, epoch).to(out_ptr.dtype)
                if out_desc is not None:
                    target_ptr = tl.multiple_of(target_ptr, 16)
                copy_block(
                    staging_ptr + owner.to(tl.int64) * rows * N, target_ptr + rank.to(tl.int64) * slot_rows * N,
                    row, rows, col, N, BLOCK_M, BLOCK_N, COPY_BLOCK,
                )  # fmt: skip
                release_flag(flags_ptr(buffer_ptr, owner, rank, epoch) + tile, epoch)
        else:
            # A tile's rows past its chunk are another's and come to nothing: A is this rank's own, nobody writes it.
            acc = matmul_tile(
                a_desc, a_ptr, b_desc, b_ptr, stride_b, 0, owner * rows + row, capacity * world_size, col, N, K,
                PRECISION, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if kind == PEER_TILE:
                _stage_tile(staging_ptr, acc, owner, row, rows, col, N, BLOCK_M, BLOCK_N)
                release_staged(staged_ptr(buffer_ptr, owner) + tile, epoch)
            else:
                waited = moment(timeline_ptr, buffer_ptr)
                ok = wait_headers(buffer_ptr, checked, world_size, epoch, rows, N, K, operation)
                checked = world_size
                for step in range(1, world_size):
                    if ok == 1:
                        source = (rank + step) % world_size
                        own_flags = flags_ptr(buffer_ptr, rank, source, epoch)
                        ok = wait_flags(buffer_ptr, own_flags, tile, 1, epoch, operation, AT_DATA, source, 1)
                went_on = moment(timeline_ptr, buffer_ptr)
                if ok == 1:
                    _store_own(
                        out_desc, out_ptr, bias_ptr, residual_ptr,
                        slot_desc, slot_ptr, first_chunk, slot_rows, buffer_ptr,
                        acc, row, rows, col, N, tokens_ptr is None, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
        record_task(timeline_ptr, buffer_ptr, task, kind, began, waited, went_on)
        task = claim_task(buffer_ptr)
    if end_call(buffer_ptr, tokens_ptr, ok, checked, epoch, rows, N, K, operation) == 2:
        poison(out_ptr, capacity.to(tl.int64) * N, COPY_BLOCK)


def launch(
    buffer: UserBuffer,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    active_tokens: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """This rank's chunk of ``sum over ranks of a @ b``, plus ``bias`` and ``residual``, as a fresh [T/W, N] tensor.

    Args:
        buffer: symmetric memory with hidden size N and the dtype of ``a``.
        a: [T, K].
        b: [K, N].
        bias: [N] or None; added once, after the reduction.
        residual: [T/W, N] or None; added in fp32 before the one rounding.
        active_tokens: int32 scalar on the device, for a buffer that counts there: T, up to the rows of ``a``. Rows past
            the active ones are neither read, with any effect, nor written.
        config: tile sizes; by default those for N, K and the dtype.
    """
    group = buffer.group
    a = contiguous_rows(a)
    tokens, k = a.shape
    rows = tokens // group.world_size
    stored_b = StoredB.of(b)
    # Those that nobody chose follow from what the header has anyway; a difference in N is to be called that.
    tile = None if config is None else config.tile
    config = config or tile_config(a.dtype, b.shape[1], k, interpreted=group.backend.interpreted)
    out = torch.empty(rows, b.shape[1], dtype=a.dtype, device=a.device)
    descriptors = use_descriptors(config, a, stored_b.matrix, out)

    def tasks() -> int:
        tiles = triton.cdiv(rows, config.BLOCK_M) * triton.cdiv(out.shape[1], config.BLOCK_N)
        return int((2 * group.world_size - 1) * tiles)

    with buffer.call() as call:
        slot, slot_rows = buffer.slot_chunks(rows)
        launch_kernel(
            matmul_reduce_scatter_kernel,
            group.backend.num_programs,
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
            buffer_ptr=buffer.table,
            tokens_ptr=active_tokens,
            slot_desc=chunk_descriptor(slot, slot_rows, [config.BLOCK_M, config.store_columns], descriptors),
            a_ptr=a,
            a_desc=chunk_descriptor(a, tokens, [config.BLOCK_M, config.BLOCK_K], descriptors),
            bias_ptr=None if bias is None else bias.contiguous(),
            residual_ptr=None if residual is None else contiguous_rows(residual),
            epoch=call.epoch,
            rows=rows,
            slot_rows=slot_rows,
            delay=DELAY_PER_PROGRAM * group.backend.num_programs,
            operation=operation_code(HeaderOperation.MATMUL_REDUCE_SCATTER, a.dtype, tile=tile),
            timeline_ptr=task_rows(buffer, "matmul_reduce_scatter", tasks),
            **gemm_arguments(config, stored_b, out, rows, descriptors),
        )
    return out
