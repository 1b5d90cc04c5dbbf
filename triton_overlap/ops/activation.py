"""``activation`` and ``gated_activation``, with ``gelu`` and ``swiglu``, over the active rows.

Shape ledger (C rows of room, of which T / shards are active; F features)
    activation         x [C, F]            forward  f(x)              -> out [C, F]
    gated_activation   gate_up [C, 2 F]    forward  f(gate) * up      -> out [C, F], gate the first F columns
    backward           grad [C, F] and the input                      -> the input's gradient, in its shape
    saved              the input, the count
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_choice
from ..kernels import activation as activation_kernel
from ..kernels.activation import FUNCTIONS, GATED_FUNCTIONS
from .operator import operator
from .rows import check_active_tokens, check_matrix, check_same
from .validation import check_count_types, check_tensors, refuse_double_backward

__all__ = ["activation", "activation_named", "activation_op", "gated_activation", "gelu", "swiglu"]

_GELU_NAMES = {"tanh": "gelu", "none": "gelu_exact"}


def _function(name: str, gated: bool) -> str:
    known: Mapping[str, str] = GATED_FUNCTIONS if gated else FUNCTIONS
    check_choice(_operation(gated), "name", name, known)
    return known[name]


def activation_named(operation: str, name: str) -> tuple[str, bool]:
    """The function of the kernels behind ``name``, and whether it is gated.

    Raises:
        TypeError, ValueError: no activation has this name; lists those that there are.
    """
    check_choice(operation, "activation", name, sorted({**FUNCTIONS, **GATED_FUNCTIONS}))
    gated = name in GATED_FUNCTIONS
    return (GATED_FUNCTIONS if gated else FUNCTIONS)[name], gated


def _operation(gated: bool) -> str:
    return "gated_activation" if gated else "activation"


def _features(x: Tensor, gated: bool) -> int:
    return x.shape[1] // 2 if gated else x.shape[1]


@operator("activation")
def activation_op(x: Tensor, name: str, gated: bool, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``torch.ops.triton_overlap.activation``: both functions of this file; the gated names with ``gated``."""
    operation = _operation(gated)
    function = _function(name, gated)
    # The rows that a rank's experts received, for instance, may be none.
    check_matrix(operation, "gate_up" if gated else "x", x, may_be_empty=True)
    if gated and x.shape[1] % 2:
        raise ValueError(f"{operation}: gate_up must have an even number of columns, got {list(x.shape)}")
    check_active_tokens(operation, x, active_tokens, shards)
    return activation_kernel.launch(x, function, gated=gated, active_tokens=active_tokens, shards=shards)


@activation_op.register_fake
def _fake(x: Tensor, name: str, gated: bool, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    return x.new_empty((x.shape[0], _features(x, gated)))


@operator("activation_backward")
def activation_backward_op(
    grad: Tensor, x: Tensor, name: str, gated: bool, active_tokens: Tensor | None = None, shards: int = 1
) -> Tensor:
    """``torch.ops.triton_overlap.activation_backward``: the gradient of ``x``, fresh."""
    check_same(f"{_operation(gated)}_backward", "grad", grad, x, (x.shape[0], _features(x, gated)))
    function = _function(name, gated)
    return activation_kernel.launch_gradient(grad, x, function, gated=gated, active_tokens=active_tokens, shards=shards)


@activation_backward_op.register_fake
def _backward_fake(
    grad: Tensor, x: Tensor, name: str, gated: bool, active_tokens: Tensor | None = None, shards: int = 1
) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.name, ctx.gated, active_tokens, ctx.shards = inputs
    ctx.save_for_backward(x, active_tokens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_operation(ctx.gated))
    x, active_tokens = ctx.saved_tensors
    x_grad = torch.ops.triton_overlap.activation_backward(grad, x, ctx.name, ctx.gated, active_tokens, ctx.shards)
    return x_grad, None, None, None, None


activation_op.register_autograd(_backward, setup_context=_setup_context)


def activation(x: Tensor, name: str, *, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``f(x)`` over the active rows, computed in float32.

    Differentiable once.

    Args:
        x: [C, F], bfloat16, float16 or float32.
        name: of f, as ``nn.LayerNormMLP`` has it: "gelu" (tanh approximation), "gelu_exact", "qgelu", "relu", "silu" or
            "srelu".
        active_tokens: int32, one element on the device of ``x``: the count of tokens. All rows are active without it.
        shards: ranks that the tokens are split over, so that ``active_tokens // shards`` rows are active.

    Returns:
        [C, F] in the dtype of ``x``, fresh; rows past the active ones are uninitialised memory.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: the name is unknown; shape, dtype or device do not fit.
    """
    check_tensors("activation", x=x)
    check_choice("activation", "name", name, FUNCTIONS)
    check_count_types("activation", active_tokens, shards)
    out: Tensor = torch.ops.triton_overlap.activation(x, name, False, active_tokens, shards)
    return out


def gated_activation(gate_up: Tensor, name: str, *, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``f(gate) * up`` over the active rows, computed in float32.

    Differentiable once.

    Args:
        gate_up: [C, 2 F], the gate's columns first; bfloat16, float16 or float32.
        name: of the pair, as ``nn.LayerNormMLP`` has it: "geglu", "glu", "qgeglu", "reglu", "sreglu" or "swiglu".
        active_tokens: see ``activation``.
        shards: see ``activation``.

    Returns:
        [C, F] in the dtype of ``gate_up``, fresh; rows past the active ones are uninitialised memory.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: the name is unknown; shape, dtype or device do not fit.
    """
    check_tensors("gated_activation", gate_up=gate_up)
    check_choice("gated_activation", "name", name, GATED_FUNCTIONS)
    check_count_types("gated_activation", active_tokens, shards)
    out: Tensor = torch.ops.triton_overlap.activation(gate_up, name, True, active_tokens, shards)
    return out


def gelu(x: Tensor, approximate: str = "tanh", *, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``activation`` with GELU: ``approximate`` is "tanh", TransformerEngine's, or "none", as in torch.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: ``approximate`` is neither; shape, dtype or device do not fit.
    """
    check_choice("gelu", "approximate", approximate, _GELU_NAMES)
    return activation(x, _GELU_NAMES[approximate], active_tokens=active_tokens, shards=shards)


def swiglu(gate_up: Tensor, *, active_tokens: Tensor | None = None, shards: int = 1) -> Tensor:
    """``silu(gate) * up``: ``gated_activation`` with "swiglu"."""
    return gated_activation(gate_up, "swiglu", active_tokens=active_tokens, shards=shards)
