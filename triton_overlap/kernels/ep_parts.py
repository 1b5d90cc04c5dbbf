"""The arithmetic of ``ep_geometry`` on runtime values: no token count and no geometry compiles a kernel anew.

A channel's cut is int32 words (:func:`cut_words`): parts N, the first slot of part 1, the step between later parts with
its remainder, the size of the last part, the sub-parts asked for and the smallest one. Where all parts have size B, the
first five are N, B, B, 0, B.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ep_geometry import Geometry, Knobs


def cut_words(geometry: Geometry, knobs: Knobs) -> list[int]:
    """What kernels need to know of a geometry."""
    sizes, parts = geometry.part_sizes, geometry.num_parts
    first = sizes[0]
    middle = sum(sizes[1:-1]) if parts > 2 else 0
    step, longer = divmod(middle, parts - 2) if parts > 2 else (first, 0)
    floor = max(knobs.min_sub_tokens, knobs.arch_min_sub_tokens)
    return [parts, first, step, longer, geometry.part_size, knobs.num_sub_parts, floor, 0]


@triton.jit
def part_start(cut_ptr, part):
    """First slot of ``part``; for part N, the end of the last one where parts differ in size."""
    first = tl.load(cut_ptr + 1)
    later = first + (part - 1) * tl.load(cut_ptr + 2) + tl.minimum(part - 1, tl.load(cut_ptr + 3))
    return tl.where(part == 0, 0, later)


@triton.jit
def part_size(cut_ptr, part):
    """Slots of ``part``."""
    last = tl.load(cut_ptr) - 1
    return tl.where(part == last, tl.load(cut_ptr + 4), part_start(cut_ptr, part + 1) - part_start(cut_ptr, part))


@triton.jit
def sub_part_count(cut_ptr, size):
    """Sub-parts of a part of ``size`` slots."""
    count = tl.minimum(tl.minimum(size, tl.load(cut_ptr + 5)), tl.load(cut_ptr + 4))
    floor = tl.load(cut_ptr + 6)
    count = tl.where(floor > 1, tl.minimum(count, size // tl.maximum(floor, 1)), count)
    return tl.maximum(count, 1)


@triton.jit
def sub_part_start(size, count, sub_part):
    """First slot, within its part of ``size`` slots in ``count`` sub-parts, of ``sub_part``; its end is the next one's
    start."""
    return sub_part * (size // count) + tl.minimum(sub_part, size % count)
