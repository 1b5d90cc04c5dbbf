"""Small kernels on the words of symmetric memory, for the tests of backends."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(table_ptr, peer, word, count):
    """Add 1 to int32 ``word`` of ``peer``'s copy, ``count`` times."""
    target = tl.load(table_ptr + peer).to(tl.pointer_type(tl.int32)) + word
    for _ in range(count):
        tl.atomic_add(target, 1, sem="relaxed", scope="sys")


@triton.jit
def wait_and_sum_kernel(table_ptr, rank, flag, epoch, first, out_ptr, N: tl.constexpr):
    """Add up ``N`` int32 words from word ``first`` of the own copy as soon as word ``flag`` is ``epoch``."""
    words = tl.load(table_ptr + rank).to(tl.pointer_type(tl.int32))
    seen = tl.atomic_add(words + flag, 0, sem="acquire", scope="sys")
    while seen != epoch:
        seen = tl.atomic_add(words + flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # one thread acquired; the others read after it
    tl.store(out_ptr, tl.sum(tl.load(words + first + tl.arange(0, N)), 0))


@triton.jit
def put_kernel(table_ptr, peer, flag, epoch, first, value, N: tl.constexpr):
    """Store ``value`` to ``N`` int32 words of ``peer``'s copy, then release ``epoch`` in its word ``flag``."""
    words = tl.load(table_ptr + peer).to(tl.pointer_type(tl.int32))
    tl.store(words + first + tl.arange(0, N), tl.full((N,), 0, tl.int32) + value)
    tl.debug_barrier()
    tl.atomic_xchg(words + flag, epoch, sem="release", scope="sys")
