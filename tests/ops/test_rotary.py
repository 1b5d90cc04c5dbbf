"""Rotary embedding: the module's functions as the measure, tables, documents, heads, and the errors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import assert_close, assert_equal
from triton_overlap.nn.rotary import apply_rotary

ANGLES = to.nn.RotaryPositionEmbedding(dim=16)(max_seq_len=32)


def _expected(x: Tensor, angles: Tensor, cu_seqlens: Tensor) -> Tensor:
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    positions = torch.tensor([position for length in lengths for position in range(length)])
    return apply_rotary(x, angles.flatten(1, 2)[positions])


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("lengths", ((1,), (9,), (3, 0, 0, 4, 1), (1,) * 20, (2, 5, 0)), ids=str)
def test_positions_of_every_packing(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)
    x = torch.randn(int(cu_seqlens[-1]), 3, 16)
    assert_close("rotary", to.rotary(x, ANGLES, cu_seqlens=cu_seqlens), _expected(x, ANGLES, cu_seqlens), x.dtype)


@pytest.mark.parametrize("rotated", (2, 6, 16, 20))
def test_part_of_a_head(rotated: int) -> None:
    angles = to.nn.RotaryPositionEmbedding(dim=rotated)(max_seq_len=8)
    x, cu_seqlens = torch.randn(8, 2, 20), torch.tensor([0, 8])
    out = to.rotary(x, angles)
    assert_close("one document", out, _expected(x, angles, cu_seqlens), torch.float32)
    assert_equal("the rest", out[..., rotated:], x[..., rotated:])


def test_documents_beyond_the_table_are_nan() -> None:
    x = torch.randn(8, 2, 16)
    out = to.rotary(x, ANGLES[:5], cu_seqlens=torch.tensor([0, 6, 8]))
    assert out.isnan().flatten(1).all(dim=1).tolist() == [False] * 5 + [True] + [False] * 2


def test_turns_back() -> None:
    x = torch.randn(8, 2, 16, requires_grad=True)
    out = to.rotary(x, ANGLES)
    (back,) = torch.autograd.grad(out, x, out.detach(), create_graph=True)
    assert_close("turned back", back.detach(), x.detach(), torch.float32)


def test_heads_of_grouped_attention() -> None:
    """Where every head goes: the head's number is its value."""
    groups, heads = 3, 4
    qkv = torch.arange(groups * (heads + 2.0)).view(1, groups, heads + 2, 1).expand(5, -1, -1, 8)
    query, key, value = to.rotary_qkv(qkv, None)
    assert query[2, :, 0].tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15]
    assert key[2, :, 0].tolist() == [4, 10, 16]
    assert value[2, :, 0].tolist() == [5, 11, 17]


def test_views_of_wider_rows() -> None:
    wide = torch.randn(7, 100)
    x = wide[:, 3:51].unflatten(1, (3, 16))
    assert_equal("view", to.rotary(x, ANGLES), to.rotary(x.contiguous(), ANGLES))
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)  # no unit stride within a head
    assert_equal("copied", to.rotary(turned, ANGLES), to.rotary(x.contiguous(), ANGLES))


def test_errors() -> None:
    x, qkv = torch.ones(4, 2, 16), torch.ones(4, 2, 3, 16)
    with pytest.raises(ValueError, match=r"rotary: x must be \[tokens, heads, head size\], got \[4, 32\]"):
        to.rotary(x.flatten(1), ANGLES)
    for bad in (ANGLES.double(), ANGLES[..., :3], ANGLES.repeat(1, 1, 1, 2), ANGLES.repeat(1, 2, 1, 1)):
        with pytest.raises(ValueError, match="rotary: angles must be"):
            to.rotary(x, bad)
    with pytest.raises(ValueError, match=r"cu_seqlens must be torch\.int32 or torch\.int64, got torch\.float32"):
        to.rotary(x, ANGLES, cu_seqlens=torch.ones(3))
    with pytest.raises(ValueError, match=r"cu_seqlens must be \[documents \+ 1\], where documents start, got \[1\]"):
        to.rotary_qkv(qkv, ANGLES, cu_seqlens=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="at least one query head, a key head and a value head"):
        to.rotary_qkv(qkv[:, :, :2], ANGLES)
    with pytest.raises(NotImplementedError, match=r"rotary: angles have no gradient; give angles\.detach\(\)"):
        to.rotary(x, ANGLES.clone().requires_grad_())
