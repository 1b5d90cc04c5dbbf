"""Normalisation over the hidden size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..ops import layer_norm, rms_norm

__all__ = ["NORMALIZATIONS", "normalize"]

#: Names that modules take, as TransformerEngine has them.
NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def normalize(
    normalization: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    active_tokens: Tensor | None = None,
    shards: int = 1,
) -> Tensor:
    """LayerNorm or RMSNorm of ``x`` [.., hidden], with ``weight`` [hidden] and, for LayerNorm, ``bias`` [hidden].

    With ``active_tokens``, of the first ``active_tokens // shards`` rows of ``x`` [C, hidden].
    """
    if active_tokens is not None:
        count = {"active_tokens": active_tokens, "shards": shards}
        if normalization == "RMSNorm":
            return rms_norm(x, weight, eps, **count)  # type: ignore[arg-type]
        return layer_norm(x, weight, bias, eps, **count)  # type: ignore[arg-type]
    if normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)
