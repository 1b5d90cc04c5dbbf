"""Packed batches (THD): sequences of different length laid one after another, without padding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pad_packed"]


def pad_packed(
    tokens: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    multiple: int,
    ignore_index: int = -100,
    pad_token: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the token count of a packed batch divisible by ``multiple``, usually the group's world size.

    Adds at most ``multiple - 1`` pad tokens at the end, as a document of their own, so that attention within documents
    never mixes them with data, and with ignored labels, so that they do not enter the loss. Nothing is read back from
    the device. A batch that fits already is returned as it is.

    Numeric example: 5 tokens in documents of 3 and 2, ``cu_seqlens`` [0, 3, 5], ``multiple`` 4: 8 tokens,
    ``cu_seqlens`` [0, 3, 5, 8], the last three labels ``ignore_index``.

    Args:
        tokens: [T], any integer dtype.
        labels: [T], any integer dtype.
        cu_seqlens: [documents + 1], int32 or int64: where each document starts, and T at the end.
        multiple: what the count has to be divisible by, at least 1.
        ignore_index: label of pad tokens, the ``ignore_index`` of ``torch.nn.functional.cross_entropy``.
        pad_token: id of pad tokens; any valid id does.

    Returns:
        ``tokens``, ``labels`` and ``cu_seqlens`` of the padded batch.

    Raises:
        TypeError: not three tensors and a whole number.
        ValueError: ``multiple`` below 1, no tokens, or shapes that do not belong together.
    """
    for name, value in (("tokens", tokens), ("labels", labels), ("cu_seqlens", cu_seqlens)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}; torch.as_tensor makes one")
    if isinstance(multiple, bool) or not isinstance(multiple, int):
        raise TypeError(f"multiple must be an int, usually the group's world size, got {multiple!r}")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    if tokens.dim() != 1 or labels.shape != tokens.shape:
        raise ValueError(f"tokens and labels must both be [T], got {list(tokens.shape)} and {list(labels.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must be [documents + 1] of at least one document, got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be torch.int32 or torch.int64, got {cu_seqlens.dtype}; cast it")
    count = tokens.shape[0]
    if count == 0:
        raise ValueError("the batch has no tokens; a step needs at least one")
    padding = -count % multiple
    if padding == 0:
        return tokens, labels, cu_seqlens
    end = torch.full((1,), count + padding, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return (
        torch.cat([tokens, tokens.new_full((padding,), pad_token)]),
        torch.cat([labels, labels.new_full((padding,), ignore_index)]),
        torch.cat([cu_seqlens, end]),
    )
