"""Attention of this rank's heads: within each document of a packed batch, or within each sequence of a plain one.

Shape ledger (T tokens, H query heads and G key/value heads of this rank, D head size, L the length of a document)
    query              [T, H, D]
    key, value         [T, G, D]    H a multiple of G; head h reads key/value head h // (H / G)
    forward            softmax(scale * q k^T) v, document by document       -> out [T, H, D]
    dgrad              from probabilities computed again, document by document
    saved              query, key, value, cu_seqlens
    largest temporary  [H, L, L]; never [T, T]

On GPUs, bfloat16 and float16 go through the variable-length kernel that PyTorch ships, with its own backward.
"""

from __future__ import annotations

import inspect
import itertools
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.operator import operator

__all__ = [
    "check_documents",
    "packed_attention",
    "packed_attention_backward_op",
    "packed_attention_op",
    "plain_attention",
]


def check_documents(kind: str, cu_seqlens: Tensor, x: Tensor) -> None:
    """ValueError, in the name of the module ``kind``, unless ``cu_seqlens`` could be that of ``packed_attention``, as
    far as can be said without reading it, and lies on the device of ``x``."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{kind}: cu_seqlens_q must be int32 or int64 of shape [documents + 1], got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(f"{kind}: cu_seqlens_q is on {cu_seqlens.device}, the tokens are on {x.device}; move it there")


def plain_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention within each sequence of a batch: query [S, B, H, D], key and value [S, B, G, D] -> [S, B, H, D]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.permute(2, 0, 1, 3)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int | None,
    causal: bool,
    scale: float,
    active_tokens: Tensor | None = None,
) -> Tensor:
    """Attention within each document of a packed batch.

    bfloat16 and float16 on a GPU read nothing back from the device; ``cu_seqlens`` is trusted there. Elsewhere its
    values are read and checked.

    Args:
        query: [T, H, D].
        key: [T, G, D].
        value: [T, G, D].
        cu_seqlens: as ``check_documents`` has it: 0, where each further document starts, and T at the end.
        max_seqlen: length of the longest document or more; T where it is None.
        causal: whether a token sees only itself and what comes before it.
        scale: of the scores.
        active_tokens: T on the device, where the tensors have room for more rows. Those past T are neither read, with
            any effect, nor written.

    Returns:
        [T, H, D].

    Raises:
        ValueError: ``cu_seqlens`` or ``max_seqlen`` is not what it should be.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _variable_length_kernel(query, key, value, cu_seqlens, max_seqlen, causal, scale)
    out: Tensor = torch.ops.triton_overlap.packed_attention(
        query, key, value, cu_seqlens, causal, scale, max_seqlen, active_tokens
    )
    return out


def _variable_length_kernel(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, causal: bool, scale: float
) -> Tensor:
    # Imported here: it brings torch's compiler with it, which the CPU can do without.
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _kernel_takes_grouped_heads():
            grouped["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    ends = cu_seqlens.to(device=query.device, dtype=torch.int32, non_blocking=True)
    longest = query.shape[0] if max_seqlen is None else max_seqlen
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=window, **grouped)
    assert isinstance(out, Tensor)  # a tuple only where auxiliary outputs are asked for
    return out


@cache
def _kernel_takes_grouped_heads() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# An operator, so that a compiler which traces the module need not know the lengths.
@operator("packed_attention")
def packed_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
    max_seqlen: int | None = None,
    active_tokens: Tensor | None = None,
) -> Tensor:
    """``torch.ops.triton_overlap.packed_attention``: document by document; arguments as in ``packed_attention``."""
    tokens = query.shape[0] if active_tokens is None else int(active_tokens)
    lengths = _document_lengths(cu_seqlens, tokens)
    if max_seqlen is not None and max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"max_seqlen_q must be the length of the longest document, {max(lengths)}, or more, got {max_seqlen}"
        )
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for q, k, v, o in zip(*(x[:tokens].split(lengths) for x in (query, key, value, out)), strict=True):
        batch = (x.unsqueeze(1) for x in (q, k, v))  # of one sequence
        o.copy_(plain_attention(*batch, causal=causal, scale=scale).squeeze(1))
    return out


@packed_attention_op.register_fake
def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
    max_seqlen: int | None = None,
    active_tokens: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@operator("packed_attention_backward")
def packed_attention_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
    active_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.triton_overlap.packed_attention_backward``: gradients of query, key and value."""
    tokens = query.shape[0] if active_tokens is None else int(active_tokens)
    lengths = _document_lengths(cu_seqlens, tokens)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    documents = zip(*(x[:tokens].split(lengths) for x in (grad, query, key, value, *grads)), strict=True)
    for g, q, k, v, q_grad, k_grad, v_grad in documents:
        for into, result in zip((q_grad, k_grad, v_grad), _document_gradients(g, q, k, v, causal, scale), strict=True):
            into.copy_(result)
    return grads[0], grads[1], grads[2]


@packed_attention_backward_op.register_fake
def _backward_fake(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
    active_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    return like[0], like[1], like[2]


def _document_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one document, in float32: with P = softmax(S), dV = P^T dO and dS = P * (dO V^T - rowsum(dO * O))."""
    # Inside an operator autograd does not record, so the formula stands here.
    length, kv_heads, _ = key.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    # [G, H/G, L, D]: the query heads of a key/value head side by side.
    q, g = (x.to(wide).reshape(length, kv_heads, -1, x.shape[-1]).permute(1, 2, 0, 3) for x in (query, grad))
    k, v = (x.to(wide).transpose(0, 1).unsqueeze(1) for x in (key, value))
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal:
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    p = scores.softmax(dim=-1)
    p_grad = torch.matmul(g, v.transpose(-1, -2))
    s_grad = p * (p_grad - (p_grad * p).sum(dim=-1, keepdim=True)) * scale
    q_grad = torch.matmul(s_grad, k).permute(2, 0, 1, 3).reshape(query.shape)
    k_grad = torch.matmul(s_grad.transpose(-1, -2), q).sum(dim=1).transpose(0, 1)
    v_grad = torch.matmul(p.transpose(-1, -2), g).sum(dim=1).transpose(0, 1)
    return q_grad, k_grad, v_grad


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.scale, _, active_tokens = inputs
    ctx.save_for_backward(*tensors, active_tokens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "packed_attention cannot be differentiated twice; call backward() or grad() without create_graph=True"
        )
    *tensors, active_tokens = ctx.saved_tensors
    grads = torch.ops.triton_overlap.packed_attention_backward(
        grad.contiguous(), *tensors, ctx.causal, ctx.scale, active_tokens
    )
    return *grads, None, None, None, None, None


packed_attention_op.register_autograd(_backward, setup_context=_setup_context)


def _document_lengths(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Of the documents that have tokens."""
    bounds: list[int] = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if not lengths or bounds[0] != 0 or bounds[-1] != tokens or min(lengths) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the token count {tokens}, got {bounds}")
    return [length for length in lengths if length]
