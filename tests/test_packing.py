"""Padding of packed batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_overlap.packing import pad_packed


def _batch(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = sum(lengths)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.arange(1, count + 1), torch.arange(2, count + 2), ends


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), multiple=st.integers(1, 16))
def test_padding_is_a_document_of_its_own(lengths: list[int], multiple: int) -> None:
    tokens, labels, cu_seqlens = _batch(lengths)
    count = len(tokens)
    padded = pad_packed(tokens, labels, cu_seqlens, multiple, ignore_index=-7, pad_token=9)
    new_tokens, new_labels, new_cu_seqlens = padded
    extra = len(new_tokens) - count
    assert len(new_tokens) % multiple == 0
    assert 0 <= extra < multiple
    assert len(new_labels) == len(new_tokens)
    assert torch.equal(new_tokens[:count], tokens)
    assert torch.equal(new_labels[:count], labels)
    assert bool((new_tokens[count:] == 9).all())
    assert bool((new_labels[count:] == -7).all())
    assert torch.equal(new_cu_seqlens[: len(cu_seqlens)], cu_seqlens)
    assert new_cu_seqlens.dtype == cu_seqlens.dtype
    assert new_cu_seqlens.tolist()[len(cu_seqlens) :] == ([count + extra] if extra else [])


def test_labels_are_ignored_by_cross_entropy() -> None:
    tokens, labels, cu_seqlens = _batch([3, 2])
    logits = torch.randn(8, 10)
    _, padded, _ = pad_packed(tokens, labels, cu_seqlens, 4)
    torch.testing.assert_close(
        torch.nn.functional.cross_entropy(logits, padded), torch.nn.functional.cross_entropy(logits[:5], labels)
    )


@pytest.mark.parametrize(
    "change, words",
    (
        ({"multiple": 0}, "multiple must be at least 1"),
        ({"tokens": torch.zeros(2, 2)}, r"must both be \[T\]"),
        ({"labels": torch.zeros(4)}, r"must both be \[T\]"),
        ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, "cu_seqlens must be"),
        ({"tokens": torch.zeros(0), "labels": torch.zeros(0)}, "no tokens"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens must be torch.int32 or torch.int64, got torch.float32"),
    ),
)
def test_errors(change: dict[str, object], words: str) -> None:
    tokens, labels, cu_seqlens = _batch([3, 2])
    arguments = {"tokens": tokens, "labels": labels, "cu_seqlens": cu_seqlens, "multiple": 2, **change}
    with pytest.raises(ValueError, match=words):
        pad_packed(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change, words",
    (
        ({"tokens": [1, 2, 3, 4, 5]}, "tokens must be a torch.Tensor, got list"),
        ({"labels": None}, "labels must be a torch.Tensor, got NoneType"),
        ({"cu_seqlens": (0, 5)}, "cu_seqlens must be a torch.Tensor, got tuple; torch.as_tensor makes one"),
        ({"multiple": 2.0}, "multiple must be an int, usually the group's world size, got 2.0"),
        ({"multiple": None}, "multiple must be an int"),
    ),
)
def test_arguments_of_the_wrong_type(change: dict[str, object], words: str) -> None:
    tokens, labels, cu_seqlens = _batch([3, 2])
    arguments = {"tokens": tokens, "labels": labels, "cu_seqlens": cu_seqlens, "multiple": 2, **change}
    with pytest.raises(TypeError, match=words):
        pad_packed(**arguments)  # type: ignore[arg-type]
