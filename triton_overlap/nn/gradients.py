"""Gradients of parameters that every rank holds and applies to its own tokens only.

Under sequence parallelism a norm's weight sees T/W rows on each rank, so each rank's gradient is a partial sum. The
modules mark such parameters with ``sequence_parallel = True``; other parameters' gradients are complete.

Shape ledger (n elements of all marked gradients, W ranks)
    flat       [W, n/W]     float32, zeros up to a multiple of 4 W elements
    sum        all_gather(reduce_scatter(flat)), in rank order: the same bits on every rank
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..comm.group import Group
from ..ops import all_gather, reduce_scatter
from .arguments import check_group, check_module
from .marks import mark_parameters

__all__ = ["all_reduce_replicated_gradients"]

_NAME = "all_reduce_replicated_gradients"


@torch.no_grad()
def all_reduce_replicated_gradients(module: nn.Module, group: Group) -> None:
    """Sum the gradients of all parameters marked ``sequence_parallel`` over the ranks, in place.

    Call it on every rank once a step: after the last microbatch's backward, before gradient clipping and the optimizer.
    A second call would sum the sums. The hosts meet at each call, to compare what they are about to sum. The first call
    for a set of parameters registers a buffer of their total size; later ones allocate no symmetric memory. Sums are
    taken in float32 in a fixed order, so replicas stay bitwise equal.

    Args:
        module: the model. A marked parameter without a gradient is left alone; which ones have a gradient must be the
            same on every rank. Gradients that another group shards too, as ``fully_shard`` does, are summed shard by
            shard.
        group: the ranks that the modules are split over.

    Raises:
        ClosedError, CommError: the group was closed or is broken, or a rank did not arrive in time.
        TypeError: ``module`` is no module, or ``group`` no group; on every rank where a module is at fault.
        ValueError: a gradient cannot be summed, or the ranks have gradients of different parameters, dtypes or shapes,
            on every rank.
    """
    check_group(_NAME, group)
    group.before_call()
    grads = list(
        group.agree_on(
            "gradients marked sequence_parallel", lambda: _marked_gradients(module, group), _described
        ).values()
    )
    count, world_size = sum(grad.numel() for grad in grads), group.world_size
    if count == 0 or world_size == 1:
        return
    columns = -(-count // (4 * world_size)) * 4  # rows of whole 16 bytes
    buffer = group.user_buffer(world_size, columns, torch.float32)
    flat = torch.zeros(world_size * columns, dtype=torch.float32, device=group.device)
    torch.cat([grad.reshape(-1).to(torch.float32) for grad in grads], out=flat[:count])
    total = all_gather(reduce_scatter(flat.view(world_size, columns), buffer=buffer), buffer=buffer).view(-1)[:count]
    for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def _marked_gradients(module: object, group: Group) -> dict[str, Tensor]:
    check_module(_NAME, module)
    assert isinstance(module, nn.Module)
    mark_parameters(module)
    grads = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        if grad is None or not getattr(parameter, "sequence_parallel", False):
            continue
        dim = getattr(parameter, "tensor_parallel_dim", None)
        if dim is not None:
            raise ValueError(
                f"{_NAME}: {name} is marked sequence_parallel, and the ranks split its dimension {dim}: gradients of "
                "different shards have no sum; leave out one of the two, sequence_parallel or tensor_parallel_dim "
                "(nn.mark_sequence_parallel marks a model's whole parameters alone)"
            )
        if hasattr(grad, "to_local"):  # a DTensor, whose class is slow to import: this rank's shard, in place
            grad = grad.to_local()
        if grad.layout != torch.strided or grad.device != group.device:
            raise ValueError(
                f"{_NAME}: the gradient of {name} must be dense and on {group.device}, got one of layout {grad.layout} "
                f"on {grad.device}"
            )
        grads[name] = grad
    return grads


def _described(grads: dict[str, Tensor]) -> dict[str, str]:
    # With the dtype, in which each rank keeps the sum.
    return {name: f"{grad.dtype} {list(grad.shape)}" for name, grad in grads.items()}
