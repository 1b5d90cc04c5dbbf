"""How gathered rows leave a slot: as a copy, or as NaN where the group has failed.

A slot's memory never escapes to a caller, and a failed call must not hand out what is left in one. Each program copies
its share and then looks at the failure notice. A rank that fails raises the notice before any store of its that the
protocol does not cover, so a program that read such a store sees the notice, and fills its share with NaN instead.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import RANK, WORLD_SIZE, device_epoch, failure_noticed, slot_address
from ..comm.user_buffers import UserBuffer
from .config import tile_config
from .launching import launch_kernel

#: Programs for each multiprocessor: enough loads in flight to fill the memory's bandwidth.
PROGRAMS_EACH = 4


@triton.jit(do_not_specialize=["tokens_ptr", "epoch", "rows", "slot_rows"])
def copy_gathered_kernel(
    buffer_ptr, tokens_ptr, out_ptr, epoch, rows, slot_rows, K, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    world_size = tl.load(buffer_ptr + WORLD_SIZE)
    capacity = rows.to(tl.int64) * world_size * K
    if tokens_ptr is not None:
        epoch = device_epoch(buffer_ptr) - 1  # of the call that has just ended; its parity is all that counts
        rows = tl.minimum(tl.maximum(tl.load(tokens_ptr) // world_size.to(tl.int32), 0), rows)
    slot_ptr = slot_address(buffer_ptr, tl.load(buffer_ptr + RANK), epoch).to(out_ptr.dtype)
    if ALIGNED:
        slot_ptr = tl.multiple_of(slot_ptr, 16)
    count = rows.to(tl.int64) * K
    lane = tl.arange(0, BLOCK)
    # One queue over the chunks: each is cut into blocks of its own, so that no block lies in two.
    blocks = tl.cdiv(count, BLOCK)
    for block in range(tl.program_id(0).to(tl.int64), blocks * world_size, tl.num_programs(0)):
        chunk = block // blocks
        offset = block % blocks * BLOCK + lane
        value = tl.load(slot_ptr + chunk * slot_rows * K + offset, mask=offset < count)
        tl.store(out_ptr + chunk * count + offset, value, mask=offset < count)
    tl.debug_barrier()
    if failure_noticed(buffer_ptr) != 0:
        tl.debug_barrier()
        value = tl.full((BLOCK,), float("nan"), out_ptr.dtype.element_ty)
        for block in range(tl.program_id(0).to(tl.int64), blocks * world_size, tl.num_programs(0)):
            offset = block % blocks * BLOCK + lane
            tl.store(out_ptr + block // blocks * count + offset, value, mask=offset < count)
        # Past the active rows too: what failed may be their count.
        for start in range(count * world_size + tl.program_id(0) * BLOCK, capacity, tl.num_programs(0) * BLOCK):
            tl.store(out_ptr + start + lane, value, mask=start + lane < capacity)


def launch(buffer: UserBuffer, tokens: int, active_tokens: torch.Tensor | None = None) -> torch.Tensor:
    """The rows that the buffer's last call gathered, as a fresh [tokens, hidden] tensor.

    ``active_tokens`` is what that call had; rows past the active ones are not written then.
    """
    backend = buffer.group.backend
    rows = tokens // buffer.group.world_size
    _, slot_rows = buffer.slot_chunks(rows)
    hidden = buffer.capacity_shape[1]
    out = torch.empty(tokens, hidden, dtype=buffer.dtype, device=buffer.group.device)
    config = tile_config(out.dtype, hidden, hidden, interpreted=backend.interpreted)
    launch_kernel(
        copy_gathered_kernel,
        backend.num_programs if backend.interpreted else PROGRAMS_EACH * backend.num_programs,
        {"num_warps": config.num_warps, "num_stages": 1},
        buffer_ptr=buffer.table,
        tokens_ptr=active_tokens,
        out_ptr=out,
        epoch=0 if active_tokens is not None else buffer.epoch,
        rows=rows,
        slot_rows=slot_rows,
        K=hidden,
        ALIGNED=hidden * out.element_size() % 16 == 0,
        BLOCK=config.COPY_BLOCK,
    )
    buffer.extend_call()
    return out
