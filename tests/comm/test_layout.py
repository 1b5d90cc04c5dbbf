"""Layout of a buffer: sizes and offsets by hand, and regions that neither overlap nor leave the allocation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triton_overlap.comm.layout import ALIGNMENT, HEADER_WORDS, BufferLayout, control_bytes


def test_numeric_example() -> None:
    layout = BufferLayout(world_size=2, max_tokens=64, hidden=32, itemsize=2)
    assert layout.flags_per_source == 32
    assert layout.slot_bytes == 4096
    assert (layout.headers, layout.flags, layout.data) == (0, 1024, 2048)
    assert layout.num_bytes == 2048 + 2 * 4096
    assert layout.flag_offset(slot=1, source=0, index=3) == 1024 + 4 * (2 * 32 + 3)
    assert layout.data_offset(slot=1, row=2) == 2048 + 4096 + 2 * 64
    assert control_bytes(2) == 1024


@given(st.integers(1, 16), st.integers(1, 300), st.integers(1, 500), st.sampled_from([2, 4]))
def test_regions_are_aligned_and_disjoint(world_size: int, chunk: int, hidden: int, itemsize: int) -> None:
    layout = BufferLayout(world_size, chunk * world_size, hidden, itemsize)
    starts = [layout.headers, layout.flags, layout.data, layout.num_bytes]
    assert starts == sorted(starts)
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert layout.flags - layout.headers >= 2 * world_size * HEADER_WORDS * 8
    last_flag = layout.flag_offset(1, world_size - 1, layout.flags_per_source - 1)
    assert layout.flags <= last_flag
    assert last_flag + 4 <= layout.data
    last_row = layout.data_offset(1, layout.max_tokens - 1)
    assert last_row + hidden * itemsize <= layout.num_bytes
    assert layout.data_offset(0, layout.max_tokens) <= layout.data_offset(1, 0)
