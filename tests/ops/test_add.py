"""The residual connection: gradients of one use or two, a count that changes under way, and the errors."""

from __future__ import annotations

import pytest
import torch

import triton_overlap as to
from tests.ops.cases import assert_equal


def test_gradient_of_a_sum_is_passed_on() -> None:
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    grad = torch.randn(4, 8)
    for got in torch.autograd.grad(to.add(x, y), [x, y], grad):
        assert_equal("gradient", got, grad)


def test_fork_shares_its_memory_and_adds_gradients() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    first, second = to.fork(x)
    assert first.data_ptr() == second.data_ptr() == x.data_ptr()
    one, two = torch.randn(4, 8), torch.randn(4, 8)
    assert_equal("both", torch.autograd.grad([first, second], x, [one, two], retain_graph=True)[0], one + two)
    assert_equal("first", torch.autograd.grad(first, x, one, retain_graph=True)[0], one)
    assert_equal("second", torch.autograd.grad(second, x, two)[0], two)


def test_a_count_that_was_changed_before_backward_is_an_error() -> None:
    """Each microbatch has a count of its own: backward works on the rows of its forward."""
    count = torch.tensor(3, dtype=torch.int32)
    x = torch.randn(4, 8, requires_grad=True)
    out = to.gelu(x, active_tokens=count)
    count.fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out[:2].sum().backward()


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"add: y must have shape \[3, 5\], got \[5\]"):
        to.add(x, x[0])
    with pytest.raises(ValueError, match=r"add: y is torch\.float16, the other operand is torch\.float32"):
        to.add(x, x.half())
    with pytest.raises(ValueError, match=r"fork: x must be \[rows, columns\], got \[3, 5, 1\]"):
        to.fork(x[..., None])
