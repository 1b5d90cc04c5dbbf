"""Where everything of an expert buffer lies; sizes and offsets for the host and, as a table, for kernels. Plain Python.

Ranks form ``num_scale_out`` S x ``num_scale_up`` U; rank = scale_out * U + scale_up. One symmetric allocation a rank:

    region     shape                            written by              meaning
    headers    int64 [2, W, 4]                  scale-up peers          opening header of a call, by parity and rank
    hello_out  int64 [2, S, hello_words]        own rank                source of the opening puts, by parity and peer
    hello_in   int64 [2, S, hello_words]        scale-out peers         header and counts, by parity and scale-out rank
    counts     int64 [2, W, count_words]        scale-up peers          what each rank will send here
    signals    int64 [num_signals]              everybody               counters that only grow: see :class:`EpWord`
    staging    slot [S, C, slots]               own rank                source of puts
    incoming   slot [S, C, slots]               scale-out peers         target of puts
    rows       slot [W, max_tokens]             scale-up peers          dispatch: row ``position`` of each source rank;
                                                                        combine: [S, max_tokens, U] partial results

A slot, the same stride in every region, so that no payload of an earlier call lies where a header is looked for:

    bytes            contents
    0                int64 header, alive in the first slot of each sub-part
    8                int32 token index at the source, int32 unused
    16               int32 [U] links: the row position at each rank of the receiving scale-out rank, or -1
    16 + 4 U         int32 [K] expert ids, float32 [K] weights
    scale_offset     the row's scale factors
    row_offset       the row, on 32 bytes

One more int32 tensor, the *routing* of a handle, keeps what a call leaves for later ones (:class:`Routing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

from ..comm.layout import ALIGNMENT, HEADER_WORDS
from .ep_geometry import Geometry

#: Slots of a combine's put.
BATCH = 12
#: int64 words of a slot before links, experts and weights, counted in int32.
FIXED_WORDS = 4


class EpWord(IntEnum):
    """Index into the int64 table of an expert buffer that kernels get beside the one of ``comm.layout``."""

    SCALE_OUT = 0  # S
    SCALE_UP = auto()  # U
    CHANNELS = auto()
    SLOTS = auto()  # of a channel
    MAX_TOKENS = auto()
    TOPK = auto()
    EXPERTS = auto()  # of a rank
    SLOT_BYTES = auto()
    SCALE_OFFSET = auto()  # in a slot
    ROW_OFFSET = auto()  # in a slot
    HELLO_OUT = auto()  # byte offsets in the symmetric allocation, up to ROWS
    HELLO_IN = auto()
    COUNTS = auto()
    STAGING = auto()
    INCOMING = auto()
    ROWS = auto()
    HELLO_SIGNALS = auto()  # int64 [S]: calls that the scale-out rank has entered
    DATA_SIGNALS = auto()  # int64: puts of each part
    BATCH_SIGNALS = auto()  # int64 [C]: batches of a combine
    PUSH_SIGNALS = auto()  # int64 [S]: rows pushed here by scale-up peers in combines
    ARRIVAL_SIGNALS = auto()  # int64 [U]: channels whose rows a scale-up rank has stored here
    BASES = auto()  # address of int64 [signals], this device only: each signal when the last call ended
    CUT = auto()  # address of int32 [CUT_WORDS], this device only (ep_parts.py)
    CHANNEL_SIGNALS = auto()  # address of int32 [C], this device only: index of the signal of a channel's part 0
    # Offsets in int32 of the tensors of a routing, in the order of Routing's page:
    POSITIONS = auto()
    SENT_COUNTS = auto()
    MAP = auto()
    SENT = auto()
    FORWARDED = auto()
    FORWARDED_COUNTS = auto()
    FORWARDED_ROWS = auto()
    PREFIX = auto()
    EXPERT_COUNTS = auto()
    ORIGINS = auto()
    EXPANDED = auto()


NUM_WORDS = len(EpWord)


def _aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class EpLayout:
    """Sizes and byte offsets of an expert buffer.

    Args:
        num_scale_out, num_scale_up: S and U.
        max_tokens: of a rank.
        topk: experts of a token.
        experts_per_rank: experts of a rank.
        row_bytes: the widest row, a multiple of 32.
        scale_bytes: scale factors of a row, a multiple of 4.
        geometry: channels and parts.
    """

    num_scale_out: int
    num_scale_up: int
    max_tokens: int
    topk: int
    experts_per_rank: int
    row_bytes: int
    scale_bytes: int
    geometry: Geometry

    @property
    def world_size(self) -> int:
        return self.num_scale_out * self.num_scale_up

    @property
    def meta_words(self) -> int:
        """int32 words of a slot before its scale factors."""
        return FIXED_WORDS + self.num_scale_up + 2 * self.topk

    @property
    def scale_offset(self) -> int:
        return _aligned(4 * self.meta_words, 8)

    @property
    def row_offset(self) -> int:
        return _aligned(self.scale_offset + self.scale_bytes, 32)

    @property
    def slot_bytes(self) -> int:
        return self.row_offset + self.row_bytes

    @property
    def count_words(self) -> int:
        """int64 words one rank tells another: rows, and rows for each of its experts."""
        return 1 + self.experts_per_rank

    @property
    def hello_words(self) -> int:
        return HEADER_WORDS + self.num_scale_up * self.count_words

    @property
    def num_data_signals(self) -> int:
        return self.geometry.data_contexts * self.geometry.signals_per_context

    @property
    def num_signals(self) -> int:
        return 2 * self.num_scale_out + self.num_data_signals + self.geometry.num_channels + self.num_scale_up

    @property
    def max_puts(self) -> int:
        """Entries of a hand-off ring: the puts of two calls. A call's opening puts leave before its barrier, so those
        of the call before it may still be read then."""
        peers = self.num_scale_out - 1
        channels, slots = self.geometry.num_channels, self.geometry.slots_per_channel
        dispatch = channels * sum(len(sizes) for sizes in self.geometry.sub_part_sizes)
        combine = channels * -(-slots // BATCH)
        return max(2 * peers * (1 + max(dispatch, combine)), 1)

    @property
    def _regions(self) -> list[tuple[str, int]]:
        s, w = self.num_scale_out, self.world_size
        channels = self.geometry.num_channels
        slots = s * channels * self.geometry.slots_per_channel if s > 1 else 0
        return [
            ("headers", 2 * w * HEADER_WORDS * 8),
            ("hello_out", 2 * s * self.hello_words * 8),
            ("hello_in", 2 * s * self.hello_words * 8),
            ("counts", 2 * w * self.count_words * 8),
            ("signals", self.num_signals * 8),
            ("staging", slots * self.slot_bytes),
            ("incoming", slots * self.slot_bytes),
            ("rows", w * self.max_tokens * self.slot_bytes),
        ]

    def offset(self, region: str) -> int:
        """Byte offset of a region by its name above."""
        start = 0
        for name, num_bytes in self._regions:
            if name == region:
                return start
            start += _aligned(num_bytes)
        raise KeyError(region)

    @property
    def num_bytes(self) -> int:
        """Symmetric bytes a rank registers."""
        return sum(_aligned(num_bytes) for _, num_bytes in self._regions)

    @property
    def routing(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset in int32 and shape of each tensor of a routing.

        positions         [W, max_tokens]   row position of each token at each rank, or -1
        sent_counts       [W, count_words]  rows for each rank, and for each of its experts
        map               [max_tokens, S]   slot of the token in its channel's stream to each scale-out rank, where its
                                            partial result comes back; -1 where it is not sent. Own scale-out rank: 0
        sent              [S, C]            tokens of each channel's stream to each scale-out rank
        forwarded         [S, C, slots, 1 + U]  token index and links of each slot that came in
        forwarded_counts  [S, C]            slots that came in
        forwarded_rows    [S, C]            rows that they were forwarded as
        prefix            [W + 1]           first received row of each source rank
        expert_counts     [experts]         received rows for each local expert
        origins           [W * max_tokens]  source rank * max_tokens + token index of each received row
        expanded          [W * max_tokens, K]  row for each received row and k among rows grouped by expert, or -1
        """
        s, u, w, m = self.num_scale_out, self.num_scale_up, self.world_size, self.max_tokens
        channels, slots = self.geometry.num_channels, self.geometry.slots_per_channel
        shapes = {
            "positions": (w, m),
            "sent_counts": (w, self.count_words),
            "map": (m, s),
            "sent": (s, channels),
            "forwarded": (s, channels, slots if s > 1 else 0, 1 + u),
            "forwarded_counts": (s, channels),
            "forwarded_rows": (s, channels),
            "prefix": (w + 1,),
            "expert_counts": (self.experts_per_rank,),
            "origins": (w * m,),
            "expanded": (w * m, self.topk),
        }
        found = {}
        start = 0
        for name, shape in shapes.items():
            found[name] = (start, shape)
            size = 1
            for extent in shape:
                size *= extent
            start += size
        return found

    @property
    def routing_words(self) -> int:
        """int32 words of a routing."""
        start, shape = self.routing["expanded"]
        return start + shape[0] * shape[1]

    def words(self, bases: int, cut: int, channel_signals: int) -> list[int]:
        """The table of :class:`EpWord`; the arguments are its last three addresses."""
        signals = self.offset("signals")
        values: dict[EpWord, int] = {
            EpWord.SCALE_OUT: self.num_scale_out,
            EpWord.SCALE_UP: self.num_scale_up,
            EpWord.CHANNELS: self.geometry.num_channels,
            EpWord.SLOTS: self.geometry.slots_per_channel,
            EpWord.MAX_TOKENS: self.max_tokens,
            EpWord.TOPK: self.topk,
            EpWord.EXPERTS: self.experts_per_rank,
            EpWord.SLOT_BYTES: self.slot_bytes,
            EpWord.SCALE_OFFSET: self.scale_offset,
            EpWord.ROW_OFFSET: self.row_offset,
            EpWord.HELLO_SIGNALS: signals,
            EpWord.PUSH_SIGNALS: signals + 8 * self.num_scale_out,
            EpWord.BATCH_SIGNALS: signals + 16 * self.num_scale_out,
            EpWord.DATA_SIGNALS: signals + 16 * self.num_scale_out + 8 * self.geometry.num_channels,
            EpWord.ARRIVAL_SIGNALS: signals + 8 * (self.num_signals - self.num_scale_up),
            EpWord.BASES: bases,
            EpWord.CUT: cut,
            EpWord.CHANNEL_SIGNALS: channel_signals,
        }
        for region in ("hello_out", "hello_in", "counts", "staging", "incoming", "rows"):
            values[EpWord[region.upper()]] = self.offset(region)
        for name, (start, _) in self.routing.items():
            values[EpWord[name.upper()]] = start
        return [values[word] for word in EpWord]
