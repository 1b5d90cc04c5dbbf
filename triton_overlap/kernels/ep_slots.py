"""Device functions of an expert buffer: tables, slots, headers, copies."""

import triton
import triton.language as tl

from ..comm.device import INTERPRETED, peer_address
from .ep_layout import EpWord

SCALE_OUT = tl.constexpr(int(EpWord.SCALE_OUT))
SCALE_UP = tl.constexpr(int(EpWord.SCALE_UP))
CHANNELS = tl.constexpr(int(EpWord.CHANNELS))
SLOTS = tl.constexpr(int(EpWord.SLOTS))
RETURN_SLOTS = tl.constexpr(int(EpWord.RETURN_SLOTS))
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
TAIL_SIGNALS = tl.constexpr(int(EpWord.TAIL_SIGNALS))
ARRIVAL_SIGNALS = tl.constexpr(int(EpWord.ARRIVAL_SIGNALS))
PUSH_SIGNALS = tl.constexpr(int(EpWord.PUSH_SIGNALS))
BASES = tl.constexpr(int(EpWord.BASES))
CUT = tl.constexpr(int(EpWord.CUT))
CHANNEL_SIGNALS = tl.constexpr(int(EpWord.CHANNEL_SIGNALS))
POSITIONS = tl.constexpr(int(EpWord.POSITIONS))
SENT_COUNTS = tl.constexpr(int(EpWord.SENT_COUNTS))
MAP = tl.constexpr(int(EpWord.MAP))
RETURNED = tl.constexpr(int(EpWord.RETURNED))
FORWARDED = tl.constexpr(int(EpWord.FORWARDED))
FORWARDED_COUNTS = tl.constexpr(int(EpWord.FORWARDED_COUNTS))
FORWARDED_ROWS = tl.constexpr(int(EpWord.FORWARDED_ROWS))
PREFIX = tl.constexpr(int(EpWord.PREFIX))
EXPERT_COUNTS = tl.constexpr(int(EpWord.EXPERT_COUNTS))
DISPATCH_EPOCH = tl.constexpr(int(EpWord.DISPATCH_EPOCH))
ORIGINS = tl.constexpr(int(EpWord.ORIGINS))
FIRST_K = tl.constexpr(int(EpWord.FIRST_K))
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
def return_index(ep_ptr, scale_out, channel, slot):
    """Number of a slot in which partial results come back, as the map of a routing has it."""
    return (scale_out * number(ep_ptr, CHANNELS) + channel) * number(ep_ptr, RETURN_SLOTS) + slot


@triton.jit
def return_slot(ep_ptr, region, index):
    """Byte offset of the slot of that number of ``region``, STAGING or INCOMING, in a combine."""
    return tl.load(ep_ptr + region) + index.to(tl.int64) * tl.load(ep_ptr + SLOT_BYTES)


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
def tail_signal(ep_ptr, scale_out, channel):
    """Byte offset of the signal that counts the puts of ``channel`` from ``scale_out``, where kernels are ordered."""
    index = scale_out * number(ep_ptr, CHANNELS) + channel
    return tl.load(ep_ptr + TAIL_SIGNALS) + index.to(tl.int64) * 8


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
