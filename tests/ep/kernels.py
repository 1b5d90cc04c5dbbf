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


@triton.jit
def copy_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """``count`` elements, by one program."""
    for start in range(0, count, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        tl.store(target_ptr + offset, tl.load(source_ptr + offset, mask=offset < count), mask=offset < count)


@triton.jit
def exchange_kernel(buffer_ptr, x_ptr, out_ptr, call, words, PUT: tl.constexpr, FAULT: tl.constexpr):
    """Put ``words`` int64 in two halves to the peer, wait for both signals, read what it sent.

    Bytes of the symmetric memory: 0 outgoing, 2048 incoming, 4096 and 4104 the signals.
    """
    rank = tl.load(buffer_ptr)
    own = tl.load(buffer_ptr + 16 + rank)
    outgoing = own.to(tl.pointer_type(tl.int64))
    incoming = (own + 2048).to(tl.pointer_type(tl.int64))
    signals = (own + 4096).to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, 64)
    tl.store(outgoing + lane, tl.load(x_ptr + lane, mask=lane < words), mask=lane < words)
    half = words // 2
    PUT(buffer_ptr, 1 - rank, 0, 2048, half * 8, 4096)
    PUT(buffer_ptr, 1 - rank, half * 8, 2048 + half * 8, half * 8, 4104)
    if FAULT == "source rewritten":
        tl.store(outgoing + lane, lane.to(tl.int64), mask=lane < words)
    if FAULT != "first signal ignored":
        while tl.atomic_add(signals, 0, sem="acquire", scope="sys") < call:
            pass
    if FAULT != "second signal ignored":
        while tl.atomic_add(signals + 1, 0, sem="acquire", scope="sys") < call:
            pass
    tl.store(out_ptr + lane, tl.load(incoming + lane, mask=lane < words), mask=lane < words)


@triton.jit
def put_kernel(buffer_ptr, orders_ptr, count, PUT: tl.constexpr):
    """``count`` puts, by one program; ``orders`` int64 [count, 5]: peer, source, target, num_bytes, signal."""
    for index in range(count):
        order = orders_ptr + 5 * index
        PUT(
            buffer_ptr,
            tl.load(order),
            tl.load(order + 1),
            tl.load(order + 2),
            tl.load(order + 3),
            tl.load(order + 4),
        )
