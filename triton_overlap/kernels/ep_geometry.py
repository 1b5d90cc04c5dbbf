"""How a channel's tokens are cut into parts and sub-parts, and which signals count them. Plain Python.

Token t of a rank belongs to channel ``t % num_channels``. A channel's tokens for one scale-out peer fill its slots in
order; the slots are cut into *parts*, each with a signal, and a part into *sub-parts*, each one put. The same
arithmetic on runtime values, for kernels, is in ``ep_parts.py``.

Why a minimum size of a part: with few tokens a channel holds about as many tokens as it may have parts, and small
batches are bound by the rate of messages. 128 tokens over 48 channels are 3 tokens a channel: without the minimum four
puts of at most one token, with it one or two puts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

#: Signals that all contexts share; each context gives up two.
_SIGNALS = 256
_MIN_CONTEXTS, _MAX_CONTEXTS = 2, 17
_MAX_PARTS = 4
#: A first part this small, where parts differ in size, lets forwarding start early.
_MIN_FIRST_PART = 4
#: Sub-parts of a part that a receiver can look at in one poll.
MAX_SUB_PARTS = 8


@dataclass(frozen=True)
class Put:
    """One put of a channel to one peer.

    Attributes:
        part, sub_part: whose signal and header it uses.
        first: its first slot.
        count: tokens in it; 0 where only the header's slot is sent.
        more: False in the last put to the peer.
    """

    part: int
    sub_part: int
    first: int
    count: int
    more: bool


@dataclass(frozen=True)
class Geometry:
    """What :func:`plan` found.

    Attributes:
        num_channels: channels of a rank.
        channels_per_sm: as asked for, or fewer where the signals do not suffice.
        num_contexts: communication contexts.
        data_contexts: those that carry channels; one of the others notifies counts.
        signals_per_context: signals of each.
        budget_parts: parts a channel may have at most.
        max_tokens_per_channel: M, the largest number of tokens of a channel.
        num_parts: N, parts of a channel.
        part_size: B; a channel has N * B slots.
        part_sizes: tokens of each part; where they differ they sum to M.
        sub_part_sizes: tokens of each sub-part of each part.
    """

    num_channels: int
    channels_per_sm: int
    num_contexts: int
    data_contexts: int
    signals_per_context: int
    budget_parts: int
    max_tokens_per_channel: int
    num_parts: int
    part_size: int
    part_sizes: list[int]
    sub_part_sizes: list[list[int]]

    @property
    def slots_per_channel(self) -> int:
        return self.num_parts * self.part_size

    def part_start(self, part: int) -> int:
        """First slot of ``part``."""
        return sum(self.part_sizes[:part])

    def context(self, channel: int) -> tuple[int, int]:
        """Context of ``channel``, and its position there. Contexts hold contiguous runs of channels; the first ones
        hold one more where the division leaves a remainder.

        Numeric example: 5 channels over 2 contexts are (0, 0), (0, 1), (0, 2), (1, 0), (1, 1).
        """
        quotient, longer = divmod(self.num_channels, self.data_contexts)
        in_longer = longer * (quotient + 1)
        if channel < in_longer:
            return channel // (quotient + 1), channel % (quotient + 1)
        return longer + (channel - in_longer) // quotient, (channel - in_longer) % quotient

    def signal(self, channel: int, part: int) -> tuple[int, int]:
        """Context and number of the signal that counts the puts of ``part``. All sources and sub-parts share it."""
        context, position = self.context(channel)
        return context, position * self.budget_parts + part

    def puts(self, tokens: int) -> Iterator[Put]:
        """What a channel sends to a peer that needs ``tokens`` of its tokens.

        Full sub-parts leave as they fill. Exactly one put says that nothing follows: the channel's last sub-part if it
        fills, otherwise the batch at the end of the input, which may be empty and is sent all the same, so that every
        source announces its end to every peer.

        Numeric example: sub-parts of 2, 2, 2 and 5 tokens give puts of 2, 2 and 1; 4 tokens give 2, 2 and 0.
        """
        if tokens > sum(self.part_sizes):
            raise ValueError(f"a channel holds {sum(self.part_sizes)} tokens, got {tokens}")
        first = 0
        for part, sizes in enumerate(self.sub_part_sizes):
            for sub_part, size in enumerate(sizes):
                count = min(size, tokens - first)
                last = part == self.num_parts - 1 and sub_part == len(sizes) - 1
                more = count == size and not last
                yield Put(part, sub_part, first, count, more)
                if not more:
                    return
                first += size


def spread(total: int, pieces: int) -> list[int]:
    """``total`` over ``pieces`` as evenly as integers allow, larger pieces first: ``spread(7, 3)`` is ``[3, 2, 2]``."""
    quotient, longer = divmod(total, pieces)
    return [quotient + (index < longer) for index in range(pieces)]


def signals_of_context(num_contexts: int) -> int:
    """Signals each context has: ``signals_of_context(11)`` is 21."""
    if not _MIN_CONTEXTS <= num_contexts <= _MAX_CONTEXTS:
        raise ValueError(f"num_contexts must be {_MIN_CONTEXTS} to {_MAX_CONTEXTS}, got {num_contexts}")
    return (_SIGNALS - 2 * num_contexts) // num_contexts


def check_scale_out(num_scale_out: int, num_contexts: int) -> None:
    """Raise unless context 0 has a barrier signal for each of the other scale-out ranks.

    Raises:
        ValueError: there are more scale-out ranks than signals; names both.
    """
    signals = signals_of_context(num_contexts)
    if num_scale_out - 1 > signals:
        raise ValueError(
            f"{num_scale_out} scale-out ranks need {num_scale_out - 1} barrier signals on one context, which has "
            f"{signals} with num_contexts {num_contexts}; use fewer contexts"
        )


def _channels_per_context(num_sms: int, channels_per_sm: int, available: int) -> int:
    if num_sms <= available:
        return -(-channels_per_sm // (available // num_sms))
    return -(-num_sms * channels_per_sm // available)


def _part_sizes(tokens: int, num_parts: int, part_size: int) -> list[int]:
    first = max(part_size // 3, _MIN_FIRST_PART)
    middle = tokens - first - part_size
    if num_parts < 3 or middle < num_parts - 2:
        return [part_size] * num_parts
    return [first, *spread(middle, num_parts - 2), part_size]


def _sub_parts(tokens: int, num_sub_parts: int, part_size: int, floor: int) -> list[int]:
    count = min(tokens, num_sub_parts, part_size)
    if floor > 1:
        count = min(count, tokens // floor)
    return spread(tokens, max(count, 1))


def plan(
    max_tokens_per_rank: int,
    num_sms: int,
    channels_per_sm: int,
    num_contexts: int = 11,
    cached: bool = False,
    min_tokens_per_part: int = 15,
    num_sub_parts: int = 2,
    min_sub_tokens: int = 1,
    arch_min_sub_tokens: int = 1,
) -> Geometry:
    """Channels, parts and sub-parts for a rank with at most ``max_tokens_per_rank`` tokens.

    Args:
        num_sms: multiprocessors that send and forward.
        channels_per_sm: channels of each; lowered with a warning where the signals do not suffice.
        num_contexts: 2 to 17 communication contexts.
        cached: a dispatch that exchanges no counts has one more context for its channels.
        min_tokens_per_part: parts smaller than this are joined; 1 or less for as many parts as signals allow.
        num_sub_parts: puts a part leaves in, 1 to 8.
        min_sub_tokens: the smallest sub-part worth a put of its own; 1 for any.
        arch_min_sub_tokens: the same, for the device.

    Raises:
        ValueError: a size is out of range, or one channel a multiprocessor has too few signals.
    """
    sizes = {"max_tokens_per_rank": max_tokens_per_rank, "num_sms": num_sms, "channels_per_sm": channels_per_sm}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 1 <= num_sub_parts <= MAX_SUB_PARTS:
        raise ValueError(f"num_sub_parts must be 1 to {MAX_SUB_PARTS}, got {num_sub_parts}")
    signals = signals_of_context(num_contexts)
    available = num_contexts if cached else num_contexts - 1
    asked = channels_per_sm
    budget = max(1, min(_MAX_PARTS, signals // _channels_per_context(num_sms, asked, available)))
    while (needed := _channels_per_context(num_sms, channels_per_sm, available) * budget) > signals:
        if channels_per_sm == 1:
            raise ValueError(
                f"{num_sms} multiprocessors need {needed} signals on a context, which has {signals} with "
                f"num_contexts {num_contexts}; use fewer multiprocessors or other num_contexts"
            )
        channels_per_sm -= 1
    if channels_per_sm < asked:
        warnings.warn(
            f"{asked} channels on each of {num_sms} multiprocessors need more than the {signals} signals of a context; "
            f"using {channels_per_sm}",
            stacklevel=2,
        )
    num_channels = num_sms * channels_per_sm
    tokens = -(-max_tokens_per_rank // num_channels)
    num_parts = budget if min_tokens_per_part <= 1 else min(budget, max(tokens // min_tokens_per_part, 1))
    part_size = -(-tokens // num_parts)
    part_sizes = _part_sizes(tokens, num_parts, part_size)
    floor = max(min_sub_tokens, arch_min_sub_tokens)
    return Geometry(
        num_channels=num_channels,
        channels_per_sm=channels_per_sm,
        num_contexts=num_contexts,
        data_contexts=available,
        signals_per_context=signals,
        budget_parts=budget,
        max_tokens_per_channel=tokens,
        num_parts=num_parts,
        part_size=part_size,
        part_sizes=part_sizes,
        sub_part_sizes=[_sub_parts(size, num_sub_parts, part_size, floor) for size in part_sizes],
    )


@dataclass(frozen=True)
class Knobs:
    """The four settings of the cut, by default from the environment.

    Attributes are the arguments of :func:`plan` of the same names; ``EP_MIN_TOKENS_PER_PART``, ``EP_NUM_SUB_PARTS``,
    ``EP_MIN_SUB_TOKENS`` and ``EP_SM100_MIN_SUB_TOKENS`` are their defaults.
    """

    min_tokens_per_part: int
    num_sub_parts: int
    min_sub_tokens: int
    arch_min_sub_tokens: int

    @staticmethod
    def choose(
        min_tokens_per_part: int | None = None,
        num_sub_parts: int | None = None,
        min_sub_tokens: int | None = None,
        arch_min_sub_tokens: int | None = None,
        *,
        capability: int = 0,
    ) -> Knobs:
        """Arguments where given, else the environment, else the defaults for a device of that major ``capability``."""
        return Knobs(
            _setting(min_tokens_per_part, "EP_MIN_TOKENS_PER_PART", 15),
            _setting(num_sub_parts, "EP_NUM_SUB_PARTS", 2),
            _setting(min_sub_tokens, "EP_MIN_SUB_TOKENS", 1),
            _setting(arch_min_sub_tokens, "EP_SM100_MIN_SUB_TOKENS", 15) if capability >= 10 else 1,
        )


def _setting(given: int | None, name: str, default: int) -> int:
    if given is not None:
        return given
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name} must be an integer, got {text!r}") from error
