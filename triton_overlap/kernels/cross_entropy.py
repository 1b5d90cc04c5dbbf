"""Cross entropy over the active rows, and its gradient.

Shapes, V classes::

    forward    logits [rows, V], labels [rows]   ->  normalizers fp32 [2, rows]: the largest logit m, and
                                                         l = log of the sum over classes of exp(logits - m)
                                                     losses fp32 [rows] = l - (logits[label] - m), 0 where ignored
               losses, labels                    ->  loss fp32 []  = scale * sum of losses
                                                     scale fp32 [] = 1 / number of labels that count, or 1
    gradient   loss_grad [] * scale * (exp(logits - m - l) - (class is the label)), 0 where ignored

m and l are kept apart, since a sum of a large m and a small l would lose the digits of l.
A row is walked in blocks of classes, with the sum rescaled when a larger maximum turns up. The sum over rows is one
program's, in a fixed order, so it is bitwise reproducible. A label that is neither a class nor to be ignored makes
the loss and its row's gradient NaN: a kernel cannot raise. Lower bound: forward reads the active rows' logits once,
backward reads and writes them once.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .rows import COUNTS, RowConfig, Rows, active_rows, block_columns, block_rows, row_config, row_major, tile, tiles

#: Elements of a block of logits.
_ELEMENTS = 4096
#: Rows that the summing program takes at a time; the same everywhere, so that sums are.
_SUMMED = RowConfig(BLOCK_M=1024, BLOCK_N=1, num_warps=1 if INTERPRETED.value else 4)


@triton.jit(do_not_specialize=(*COUNTS, "ignore_index"))
def cross_entropy_kernel(
    logits_ptr, stride_logits, labels_ptr, losses_ptr, normalizers_ptr,
    tokens_ptr, shards, rows, columns, ignore_index,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    log_totals_ptr = normalizers_ptr + rows
    rows = active_rows(tokens_ptr, shards, rows)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        lanes, in_rows = block_rows(block, rows, BLOCK_M)
        # Rows that there are not start from a number, since infinity less infinity is none.
        largest = tl.where(in_rows, float("-inf"), 0.0)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, columns, BLOCK_N):
            cols, in_columns = block_columns(start, columns, BLOCK_N)
            pointers = logits_ptr + lanes[:, None] * stride_logits + cols[None, :]
            mask = in_rows[:, None] & in_columns[None, :]
            logits = tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(logits, axis=1))
            # A row that has had nothing but -inf so far has a sum of 0, whatever it is counted from.
            base = tl.where(larger == float("-inf"), 0.0, larger)
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(logits - base[:, None]), axis=1)
            largest = larger
        log_total = tl.log(tl.where(in_rows, total, 1.0))
        label = tl.load(labels_ptr + lanes, mask=in_rows, other=0)
        is_class = in_rows & (label >= 0) & (label < columns)
        logit = tl.load(logits_ptr + lanes * stride_logits + label, mask=is_class, other=float("nan")).to(tl.float32)
        tl.store(losses_ptr + lanes, tl.where(label == ignore_index, 0.0, log_total - (logit - largest)), mask=in_rows)
        tl.store(normalizers_ptr + lanes, largest, mask=in_rows)
        tl.store(log_totals_ptr + lanes, log_total, mask=in_rows)


@triton.jit(do_not_specialize=(*COUNTS, "ignore_index"))
def sum_losses_kernel(
    losses_ptr, labels_ptr, loss_ptr, scale_ptr,
    tokens_ptr, shards, rows, ignore_index,
    MEAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = active_rows(tokens_ptr, shards, rows)
    total = tl.zeros((BLOCK_M,), tl.float32)
    count = tl.zeros((BLOCK_M,), tl.int32)
    for block in range(tl.cdiv(rows, BLOCK_M)):
        lanes, in_rows = block_rows(block, rows, BLOCK_M)
        total += tl.load(losses_ptr + lanes, mask=in_rows, other=0.0)
        counted = in_rows & (tl.load(labels_ptr + lanes, mask=in_rows, other=0) != ignore_index)
        count += counted.to(tl.int32)
    scale = 1.0
    if MEAN:
        scale = 1.0 / tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)
    tl.store(loss_ptr, tl.sum(total, axis=0) * scale)
    tl.store(scale_ptr, scale)


@triton.jit(do_not_specialize=(*COUNTS, "ignore_index", "loss_grad_ptr"))
def cross_entropy_gradient_kernel(
    loss_grad_ptr, scale_ptr, logits_ptr, stride_logits, labels_ptr, normalizers_ptr, grad_ptr,
    tokens_ptr, shards, rows, columns, ignore_index,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    log_totals_ptr = normalizers_ptr + rows
    rows = active_rows(tokens_ptr, shards, rows)
    loss_grad = tl.load(loss_grad_ptr).to(tl.float32) * tl.load(scale_ptr)
    for index in range(tl.program_id(0), tiles(rows, columns, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        lanes, cols, mask = tile(index, rows, columns, BLOCK_M, BLOCK_N)
        in_rows = lanes < rows
        label = tl.load(labels_ptr + lanes, mask=in_rows, other=0)
        largest = tl.load(normalizers_ptr + lanes, mask=in_rows, other=0.0)
        log_total = tl.load(log_totals_ptr + lanes, mask=in_rows, other=0.0)
        logits = tl.load(logits_ptr + lanes * stride_logits + cols, mask=mask, other=0.0).to(tl.float32)
        value = loss_grad * (tl.exp(logits - largest - log_total) - tl.where(cols == label, 1.0, 0.0))
        value = tl.where((label >= 0) & (label < columns), value, float("nan"))
        value = tl.where(label == ignore_index, 0.0, value)
        tl.store(grad_ptr + lanes * columns + cols, value.to(grad_ptr.dtype.element_ty), mask=mask)


def launch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    *,
    mean: bool,
    active_tokens: torch.Tensor | None = None,
    shards: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of the active rows, and what its gradient needs.

    Args:
        logits: [rows, V].
        labels: int64 [rows].
        ignore_index: label of rows that do not count.
        mean: whether the sum is divided by the number of labels that count.
        active_tokens: see ``Rows``.
        shards: see ``Rows``.

    Returns:
        loss [], normalizers [2, rows] and scale [], fp32.
    """
    logits, labels = row_major(logits), labels.contiguous()
    normalizers = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    losses = torch.empty_like(normalizers[0])
    loss, scale = normalizers.new_empty(()), normalizers.new_empty(())
    rows = Rows.of(logits, active_tokens, shards)
    rows.launch(
        cross_entropy_kernel,
        row_config(logits.shape[1], _ELEMENTS),
        logits_ptr=logits,
        stride_logits=logits.stride(0),
        labels_ptr=labels,
        losses_ptr=losses,
        normalizers_ptr=normalizers,
        columns=logits.shape[1],
        ignore_index=ignore_index,
    )
    rows.launch(
        sum_losses_kernel,
        _SUMMED,
        1,
        losses_ptr=losses,
        labels_ptr=labels,
        loss_ptr=loss,
        scale_ptr=scale,
        ignore_index=ignore_index,
        MEAN=mean,
    )
    return loss, normalizers, scale


def launch_gradient(
    loss_grad: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    normalizers: torch.Tensor,
    scale: torch.Tensor,
    active_tokens: torch.Tensor | None = None,
    shards: int = 1,
) -> torch.Tensor:
    """The gradient of ``logits`` in the active rows of a fresh tensor.

    ``loss_grad`` [] is that of the loss, ``normalizers`` and ``scale`` are what ``launch`` returned.
    """
    logits, labels = row_major(logits), labels.contiguous()
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    Rows.of(logits, active_tokens, shards).launch(
        cross_entropy_gradient_kernel,
        row_config(logits.shape[1], _ELEMENTS),
        loss_grad_ptr=loss_grad,
        scale_ptr=scale,
        logits_ptr=logits,
        stride_logits=logits.stride(0),
        labels_ptr=labels,
        normalizers_ptr=normalizers,
        grad_ptr=grad,
        columns=logits.shape[1],
        ignore_index=ignore_index,
    )
    return grad
