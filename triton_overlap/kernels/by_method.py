"""The products by any method that applies to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.user_buffers import UserBuffer
from . import activation, collective, gathered, pipeline, ring_exchange
from . import all_gather_matmul as fused_all_gather
from . import matmul_reduce_scatter as fused_reduce_scatter
from .choose import choices_of
from .config import TileConfig
from .epilogue import Epilogue
from .methods import Method
from .steps import multiply_into


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
    epilogue: Epilogue | None = None,
    active_tokens: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """``concat(x of every rank) @ b + bias`` for each b, then with ``gather`` the gathered rows: [T/W, K] and [K, N_i]
    -> [T, N_i] .., [T, K], all fresh. With ``active_tokens`` or an ``epilogue`` one b; the count by the fused method.

    ``auto`` looks several b up by the sum of their N."""
    if method.name == "auto":
        n, tokens = sum(b.shape[1] for b in bs), x.shape[0] * buffer.group.world_size
        method = choices_of(buffer.group).method("all_gather_matmul", x.dtype, n, x.shape[1], tokens)
    if method.name != "fused":
        other = {"ring_exchange": ring_exchange, "nccl": collective}[method.name]
        outs = other.all_gather_matmul(buffer, x, bs, biases, gather=gather, method=method)
        if epilogue is not None:
            outs[0] = _after(outs[0], epilogue)
        return outs
    needs_gathered = gather or len(bs) > 1
    outs = [
        fused_all_gather.launch(
            buffer,
            x,
            bs[0],
            biases[0],
            active_tokens=active_tokens,
            gather=needs_gathered,
            epilogue=epilogue,
            use_ce=method.use_ce,
            config=_tiles(method),
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


def _after(product: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """The epilogue of a product that is in memory already."""
    if epilogue.product is not None:
        epilogue.product.copy_(product)
    return activation.launch(product, epilogue.function, gated=epilogue.gated)


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
