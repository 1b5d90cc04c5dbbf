"""Initial values that a group's ranks draw together, so that the model is the one that a single process would build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comm.group import Group

__all__ = ["common_generator", "initial_values"]


@contextmanager
def common_generator(group: Group, device: torch.device) -> Iterator[torch.Generator]:
    """A generator that stands, on every rank, where rank 0's default generator of ``device`` does. Collective.

    Afterwards a rank whose own generator stood there too moves on as rank 0's does; other generators are left alone.

    Raises:
        ClosedError, GroupBrokenError: of the group.
        ValueError: the parameters of some rank are on the meta device; on every rank.
    """
    group.before_call()
    group.agree_on("device type of parameters to initialise", lambda: _with_values(device))
    own_state = _generator_state(device)
    common_state = group.all_gather_object(own_state if group.rank == 0 else None)[0]
    generator = torch.Generator(device=device)
    generator.set_state(common_state)
    yield generator
    if torch.equal(own_state, common_state):
        _set_generator_state(device, generator.get_state())


@contextmanager
def initial_values(parameter: Any) -> Iterator[Tensor]:
    """Where to write all values of ``parameter``: in place; or, where another group shards it, as ``fully_shard`` does,
    in a tensor of which this rank keeps its shard afterwards."""
    if not hasattr(parameter, "device_mesh"):
        yield parameter
        return
    from torch.distributed.tensor import distribute_tensor  # slow to import

    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    yield values
    # None: each rank has drawn all of them.
    parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None))


def _with_values(device: torch.device) -> str:
    if device.type == "meta":
        raise ValueError(
            "parameters on the meta device cannot be initialised; call to_empty(device=group.device) first"
        )
    return device.type


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
