"""What each parameter says about itself, for converters, sums of gradients and optimizers.

    tensor_parallel_dim    the dimension that the ranks split, None where the parameter is whole on every rank
    tensor_parallel_parts  equal parts that this dimension is stacked from, each of which is split by itself
    sequence_parallel      whether it acts on this rank's tokens alone, so that its gradient is a partial sum

These are attributes, and a copy, a cast, ``to_empty`` or a wrapper such as ``fully_shard`` puts a new parameter in the
place of the old one. So modules remember them, and say them again. Where ``torch.nn.utils.parametrize`` makes a
parameter from others, those are marked in its place, as far as what is known of it holds for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from .arguments import check_module

__all__ = ["MarkedModule", "is_unmarked", "mark", "mark_parameters", "mark_sequence_parallel"]

_Marked = TypeVar("_Marked", bound="MarkedModule")
#: Of modules whose own parameters ``mark_sequence_parallel`` was told about.
_TOLD = "_triton_overlap_sequence_parallel"


def mark(parameter: Any, dim: int | None, parts: int, sequence_parallel: bool) -> None:
    """Set all marks of a parameter."""
    parameter.tensor_parallel_dim = dim
    parameter.tensor_parallel_parts = parts
    parameter.sequence_parallel = sequence_parallel


def is_unmarked(parameter: Any) -> bool:
    """Whether nothing says how the ranks split it."""
    return not hasattr(parameter, "tensor_parallel_dim")


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Those of the module itself and, under the name of a parametrized one, those that it is made from: name,
    parameter, and whether it has the shape and the split of what the name stands for."""
    for name, parameter in module.named_parameters(recurse=False):
        yield name, parameter, True
    made: Any = getattr(module, "parametrizations", None)
    for name, origin in made.items() if isinstance(made, nn.ModuleDict) else ():
        for part, parameter in origin.named_parameters():
            yield name, parameter, part == "original"  # the parameter that was there; several are called otherwise


class MarkedModule(nn.Module):
    """A module that marks its own parameters, and again those that torch puts in their place."""

    #: Dimension that the ranks split of its parameters, or of its weight; None where each rank holds the whole.
    _split_dim: int | None = None

    def _marks_of(self, name: str) -> tuple[int | None, int, bool] | None:
        """What ``mark`` is to say of the module's own parameter ``name``; None of one that the module does not know."""
        raise NotImplementedError

    def _mark_parameters(self, *, anew: bool = True) -> None:
        """Say on each parameter how it is split and whether its gradient is a partial sum; without ``anew`` on those
        that say nothing yet."""
        for name, parameter, is_like_it in _own_parameters(self):
            marks = self._marks_of(name)
            if marks is None or not (anew or is_unmarked(parameter)):
                continue
            # That a gradient is partial holds for whatever a parameter is made from; a split, for what has its shape.
            if is_like_it or marks[0] is None:
                mark(parameter, *marks)

    def __deepcopy__(self: _Marked, memo: dict[int, Any]) -> _Marked:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._mark_parameters()
        return copied

    def _apply(self: _Marked, fn: Callable[..., Any], recurse: bool = True) -> _Marked:
        super()._apply(fn, recurse)
        self._mark_parameters()  # to_empty and dtype changes may make new parameters
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_parameters()  # load_state_dict(assign=True) makes new parameters


def mark_parameters(module: nn.Module) -> None:
    """Mark the parameters of a model that something has replaced: ``torch.distributed.fsdp.fully_shard``, for instance.

    Converters and ``all_reduce_replicated_gradients`` do it themselves. For optimizers and others that read
    ``tensor_parallel_dim``, ``tensor_parallel_parts`` or ``sequence_parallel``. Marks that are there are left alone.

    Args:
        module: the model. Parameters of its modules from this library, and of those that ``mark_sequence_parallel`` was
            told about, are marked; others never had marks.
    """
    check_module("mark_parameters", module)
    parts = list(module.modules())
    for part in parts:
        if isinstance(part, MarkedModule):
            part._mark_parameters(anew=False)
    for part in parts:  # last: a weight tied to one of another module is partial if it is so in either
        if getattr(part, _TOLD, False):
            _mark_own(part)


def mark_sequence_parallel(module: nn.Module) -> None:
    """Say that a module sees this rank's tokens only: mark its parameters, so that their gradients are summed.

    Args:
        module: a final norm or an embedding, say, or a whole model whose norms and the like see this rank's rows.
            Layers in it that the ranks split keep their own marks, and so do other parameters that carry a
            ``tensor_parallel_dim``: gradients of different shards have no sum.

    Raises:
        TypeError: ``module`` is no module.
    """
    check_module("mark_sequence_parallel", module)
    # With what is in them, as a parametrisation is, whose parameters stand for a split one.
    split = {
        inner
        for part in module.modules()
        if isinstance(part, MarkedModule) and part._split_dim is not None
        for inner in part.modules()
    }
    for part in module.modules():
        if part not in split:
            setattr(part, _TOLD, True)
            _mark_own(part)


def _mark_own(module: nn.Module) -> None:
    for _, parameter, _ in _own_parameters(module):
        if getattr(parameter, "tensor_parallel_dim", None) is None:
            parameter.sequence_parallel = True
