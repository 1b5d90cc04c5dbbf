"""``rotary`` and ``rotary_qkv``: rotary position embedding over the active tokens.

Shape ledger (C tokens of room, of which T are active; G key/value heads, H query heads, of size D; R rotated features)
    angles     [positions, R]                  float32, of ``nn.RotaryPositionEmbedding``; R/2 angles, twice
    rotary     x [C, heads, D]                 -> out [C, heads, D]
    rotary_qkv qkv [C, G, H/G + 2, D]          -> query [C, H, D], key [C, G, D], both turned, value [C, G, D]
    backward   the same with minus the angles, and the parts put together again
    saved      angles, cu_seqlens, the count
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import rotary as rotary_kernel
from .operator import operator
from .rows import check_active_tokens, check_device, check_integers, check_matrix
from .validation import check_optional_tensors, check_tensors, refuse_double_backward

__all__ = ["rotary", "rotary_op", "rotary_qkv", "rotary_qkv_op"]


def _check_positions(
    operation: str, x: Tensor, angles: Tensor | None, cu_seqlens: Tensor | None, active_tokens: Tensor | None
) -> None:
    size = x.shape[-1]
    if angles is not None:
        check_matrix(operation, "angles", angles, ("positions", "features"))
        if angles.dtype != torch.float32 or angles.shape[1] % 2 or angles.shape[1] > size:
            raise ValueError(
                f"{operation}: angles must be torch.float32 with an even number of features up to the head size "
                f"{size}, got {angles.dtype} {list(angles.shape)}"
            )
        check_device(operation, "angles", angles, x)
    if cu_seqlens is not None:
        check_integers(operation, "cu_seqlens", cu_seqlens, x, (torch.int32, torch.int64))
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise ValueError(
                f"{operation}: cu_seqlens must be [documents + 1], where documents start, got {list(cu_seqlens.shape)}"
            )
    check_active_tokens(operation, x, active_tokens, 1)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


@operator("rotary")
def rotary_op(
    x: Tensor, angles: Tensor, cu_seqlens: Tensor | None, inverse: bool, active_tokens: Tensor | None = None
) -> Tensor:
    """``torch.ops.triton_overlap.rotary``: ``x`` [C, heads, D] turned, the other way with ``inverse``; fresh."""
    check_matrix("rotary", "x", x, ("tokens", "heads", "head size"))
    _check_positions("rotary", x, angles, cu_seqlens, active_tokens)
    table, starts = _contiguous(angles, cu_seqlens)
    out = x.new_empty(x.shape)
    rotary_kernel.launch_into(
        out.unsqueeze(1),
        _with_unit_stride(x).unsqueeze(1),
        table,
        starts,
        inverse=inverse,
        active_tokens=active_tokens,
    )
    return out


@rotary_op.register_fake
def _rotary_fake(
    x: Tensor, angles: Tensor, cu_seqlens: Tensor | None, inverse: bool, active_tokens: Tensor | None = None
) -> Tensor:
    return x.new_empty(x.shape)


def _rotary_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, angles, cu_seqlens, ctx.inverse, active_tokens = inputs
    ctx.save_for_backward(angles, cu_seqlens, active_tokens)


def _rotary_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # A rotation's transpose turns the other way. It is differentiable in its turn.
    angles, cu_seqlens, active_tokens = ctx.saved_tensors
    turned = torch.ops.triton_overlap.rotary(grad, angles, cu_seqlens, not ctx.inverse, active_tokens)
    return turned, None, None, None, None


rotary_op.register_autograd(_rotary_backward, setup_context=_rotary_setup)


def _parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads of ``qkv`` [C, G, H/G + 2, D], as views [C, G, heads, D]."""
    return qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]


@operator("rotary_qkv")
def rotary_qkv_op(
    qkv: Tensor, angles: Tensor | None, cu_seqlens: Tensor | None, active_tokens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.triton_overlap.rotary_qkv``: query and key, turned, and value; fresh."""
    check_matrix("rotary_qkv", "qkv", qkv, ("tokens", "key/value heads", "heads of each", "head size"))
    if qkv.shape[2] < 3:
        raise ValueError(
            "rotary_qkv: qkv must hold at least one query head, a key head and a value head for each key/value head, "
            f"got {list(qkv.shape)}"
        )
    _check_positions("rotary_qkv", qkv, angles, cu_seqlens, active_tokens)
    table, starts = _contiguous(angles, cu_seqlens)
    outs = [part.new_empty(part.shape) for part in _parts(qkv)]
    for part, out, turn in zip(_parts(_with_unit_stride(qkv)), outs, (table, table, None), strict=True):
        rotary_kernel.launch_into(out, part, turn, starts, inverse=False, active_tokens=active_tokens)
    query, key, value = (out.view(out.shape[0], -1, out.shape[3]) for out in outs)
    return query, key, value


@rotary_qkv_op.register_fake
def _rotary_qkv_fake(
    qkv: Tensor, angles: Tensor | None, cu_seqlens: Tensor | None, active_tokens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, groups, heads, size = qkv.shape
    return (
        qkv.new_empty((tokens, groups * (heads - 2), size)),
        qkv.new_empty((tokens, groups, size)),
        qkv.new_empty((tokens, groups, size)),
    )


@operator("rotary_qkv_backward")
def rotary_qkv_backward_op(
    query_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    angles: Tensor | None,
    cu_seqlens: Tensor | None,
    active_tokens: Tensor | None = None,
) -> Tensor:
    """``torch.ops.triton_overlap.rotary_qkv_backward``: the gradient of ``qkv``, fresh."""
    tokens, groups, size = key_grad.shape
    table, starts = _contiguous(angles, cu_seqlens)
    qkv_grad = key_grad.new_empty((tokens, groups, query_grad.shape[1] // groups + 2, size))
    grads = (query_grad, key_grad, value_grad)
    for grad, part, turn in zip(grads, _parts(qkv_grad), (table, table, None), strict=True):
        grouped = _with_unit_stride(grad).unflatten(1, (groups, -1))
        rotary_kernel.launch_into(part, grouped, turn, starts, inverse=True, active_tokens=active_tokens)
    return qkv_grad


@rotary_qkv_backward_op.register_fake
def _rotary_qkv_backward_fake(
    query_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    angles: Tensor | None,
    cu_seqlens: Tensor | None,
    active_tokens: Tensor | None = None,
) -> Tensor:
    tokens, groups, size = key_grad.shape
    return key_grad.new_empty((tokens, groups, query_grad.shape[1] // groups + 2, size))


def _rotary_qkv_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, angles, cu_seqlens, active_tokens = inputs
    ctx.save_for_backward(angles, cu_seqlens, active_tokens)


def _rotary_qkv_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward("rotary_qkv")
    return torch.ops.triton_overlap.rotary_qkv_backward(*grads, *ctx.saved_tensors), None, None, None


rotary_qkv_op.register_autograd(_rotary_qkv_backward, setup_context=_rotary_qkv_setup)


def _as_table(operation: str, angles: Tensor) -> Tensor:
    """``angles`` [positions, .., R] with dimensions of one in between, as [positions, R]."""
    if angles.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{operation}: angles have no gradient; give angles.detach()")
    if any(size != 1 for size in angles.shape[1:-1]):
        raise ValueError(
            f"{operation}: angles must be [positions, R], or have dimensions of one between the two, got "
            f"{list(angles.shape)}"
        )
    return angles.flatten(0, -2) if angles.dim() > 2 else angles


def rotary(
    x: Tensor, angles: Tensor, *, cu_seqlens: Tensor | None = None, active_tokens: Tensor | None = None
) -> Tensor:
    """Turn the first R features of each head by the angles of the token's position in its document.

    Computed in float32; differentiable any number of times with respect to ``x``. The tokens are whole on every rank,
    as the heads are what is split, so there is no ``shards``.

    Args:
        x: [C, heads, D], bfloat16, float16 or float32; a view of wider rows will do.
        angles: float32 [positions, R] or [positions, 1, 1, R], as ``nn.RotaryPositionEmbedding`` makes them: the second
            half of the features repeats the first. Rows past the longest document are not read; the rows of a document
            that is longer than the table become NaN.
        cu_seqlens: [documents + 1], int32 or int64, on the device of ``x``: where each document starts, and the count
            at the end, which may be repeated to fill a tensor of fixed size. One document without it.
        active_tokens: int32, one element on the device of ``x``: the count of tokens. All are active without it.

    Returns:
        [C, heads, D] in the dtype of ``x``, fresh; rows past the active ones are uninitialised memory.

    Raises:
        NotImplementedError: ``angles`` want a gradient.
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tensors("rotary", x=x, angles=angles)
    check_optional_tensors("rotary", cu_seqlens=cu_seqlens, active_tokens=active_tokens)
    out: Tensor = torch.ops.triton_overlap.rotary(x, _as_table("rotary", angles), cu_seqlens, False, active_tokens)
    return out


def rotary_qkv(
    qkv: Tensor, angles: Tensor | None, *, cu_seqlens: Tensor | None = None, active_tokens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the output of a query, key and value projection into heads, with query and key turned as by ``rotary``.

    One pass over the active tokens, forward and backward, where splitting and turning by themselves would each copy,
    and fill, all rows. Differentiable once.

    Args:
        qkv: [C, G, H/G + 2, D]: for each key/value head its query heads, the key head, the value head.
        angles: see ``rotary``; None only splits.
        cu_seqlens: see ``rotary``.
        active_tokens: see ``rotary``.

    Returns:
        query [C, H, D], key [C, G, D] and value [C, G, D], fresh; rows past the active ones are uninitialised memory.

    Raises:
        NotImplementedError: ``angles`` want a gradient.
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tensors("rotary_qkv", qkv=qkv)
    check_optional_tensors("rotary_qkv", angles=angles, cu_seqlens=cu_seqlens, active_tokens=active_tokens)
    table = None if angles is None else _as_table("rotary_qkv", angles)
    query, key, value = torch.ops.triton_overlap.rotary_qkv(qkv, table, cu_seqlens, active_tokens)
    return query, key, value
