"""What empties the hand-off ring of the ``simulated`` network on GPUs: a kernel beside each call, which shuffles puts.

A program of the mover holds up to WINDOW puts at a time. It cuts them into chunks and lands these in a shuffled order,
those of all its puts together. The words of a chunk land in two random halves, and the first word of a put, which may
be polled, before or after the others of its chunk. A source is read when its chunk lands. The signal of a put is added,
with release at system scope, as soon as all its bytes have been stored, while other puts are half there; strong signals
are added in the order of the tickets. Nothing orders the programs otherwise.

The order follows from a seed and from the moments at which puts come, so it differs from call to call.

The ring counts calls opened, before their kernels, and closed, after them, on their stream. A mover ends when all calls
that were open when it began are closed and the ring is empty. One that begins late finds nothing, or puts of the next
call: it is of no account which mover serves which call, and that of a captured graph may run beside another. A mover
may go on after its call: puts are under way until their signals have been seen.

Progress: a mover waits for entries alone, and without any it ends after the time limit. The kernels of a call wait for
it, so they leave it multiprocessors (``num_programs``), and streams must not share one hardware queue: leave
``CUDA_DEVICE_MAX_CONNECTIONS`` at 2 or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

from ..device import INTERPRETED, RANK, TIMEOUT_NS, now_ns, peer_address
from .ring import DEPTH, RingWord, ring_entry, ring_of

#: Programs of a mover.
NUM_PROGRAMS = 4
#: Puts that a program holds at most.
_WINDOW = 4
#: Words of a chunk.
_CHUNK = 16 if INTERPRETED.value else 512
#: Looks at an empty ring, at most, before a window that is not full lands.
_PATIENCE = 64
OPENED = tl.constexpr(int(RingWord.OPENED))
CLOSED = tl.constexpr(int(RingWord.CLOSED))
TAKEN = tl.constexpr(int(RingWord.TAKEN))
SIGNALLED = tl.constexpr(int(RingWord.SIGNALLED))
SEED = tl.constexpr(int(RingWord.SEED))


@triton.jit
def mixed(value):
    """A hash of int32 ``value``, not negative."""
    bits = value.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x31848BAB
    return ((bits ^ (bits >> 16)) >> 1).to(tl.int32)


@triton.jit
def word_of(ring, word):
    """A counter of the ring's head; what was done before it was advanced is seen."""
    return tl.atomic_add(ring + word, 0, sem="acquire", scope="gpu")


@triton.jit
def take_ticket(ring, depth):
    """The next ticket, whose entry is there; -1 where there is none, or another program was faster."""
    ticket = tl.atomic_add(ring + TAKEN, 0, sem="relaxed", scope="gpu")
    taken = tl.full((), -1, tl.int64)
    if tl.atomic_add(ring_entry(ring, depth, ticket), 0, sem="acquire", scope="gpu") == ticket + 1:
        if tl.atomic_cas(ring + TAKEN, ticket, ticket + 1, sem="relaxed", scope="gpu") == ticket:
            taken = ticket
    # One thread acquired the entry, and with it the bytes that are to be sent.
    tl.debug_barrier()
    return taken


@triton.jit
def take_window(ring, seed, WINDOW: tl.constexpr, PATIENCE: tl.constexpr):
    """Up to WINDOW puts: their number and, by place, ticket, peer, source, target, words, signal.

    It looks a random number of times before it is content with fewer: sources are then read late, and puts that come
    together land together.
    """
    depth = tl.load(ring + DEPTH)
    place = tl.arange(0, WINDOW)
    ticket = tl.zeros((WINDOW,), tl.int64)
    peer, source, target = ticket, ticket, ticket
    words, signal = ticket, ticket
    held = tl.full((), 0, tl.int32)
    looks = tl.full((), 0, tl.int32)
    patience = mixed(seed) % PATIENCE
    while (held < WINDOW) & (looks <= patience):
        taken = take_ticket(ring, depth)
        if taken >= 0:
            entry = ring_entry(ring, depth, taken)
            here = place == held
            ticket = tl.where(here, taken, ticket)
            peer = tl.where(here, tl.load(entry + 1), peer)
            source = tl.where(here, tl.load(entry + 2), source)
            target = tl.where(here, tl.load(entry + 3), target)
            words = tl.where(here, tl.load(entry + 4) // 8, words)
            signal = tl.where(here, tl.load(entry + 5), signal)
            held += 1
        looks += 1
    return held, (ticket, peer, source, target, words, signal)


@triton.jit
def chosen(mine, value):
    """The element of ``value`` where ``mine``, which is true in one place, is."""
    return tl.sum(tl.where(mine, value, 0))


@triton.jit
def land_chunk(source_ptr, target_ptr, first, words, seed, CHUNK: tl.constexpr):
    """Words ``first`` to ``first + CHUNK - 1`` of a put of ``words``, in two random halves. Word 0 by itself, before
    the others or after them."""
    lane = tl.arange(0, CHUNK)
    offset = first + lane
    half = mixed(seed + 1 + lane) & 1
    header_turn = mixed(seed) & 1
    for turn in range(2):
        if (first == 0) & (turn == header_turn):
            tl.atomic_xchg(target_ptr, tl.load(source_ptr), sem="relaxed", scope="sys")
            tl.debug_barrier()
        mask = (offset > 0) & (offset < words) & (half == turn)
        tl.store(target_ptr + offset, tl.load(source_ptr + offset, mask=mask), mask=mask)
        tl.debug_barrier()


@triton.jit
def add_signal(buffer_ptr, peer, signal):
    """Announce a put whose bytes this program has stored."""
    # The addition is one thread's: the others' stores must be behind it.
    tl.debug_barrier()
    signal_ptr = (peer_address(buffer_ptr, peer) + signal).to(tl.pointer_type(tl.int64))
    tl.atomic_add(signal_ptr, 1, sem="release", scope="sys")


@triton.jit
def land_window(buffer_ptr, puts, seed, IN_ORDER: tl.constexpr, CHUNK: tl.constexpr):
    """Land all chunks of ``puts``, shuffled, and add the signals as puts are complete, unless they are ``IN_ORDER``."""
    _, peer, source, target, words, signal = puts
    own = peer_address(buffer_ptr, tl.load(buffer_ptr + RANK))
    chunks = ((words + CHUNK - 1) // CHUNK).to(tl.int32)
    ends = tl.cumsum(chunks, 0)
    left = chunks
    total = tl.sum(chunks)
    span = tl.full((), 1, tl.int32)
    while span < total:
        span *= 2
    # An odd multiple, shifted, passes through all numbers below a power of two.
    factor = mixed(seed + 1) | 1
    shift = mixed(seed + 2)
    for step in range(span):
        number = (step * factor + shift) & (span - 1)
        if number < total:
            mine = (number >= ends - chunks) & (number < ends)
            to = chosen(mine, peer)
            source_ptr = (own + chosen(mine, source)).to(tl.pointer_type(tl.int64))
            target_ptr = (peer_address(buffer_ptr, to) + chosen(mine, target)).to(tl.pointer_type(tl.int64))
            first = (number - chosen(mine, ends - chunks)) * CHUNK
            land_chunk(source_ptr, target_ptr, first, chosen(mine, words), mixed(seed + 3 + step), CHUNK)
            left -= mine.to(tl.int32)
            if not IN_ORDER:
                if chosen(mine, left) == 0:
                    add_signal(buffer_ptr, to, chosen(mine, signal))


@triton.jit
def signal_in_order(buffer_ptr, ring, puts, held, WINDOW: tl.constexpr):
    """Add the signals of ``puts``, which have landed, each after those of all earlier tickets."""
    ticket, peer, _, _, _, signal = puts
    place = tl.arange(0, WINDOW)
    for index in range(held):
        mine = place == index
        # Whoever has the ticket before is landing it, and waits for nobody with a later one.
        while word_of(ring, SIGNALLED) < chosen(mine, ticket):
            pass
        add_signal(buffer_ptr, chosen(mine, peer), chosen(mine, signal))
        tl.atomic_add(ring + SIGNALLED, 1, sem="release", scope="gpu")


@triton.jit
def mover_kernel(
    buffer_ptr, IN_ORDER: tl.constexpr, WINDOW: tl.constexpr, PATIENCE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """See the module's page."""
    ring = ring_of(buffer_ptr)
    last_call = word_of(ring, OPENED)
    seed = mixed(tl.load(ring + SEED).to(tl.int32)) + tl.program_id(0)
    since = now_ns(buffer_ptr)
    going = tl.full((), 1, tl.int32)
    while going == 1:
        # Before the look at the ring: all entries of a call that is closed are there.
        closed = word_of(ring, CLOSED) >= last_call
        seed = mixed(seed + 1)
        held, puts = take_window(ring, seed, WINDOW, PATIENCE)
        if held > 0:
            land_window(buffer_ptr, puts, seed, IN_ORDER, CHUNK)
            if IN_ORDER:
                signal_in_order(buffer_ptr, ring, puts, held, WINDOW)
            since = now_ns(buffer_ptr)
        elif closed | (now_ns(buffer_ptr) - since > tl.load(buffer_ptr + TIMEOUT_NS)):
            going = tl.full((), 0, tl.int32)


@triton.jit
def count_kernel(buffer_ptr, WORD: tl.constexpr):
    """One call more is open, or closed."""
    tl.atomic_add(ring_of(buffer_ptr) + WORD, 1, sem="release", scope="gpu")


#: The constexprs of ``mover_kernel`` beside IN_ORDER, and how it is compiled.
MOVER_SIZES = {"WINDOW": _WINDOW, "PATIENCE": _PATIENCE, "CHUNK": _CHUNK}
MOVER_OPTIONS = {"num_warps": 4, "num_stages": 1}


def launch_mover(table: torch.Tensor, *, in_order: bool) -> None:
    """On the current stream."""
    kernel: Any = mover_kernel
    kernel[(NUM_PROGRAMS,)](table, IN_ORDER=in_order, **MOVER_SIZES, **MOVER_OPTIONS)


def count_call(table: torch.Tensor, word: RingWord) -> None:
    """On the current stream: advance ``word``, OPENED or CLOSED, of the ring of a buffer."""
    kernel: Any = count_kernel
    kernel[(1,)](table, WORD=int(word), num_warps=1)


class Mover:
    """Launches a mover beside each call.

    Args:
        device: of the ring and the calls.
        in_order: signals are strong.
    """

    def __init__(self, device: torch.device, *, in_order: bool) -> None:
        self._device = device
        self._in_order = in_order
        # High priority, so that it gets its places before a call's kernels.
        self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def beside(self, table: torch.Tensor) -> Iterator[None]:
        """Around the launches of a call on the current stream. In a capture the call ends after its mover."""
        current = torch.cuda.current_stream(self._device)
        count_call(table, RingWord.OPENED)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            launch_mover(table, in_order=self._in_order)
        try:
            yield
        finally:
            count_call(table, RingWord.CLOSED)
            if torch.cuda.is_current_stream_capturing():
                current.wait_stream(self._stream)
