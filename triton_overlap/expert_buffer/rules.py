"""What the arguments of a dispatch and of a combine must be; each broken rule is a ``ValueError`` that names it."""

from __future__ import annotations

import torch

from ..kernels.ep_dispatch import Payload
from .handle import EpHandle
from .settings import SCALE_COLUMNS, Settings

FP8 = torch.float8_e4m3fn
_MAX_BIASES = 2


def check_dispatch(settings: Settings, payload: Payload, alignment: int, *, look_at_ids: bool) -> None:
    """The rules of a dispatch. ``look_at_ids``: also that expert ids are in range, which waits for the device."""
    rows, scales = payload.rows, payload.scales
    dtype = FP8 if scales is not None else settings.dtype
    if rows.dtype != dtype:
        raise ValueError(f"x must be {dtype}{' with scales' if scales is not None else ''}, got {rows.dtype}")
    if rows.dim() != 2 or rows.shape[1] != settings.hidden:
        raise ValueError(f"x must be [tokens, {settings.hidden}], got {list(rows.shape)}")
    tokens, most = rows.shape[0], settings.num_max_tokens_per_rank
    if tokens > most:
        raise ValueError(f"a rank dispatches at most num_max_tokens_per_rank = {most} tokens, got {tokens}")
    if scales is not None:
        if not settings.use_fp8_dispatch:
            raise ValueError("scales need a buffer with use_fp8_dispatch=True")
        columns = -(-settings.hidden // SCALE_COLUMNS)
        _check_tensor("scales", scales, torch.float32, (tokens, columns))
    _check_tensor("topk_idx", payload.topk_idx, torch.int64, (tokens, settings.num_topk))
    if payload.topk_weights is not None:
        _check_tensor("topk_weights", payload.topk_weights, torch.float32, (tokens, settings.num_topk))
    if alignment < 1:
        raise ValueError(f"expert_alignment must be at least 1, got {alignment}")
    if look_at_ids and tokens:
        lowest, highest = int(payload.topk_idx.min()), int(payload.topk_idx.max())
        if lowest < -1 or highest >= settings.num_experts:
            raise ValueError(f"expert ids must be -1 to {settings.num_experts - 1}, got {lowest} to {highest}")


def check_combine(
    settings: Settings,
    y: torch.Tensor,
    handle: EpHandle,
    topk_weights: torch.Tensor | None,
    biases: tuple[torch.Tensor, ...],
) -> None:
    """The rules of a combine."""
    tokens = handle.topk_idx.shape[0]
    if y.dtype != settings.dtype:
        raise ValueError(f"y must be {settings.dtype}, got {y.dtype}")
    expected = handle.num_rows
    if y.dim() != 2 or y.shape[1] != settings.hidden or (expected is not None and y.shape[0] != expected):
        rows = "rows" if expected is None else expected
        raise ValueError(f"y must be [{rows}, {settings.hidden}] as it was received, got {list(y.shape)}")
    if len(biases) > _MAX_BIASES:
        raise ValueError(f"combine adds at most {_MAX_BIASES} biases, got {len(biases)}")
    for bias in biases:
        _check_tensor("bias", bias, bias.dtype, (tokens, settings.hidden))
    if topk_weights is not None:
        if handle.expand and not settings.allow_multiple_reduction:
            _check_tensor("topk_weights", topk_weights, torch.float32, (tokens, settings.num_topk))
        else:
            check_received_weights(settings, topk_weights, handle)


def check_received_weights(settings: Settings, topk_weights: torch.Tensor, handle: EpHandle) -> None:
    """The rules of weights [R, K] as a dispatch returned them."""
    rows = topk_weights.shape[0] if handle.num_recv_tokens is None else handle.num_recv_tokens
    _check_tensor("topk_weights", topk_weights, torch.float32, (rows, settings.num_topk))


def check_combine_weights(settings: Settings, topk_weights: torch.Tensor, handle: EpHandle) -> None:
    """The rules of weights that go back by themselves."""
    if handle.expand and not settings.allow_multiple_reduction:
        raise ValueError(
            "without allow_multiple_reduction the weights of an expanded handle cannot be summed over the ranks: its "
            "partial results come back one for each expert; take the weights of a handle that is not expanded"
        )
    check_received_weights(settings, topk_weights, handle)


def _check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        wanted, given = (str(kind).removeprefix("torch.") for kind in (dtype, tensor.dtype))
        raise ValueError(f"{name} must be {wanted} {list(shape)}, got {given} {list(tensor.shape)}")
