"""What a dispatch leaves for its combine, and for later dispatches with the same routing."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .buffer import ExpertBuffer


@dataclass(frozen=True, eq=False)
class EpHandle:
    """What a dispatch leaves for its combine, and for later dispatches with the same routing.

    Attributes:
        buffer: the buffer that made it.
        topk_idx: int64 [T, K], a copy of what was dispatched.
        routing: int32, ``ep_layout.EpLayout.routing``.
        num_recv_tokens: R; None where the host did not wait for it.
        num_recv_per_expert: rows for each local expert; None likewise.
        expand: rows are grouped by expert.
        expert_alignment: what each group is padded to.
        known_rows: rows of what was received, where they are known without ``num_recv_per_expert``.
    """

    buffer: ExpertBuffer
    topk_idx: torch.Tensor
    routing: torch.Tensor
    num_recv_tokens: int | None
    num_recv_per_expert: list[int] | None
    expand: bool
    expert_alignment: int
    known_rows: int | None = None

    def view(self, name: str) -> torch.Tensor:
        """One tensor of the routing, on the device; names and shapes are in ``ep_layout.EpLayout.routing``."""
        start, shape = self.buffer.layout.routing[name]
        return self.routing[start : start + math.prod(shape)].view(shape)

    @property
    def recv_slots(self) -> torch.Tensor:
        """int32 [T, K, 3], on the device: the rank, channel and slot from and in which the partial result with expert k
        of each token comes back; -1 for no expert.

        From the own scale-out rank, whose ranks store theirs directly, slot is the first k of what is summed there.
        """
        layout = self.buffer.layout
        entry = self.view("map")[: self.topk_idx.shape[0]]
        stream = torch.div(entry, layout.return_slots, rounding_mode="floor")
        channels = layout.geometry.num_channels
        scale_out = torch.div(stream, channels, rounding_mode="floor")
        peer = scale_out * layout.num_scale_up + self.buffer.group.rank % layout.num_scale_up
        found = torch.stack([peer, stream % channels, entry % layout.return_slots], dim=-1)
        return torch.where(entry[..., None] >= 0, found, -1)

    @property
    def expert_starts(self) -> list[int] | None:
        """First row of each expert's group, and the end of the last one."""
        if self.num_recv_per_expert is None:
            return None
        padded = (-(-count // self.expert_alignment) * self.expert_alignment for count in self.num_recv_per_expert)
        return list(itertools.accumulate(padded, initial=0))

    @property
    def num_rows(self) -> int | None:
        """Rows of what was received: R, or those of all groups; None where the host does not know."""
        if self.known_rows is not None:
            return self.known_rows
        if not self.expand:
            return self.num_recv_tokens
        starts = self.expert_starts
        return None if starts is None else starts[-1]
