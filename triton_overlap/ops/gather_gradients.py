"""What the all-gather products keep for their backward pass, and the gradients: of the shard, each b and each bias.

The shape ledger is that of ``all_gather_matmul``; which collective goes beside which product, ``GemmMethods`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.methods import reduce_method
from .bulk import reduce_scatter_beside_weight_gradient
from .gemm_methods import GemmMethods
from .validation import refuse_double_backward
from .weight_gradient import bias_gradient, local_matmul, weight_gradient

__all__ = ["gather_gradients", "save_gathered_product"]


def save_gathered_product(
    ctx: Any,
    bs: Sequence[Tensor],
    main_grads: list[Tensor | None],
    rows: Tensor | None,
    buffer: str,
    gather: bool,
    method: str,
    active_tokens: Tensor | None = None,
    more: Sequence[Tensor] = (),
) -> None:
    """Keep what ``gather_gradients`` needs, and the tensors ``more`` behind it; ``rows`` are the gathered ones, or the
    shard to gather again, or None."""
    ctx.set_materialize_grads(False)
    ctx.buffer, ctx.gather, ctx.method = buffer, gather, method
    # Not through save_for_backward: other microbatches add to it between this forward and its backward.
    ctx.main_grads = main_grads
    # The count is: should somebody write another to it before this forward's backward, autograd says so.
    ctx.save_for_backward(active_tokens, *bs, *([] if rows is None else [rows]), *more)


def gather_gradients(
    ctx: Any,
    saved: Sequence[Any],
    needs_a: bool,
    needs_bs: Sequence[bool],
    needs_biases: Sequence[bool],
    out_grads: Sequence[Tensor | None],
    gathered_grad: Tensor | None,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Of the shard, of each b and of each bias; None where nobody asks or nothing came in.

    ``saved`` is what ``save_gathered_product`` kept. Each access to ``ctx.saved_tensors`` unpacks, which under
    checkpointing may happen only once.
    """
    refuse_double_backward("all_gather_matmul")
    count = len(ctx.main_grads)
    methods = GemmMethods.parse(ctx.method)
    active_tokens, bs, rows = saved[0], saved[1 : 1 + count], saved[1 + count :]
    wanted = {i: grad for i, grad in enumerate(out_grads) if grad is not None and needs_bs[i]}
    a_grad: Tensor | None = None
    b_grads: list[Tensor | None] = [None] * count
    if needs_a and wanted and (methods.gathers_beside_dgrad or methods.wgrad is not None):
        a_grad, b_grads = _gradients_beside(ctx, methods, bs, rows[0], wanted, out_grads, gathered_grad)
    else:
        if needs_a:
            by = methods.dgrad if methods.dgrad and not methods.gathers_beside_dgrad else reduce_method(methods.fprop)
            a_grad = _shard_gradient(bs, out_grads, gathered_grad, ctx.buffer, by, active_tokens)
        if wanted:
            gathered = rows[0]
            if not ctx.gather:
                gathered = torch.ops.triton_overlap.all_gather(gathered, ctx.buffer, active_tokens)
            for i, grad in wanted.items():
                b_grads[i] = weight_gradient(gathered, grad, bs[i], ctx.main_grads[i], active_tokens)
    bias_grads = [
        None if grad is None or not needed else bias_gradient(grad, active_tokens)
        for grad, needed in zip(out_grads, needs_biases, strict=True)
    ]
    return a_grad, b_grads, bias_grads


def _gradients_beside(
    ctx: Any,
    methods: GemmMethods,
    bs: Sequence[Tensor],
    rows: Tensor,
    wanted: dict[int, Tensor],
    out_grads: Sequence[Tensor | None],
    gathered_grad: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Of the shard and of each b in ``wanted``, with collectives beside products that do not need them, which all take
    the token count from the host."""
    grad, weight = _side_by_side(bs, out_grads)
    ops, transposed = torch.ops.triton_overlap, weight.transpose(0, 1)
    if methods.dgrad is not None and not ctx.gather:
        gathered, product = ops.all_gather_beside_matmul(rows, grad, transposed, None, ctx.buffer, methods.dgrad)
    else:
        gathered = rows if ctx.gather else ops.all_gather(rows, ctx.buffer)
        product = local_matmul(grad, transposed)
    if gathered_grad is not None:
        product = product + gathered_grad
    b_grads: list[Tensor | None] = [None] * len(bs)
    if methods.wgrad is None:
        a_grad = ops.reduce_scatter(product, ctx.buffer)
    else:
        i = next(iter(wanted))
        operands = gathered, wanted.pop(i), bs[i], ctx.main_grads[i]
        a_grad, b_grads[i] = reduce_scatter_beside_weight_gradient(
            product, *operands, buffer=ctx.buffer, method=methods.wgrad
        )
    for i, out_grad in wanted.items():
        b_grads[i] = weight_gradient(gathered, out_grad, bs[i], ctx.main_grads[i])
    return a_grad, b_grads


def _side_by_side(bs: Sequence[Tensor], out_grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The gradients that came in, and their b's, each along N: one product, accumulated in float32 over all of them."""
    grads = [grad for grad in out_grads if grad is not None]
    weights = [b for b, grad in zip(bs, out_grads, strict=True) if grad is not None]
    if len(grads) == 1:
        return grads[0], weights[0]
    return torch.cat(grads, dim=1), torch.cat(weights, dim=1)


def _shard_gradient(
    bs: Sequence[Tensor],
    out_grads: Sequence[Tensor | None],
    gathered_grad: Tensor | None,
    buffer: str,
    method: str,
    active_tokens: Tensor | None,
) -> Tensor | None:
    """[T/W, K]: the ranks' sum of ``sum_i out_grads[i] @ bs[i]^T``, one call, and of ``gathered_grad``."""
    out: Tensor | None = None
    if gathered_grad is not None:
        out = torch.ops.triton_overlap.reduce_scatter(gathered_grad, buffer, active_tokens)
    if all(grad is None for grad in out_grads):
        return out
    grad, weight = _side_by_side(bs, out_grads)
    product: Tensor = torch.ops.triton_overlap.matmul_reduce_scatter(
        grad, weight.transpose(0, 1), None, None, buffer, method, None, active_tokens
    )
    return product if out is None else out + product
