"""Rotary position embedding whose positions start again in each document of a packed batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .arguments import check_number, check_size

__all__ = ["RotaryPositionEmbedding", "apply_rotary"]


class RotaryPositionEmbedding(nn.Module):
    """Angles of the rotary embedding (Su et al., RoFormer), for the ``rotary_pos_emb`` argument of the layers.

    Position p turns the pair of features (i, i + R/2) of a head by ``p * rotary_base ** (-2 i / R)``, where R is the
    number of rotated features: the convention of Llama in Transformers, and of TransformerEngine where it does not
    interleave.

    Args:
        dim: size of a head.
        rotary_percent: share of a head's features that are rotated, the first ones.
        rotary_base: of the angles.
        device: of the result.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the rotated features are none, or not an even number, or the base is not positive.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        rotary_base: float = 10000.0,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        check_size(kind, "dim", dim)
        check_number(kind, "rotary_percent", rotary_percent, positive=True)
        check_number(kind, "rotary_base", rotary_base, positive=True)
        self.features = int(dim * rotary_percent)
        if not 0 < self.features <= dim or self.features % 2:
            raise ValueError(
                f"{kind}: dim * rotary_percent must be an even number from 2 to {dim}, got {self.features}"
            )
        self.rotary_base = float(rotary_base)
        self.device = device

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """float32 [max_seq_len, 1, 1, R]: the angles of positions ``offset`` and up, each once for either half."""
        check_size(type(self).__name__, "max_seq_len", max_seq_len)
        check_size(type(self).__name__, "offset", offset, 0)
        positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=self.device)
        exponents = torch.arange(0, self.features, 2, dtype=torch.float32, device=self.device) / self.features
        angles = torch.outer(positions, self.rotary_base**-exponents)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]

    def extra_repr(self) -> str:
        return f"features={self.features}, rotary_base={self.rotary_base:g}"


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the first R features of each head; computed in float32 at least, returned in ``x``'s dtype.

    Args:
        x: [.., heads, D].
        angles: [.., 1, R], one for all heads.
    """
    rotated, rest = x.split([angles.shape[-1], x.shape[-1] - angles.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
