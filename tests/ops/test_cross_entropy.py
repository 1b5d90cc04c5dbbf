"""Cross entropy: torch's own as the measure, labels that do not count, extreme logits, and the errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import assert_close


def _both(logits: Tensor, labels: Tensor, **options: int) -> tuple[list[Tensor], list[Tensor]]:
    results = []
    for function in (to.cross_entropy, F.cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels, **options)  # type: ignore[arg-type]
        results.append([loss.detach(), torch.autograd.grad(loss * 3, leaf)[0]])
    return results[0], results[1]


@pytest.mark.parametrize("classes", (1, 7, 4100, 9000))
def test_same_as_torch(classes: int) -> None:
    """Up to three blocks of classes, with the label in any of them."""
    labels = torch.arange(5) * (classes - 1) // 4
    labels[2] = -100
    for got, expected in zip(*_both(torch.randn(5, classes) * 4, labels), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_ignored_class() -> None:
    """The ignored label may be a class, and a row of its own may hold anything."""
    logits = torch.randn(4, 6)
    logits[1] = float("nan")
    ours, theirs = _both(logits, torch.tensor([2, 0, 5, 0]), ignore_index=0)
    assert_close("loss", ours[0], theirs[0], torch.float32)
    assert not bool(ours[1][[1, 3]].any()), "rows that do not count have a gradient of 0"
    assert_close("gradient", ours[1][[0, 2]], theirs[1][[0, 2]], torch.float32)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, under the interpreter
def test_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [float("-inf"), 1.0, 2.0], [-3e38, -3e38, -3e38]])
    for got, expected in zip(*_both(logits, torch.tensor([0, 2, 1])), strict=True):
        torch.testing.assert_close(got, expected)


def test_leading_blocks_without_any_weight() -> None:
    logits = torch.full((1, 5000), float("-inf"))
    logits[0, 4999] = 1.0
    assert float(to.cross_entropy(logits, torch.tensor([4999]))) == 0


def test_no_label_counts() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = to.cross_entropy(logits, torch.full((3,), -100))
    (grad,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == 0
    assert not bool(grad.any())


@pytest.mark.parametrize("label", (-1, 5, 2**40))
def test_labels_that_are_no_class_give_nan(label: int) -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = to.cross_entropy(logits, torch.tensor([1, label, 2]))
    assert bool(loss.detach().isnan())
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.isnan().all(dim=1).tolist() == [False, True, False]


def test_errors() -> None:
    logits, labels = torch.ones(3, 5), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"cross_entropy: labels must be torch\.int64, got torch\.int32"):
        to.cross_entropy(logits, labels.int())
    with pytest.raises(ValueError, match=r"cross_entropy: labels must have shape \[3\], got \[2\]"):
        to.cross_entropy(logits, labels[:2])
    with pytest.raises(ValueError, match=r"cross_entropy: logits must be \[rows, classes\], got \[5\]"):
        to.cross_entropy(logits[0], labels)
    with pytest.raises(ValueError, match="reduction must be one of mean, sum, got 'none'"):
        to.cross_entropy(logits, labels, reduction="none")
    leaf = logits.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="cross_entropy cannot be differentiated twice"):
        torch.autograd.grad(to.cross_entropy(leaf, labels), leaf, create_graph=True)
