"""Arguments that are no tensors: a wrong type is a TypeError by name, whatever the operator's schema says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import triton_overlap as to

X, W = torch.ones(4, 8), torch.ones(8)
LABELS = torch.zeros(4, dtype=torch.int64)
B, COUNTS = torch.ones(2, 8, 8), torch.tensor([2, 2], dtype=torch.int32)
odd: Any = [1]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: to.layer_norm(X, W, eps=odd), "layer_norm: eps must be a number, got an object of type list"),
        (lambda: to.rms_norm(X, W, eps=odd), "rms_norm: eps must be a number"),
        (lambda: to.rms_norm(X, W, shards=odd), "rms_norm: shards must be an int"),
        (lambda: to.layer_norm(X, W, shards=True), "layer_norm: shards must be an int, got True"),
        (lambda: to.activation(X, odd), "activation: name must be one of gelu, "),
        (lambda: to.activation(X, "relu", shards=odd), "activation: shards must be an int"),
        (lambda: to.gated_activation(X, odd), "gated_activation: name must be one of geglu, "),
        (lambda: to.gelu(X, odd), "gelu: approximate must be one of tanh, none, got an object of type list"),
        (lambda: to.add(X, X, shards=odd), "add: shards must be an int"),
        (lambda: to.fork(X, shards=odd), "fork: shards must be an int"),
        (lambda: to.matmul(X, X.t(), shards=odd), "matmul: shards must be an int"),
        (lambda: to.cross_entropy(X, LABELS, ignore_index=odd), "cross_entropy: ignore_index must be an int"),
        (lambda: to.cross_entropy(X, LABELS, reduction=odd), "cross_entropy: reduction must be one of mean, sum"),
        (lambda: to.grouped_matmul(X, B, COUNTS, alignment=odd), "grouped_matmul: alignment must be an int"),
    ],
)
def test_wrong_types(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: to.layer_norm(X, W, eps=-1.0), "layer_norm: eps must be finite and not negative, got -1.0"),
        (lambda: to.activation(X, "swiglu"), "activation: name must be one of .*, got 'swiglu'"),
        (lambda: to.gelu(X, "erf"), "gelu: approximate must be one of tanh, none, got 'erf'"),
        (lambda: to.add(X, X, shards=0), "add: shards, .*, must be at least 1, got 0"),
    ],
)
def test_wrong_values(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
