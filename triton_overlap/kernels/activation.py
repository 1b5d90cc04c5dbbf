"""Activations over the active rows, plain and gated, and their gradients.

Shapes, F features::

    plain     x [rows, F]                          ->  out [rows, F]    = f(x)
    gated     gate_up [rows, 2 F], the gate first  ->  out [rows, F]    = f(gate) * up
    gradient  grad [rows, F], the input            ->  the input's gradient, in the input's shape

Everything is computed in fp32 and rounded once. Lower bound: each element of an active row read or written once.
"""

import torch
import triton
import triton.language as tl

from .rows import COUNTS, Rows, active_rows, row_config, row_major, tile, tiles

#: f of each activation, by TransformerEngine's names: "gelu" has the tanh approximation, "gelu_exact" is torch's own.
FUNCTIONS = {
    "gelu": "gelu_tanh",
    "gelu_exact": "gelu_erf",
    "qgelu": "gelu_sigmoid",
    "relu": "relu",
    "silu": "silu",
    "srelu": "squared_relu",
}
#: f of each gated activation.
GATED_FUNCTIONS = {
    "geglu": "gelu_tanh",
    "glu": "sigmoid",
    "qgeglu": "gelu_sigmoid",
    "reglu": "relu",
    "sreglu": "squared_relu",
    "swiglu": "silu",
}


@triton.jit
def value_and_slope(x, FUNCTION: tl.constexpr):
    """``f(x)`` and ``f'(x)`` of fp32 ``x``."""
    if FUNCTION == "relu":
        slope = tl.where(x > 0, 1.0, 0.0)
        value = tl.where(x > 0, x, 0.0)
        value = tl.where(x != x, x, value)
    elif FUNCTION == "squared_relu":
        positive = tl.where(x > 0, x, 0.0)
        positive = tl.where(x != x, x, positive)
        slope = 2 * positive
        value = positive * positive
    elif FUNCTION == "sigmoid":
        value = tl.sigmoid(x)
        slope = value * (1 - value)
    elif FUNCTION == "gelu_erf":
        normal = 0.5 * (1 + tl.erf(x * 0.7071067811865476))  # the normal distribution up to x; x / sqrt(2)
        value = x * normal
        slope = normal + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # its density; 1 / sqrt(2 pi)
    else:
        # x * sigmoid(u), since (1 + tanh(u / 2)) / 2 is sigmoid(u); here u and its slope.
        if FUNCTION == "gelu_tanh":  # u / 2 = sqrt(2 / pi) (x + 0.044715 x^3)
            u = 1.5957691216057308 * x * (1 + 0.044715 * x * x)
            du = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
        elif FUNCTION == "gelu_sigmoid":
            u = 1.702 * x
            du = 1.702
        else:
            tl.static_assert(FUNCTION == "silu")
            u = x
            du = 1.0
        share = tl.sigmoid(u)
        value = x * share
        slope = share + x * share * (1 - share) * du
    return value, slope


@triton.jit(do_not_specialize=COUNTS)
def activation_kernel(
    x_ptr, stride_x, out_ptr,
    tokens_ptr, shards, rows, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    for index in range(tl.program_id(0), tiles(rows, columns, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        lanes, cols, mask = tile(index, rows, columns, BLOCK_M, BLOCK_N)
        inputs = x_ptr + lanes * stride_x + cols
        value, _ = value_and_slope(tl.load(inputs, mask=mask, other=0.0).to(tl.float32), FUNCTION)
        if GATED:
            value *= tl.load(inputs + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + lanes * columns + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def activation_gradient_kernel(
    grad_ptr, stride_grad, x_ptr, stride_x, x_grad_ptr, stride_x_grad,
    tokens_ptr, shards, rows, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    dtype = x_grad_ptr.dtype.element_ty
    for index in range(tl.program_id(0), tiles(rows, columns, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        lanes, cols, mask = tile(index, rows, columns, BLOCK_M, BLOCK_N)
        inputs = x_ptr + lanes * stride_x + cols
        outputs = x_grad_ptr + lanes * stride_x_grad + cols
        grad = tl.load(grad_ptr + lanes * stride_grad + cols, mask=mask, other=0.0).to(tl.float32)
        value, slope = value_and_slope(tl.load(inputs, mask=mask, other=0.0).to(tl.float32), FUNCTION)
        if GATED:
            up = tl.load(inputs + columns, mask=mask, other=0.0).to(tl.float32)
            tl.store(outputs + columns, (grad * value).to(dtype), mask=mask)
            grad *= up
        tl.store(outputs, (grad * slope).to(dtype), mask=mask)


def launch(
    x: torch.Tensor, function: str, *, gated: bool, active_tokens: torch.Tensor | None = None, shards: int = 1
) -> torch.Tensor:
    """``f(x)``, or ``f(gate) * up`` where ``gated``, in the active rows of a fresh tensor.

    Args:
        x: [rows, F], or [rows, 2 F] where ``gated``.
        function: a value of ``FUNCTIONS`` or ``GATED_FUNCTIONS``.
        gated: whether ``x`` holds a gate and what it lets through.
        active_tokens: see ``Rows``.
        shards: see ``Rows``.
    """
    x = row_major(x)
    columns = x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
    Rows.of(x, active_tokens, shards).launch(
        activation_kernel,
        row_config(columns),
        x_ptr=x,
        stride_x=x.stride(0),
        out_ptr=out,
        columns=columns,
        FUNCTION=function,
        GATED=gated,
    )
    return out


def launch_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    function: str,
    *,
    gated: bool,
    active_tokens: torch.Tensor | None = None,
    shards: int = 1,
) -> torch.Tensor:
    """The gradient of ``x``, in the active rows of a fresh tensor, from ``grad`` [rows, F] of the output."""
    x, grad = row_major(x), row_major(grad)
    x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    Rows.of(x, active_tokens, shards).launch(
        activation_gradient_kernel,
        row_config(grad.shape[1]),
        grad_ptr=grad,
        stride_grad=grad.stride(0),
        x_ptr=x,
        stride_x=x.stride(0),
        x_grad_ptr=x_grad,
        stride_x_grad=x_grad.stride(0),
        columns=grad.shape[1],
        FUNCTION=function,
        GATED=gated,
    )
    return x_grad
