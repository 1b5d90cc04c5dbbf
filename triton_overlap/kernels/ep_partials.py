"""How many partial results of a token come back from a scale-out rank, and which of its experts each stands for.

Three ways, by what is summed before it is sent back:

    TOGETHER    everything that a scale-out rank made of a token: one partial
    BY_RANK     what each rank made of it: one partial a rank, for the first of its experts there
    BY_EXPERT   nothing: one partial an expert

Numeric example: experts 0, 3, 1 of a token, two a rank, all in one scale-out rank. TOGETHER all three stand for k = 0;
BY_RANK the first and the third stand for k = 0, the second for k = 1; BY_EXPERT each stands for itself.
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl

from .ep_slots import EXPERTS, SCALE_UP, number


class Partials(IntEnum):
    """What the module's page says."""

    TOGETHER = 0
    BY_RANK = 1
    BY_EXPERT = 2

    @staticmethod
    def of(*, separate: bool, expand: bool) -> Partials:
        """Those of a call on a buffer whose partial results come back ``separate``."""
        if not separate:
            return Partials.TOGETHER
        return Partials.BY_EXPERT if expand else Partials.BY_RANK


_BY_RANK = tl.constexpr(int(Partials.BY_RANK))
_BY_EXPERT = tl.constexpr(int(Partials.BY_EXPERT))


@triton.jit
def find_partials(ep_ptr, expert, scale_out, partials, LANES: tl.constexpr):
    """For ``expert`` int32 [LANES] of a token, -1 for none: in each lane, 1 where it is in ``scale_out``; the k that
    stands for its partial; and 1 where that is this lane's own."""
    k = tl.arange(0, LANES)
    host = expert // number(ep_ptr, EXPERTS)
    inside = (expert >= 0) & (host // number(ep_ptr, SCALE_UP) == scale_out)
    key = tl.where(partials == _BY_EXPERT, k, tl.where(partials == _BY_RANK, host, 0))
    same = (key[:, None] == key[None, :]) & inside[None, :]
    stands = tl.min(tl.where(same, k[None, :], LANES), 1)
    return inside.to(tl.int32), stands, (inside & (stands == k)).to(tl.int32)


@triton.jit
def partials_before(stands, own, LANES: tl.constexpr):
    """In each lane, the number of partials before the one that ``stands`` for it."""
    k = tl.arange(0, LANES)
    earlier = (k[None, :] < stands[:, None]) & (own[None, :] == 1)
    return tl.sum(earlier.to(tl.int32), 1)
