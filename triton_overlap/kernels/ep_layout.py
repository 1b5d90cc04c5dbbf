"""Where everything of an expert buffer lies; sizes and offsets for the host and, as a table, for kernels. Plain Python.

Ranks form ``num_scale_out`` S x ``num_scale_up`` U; rank = scale_out * U + scale_up. One symmetric allocation a rank:

    region     shape                            written by              meaning
    headers    int64 [2, W, 4]                  scale-up peers          opening header of a call, by parity and rank
    hello_out  int64 [2, S, hello_words]        own rank                source of the opening puts, by parity and peer
    hello_in   int64 [2, S, hello_words]        scale-out peers         header and counts, by parity and scale-out rank
    counts     int64 [2, W, count_words]        scale-up peers          what each rank will send here
    signals    int64 [num_signals]              everybody               counters that only grow: see :class:`EpWord`
    staging    slot [S, C, slots]               own rank                source of puts, for each format
    incoming   slot [S, C, slots]               scale-out peers         target of puts, for each format
    rows       slot [W, max_tokens]             scale-up peers          dispatch: row ``position`` of each source rank;
                                                                        combine: [S, max_tokens, U] partial results, or
                                                                        [S, max_tokens, K] where they come back apart

A *format* is what a slot's row is: ``rows`` of the buffer's dtype, ``fp8`` rows with scales, ``weights`` of a token in
a combine. A slot is as long as its format needs, so a put carries nothing else; each format has its own staging and
incoming region, of one stride, so that no payload of an earlier call lies where a header is looked for. Only in
``rows``, where nobody looks for headers, do formats take turns. A slot:

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
    RETURN_SLOTS = auto()  # of a channel in a combine
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
    HELLO_SIGNALS = auto()  # int64 [2, S]: calls of each parity that the scale-out rank has entered
    DATA_SIGNALS = auto()  # int64: puts of each part
    BATCH_SIGNALS = auto()  # int64 [C]: batches of a combine
    PUSH_SIGNALS = auto()  # int64 [S]: rows pushed here by scale-up peers in combines
    TAIL_SIGNALS = auto()  # int64 [S, C]: puts of a channel of a scale-out rank, where kernels are ordered
    ARRIVAL_SIGNALS = auto()  # int64 [U]: channels whose rows a scale-up rank has stored here
    BASES = auto()  # address of int64 [signals], this device only: each signal when the last call ended
    CUT = auto()  # address of a cut's int32 words (ep_parts.py), this device only
    CHANNEL_SIGNALS = auto()  # address of int32 [C], this device only: index of the signal of a channel's part 0
    # Offsets in int32 of the tensors of a routing, in the order of Routing's page:
    POSITIONS = auto()
    SENT_COUNTS = auto()
    MAP = auto()
    RETURNED = auto()
    FORWARDED = auto()
    FORWARDED_COUNTS = auto()
    FORWARDED_ROWS = auto()
    PREFIX = auto()
    EXPERT_COUNTS = auto()
    DISPATCH_EPOCH = auto()
    ORIGINS = auto()
    FIRST_K = auto()
    EXPANDED = auto()


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
        row_bytes: a row of the buffer's dtype, a multiple of 32.
        fp8_row_bytes: an fp8 row, a multiple of 32; 0 where there are none.
        scale_bytes: scale factors of an fp8 row, a multiple of 4.
        geometry: channels and parts.
        separate: partial results of a token come back apart, up to K of them, in place of one sum.
        ordered: with signals for ordered kernels.
    """

    num_scale_out: int
    num_scale_up: int
    max_tokens: int
    topk: int
    experts_per_rank: int
    row_bytes: int
    fp8_row_bytes: int
    scale_bytes: int
    geometry: Geometry
    separate: bool = False
    ordered: bool = False

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
    def formats(self) -> dict[str, int]:
        """Bytes of a row of each format."""
        found = {"rows": self.row_bytes, "weights": _aligned(4 * self.topk, 32)}
        return found | {"fp8": self.fp8_row_bytes} if self.fp8_row_bytes else found

    def slot_bytes(self, form: str) -> int:
        """Stride of the slots of a format."""
        return self.row_offset + self.formats[form]

    @property
    def return_slots(self) -> int:
        """Slots in which the partial results of a channel come back from a scale-out rank."""
        return self.geometry.slots_per_channel * (self.topk if self.separate else 1)

    def put_slots(self, form: str) -> int:
        """Slots of a channel in the staging and incoming regions of a format: fp8 rows are dispatched alone."""
        return self.geometry.slots_per_channel if form == "fp8" else self.return_slots

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

    def data_signal(self, channel: int) -> int:
        """Index, among the data signals, of the one that counts the puts of part 0 of ``channel``."""
        context, first = self.geometry.signal(channel, 0)
        return context * self.geometry.signals_per_context + first

    @property
    def num_signals(self) -> int:
        channels = self.geometry.num_channels
        return 3 * self.num_scale_out + channels + self.num_data_signals + self.num_tail_signals + self.num_scale_up

    @property
    def num_tail_signals(self) -> int:
        return self.num_scale_out * self.geometry.num_channels if self.ordered else 0

    @property
    def max_puts(self) -> int:
        """Entries of a hand-off ring: the puts of two calls. A call's opening puts leave before its barrier, so those
        of the call before it may still be read then."""
        peers = self.num_scale_out - 1
        channels = self.geometry.num_channels
        dispatch = channels * sum(len(sizes) for sizes in self.geometry.sub_part_sizes)
        combine = channels * -(-self.return_slots // BATCH)
        return max(2 * peers * (1 + max(dispatch, combine)), 1)

    @property
    def _regions(self) -> list[tuple[str, int]]:
        s, w = self.num_scale_out, self.world_size
        streams = s * self.geometry.num_channels if s > 1 else 0
        partials = max(self.num_scale_up, self.topk if self.separate else 1)
        puts = [
            (f"{region} of {form}", streams * self.put_slots(form) * self.slot_bytes(form))
            for form in self.formats
            for region in ("staging", "incoming")
        ]
        return [
            ("headers", 2 * w * HEADER_WORDS * 8),
            ("hello_out", 2 * s * self.hello_words * 8),
            ("hello_in", 2 * s * self.hello_words * 8),
            ("counts", 2 * w * self.count_words * 8),
            ("signals", self.num_signals * 8),
            *puts,
            ("rows", s * partials * self.max_tokens * max(map(self.slot_bytes, self.formats))),
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
        map               [max_tokens, K]   where the partial result with expert k of the token comes back: (scale-out
                                            rank * C + channel) * return_slots + slot, or -1 for no expert. Experts
                                            whose results are summed before they come share one. From the own scale-out
                                            rank nothing comes by puts: there slot is the first k of what is summed
        returned          [S, C]            partial results of each channel that come back from each scale-out rank
        forwarded         [S, C, slots, 2 + U]  token index, links, and bits k of the partial results to send back, of
                                            each slot that came in
        forwarded_counts  [S, C]            slots that came in
        forwarded_rows    [S, C]            rows that they were forwarded as
        prefix            [W + 1]           first received row of each source rank
        expert_counts     [experts]         received rows for each local expert
        dispatch_epoch    [1]               the call that counted, the same on all ranks: ranks tell by it that they
                                            use one routing. 0 after a failed dispatch, which may have left anything
                                            in the rest; prefix and expert_counts are then 0 as well
        origins           [W * max_tokens]  source rank * max_tokens + token index of each received row
        first_k           [W * max_tokens]  first k of each received row that is an expert here
        expanded          [W * max_tokens, K]  row for each received row and k among rows grouped by expert, or -1
        """
        s, u, w, m = self.num_scale_out, self.num_scale_up, self.world_size, self.max_tokens
        channels, slots = self.geometry.num_channels, self.geometry.slots_per_channel
        shapes = {
            "positions": (w, m),
            "sent_counts": (w, self.count_words),
            "map": (m, self.topk),
            "returned": (s, channels),
            "forwarded": (s, channels, slots if s > 1 else 0, 2 + u),
            "forwarded_counts": (s, channels),
            "forwarded_rows": (s, channels),
            "prefix": (w + 1,),
            "expert_counts": (self.experts_per_rank,),
            "dispatch_epoch": (1,),
            "origins": (w * m,),
            "first_k": (w * m,),
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

    def words(self, form: str, bases: int, cut: int, channel_signals: int) -> list[int]:
        """The table of :class:`EpWord` for calls whose rows are of a format; the others are three addresses in it."""
        signals = self.offset("signals")
        values: dict[EpWord, int] = {
            EpWord.SCALE_OUT: self.num_scale_out,
            EpWord.SCALE_UP: self.num_scale_up,
            EpWord.CHANNELS: self.geometry.num_channels,
            EpWord.SLOTS: self.geometry.slots_per_channel,
            EpWord.MAX_TOKENS: self.max_tokens,
            EpWord.TOPK: self.topk,
            EpWord.EXPERTS: self.experts_per_rank,
            EpWord.RETURN_SLOTS: self.return_slots,
            EpWord.SLOT_BYTES: self.slot_bytes(form),
            EpWord.SCALE_OFFSET: self.scale_offset,
            EpWord.ROW_OFFSET: self.row_offset,
            EpWord.HELLO_SIGNALS: signals,
            EpWord.PUSH_SIGNALS: signals + 16 * self.num_scale_out,
            EpWord.BATCH_SIGNALS: signals + 24 * self.num_scale_out,
            EpWord.DATA_SIGNALS: signals + 24 * self.num_scale_out + 8 * self.geometry.num_channels,
            EpWord.TAIL_SIGNALS: signals + 8 * (self.num_signals - self.num_scale_up - self.num_tail_signals),
            EpWord.ARRIVAL_SIGNALS: signals + 8 * (self.num_signals - self.num_scale_up),
            EpWord.BASES: bases,
            EpWord.CUT: cut,
            EpWord.CHANNEL_SIGNALS: channel_signals,
        }
        for region in ("hello_out", "hello_in", "counts", "rows"):
            values[EpWord[region.upper()]] = self.offset(region)
        for region in ("staging", "incoming"):
            values[EpWord[region.upper()]] = self.offset(f"{region} of {form}")
        for name, (start, _) in self.routing.items():
            values[EpWord[name.upper()]] = start
        return [values[word] for word in EpWord]
