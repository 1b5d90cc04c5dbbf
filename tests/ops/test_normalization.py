"""LayerNorm and RMSNorm: torch's own as the measure, wide rows, a weight of another dtype, which gradients are made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import assert_close
from triton_overlap.kernels.rows import row_config


def _draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize("hidden", (5, 4100))
def test_same_as_torch(hidden: int) -> None:
    """4100 columns are walked in more than one block."""
    assert (hidden > row_config(hidden).BLOCK_N) == (hidden == 4100)
    x, weight, bias, grad = _draw(3, hidden), _draw(hidden, seed=1), _draw(hidden, seed=2), _draw(3, hidden, seed=3)
    pairs = (
        (to.layer_norm(x, weight, bias, 1e-3), F.layer_norm(x, [hidden], weight, bias, 1e-3), [x, weight, bias]),
        (to.rms_norm(x, weight, 1e-3), F.rms_norm(x, [hidden], weight, 1e-3), [x, weight]),
    )
    for ours, theirs, leaves in pairs:
        assert_close("output", ours, theirs, torch.float32)
        for got, expected in zip(
            torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad), strict=True
        ):
            assert_close("gradient", got, expected, torch.float32)


def test_mean_far_from_zero() -> None:
    """The variance is taken around the mean: the difference of the sums of squares would have no digit right."""
    x = _draw(2, 64).detach() + 3000
    ones = torch.ones(64)
    expected = F.layer_norm(x.double(), [64]).float()
    torch.testing.assert_close(to.layer_norm(x, ones), expected, rtol=1e-3, atol=1e-3)


def test_weight_of_another_dtype() -> None:
    x, weight, bias = _draw(4, 32, dtype=torch.bfloat16), _draw(32, seed=1), _draw(32, seed=2)
    out = to.layer_norm(x, weight, bias)
    assert_close("output", out, F.layer_norm(x.float(), [32], weight, bias), torch.bfloat16)
    grads = torch.autograd.grad(out, [x, weight, bias], torch.ones_like(out))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]


def test_strided_rows() -> None:
    """A column slice is read in place, a transposed matrix and an expanded gradient through copies."""
    wide, tall, weight = _draw(6, 40), _draw(32, 6, seed=1), _draw(32, seed=2)
    for x in (wide[:, 4:36], tall.t()):
        out = to.rms_norm(x, weight)
        assert_close("output", out, F.rms_norm(x, [32], weight, 1e-5), torch.float32)
        got = torch.autograd.grad(out.sum(), weight)[0]
        assert_close("gradient", got, torch.autograd.grad(F.rms_norm(x, [32], weight, 1e-5).sum(), weight)[0], x.dtype)


@pytest.mark.parametrize("frozen", (0, 1, 2))
def test_only_gradients_that_are_needed(frozen: int) -> None:
    leaves = x, weight, bias = _draw(3, 16), _draw(16, seed=1), _draw(16, seed=2)
    leaves[frozen].requires_grad_(False)
    to.layer_norm(x, weight, bias).square().sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [index == frozen for index in range(3)]


def test_no_second_derivative() -> None:
    x, weight = _draw(3, 16), _draw(16, seed=1)
    with pytest.raises(NotImplementedError, match="rms_norm cannot be differentiated twice"):
        torch.autograd.grad(to.rms_norm(x, weight).sum(), x, create_graph=True)


def test_errors() -> None:
    x, weight = torch.ones(3, 16), torch.ones(16)
    with pytest.raises(ValueError, match=r"layer_norm: x must be \[rows, columns\], got \[1, 3, 16\]; flatten"):
        to.layer_norm(x[None], weight)
    with pytest.raises(ValueError, match=r"rms_norm: x must not be empty, got \[0, 16\]"):
        to.rms_norm(x[:0], weight)
    with pytest.raises(ValueError, match=r"layer_norm: x must be one of torch\.bfloat16.*got torch\.float64"):
        to.layer_norm(x.double(), weight)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[16\], got \[15\]"):
        to.rms_norm(x, weight[:15])
    with pytest.raises(ValueError, match=r"layer_norm: bias is torch\.float16, the other operand is torch\.float32"):
        to.layer_norm(x, weight, weight.half())
