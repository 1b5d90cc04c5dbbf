"""Activations: torch's own as the measure, NaN, and the errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import triton_overlap as to
from tests.ops.cases import assert_close
from triton_overlap import reference
from triton_overlap.activations import ACTIVATIONS, GATED_ACTIVATIONS
from triton_overlap.kernels.activation import FUNCTIONS, GATED_FUNCTIONS


def test_the_names_are_those_of_the_modules() -> None:
    assert set(FUNCTIONS) == set(ACTIVATIONS)
    assert set(GATED_FUNCTIONS) == set(GATED_ACTIVATIONS)
    x = torch.linspace(-4, 4, 33)[None]
    for name, function in ACTIVATIONS.items():
        torch.testing.assert_close(reference.activation(x, name), function(x))
    for name, function in GATED_ACTIVATIONS.items():
        pair = torch.cat([x, x + 1], dim=1)
        torch.testing.assert_close(reference.gated_activation(pair, name), function(x) * (x + 1))


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, under the interpreter
@pytest.mark.parametrize("approximate", ("tanh", "none"))
def test_gelu_far_from_zero(approximate: str) -> None:
    x = torch.tensor([[-200.0, -40.0, -9.0, -0.0, 0.0, 9.0, 40.0, 200.0]], requires_grad=True)
    out, expected = to.gelu(x, approximate), F.gelu(x, approximate=approximate)
    assert_close("gelu", out, expected, torch.float32)
    got, right = (torch.autograd.grad(y.sum(), x)[0] for y in (out, expected))
    assert_close("gradient", got, right, torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, under the interpreter
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_nan_and_infinity_pass_as_in_torch(name: str) -> None:
    x = torch.tensor([[float("nan"), float("inf"), 1.0]])
    expected = reference.activation(x.double(), name).float()
    torch.testing.assert_close(to.activation(x, name), expected, equal_nan=True)


def test_wide_rows() -> None:
    """More columns than a block has, an odd number of them in each half."""
    gate_up = torch.randn(3, 2 * 4099)
    assert_close("swiglu", to.swiglu(gate_up), reference.gated_activation(gate_up, "swiglu"), torch.float32)


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"activation: name must be one of gelu, .*, got 'swiglu'"):
        to.activation(x, "swiglu")
    with pytest.raises(ValueError, match=r"gated_activation: name must be one of geglu, .*, got 'gelu'"):
        to.gated_activation(x, "gelu")
    with pytest.raises(ValueError, match=r"gate_up must have an even number of columns, got \[3, 5\]"):
        to.swiglu(x)
    with pytest.raises(ValueError, match="gelu: approximate must be one of tanh, none, got 'sigmoid'"):
        to.gelu(x, "sigmoid")
    leaf = x.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="activation cannot be differentiated twice"):
        torch.autograd.grad(to.gelu(leaf).sum(), leaf, create_graph=True)
