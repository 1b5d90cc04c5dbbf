"""How a full parameter and the ranks' shards of it belong together.

Numeric example: 4 rows of 2 parts, gate rows 0 and 1 and up rows 2 and 3, on 2 ranks: rank 0 holds rows [0, 2], rank 1
rows [1, 3].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["join_shards", "take_shard"]


def take_shard(full: Tensor, dim: int | None, parts: int, rank: int, world_size: int) -> Tensor:
    """Rank ``rank``'s piece of ``full``: its share of each of the ``parts`` that ``dim`` is stacked from.

    A view where there is one part; all of ``full`` where ``dim`` is None.
    """
    if dim is None:
        return full
    pieces = [part.chunk(world_size, dim)[rank] for part in full.chunk(parts, dim)]
    return pieces[0] if parts == 1 else torch.cat(pieces, dim)


def join_shards(shards: Sequence[Tensor], dim: int | None, parts: int) -> Tensor:
    """The inverse of ``take_shard``, from all ranks' shards in rank order; rank 0's copy where ``dim`` is None."""
    if dim is None:
        return shards[0]
    pieces = [shard.chunk(parts, dim) for shard in shards]
    return torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)
