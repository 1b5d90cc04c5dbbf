"""How gathered rows leave a slot: as a copy, or as NaN where the group has failed.

A slot's memory never escapes to a caller, and a failed call must not hand out what is left in one. Each program copies
its share and then looks at the failure notice. A rank that fails raises the notice before any store of its that the
protocol does not cover, so a program that read such a store sees the notice, and fills its share with NaN instead.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import failure_noticed
from ..comm.user_buffers import UserBuffer
from .config import tile_config
from .launching import launch_kernel

#: Programs for each multiprocessor: enough loads in flight to fill the memory's bandwidth.
PROGRAMS_EACH = 4


@triton.jit(do_not_specialize=["rows"])
def copy_gathered_kernel(buffer_ptr, slot_ptr, out_ptr, rows, K, BLOCK: tl.constexpr):
    count = rows.to(tl.int64) * K
    first = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    for start in range(first, count, stride):
        offset = start + lane
        tl.store(out_ptr + offset, tl.load(slot_ptr + offset, mask=offset < count), mask=offset < count)
    tl.debug_barrier()
    if failure_noticed(buffer_ptr) != 0:
        tl.debug_barrier()
        for start in range(first, count, stride):
            offset = start + lane
            value = tl.full((BLOCK,), float("nan"), out_ptr.dtype.element_ty)
            tl.store(out_ptr + offset, value, mask=offset < count)


def launch(buffer: UserBuffer, tokens: int) -> torch.Tensor:
    """The rows that the buffer's last call gathered, as a fresh [tokens, hidden] tensor."""
    backend = buffer.group.backend
    slot = buffer.gathered(tokens)
    hidden = slot.shape[1]
    out = torch.empty_like(slot)
    config = tile_config(slot.dtype, hidden, hidden, interpreted=backend.interpreted)
    launch_kernel(
        copy_gathered_kernel,
        backend.num_programs if backend.interpreted else PROGRAMS_EACH * backend.num_programs,
        {"num_warps": config.num_warps, "num_stages": 1},
        buffer_ptr=buffer.table,
        slot_ptr=slot,
        out_ptr=out,
        rows=tokens,
        K=hidden,
        BLOCK=config.COPY_BLOCK,
    )
    buffer.extend_call()
    return out
