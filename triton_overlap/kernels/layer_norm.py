"""LayerNorm and RMSNorm over the active rows, and their gradients.

Shapes::

    forward    x [rows, columns]                  ->  out [rows, columns] = (x - mean) * rstd * weight + bias
                                                      mean, rstd fp32 [rows], kept for the gradients
    gradient   g = grad * weight, n = (x - mean) * rstd, averages over the columns
               x_grad = rstd * (g - average(g) - n * average(g * n))        [rows, columns]
               weight_grad = sum over rows of grad * n                      [columns]
               bias_grad = sum over rows of grad                            [columns]

RMSNorm (Zhang and Sennrich) is the same with a mean of 0, no bias and no ``average(g)``; its kernels get no
``mean_ptr``. A row is walked in blocks of columns, once for each statistic; what a walk has read, the next one finds in
the L1 cache. The parameters' gradients are sums over the rows, taken as ``column_sum`` takes them.

Lower bound in elements of the active rows: forward reads x and writes out; backward reads grad and x and writes x_grad.
The parameters' gradients read grad and x a second time, which buys parallelism at few rows and a fixed order of
summation without a block of partial sums as wide as a row in each program.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .column_sum import PARTIALS, column_config, partial_sums, store_partial, summing_programs
from .rows import COUNTS, Rows, active_rows, block_columns, block_rows, num_programs, row_config, row_major

#: Elements of a block; two arrays of them fit a program's registers beside the loads.
_ELEMENTS = 4096
#: Programs for each multiprocessor, of eight warps.
_PROGRAMS_EACH = 4


@triton.jit
def _load(x_ptr, stride_x, lanes, in_rows, cols, in_columns):
    mask = in_rows[:, None] & in_columns[None, :]
    return tl.load(x_ptr + lanes[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_weight(weight_ptr, cols, in_columns):
    return tl.load(weight_ptr + cols, mask=in_columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _row_mean(x_ptr, stride_x, lanes, in_rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, columns, BLOCK_N):
        cols, in_columns = block_columns(start, columns, BLOCK_N)
        total += _load(x_ptr, stride_x, lanes, in_rows, cols, in_columns)
    return tl.sum(total, axis=1) / columns


@triton.jit
def _row_variance(x_ptr, stride_x, lanes, in_rows, mean, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # Around the mean, not as a difference of two large sums.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, columns, BLOCK_N):
        cols, in_columns = block_columns(start, columns, BLOCK_N)
        x = _load(x_ptr, stride_x, lanes, in_rows, cols, in_columns)
        centred = tl.where(in_columns[None, :], x - mean[:, None], 0.0)
        total += centred * centred
    return tl.sum(total, axis=1) / columns


@triton.jit
def _normalized(x_ptr, stride_x, lanes, in_rows, cols, in_columns, mean, rstd):
    return (_load(x_ptr, stride_x, lanes, in_rows, cols, in_columns) - mean[:, None]) * rstd[:, None]


@triton.jit
def _statistics(mean_ptr, rstd_ptr, lanes, in_rows, BLOCK_M: tl.constexpr):
    mean = tl.zeros((BLOCK_M,), tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + lanes, mask=in_rows, other=0.0)
    return mean, tl.load(rstd_ptr + lanes, mask=in_rows, other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def layer_norm_kernel(
    x_ptr, stride_x, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr,
    tokens_ptr, shards, rows, columns, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        lanes, in_rows = block_rows(block, rows, BLOCK_M)
        mean = tl.zeros((BLOCK_M,), tl.float32)
        if mean_ptr is not None:
            mean = _row_mean(x_ptr, stride_x, lanes, in_rows, columns, BLOCK_M, BLOCK_N)
            tl.store(mean_ptr + lanes, mean, mask=in_rows)
        variance = _row_variance(x_ptr, stride_x, lanes, in_rows, mean, columns, BLOCK_M, BLOCK_N)
        rstd = 1 / tl.sqrt(variance + eps)
        tl.store(rstd_ptr + lanes, rstd, mask=in_rows)
        for start in range(0, columns, BLOCK_N):
            cols, in_columns = block_columns(start, columns, BLOCK_N)
            value = _normalized(x_ptr, stride_x, lanes, in_rows, cols, in_columns, mean, rstd)
            value *= _load_weight(weight_ptr, cols, in_columns)
            if bias_ptr is not None:
                value += _load_weight(bias_ptr, cols, in_columns)
            pointers = out_ptr + lanes[:, None] * columns + cols[None, :]
            tl.store(pointers, value.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=COUNTS)
def layer_norm_input_gradient_kernel(
    grad_ptr, stride_grad, x_ptr, stride_x, weight_ptr, mean_ptr, rstd_ptr, x_grad_ptr,
    tokens_ptr, shards, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        lanes, in_rows = block_rows(block, rows, BLOCK_M)
        mean, rstd = _statistics(mean_ptr, rstd_ptr, lanes, in_rows, BLOCK_M)
        along = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, columns, BLOCK_N):
            cols, in_columns = block_columns(start, columns, BLOCK_N)
            grad = _load(grad_ptr, stride_grad, lanes, in_rows, cols, in_columns)
            grad *= _load_weight(weight_ptr, cols, in_columns)
            along += grad * _normalized(x_ptr, stride_x, lanes, in_rows, cols, in_columns, mean, rstd)
            if mean_ptr is not None:
                total += grad
        average_along = tl.sum(along, axis=1)[:, None] / columns
        average = tl.sum(total, axis=1)[:, None] / columns
        for start in range(0, columns, BLOCK_N):
            cols, in_columns = block_columns(start, columns, BLOCK_N)
            grad = _load(grad_ptr, stride_grad, lanes, in_rows, cols, in_columns)
            grad *= _load_weight(weight_ptr, cols, in_columns)
            normalized = _normalized(x_ptr, stride_x, lanes, in_rows, cols, in_columns, mean, rstd)
            value = (grad - average - normalized * average_along) * rstd[:, None]
            pointers = x_grad_ptr + lanes[:, None] * columns + cols[None, :]
            tl.store(pointers, value.to(x_grad_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=COUNTS)
def layer_norm_parameter_gradient_kernel(
    grad_ptr, stride_grad, x_ptr, stride_x, mean_ptr, rstd_ptr, weight_partial_ptr, bias_partial_ptr,
    tokens_ptr, shards, rows, columns,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    part = tl.program_id(0) % PARTS
    cols, in_columns = block_columns(tl.program_id(0) // PARTS * BLOCK_N, columns, BLOCK_N)
    weight_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    bias_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(part, tl.cdiv(rows, BLOCK_M), PARTS):
        lanes, in_rows = block_rows(block, rows, BLOCK_M)
        mean, rstd = _statistics(mean_ptr, rstd_ptr, lanes, in_rows, BLOCK_M)
        grad = _load(grad_ptr, stride_grad, lanes, in_rows, cols, in_columns)
        weight_total += grad * _normalized(x_ptr, stride_x, lanes, in_rows, cols, in_columns, mean, rstd)
        if bias_partial_ptr is not None:
            bias_total += grad
    store_partial(weight_partial_ptr, weight_total, part, cols, columns)
    if bias_partial_ptr is not None:
        store_partial(bias_partial_ptr, bias_total, part, cols, columns)


@dataclass(frozen=True)
class Statistics:
    """What the forward pass found in each row, kept for its gradients: fp32 [rows].

    Attributes:
        rstd: one over the standard deviation, or over the root of the mean square.
        mean: None for RMSNorm.
    """

    rstd: torch.Tensor
    mean: torch.Tensor | None


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    centred: bool,
    active_tokens: torch.Tensor | None = None,
    shards: int = 1,
) -> tuple[torch.Tensor, Statistics]:
    """LayerNorm of the active rows of ``x``, or RMSNorm unless ``centred``; fresh tensors.

    Args:
        x: [rows, columns].
        weight: [columns].
        bias: [columns] or None.
        eps: added to the variance or the mean square.
        centred: whether the mean is taken off.
        active_tokens: see ``Rows``.
        shards: see ``Rows``.
    """
    x = row_major(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    statistics = Statistics(rstd, torch.empty_like(rstd) if centred else None)
    Rows.of(x, active_tokens, shards).launch(
        layer_norm_kernel,
        row_config(x.shape[1], _ELEMENTS),
        num_programs(x.device, _PROGRAMS_EACH),
        x_ptr=x,
        stride_x=x.stride(0),
        weight_ptr=weight.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        out_ptr=out,
        mean_ptr=statistics.mean,
        rstd_ptr=rstd,
        columns=x.shape[1],
        eps=eps,
    )
    return out, statistics


def launch_input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    statistics: Statistics,
    active_tokens: torch.Tensor | None = None,
    shards: int = 1,
) -> torch.Tensor:
    """The gradient of ``x`` in the active rows of a fresh tensor, from ``grad`` [rows, columns] of the output."""
    x, grad = row_major(x), row_major(grad)
    x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    Rows.of(x, active_tokens, shards).launch(
        layer_norm_input_gradient_kernel,
        row_config(x.shape[1], _ELEMENTS),
        num_programs(x.device, _PROGRAMS_EACH),
        grad_ptr=grad,
        stride_grad=grad.stride(0),
        x_ptr=x,
        stride_x=x.stride(0),
        weight_ptr=weight.contiguous(),
        mean_ptr=statistics.mean,
        rstd_ptr=statistics.rstd,
        x_grad_ptr=x_grad,
        columns=x.shape[1],
    )
    return x_grad


def launch_parameter_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    statistics: Statistics,
    *,
    with_bias: bool,
    active_tokens: torch.Tensor | None = None,
    shards: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias, fp32 [columns] each; None for the bias unless ``with_bias``."""
    x, grad = row_major(x), row_major(grad)
    columns = x.shape[1]
    config = column_config(columns)
    weight_partial = partial_sums(columns, x.device)
    bias_partial = partial_sums(columns, x.device) if with_bias else None
    Rows.of(x, active_tokens, shards).launch(
        layer_norm_parameter_gradient_kernel,
        config,
        summing_programs(columns, config),
        grad_ptr=grad,
        stride_grad=grad.stride(0),
        x_ptr=x,
        stride_x=x.stride(0),
        mean_ptr=statistics.mean,
        rstd_ptr=statistics.rstd,
        weight_partial_ptr=weight_partial,
        bias_partial_ptr=bias_partial,
        columns=columns,
        PARTS=PARTIALS,
    )
    return weight_partial.sum(dim=0), None if bias_partial is None else bias_partial.sum(dim=0)
