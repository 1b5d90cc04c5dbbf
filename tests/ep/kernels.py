"""Kernels of the expert-parallel tests."""

import triton
import triton.language as tl

from triton_overlap.kernels.ep_parts import part_size, part_start, sub_part_count, sub_part_start


@triton.jit
def cut_kernel(cut_ptr, out_ptr):
    """``out`` int32 [N, 3 + sub-parts, up to 32]: start, size, number of sub-parts, start of each and their end."""
    for part in range(tl.load(cut_ptr)):
        size = part_size(cut_ptr, part)
        count = sub_part_count(cut_ptr, size)
        row_ptr = out_ptr + part * 32
        tl.store(row_ptr, part_start(cut_ptr, part))
        tl.store(row_ptr + 1, size)
        tl.store(row_ptr + 2, count)
        for sub_part in range(count + 1):
            tl.store(row_ptr + 3 + sub_part, sub_part_start(size, count, sub_part))
