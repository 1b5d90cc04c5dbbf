"""``all_gather_matmul``: gather the ranks' rows and multiply, in one overlapped operation.

Shape ledger (W ranks, K the buffer's hidden size, b_i any number of right operands)
    a_shard    [T/W, K]   this rank's rows
    b_i        [K, N_i]   this rank's columns, any strides torch.matmul takes without a copy
    gathered   [T, K]     all ranks' rows, rank 0's first
    forward    gathered @ b_i + bias_i                    -> out_i     [T, N_i]
    dgrad      reduce_scatter([dOut_0 | dOut_1 ..] @ [b_0 | b_1 ..]^T) -> dA [T/W, K], one call on the same buffer
    wgrad      gathered^T @ dOut_i                        -> dB_i      [K, N_i], local
               with bulk methods a_shard is gathered again beside the product of dgrad, and its result is
               reduce-scattered beside that of wgrad; see GemmMethods
    bias       sum over rows of dOut_i, in float32        -> dBias_i   [N_i], local
    saved      b_i, where a b_i wants a gradient gathered, or a_shard to gather again, and the count where it is on the
               device: T then, of the rows that a_shard and out have room for
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..arguments import check_switch
from ..comm.user_buffers import Communicator, UserBuffer, user_buffer_by_handle
from ..kernels import by_method
from ..kernels.methods import Method
from .activation import activation_named
from .all_gather_matmul_activation import all_gather_matmul_activation_op
from .autocast import autocast_operands
from .gather_gradients import gather_gradients, save_gathered_product
from .gemm_methods import GemmMethods
from .operator import COMMUNICATES, operator
from .validation import (
    check_activation,
    check_methods,
    check_one_per_b,
    check_optional_tensors,
    check_right_operand,
    check_tensors,
    handle_of,
    listed_optional_tensors,
    listed_tensors,
    refuse_list,
    text_of,
    world_size_of,
)

__all__ = ["all_gather_matmul", "all_gather_matmul_op", "all_gather_matmuls_op"]

_NAME = "all_gather_matmul"


@operator("all_gather_matmul", tags=COMMUNICATES)
def all_gather_matmul_op(
    a_shard: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    buffer: str,
    gather: bool,
    method: str,
    active_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``torch.ops.triton_overlap.all_gather_matmul``: the operation without conveniences.

    Args:
        a_shard: [T/W, K].
        b: [K, N].
        bias: [N] or None.
        main_grad: float32 [K, N] or None. Backward adds the weight gradient to it and returns none for b.
        buffer: handle of a user buffer with hidden size K.
        gather: also return the gathered rows. Without them, backward gathers again if b wants a gradient.
        method: see ``all_gather_matmul``.
        active_tokens: int32 scalar on the device, or None.

    Returns:
        [T, N], and the gathered rows [T, K] where ``gather``, else [0, K]; both fresh.
    """
    outs = _forward(a_shard, [b], [bias], [main_grad], buffer, gather, method, active_tokens)
    return outs[0], outs[1] if gather else a_shard.new_empty((0, a_shard.shape[1]))


@all_gather_matmul_op.register_fake
def _fake(
    a_shard: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    buffer: str,
    gather: bool,
    method: str,
    active_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tokens = a_shard.shape[0] * world_size_of(buffer)
    return a_shard.new_empty((tokens, b.shape[1])), a_shard.new_empty((tokens if gather else 0, a_shard.shape[1]))


@operator("all_gather_matmuls", tags=COMMUNICATES)
def all_gather_matmuls_op(
    a_shard: Tensor,
    bs: list[Tensor],
    biases: list[Tensor],
    main_grads: list[Tensor],
    buffer: str,
    gather: bool,
    method: str,
) -> list[Tensor]:
    """``torch.ops.triton_overlap.all_gather_matmuls``: several b share one gather.

    An operator of its own because autograd spends more host time on lists of tensors, which one b need not pay.

    Args:
        a_shard: [T/W, K].
        bs: at least one [K, N_i].
        biases: empty, or one [N_i] for each b, where a tensor of no elements means none.
        main_grads: empty, or one float32 [K, N_i] for each b, where a tensor of no elements means none.
        buffer: handle of a user buffer with hidden size K.
        gather: also return the gathered rows. Without them, backward gathers again if a b wants a gradient.
        method: see ``all_gather_matmul``.

    Returns:
        [T, N_i] for each b, then the gathered rows [T, K] where ``gather``; all fresh.
    """
    if not bs:
        raise ValueError(f"{_NAME}: give at least one b")
    for name, values in (("biases", biases), ("main_grads", main_grads)):
        if values:
            check_one_per_b(_NAME, name, values, len(bs))
    return _forward(a_shard, bs, _optional(biases, bs), _optional(main_grads, bs), buffer, gather, method)


@all_gather_matmuls_op.register_fake
def _several_fake(
    a_shard: Tensor,
    bs: list[Tensor],
    biases: list[Tensor],
    main_grads: list[Tensor],
    buffer: str,
    gather: bool,
    method: str,
) -> list[Tensor]:
    tokens = a_shard.shape[0] * world_size_of(buffer)
    columns = [b.shape[1] for b in bs] + ([a_shard.shape[1]] if gather else [])
    return [a_shard.new_empty((tokens, n)) for n in columns]


def _forward(
    a_shard: Tensor,
    bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    main_grads: Sequence[Tensor | None],
    buffer: str,
    gather: bool,
    method: str,
    active_tokens: Tensor | None = None,
) -> list[Tensor]:
    """What both operators compute: [T, N_i] for each b, then the gathered rows where ``gather``."""
    user_buffer = user_buffer_by_handle(buffer)
    by = check_methods(_NAME, user_buffer, method, active_tokens)
    check_activation(_NAME, user_buffer, "a_shard", a_shard, is_shard=True, is_hidden=True)
    for b, bias, main_grad in zip(bs, biases, main_grads, strict=True):
        check_right_operand(_NAME, user_buffer, b, bias, main_grad, a_shard.shape[1])
    return by_method.all_gather_matmul(
        user_buffer, a_shard, bs, biases, gather=gather, method=by, active_tokens=active_tokens
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a_shard, b, _, main_grad, buffer, gather, method, active_tokens = inputs
    rows = output[1] if gather else a_shard
    save_gathered_product(
        ctx, [b], [main_grad], rows if ctx.needs_input_grad[1] else None, buffer, gather, method, active_tokens
    )


def _backward(ctx: Any, out_grad: Tensor | None, gathered_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
    a_grad, (b_grad,), (bias_grad,) = gather_gradients(
        ctx, ctx.saved_tensors, needs_a, [needs_b], [needs_bias], [out_grad], gathered_grad if ctx.gather else None
    )
    return a_grad, b_grad, bias_grad, None, None, None, None, None


def _several_setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a_shard, bs, biases, main_grads, buffer, gather, method = inputs
    ctx.num_biases, ctx.num_main_grads = len(biases), len(main_grads)
    # Flat here, one flag for each tensor; in backward it is nested as the arguments are.
    needs_any_b = any(ctx.needs_input_grad[1 : 1 + len(bs)])
    rows = output[-1] if gather else a_shard
    save_gathered_product(ctx, bs, _optional(main_grads, bs), rows if needs_any_b else None, buffer, gather, method)


def _several_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    needs_a, needs_bs, needs_biases, *_ = ctx.needs_input_grad
    count = len(ctx.main_grads)
    a_grad, b_grads, bias_grads = gather_gradients(
        ctx,
        ctx.saved_tensors,
        needs_a,
        needs_bs,
        needs_biases or [False] * count,
        grads[:count],
        grads[count] if ctx.gather else None,
    )
    return a_grad, b_grads, bias_grads[: ctx.num_biases], [None] * ctx.num_main_grads, None, None, None


all_gather_matmul_op.register_autograd(_backward, setup_context=_setup_context)
all_gather_matmuls_op.register_autograd(_several_backward, setup_context=_several_setup_context)


@overload
def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | None = ...,
    method: str | Method | GemmMethods = ...,
    return_gathered: Literal[False] = ...,
    save_gathered: bool = ...,
    main_grad: Tensor | None = ...,
    activation: str | None = ...,
    active_tokens: Tensor | None = ...,
) -> Tensor: ...


@overload
def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor,
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | None = ...,
    method: str | Method | GemmMethods = ...,
    return_gathered: Literal[True],
    save_gathered: bool = ...,
    main_grad: Tensor | None = ...,
    activation: str | None = ...,
    active_tokens: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def all_gather_matmul(
    a_shard: Tensor,
    b: Sequence[Tensor],
    *,
    buffer: UserBuffer | Communicator,
    bias: Sequence[Tensor | None] | None = ...,
    method: str | Method | GemmMethods = ...,
    return_gathered: Literal[False] = ...,
    save_gathered: bool = ...,
    main_grad: Sequence[Tensor | None] | None = ...,
) -> list[Tensor]: ...


@overload
def all_gather_matmul(
    a_shard: Tensor,
    b: Sequence[Tensor],
    *,
    buffer: UserBuffer | Communicator,
    bias: Sequence[Tensor | None] | None = ...,
    method: str | Method | GemmMethods = ...,
    return_gathered: Literal[True],
    save_gathered: bool = ...,
    main_grad: Sequence[Tensor | None] | None = ...,
) -> tuple[list[Tensor], Tensor]: ...


def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor | Sequence[Tensor],
    *,
    buffer: UserBuffer | Communicator,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    method: str | Method | GemmMethods = "fused",
    return_gathered: bool = False,
    save_gathered: bool = True,
    main_grad: Tensor | Sequence[Tensor | None] | None = None,
    activation: str | None = None,
    active_tokens: Tensor | None = None,
) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], Tensor]:
    """Gather every rank's rows and multiply them by this rank's ``b``: ``gather(a_shard) @ b + bias``.

    Collective: every rank of the buffer's group calls it with the same T, K, N and dtype. Differentiable once, with
    respect to ``a_shard``, ``b`` and ``bias``; backward is collective as well. Under autocast the operands are cast as
    ``torch.matmul`` would, and the buffer must have the autocast dtype.

    Args:
        a_shard: [T/W, K], this rank's rows; bfloat16, float16 or float32, the buffer's dtype.
        b: [K, N], any strides ``torch.matmul`` takes without a copy, or several that share one gather.
        buffer: a user buffer with hidden size K and room for T tokens.
        bias: [N], or one (or None) for each of several ``b``.
        method: ``"fused"`` (one persistent kernel), ``"ring_exchange"`` or ``"nccl"``, a ``Method`` with options, or
            ``"auto"``, which chooses by a measured table; see docs/methods.md. Backward takes the same one, or what a
            ``GemmMethods`` gives.
        return_gathered: also return the gathered rows, differentiable as well.
        save_gathered: keep the gathered rows, T K elements, for the gradient of ``b``; False keeps ``a_shard`` and
            gathers again in backward. Rows that are returned are kept anyway.
        main_grad: float32 [K, N], any strides, or one (or None) for each of several ``b``. Backward adds the weight
            gradient to it, and ``b`` gets no gradient of its own.
        activation: of the product, by a name of ``to.activation`` or ``to.gated_activation``: [T, N], or [T, N/2] of a
            gated one, whose gate are the left N/2 columns of ``b``. By the fused method inside the kernel, so that the
            product is written for backward alone and not read in forward; by others after it. With one ``b``.
        active_tokens: T on the device, for a buffer with ``device_count``; see docs/device_count.md. With one ``b``, by
            the fused method.

    Returns:
        [T, N], rank 0's rows first, or a list of them for several ``b``; with ``return_gathered`` a pair of that and
        the gathered rows [T, K]. All are fresh tensors.

    Raises:
        ActiveShapeError: the shape of ``a_shard`` breaks a rule of the active shape.
        ClosedError: the buffer was closed.
        TypeError: an argument is of another type than its annotation says.
        ValueError: dtype, layout, device, shapes or method do not fit.
        CommError: the ranks disagree, or one did not arrive in time.
    """
    handle, text = handle_of(_NAME, buffer), text_of(_NAME, method)
    check_tensors(_NAME, a_shard=a_shard)
    check_switch(_NAME, "return_gathered", return_gathered)
    check_switch(_NAME, "save_gathered", save_gathered)
    check_optional_tensors(_NAME, active_tokens=active_tokens)
    if activation is not None:
        activation_named(_NAME, activation)
    if isinstance(b, Tensor):
        bias, main_grad = refuse_list(_NAME, "bias", bias), refuse_list(_NAME, "main_grad", main_grad)
        check_tensors(_NAME, b=b)
        check_optional_tensors(_NAME, bias=bias, main_grad=main_grad)
        gather = return_gathered or (save_gathered and torch.is_grad_enabled() and b.requires_grad)
        a_cast, b_cast, bias_cast = autocast_operands(a_shard, b, bias)
        out: Tensor
        gathered: Tensor
        if activation is not None:
            differentiates = torch.is_grad_enabled() and any(
                x is not None and x.requires_grad for x in (a_cast, b_cast, bias_cast)
            )
            out, _, gathered = all_gather_matmul_activation_op(
                a_cast,
                b_cast,
                bias_cast,
                main_grad,
                handle,
                gather,
                text,
                activation,
                differentiates,
                active_tokens,
            )
            return (out, gathered) if return_gathered else out
        out, gathered = torch.ops.triton_overlap.all_gather_matmul(
            a_cast, b_cast, bias_cast, main_grad, handle, gather, text, active_tokens
        )
        return (out, gathered) if return_gathered else out

    if activation is not None:
        raise NotImplementedError(
            f"{_NAME}: activation is for one b; take it of each product, with to.activation or to.gated_activation"
        )
    if active_tokens is not None:
        raise NotImplementedError(
            f"{_NAME}: several b cannot share a gather whose count is on the device; concatenate them along N and "
            "split the product"
        )
    bs = listed_tensors(_NAME, "b", b)
    biases = listed_optional_tensors(_NAME, "bias", bias, len(bs))
    main_grads = listed_optional_tensors(_NAME, "main_grad", main_grad, len(bs))
    gather = return_gathered or (save_gathered and torch.is_grad_enabled() and any(x.requires_grad for x in bs))
    a_cast, *rest = autocast_operands(a_shard, *bs, *biases)
    outs: list[Tensor] = torch.ops.triton_overlap.all_gather_matmuls(
        a_cast,
        rest[: len(bs)],
        _tensors(rest[len(bs) :], a_shard),
        _tensors(main_grads, a_shard),
        handle,
        gather,
        text,
    )
    return (list(outs[:-1]), outs[-1]) if return_gathered else list(outs[: len(bs)])


def _tensors(values: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """How the operator's schema says None: an empty list for none at all, a tensor of no elements for one."""
    # Lists that mix tensors and None get no gradients from torch.library's autograd.
    if all(value is None for value in values):
        return []
    return [like.new_empty((0,)) if value is None else value for value in values]


def _optional(values: list[Tensor], bs: list[Tensor]) -> list[Tensor | None]:
    """The inverse of ``_tensors``, one entry for each b."""
    return [value if value.numel() else None for value in values] if values else [None] * len(bs)
