"""Normalisation over the hidden size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["NORMALIZATIONS", "check_normalization", "normalize"]

#: Names that modules take, as TransformerEngine has them.
NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def check_normalization(kind: str, normalization: str) -> None:
    """ValueError, in the name of the module ``kind``, unless the normalisation is known."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"{kind}: normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}")


def normalize(normalization: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm or RMSNorm of ``x`` [.., hidden], with ``weight`` [hidden] and, for LayerNorm, ``bias`` [hidden]."""
    if normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)
