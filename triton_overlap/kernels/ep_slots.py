"""Device functions of an expert buffer: tables, slots, headers, copies, and the barrier that opens a call."""

import triton
import triton.language as tl

from ..comm.device import (
    AT_SIGNAL,
    HEADER_WORDS,
    INTERPRETED,
    RANK,
    compare_header,
    header_words,
    peer_address,
    send_header,
    wait_header,
    wait_signal,
)
from .ep_layout import EpWord

SCALE_OUT = tl.constexpr(int(EpWord.SCALE_OUT))
SCALE_UP = tl.constexpr(int(EpWord.SCALE_UP))
CHANNELS = tl.constexpr(int(EpWord.CHANNELS))
SLOTS = tl.constexpr(int(EpWord.SLOTS))
MAX_TOKENS = tl.constexpr(int(EpWord.MAX_TOKENS))
TOPK = tl.constexpr(int(EpWord.TOPK))
EXPERTS = tl.constexpr(int(EpWord.EXPERTS))
SLOT_BYTES = tl.constexpr(int(EpWord.SLOT_BYTES))
SCALE_OFFSET = tl.constexpr(int(EpWord.SCALE_OFFSET))
ROW_OFFSET = tl.constexpr(int(EpWord.ROW_OFFSET))
HELLO_OUT = tl.constexpr(int(EpWord.HELLO_OUT))
HELLO_IN = tl.constexpr(int(EpWord.HELLO_IN))
COUNTS = tl.constexpr(int(EpWord.COUNTS))
STAGING = tl.constexpr(int(EpWord.STAGING))
INCOMING = tl.constexpr(int(EpWord.INCOMING))
ROWS = tl.constexpr(int(EpWord.ROWS))
HELLO_SIGNALS = tl.constexpr(int(EpWord.HELLO_SIGNALS))
DATA_SIGNALS = tl.constexpr(int(EpWord.DATA_SIGNALS))
BATCH_SIGNALS = tl.constexpr(int(EpWord.BATCH_SIGNALS))
ARRIVAL_SIGNALS = tl.constexpr(int(EpWord.ARRIVAL_SIGNALS))
PUSH_SIGNALS = tl.constexpr(int(EpWord.PUSH_SIGNALS))
BASES = tl.constexpr(int(EpWord.BASES))
CUT = tl.constexpr(int(EpWord.CUT))
CHANNEL_SIGNALS = tl.constexpr(int(EpWord.CHANNEL_SIGNALS))
POSITIONS = tl.constexpr(int(EpWord.POSITIONS))
SENT_COUNTS = tl.constexpr(int(EpWord.SENT_COUNTS))
MAP = tl.constexpr(int(EpWord.MAP))
SENT = tl.constexpr(int(EpWord.SENT))
FORWARDED = tl.constexpr(int(EpWord.FORWARDED))
FORWARDED_COUNTS = tl.constexpr(int(EpWord.FORWARDED_COUNTS))
FORWARDED_ROWS = tl.constexpr(int(EpWord.FORWARDED_ROWS))
PREFIX = tl.constexpr(int(EpWord.PREFIX))
EXPERT_COUNTS = tl.constexpr(int(EpWord.EXPERT_COUNTS))
ORIGINS = tl.constexpr(int(EpWord.ORIGINS))
EXPANDED = tl.constexpr(int(EpWord.EXPANDED))

#: Words of a row that a program moves at a time.
COPY_WORDS = tl.constexpr(256 if INTERPRETED.value else 1024)
#: Lanes for the counts that ranks exchange.
COUNT_LANES = tl.constexpr(32 if INTERPRETED.value else 256)


@triton.jit
def number(ep_ptr, word):
    """A size of the table as int32."""
    return tl.load(ep_ptr + word).to(tl.int32)


@triton.jit
def words_at(buffer_ptr, peer, offset):
    """int64 pointer to byte ``offset`` in ``peer``'s copy."""
    return (peer_address(buffer_ptr, peer) + offset).to(tl.pointer_type(tl.int64))


@triton.jit
def channel_slot(ep_ptr, region, scale_out, channel, slot):
    """Byte offset of a slot of ``region``, STAGING or INCOMING."""
    row = (scale_out * number(ep_ptr, CHANNELS) + channel) * number(ep_ptr, SLOTS) + slot
    return tl.load(ep_ptr + region) + row.to(tl.int64) * tl.load(ep_ptr + SLOT_BYTES)


@triton.jit
def row_slot(ep_ptr, index):
    """Byte offset of slot ``index`` of the region ROWS."""
    return tl.load(ep_ptr + ROWS) + index.to(tl.int64) * tl.load(ep_ptr + SLOT_BYTES)


@triton.jit
def base_ptr(ep_ptr, signal_offset):
    """Where the value of a signal at the end of the last call is kept."""
    index = (signal_offset - tl.load(ep_ptr + HELLO_SIGNALS)) // 8
    return tl.load(ep_ptr + BASES).to(tl.pointer_type(tl.int64)) + index


@triton.jit
def data_signal(ep_ptr, channel, part):
    """Byte offset of the signal that counts the puts of ``part`` of ``channel``."""
    first = tl.load(tl.load(ep_ptr + CHANNEL_SIGNALS).to(tl.pointer_type(tl.int32)) + channel)
    return tl.load(ep_ptr + DATA_SIGNALS) + (first + part).to(tl.int64) * 8


@triton.jit
def copy_words(source_ptr, target_ptr, words):
    """Copy ``words`` int64 words."""
    lane = tl.arange(0, COPY_WORDS)
    for start in range(0, words, COPY_WORDS):
        offset = start + lane
        tl.store(target_ptr + offset, tl.load(source_ptr + offset, mask=offset < words), mask=offset < words)


@triton.jit
def rounded(value, like_ptr):
    """fp32 ``value`` to the element type of ``like_ptr``, to the nearest even."""
    if INTERPRETED and like_ptr.dtype.element_ty == tl.bfloat16:
        # The interpreter would cut the lower bits off.
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = bits.to(tl.float32, bitcast=True)
    return value.to(like_ptr.dtype.element_ty)


@triton.jit
def batch_header(epoch, count, more):
    """The int64 header of a sub-part: bit 63 written, 62 to 32 epoch, 30 to 1 tokens, 0 whether more follows."""
    # Bit 63 by a shift: a literal would not fit an int64.
    written = tl.full((), 1, tl.int64) << 63
    return written | (epoch.to(tl.int64) << 32) | (count.to(tl.int64) << 1) | more.to(tl.int64)


@triton.jit
def header_valid(header, epoch):
    """Whether ``header`` was written in the call ``epoch``."""
    return (header < 0) & (((header >> 32) & 0x7FFFFFFF) == epoch)


@triton.jit
def enter_call(buffer_ptr, ep_ptr, routing_ptr, epoch, operation, counts, PUT: tl.constexpr):
    """The first task of a call: tell every rank that this one is in it, and pass on what scale-out peers say.

    First the scale-out peers of the same scale-up index, by one put each; then, after theirs have come, the scale-up
    peers: so whoever has the headers of its scale-up peers, and its own, knows that all ranks have entered. With
    ``counts`` the puts carry the rows that this rank sends to each rank there. Returns 1, or 0 after a failure.
    """
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    own_out, own_up = rank // scale_up, rank % scale_up
    count_words = number(ep_ptr, EXPERTS) + 1
    hello_words = scale_up * count_words + HEADER_WORDS
    parity = epoch & 1
    lane = tl.arange(0, HEADER_WORDS)
    header = header_words(epoch, 0, 0, 0, operation)
    for step in range(1, scale_out):
        peer_out = (own_out + step) % scale_out
        out = tl.load(ep_ptr + HELLO_OUT) + (parity * scale_out + peer_out).to(tl.int64) * hello_words * 8
        into = tl.load(ep_ptr + HELLO_IN) + (parity * scale_out + own_out).to(tl.int64) * hello_words * 8
        out_ptr = words_at(buffer_ptr, rank, out)
        tl.store(out_ptr + lane, header)
        num_bytes = tl.full((), 8 * HEADER_WORDS, tl.int64)
        if counts != 0:
            first = peer_out * scale_up * count_words
            _widen(routing_ptr + tl.load(ep_ptr + SENT_COUNTS) + first, out_ptr + HEADER_WORDS, scale_up * count_words)
            num_bytes = hello_words.to(tl.int64) * 8
        signal = tl.load(ep_ptr + HELLO_SIGNALS) + own_out.to(tl.int64) * 8
        PUT(buffer_ptr, peer_out * scale_up + own_up, out, into, num_bytes, signal)
    ok = tl.full((), 1, tl.int32)
    for step in range(1, scale_out):
        if ok == 1:
            ok = _hear(buffer_ptr, ep_ptr, (own_out + step) % scale_out, epoch, operation, header)
    if ok == 1:
        for step in range(scale_up):
            peer_up = (own_up + step) % scale_up
            peer = own_out * scale_up + peer_up
            if counts != 0:
                _relay(buffer_ptr, ep_ptr, routing_ptr, peer, peer_up, parity, count_words, hello_words)
            tl.debug_barrier()
            send_header(buffer_ptr, peer, epoch, 0, 0, 0, operation)
    return ok


@triton.jit
def _widen(source_ptr, target_ptr, count):
    """Copy ``count`` int32 to int64."""
    lane = tl.arange(0, COUNT_LANES)
    for start in range(0, count, COUNT_LANES):
        mask = start + lane < count
        tl.store(target_ptr + start + lane, tl.load(source_ptr + start + lane, mask=mask).to(tl.int64), mask=mask)


@triton.jit
def _hear(buffer_ptr, ep_ptr, source_out, epoch, operation, header):
    """Wait until the peer in ``source_out`` is in this call, and compare its header."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    peer = source_out * scale_up + rank % scale_up
    signal = tl.load(ep_ptr + HELLO_SIGNALS) + source_out.to(tl.int64) * 8
    # One addition a call, so the base moves on by one, here: nobody else reads it.
    base = base_ptr(ep_ptr, signal)
    target = tl.load(base) + 1
    ok = wait_signal(
        buffer_ptr, words_at(buffer_ptr, rank, signal), target, epoch, operation, AT_SIGNAL, peer, source_out
    )
    tl.store(base, target)
    if ok == 1:
        hello_words = scale_up * (number(ep_ptr, EXPERTS) + 1) + HEADER_WORDS
        row = ((epoch & 1) * scale_out + source_out).to(tl.int64)
        hello = words_at(buffer_ptr, rank, tl.load(ep_ptr + HELLO_IN) + row * hello_words * 8)
        seen = tl.load(hello + tl.arange(0, HEADER_WORDS))
        ok = compare_header(buffer_ptr, peer, epoch, header, seen, operation)
    return ok


@triton.jit
def _relay(buffer_ptr, ep_ptr, routing_ptr, peer, peer_up, parity, count_words, hello_words):
    """Store in ``peer``'s counts what this rank, and its scale-out peers through it, will send there."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_out, scale_up = number(ep_ptr, SCALE_OUT), number(ep_ptr, SCALE_UP)
    for source_out in range(scale_out):
        row = (parity * scale_out * scale_up + source_out * scale_up + rank % scale_up).to(tl.int64)
        target_ptr = words_at(buffer_ptr, peer, tl.load(ep_ptr + COUNTS) + row * count_words * 8)
        if source_out == rank // scale_up:
            own = routing_ptr + tl.load(ep_ptr + SENT_COUNTS) + peer * count_words
            _widen(own, target_ptr, count_words)
        else:
            hello = tl.load(ep_ptr + HELLO_IN) + (parity * scale_out + source_out).to(tl.int64) * hello_words * 8
            source_ptr = words_at(buffer_ptr, rank, hello) + HEADER_WORDS + peer_up * count_words
            copy_words(source_ptr, target_ptr, count_words)


@triton.jit
def wait_entered(buffer_ptr, ep_ptr, epoch, operation):
    """Wait until every rank is in this call. Returns 1, or 0 after a failure."""
    rank = tl.load(buffer_ptr + RANK).to(tl.int32)
    scale_up = number(ep_ptr, SCALE_UP)
    first = rank // scale_up * scale_up
    ok = tl.full((), 1, tl.int32)
    for step in range(scale_up):
        if ok == 1:
            ok = wait_header(buffer_ptr, first + (rank + step) % scale_up, epoch, 0, 0, 0, operation)
    # The headers were acquired by lanes; what came before them is for every thread.
    tl.debug_barrier()
    return ok
