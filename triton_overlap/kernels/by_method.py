"""The products by any method that applies to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm.user_buffers import UserBuffer
from . import activation as activation_kernel
from . import all_gather_matmul as fused_all_gather
from . import collective, gathered, pipeline, ring_exchange
from . import matmul_reduce_scatter as fused_reduce_scatter
from .choose import choices_of
from .config import TileConfig
from .epilogue import Epilogue
from .methods import Method
from .steps import multiply_into


@dataclass(frozen=True)
class Activation:
    """An activation of a product, by the method's own means.

    Attributes:
        function: as in ``kernels.activation``.
        gated: whether the product's left half is a gate for its right half.
        keep_product: whether the product is a result too.
    """

    function: str
    gated: bool
    keep_product: bool


#: Who sends in the fused all-gather, by the option ``use_ce``.
_SENDERS = {None: "auto", False: "programs", True: "copy_engine"}


def _tiles(method: Method) -> TileConfig | None:
    return None if method.tiles is None else TileConfig.named(method.tiles)


def all_gather_matmul(
    buffer: UserBuffer,
    x: torch.Tensor,
    bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    gather: bool = False,
    method: Method,
    active_tokens: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """``concat(x of every rank) @ b + bias`` for each b, then with ``gather`` the gathered rows: [T/W, K] and [K, N_i]
    -> [T, N_i] .., [T, K], all fresh. With ``active_tokens`` one b, by the fused method.

    ``auto`` looks several b up by the sum of their N."""
    if method.name == "auto":
        group = buffer.group
        n = bs[0].shape[1] if len(bs) == 1 else sum(b.shape[1] for b in bs)
        tokens = x.shape[0] * group.world_size
        method = choices_of(group).method("all_gather_matmul", x.dtype, n, x.shape[1], tokens)
    if method.name == "ring_exchange":
        return ring_exchange.all_gather_matmul(buffer, x, bs, biases, gather=gather, method=method)
    if method.name == "nccl":
        return collective.all_gather_matmul(buffer, x, bs, biases, gather=gather, method=method)
    needs_gathered = gather or len(bs) > 1
    sender, config = _SENDERS[method.use_ce], _tiles(method)
    outs = [
        fused_all_gather.launch(
            buffer,
            x,
            bs[0],
            biases[0],
            active_tokens=active_tokens,
            gather=needs_gathered,
            sender=sender,
            config=config,
        )
    ]
    if needs_gathered:
        rows = gathered.launch(buffer, outs[0].shape[0], active_tokens)
        for b, bias in zip(bs[1:], biases[1:], strict=True):
            outs.append(x.new_empty((rows.shape[0], b.shape[1])))
            multiply_into(outs[-1], rows, b, bias)
        if gather:
            outs.append(rows)
    return outs


def all_gather_matmul_activation(
    buffer: UserBuffer,
    x: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    *,
    gather: bool,
    method: Method,
    active_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation of the product, the product [T, N] where it is kept, else [0, N], and the gathered rows [T, K]
    where ``gather``, else [0, K]; all fresh."""
    if method.name == "auto":
        tokens = x.shape[0] * buffer.group.world_size
        method = choices_of(buffer.group).method("all_gather_matmul", x.dtype, b.shape[1], x.shape[1], tokens)
    if method.name == "fused":
        tokens = x.shape[0] * buffer.group.world_size
        product = x.new_empty((tokens if activation.keep_product else 0, b.shape[1]))
        epilogue = Epilogue(activation.function, activation.gated, product if activation.keep_product else None)
        out = fused_all_gather.launch(
            buffer,
            x,
            b,
            bias,
            active_tokens=active_tokens,
            gather=gather,
            epilogue=epilogue,
            sender=_SENDERS[method.use_ce],
            config=_tiles(method),
        )
        rows = gathered.launch(buffer, out.shape[0], active_tokens) if gather else x.new_empty((0, x.shape[1]))
        return out, product, rows
    outs = all_gather_matmul(buffer, x, [b], [bias], gather=gather, method=method)
    out = activation_kernel.launch(outs[0], activation.function, gated=activation.gated)
    product = outs[0] if activation.keep_product else x.new_empty((0, b.shape[1]))
    return out, product, outs[1] if gather else x.new_empty((0, x.shape[1]))


def matmul_reduce_scatter(
    buffer: UserBuffer,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    method: Method,
    active_tokens: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    operation: str = "matmul_reduce_scatter",
) -> torch.Tensor:
    """This rank's chunk of ``sum over ranks of a @ b``, plus ``bias`` and ``residual``: [T, K] and [K, N] -> [T/W, N],
    fresh. With ``active_tokens`` by the fused method.

    ``operation`` is the one that this product is a part of, under which ``auto`` looks it up.
    """
    if method.name == "auto":
        method = choices_of(buffer.group).method(operation, a.dtype, b.shape[1], a.shape[1], a.shape[0])
    if method.name == "fused":
        return fused_reduce_scatter.launch(
            buffer, a, b, bias, residual=residual, active_tokens=active_tokens, config=_tiles(method)
        )
    other = {"ring_exchange": ring_exchange, "pipeline": pipeline, "nccl": collective}[method.name]
    out = other.matmul_reduce_scatter(buffer, a, b, bias, method=method)
    return out if residual is None else out.add_(residual)
