"""What every operator has from ``ops.operator``, shown by some."""

from __future__ import annotations

import pytest
import torch

import triton_overlap  # noqa: F401  registers the operators

operators = torch.ops.triton_overlap


def test_changed_arguments_are_newer_versions() -> None:
    """Autograd refuses a saved tensor that was changed since, by its version."""
    a, g = torch.randn(4, 8), torch.randn(4, 8)
    main_grad = torch.zeros(8, 8)
    scale = torch.ones((), requires_grad=True)
    scaled = scale * main_grad  # saves main_grad
    before = main_grad._version
    operators.weight_gradient_(a, g, main_grad)
    assert main_grad._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.sum().backward()


def test_an_operator_without_a_gradient_says_so() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    grad, rstd = torch.ones(4, 8), torch.ones(4)
    found = operators.norm_backward(grad, x, torch.ones(8), rstd, None, [True, False, False], None, 1)
    with pytest.raises(NotImplementedError, match="triton_overlap::norm_backward has no gradient"):
        found[0].sum().backward()


@pytest.mark.parametrize("rest", [(), (None,)], ids=["left out", "given"])
def test_defaults_may_be_given_or_left_out(rest: tuple[None, ...]) -> None:
    """Backward has a gradient for each argument either way."""
    q, k, v = (torch.randn(5, 2, 8, requires_grad=True) for _ in range(3))
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    out = operators.packed_attention(q, k, v, cu_seqlens, False, 0.5, *rest)
    expected = torch.softmax(0.5 * torch.einsum("qhd,khd->hqk", q, k), dim=-1)
    expected = torch.einsum("hqk,khd->qhd", expected, v)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.square().sum(), [q, k, v])
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), [q, k, v]))


def test_counts_come_last_in_every_schema() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("triton_overlap::")]
    counted = 0
    for schema in schemas:
        names = [argument.name for argument in schema.arguments]
        if "active_tokens" in names:
            last = schema.arguments[names.index("active_tokens") :]
            found = [(argument.name, argument.default_value) for argument in last]
            assert found == [("active_tokens", None), ("shards", 1)][: len(found)], schema
            counted += 1
        else:
            assert "shards" not in names, schema
    assert counted
