"""What the arguments of a dispatch and of a combine must be. A broken rule is a ``TypeError`` or a ``ValueError`` that
names it, what was given and what is allowed; nothing was sent then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm.rules import DTYPES
from ..kernels.ep_dispatch import Payload
from .handle import EpHandle
from .settings import MOST_INT32, SCALE_COLUMNS, Settings

FP8 = torch.float8_e4m3fn
_MAX_BIASES = 2


def check_switches(**switches: object) -> None:
    """``TypeError`` for one that is no bool."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}; bool() makes it one")


def check_alignment(settings: Settings, alignment: object) -> None:
    """The rule of ``expert_alignment``: rows that are grouped by expert are numbered in int32."""
    if isinstance(alignment, bool) or not isinstance(alignment, int):
        raise TypeError(f"expert_alignment must be an int, got {alignment!r}; int() makes it one")
    if alignment < 1:
        raise ValueError(f"expert_alignment must be at least 1, got {alignment}")
    rows = settings.most_rows(expand=True, expert_alignment=alignment)
    if rows > MOST_INT32:
        raise ValueError(
            f"expert_alignment {alignment} could make {rows} rows of a dispatch, at most {MOST_INT32}; give less"
        )


def rows_and_scales(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that a dispatch sends, with their scale factors where there are some."""
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise TypeError(f"x must be a tensor, or two: fp8 rows and their scales; got {len(x)}")
        return x[0], x[1]
    return x, None


def listed_biases(bias: Any) -> tuple[torch.Tensor, ...]:
    """What a combine adds, none, one or more, one after another."""
    if bias is None:
        return ()
    if isinstance(bias, torch.Tensor) or not isinstance(bias, Sequence):
        return (bias,)
    return tuple(bias)


def check_dispatch(settings: Settings, payload: Payload, device: torch.device, *, look_at_ids: bool) -> None:
    """The rules of a dispatch. ``look_at_ids``: also that expert ids are in range, which waits for the device."""
    rows, scales = payload.rows, payload.scales
    dtype = FP8 if scales is not None else settings.dtype
    _check_dense("x", rows, device)
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
        _check_tensor("scales", scales, torch.float32, (tokens, columns), device)
    _check_tensor("topk_idx", payload.topk_idx, torch.int64, (tokens, settings.num_topk), device)
    if payload.topk_weights is not None:
        _check_tensor("topk_weights", payload.topk_weights, torch.float32, (tokens, settings.num_topk), device)
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
    tokens, device = handle.topk_idx.shape[0], handle.topk_idx.device
    _check_dense("y", y, device)
    if y.dtype != settings.dtype:
        raise ValueError(f"y must be {settings.dtype}, got {y.dtype}")
    expected = handle.num_rows
    if y.dim() != 2 or y.shape[1] != settings.hidden or (expected is not None and y.shape[0] != expected):
        rows = "rows" if expected is None else expected
        raise ValueError(f"y must be [{rows}, {settings.hidden}] as it was received, got {list(y.shape)}")
    if len(biases) > _MAX_BIASES:
        raise ValueError(f"combine adds at most {_MAX_BIASES} biases, got {len(biases)}")
    for bias in biases:
        _check_dense("bias", bias, device)
        if bias.dtype not in DTYPES:
            raise ValueError(f"bias must be one of {', '.join(map(str, DTYPES))}, got {bias.dtype}")
        _check_tensor("bias", bias, bias.dtype, (tokens, settings.hidden), device)
    if topk_weights is not None:
        if handle.expand and not settings.allow_multiple_reduction:
            _check_tensor("topk_weights", topk_weights, torch.float32, (tokens, settings.num_topk), device)
        else:
            check_received_weights(settings, topk_weights, handle)


def check_received_weights(settings: Settings, topk_weights: torch.Tensor, handle: EpHandle) -> None:
    """The rules of weights [R, K] as a dispatch returned them."""
    device = handle.topk_idx.device
    _check_dense("topk_weights", topk_weights, device)
    rows = handle.num_recv_tokens
    if rows is None:  # the device alone knows
        rows = topk_weights.shape[0] if topk_weights.dim() else 0
    _check_tensor("topk_weights", topk_weights, torch.float32, (rows, settings.num_topk), device)


def check_combine_weights(settings: Settings, topk_weights: torch.Tensor, handle: EpHandle) -> None:
    """The rules of weights that go back by themselves."""
    if handle.expand and not settings.allow_multiple_reduction:
        raise ValueError(
            "without allow_multiple_reduction the weights of an expanded handle cannot be summed over the ranks: its "
            "partial results come back one for each expert; take the weights of a handle that is not expanded"
        )
    check_received_weights(settings, topk_weights, handle)


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    _check_dense(name, tensor, device)
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        wanted, given = (str(kind).removeprefix("torch.") for kind in (dtype, tensor.dtype))
        raise ValueError(f"{name} must be {wanted} {list(shape)}, got {given} {list(tensor.shape)}")


def _check_dense(name: str, tensor: object, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got one of layout {tensor.layout}; to_dense() makes it one")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}; move it there")
