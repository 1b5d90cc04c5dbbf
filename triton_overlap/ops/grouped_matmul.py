"""``grouped_matmul``: rows grouped by expert, each group times its own matrix.

Shape ledger (R rows of room, E groups of counts[e] rows, each padded to a multiple of ``alignment``)
    a          [R, K]      rows, group after group
    b          [E, K, N]   any strides torch.matmul takes without a copy: a weight [E, N, K] is given transposed
    counts     int32 [E]   on the device
    forward    a rows of e @ b[e]                   -> out [R, N]
    dgrad      d out rows of e @ b[e]^T             -> da [R, K]
    wgrad      (a rows of e)^T @ d out rows of e    -> db[e] [K, N], zeros for an empty group
    saved      a, b, counts

Who computes it: ``torch.nn.functional.grouped_mm`` on a GPU of compute capability 9.0, for bfloat16, without padding
and without ``main_grad``; kernels/grouped_matmul.py everywhere else. Both take the counts from the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import check_int
from ..kernels import grouped_matmul as kernel
from ..kernels.grouped_matmul import Groups, stored_by_columns
from .autocast import autocast_operands
from .operator import operator
from .validation import (
    PRODUCT_DTYPES,
    check_dense,
    check_main_grad,
    check_optional_tensors,
    check_tensors,
    refuse_double_backward,
)

__all__ = ["grouped_matmul", "grouped_matmul_op"]

_NAME = "grouped_matmul"
#: What the kernels multiply; torch's own product takes bfloat16 alone.
_DTYPES = tuple(dtype for dtype in PRODUCT_DTYPES if dtype != torch.float64)
#: Compute capability that torch's grouped product is made for.
_TORCH_CAPABILITY = (9, 0)
#: Rows of every operand on 16 bytes.
_TORCH_COLUMNS = 8


def _torch_has_it(a: Tensor, k: int, n: int, alignment: int) -> bool:
    """Whether torch's grouped product takes these operands, and wants no row of padding for it."""
    return (
        a.is_cuda
        and a.dtype == torch.bfloat16
        and alignment == 1
        and k % _TORCH_COLUMNS == 0
        and n % _TORCH_COLUMNS == 0
        and torch.cuda.get_device_capability(a.device) == _TORCH_CAPABILITY
    )


@operator("grouped_matmul")
def grouped_matmul_op(a: Tensor, b: Tensor, counts: Tensor, main_grad: Tensor | None, alignment: int) -> Tensor:
    """``torch.ops.triton_overlap.grouped_matmul``. Arguments as those of ``grouped_matmul``."""
    _check(a, b, counts, main_grad, alignment)
    groups = Groups(counts, alignment)
    if a.shape[0] and _torch_has_it(a, b.shape[1], b.shape[2], alignment):
        right = b if 1 in b.stride()[1:] else b.contiguous()
        return F.grouped_mm(a.contiguous(), right, offs=groups.ends(a.shape[0]))
    return kernel.launch(a, b, groups)


@grouped_matmul_op.register_fake
def _fake(a: Tensor, b: Tensor, counts: Tensor, main_grad: Tensor | None, alignment: int) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]))


@operator("grouped_gradient")
def grouped_gradient_op(a: Tensor, g: Tensor, counts: Tensor, alignment: int, by_columns: bool) -> Tensor:
    """``torch.ops.triton_overlap.grouped_gradient``: ``a^T g`` of each group, of contiguous memory.

    Args:
        a: [R, K].
        g: [R, N], the dtype of ``a``.
        counts: int32 [E].
        alignment: of the groups.
        by_columns: return [E, N, K] instead of [E, K, N].
    """
    groups = Groups(counts, alignment)
    if a.shape[0] and _torch_has_it(a, a.shape[1], g.shape[1], alignment):
        left, right = (g, a) if by_columns else (a, g)
        return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=groups.ends(a.shape[0]))
    out = kernel.launch_gradient(a, g, groups, by_columns=by_columns)
    return out.transpose(1, 2) if by_columns else out


@grouped_gradient_op.register_fake
def _gradient_fake(a: Tensor, g: Tensor, counts: Tensor, alignment: int, by_columns: bool) -> Tensor:
    sizes = (g.shape[1], a.shape[1]) if by_columns else (a.shape[1], g.shape[1])
    return a.new_empty((counts.shape[0], *sizes))


@operator("grouped_gradient_", mutates_args=("main_grad",))
def grouped_gradient_into_op(a: Tensor, g: Tensor, counts: Tensor, alignment: int, main_grad: Tensor) -> None:
    """``torch.ops.triton_overlap.grouped_gradient_``: add ``a^T g`` of each group to float32 [E, K, N]."""
    kernel.launch_gradient(a, g, Groups(counts, alignment), by_columns=False, accumulate_into=main_grad)


@grouped_gradient_into_op.register_fake
def _gradient_into_fake(a: Tensor, g: Tensor, counts: Tensor, alignment: int, main_grad: Tensor) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, counts, main_grad, ctx.alignment = inputs
    needs_a, needs_b, *_ = ctx.needs_input_grad
    ctx.by_columns = stored_by_columns(b)
    # Not through save_for_backward: other microbatches add to it between this forward and its backward.
    ctx.main_grad = main_grad
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None, counts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward(_NAME)
    a, b, counts = ctx.saved_tensors
    operators = torch.ops.triton_overlap
    a_grad = b_grad = None
    if b is not None:
        a_grad = operators.grouped_matmul(grad, b.transpose(1, 2), counts, None, ctx.alignment)
    if a is not None and ctx.main_grad is not None:
        operators.grouped_gradient_(a, grad, counts, ctx.alignment, ctx.main_grad)
    elif a is not None:
        b_grad = operators.grouped_gradient(a, grad, counts, ctx.alignment, ctx.by_columns)
        b_grad = b_grad.transpose(1, 2) if ctx.by_columns else b_grad
    return a_grad, b_grad, None, None, None


grouped_matmul_op.register_autograd(_backward, setup_context=_setup_context)


def _check(a: Tensor, b: Tensor, counts: Tensor, main_grad: Tensor | None, alignment: int) -> None:
    """ValueError unless the operands belong together."""
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[1] or 0 in b.shape:
        raise ValueError(f"{_NAME}: a [R, K] and b [E, K, N] expected, got {list(a.shape)} and {list(b.shape)}")
    if a.dtype not in _DTYPES:
        raise ValueError(f"{_NAME}: a must be one of {', '.join(map(str, _DTYPES))}, got {a.dtype}; cast it")
    if b.dtype != a.dtype:
        raise ValueError(f"{_NAME}: a is {a.dtype}, b is {b.dtype}; they must agree")
    if counts.dtype != torch.int32 or list(counts.shape) != [b.shape[0]]:
        raise ValueError(
            f"{_NAME}: counts must be torch.int32 [{b.shape[0]}], one for each b, got {counts.dtype} "
            f"{list(counts.shape)}"
        )
    if alignment < 1:
        raise ValueError(f"{_NAME}: alignment must be at least 1, got {alignment}")
    for name, tensor in (("a", a), ("b", b), ("counts", counts)):
        check_dense(_NAME, name, tensor)
        if tensor.device != a.device:
            raise ValueError(f"{_NAME}: {name} is on {tensor.device}, a is on {a.device}; move it there")
    if main_grad is not None:
        check_main_grad(_NAME, main_grad, b)


def grouped_matmul(
    a: Tensor, b: Tensor, counts: Tensor, *, alignment: int = 1, main_grad: Tensor | None = None
) -> Tensor:
    """Rows grouped by expert, each group times its own matrix; what a dispatch with ``expand`` returns is so grouped.

    Local; nothing waits for the device, and no count compiles anything. Differentiable once with respect to ``a`` and
    ``b``. Under autocast the operands are cast as ``torch.matmul`` would.

    Args:
        a: [R, K], bfloat16, float16 or float32: group e begins where group e - 1 and its padding end.
        b: [E, K, N], one matrix for each group, any strides ``torch.matmul`` takes without a copy.
        counts: int32 [E] on the device, rows of each group. Rows past ``R`` do not exist, whatever the counts are.
        alignment: rows that each group is padded to a multiple of, ``expert_alignment`` of the dispatch.
        main_grad: float32 [E, K, N], any strides. Backward adds the gradient of ``b`` to it, and ``b`` gets none of its
            own.

    Returns:
        [R, N], fresh. Padding, and rows past the last group, are uninitialised memory, and so are their gradients.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: shapes, dtypes or devices do not belong together.
    """
    check_tensors(_NAME, a=a, b=b, counts=counts)
    check_optional_tensors(_NAME, main_grad=main_grad)
    check_int(_NAME, "alignment", alignment)
    a_cast, b_cast = autocast_operands(a, b)
    out: Tensor = torch.ops.triton_overlap.grouped_matmul(a_cast, b_cast, counts, main_grad, alignment)
    return out
