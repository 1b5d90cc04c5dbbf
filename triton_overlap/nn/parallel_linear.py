"""What the tensor-parallel linear layers share: sharding, initialisation, buffers, and the two products."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..comm.group import Group
from ..comm.rules import check_capacity
from ..comm.user_buffers import Communicator, UserBuffer
from ..errors import ActiveShapeError
from ..ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, replicated_matmul
from .arguments import (
    agree,
    check_group,
    check_input_of,
    check_parameters_dtype,
    check_size,
    check_switches,
    device_of,
    main_grad_of,
)
from .initialization import common_generator, initial_values
from .marks import MarkedModule
from .overlap import LIBRARY_CHOICE
from .settings import multiplied_dtype
from .sharding import take_shard

__all__ = ["ParallelLinear"]

_Parallel = TypeVar("_Parallel", bound="ParallelLinear")


class ParallelLinear(MarkedModule):
    """What the layers share: sharding, initialisation, buffers, flattening.

    A subclass says which dimension of the full [out_features, in_features] weight is split.
    """

    #: Equal parts that the out_features are stacked from, each of which is split over the ranks by itself.
    _parts: int = 1
    #: Of the operations, as ``str`` of a ``GemmMethods`` or of a ``Method``.
    method: str = LIBRARY_CHOICE
    #: Whether a column-parallel layer keeps the gathered input for backward, or gathers it again there.
    save_gathered_input: bool = True
    #: The user buffer that ``initialize_ub`` registered for the layer, if it is to use that.
    communicator: Communicator | None = None

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group,
        max_tokens: int,
        sequence_parallel: bool = True,
        device_count: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kind = type(self).__name__
        check_group(kind, group)
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.group = group
        self.max_tokens = max_tokens
        self.sequence_parallel = sequence_parallel
        dtype = torch.get_default_dtype() if dtype is None else dtype
        agree(kind, group, lambda: self._settle(bias, dtype, device, device_count))

        where = device_of(kind, device, group)
        self._make_parameters(bias, where, dtype)
        self._mark_parameters()
        self._registered: dict[tuple[torch.dtype, bool], UserBuffer | Communicator] = {}
        # Registered here, in the order in which all ranks build their model. Few layers have calls with active_tokens
        # and calls without, so the buffer of the other kind is registered at the first of them.
        if self._split_dim is not None:
            self._user_buffer(multiplied_dtype(dtype, group), device_count)
        if where.type != "meta":
            self.reset_parameters()

    def _settle(
        self, bias: object, dtype: torch.dtype, device: torch.device | str | None, device_count: bool
    ) -> dict[str, Any]:
        """Check the arguments, and choose what they leave open. Local.

        Returns:
            What must be the same on every rank.
        """
        kind = type(self).__name__
        check_switches(kind, bias=bias, sequence_parallel=self.sequence_parallel, device_count=device_count)
        for name, size in (("in_features", self.in_features), ("out_features", self.out_features)):
            check_size(kind, name, size)
        check_parameters_dtype(kind, dtype)
        where = device_of(kind, device, self.group)
        if self._split_dim is not None:
            self._check_split(kind)
            check_capacity(kind, self.group.world_size, self.max_tokens, self._hidden(), dtype)
        if device_count:
            self._check_device_count()
        multiplied = multiplied_dtype(dtype, self.group)
        if self.communicator is not None and not device_count:
            self._fitting(self.communicator, multiplied)
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": bias,
            "dtype": dtype,
            "multiplied in": multiplied,
            "max_tokens": self.max_tokens,
            "sequence_parallel": self.sequence_parallel,
            "device_count": device_count,
            "on the meta device": where.type == "meta",
        }

    def _make_parameters(self, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        """Uninitialised parameters; ``reset_parameters`` fills them."""
        shape = self._shard_shape((self.out_features, self.in_features))
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(self._bias_shape(), device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    def __deepcopy__(self: _Parallel, memo: dict[int, Any]) -> _Parallel:
        """A layer with parameters of its own in the same group, whose buffers it shares."""
        memo.update((id(shared), shared) for shared in (self.group, *self._registered.values()))
        return super().__deepcopy__(memo)

    def reset_parameters(self) -> None:
        """Draw the parameters as ``nn.Linear`` of the full size does, and keep this rank's part. Collective.

        All ranks draw the full tensors from rank 0's default generator of the device and each keeps its own slice, so
        the model is the one a single process would build from rank 0's seed. A rank whose generator stood where rank
        0's did moves on as rank 0's does; other generators are left alone.
        """
        self._mark_parameters()
        device = self.weight.device
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad(), common_generator(self.group, device) as generator:
            full = torch.empty((self.out_features, self.in_features), device=device, dtype=self.weight.dtype)
            # kaiming_uniform_ with a = sqrt(5), as in nn.Linear, is uniform in +-1/sqrt(in_features).
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
            with initial_values(self.weight) as weight:
                weight.copy_(self._shard(full))
            if self.bias is not None:
                full_bias = torch.empty((self.out_features,), device=device, dtype=self.bias.dtype)
                nn.init.uniform_(full_bias, -bound, bound, generator=generator)
                with initial_values(self.bias) as bias:
                    bias.copy_(self._bias_shard(full_bias))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.group.rank}, world_size={self.group.world_size}, max_tokens={self.max_tokens}, "
            f"sequence_parallel={self.sequence_parallel}"
        )

    # Which of the two features is split, and which one is the buffer's hidden size.

    def _split_features(self) -> tuple[str, int]:
        return ("in_features", self.in_features) if self._split_dim == 1 else ("out_features", self.out_features)

    def _hidden(self) -> int:
        return self.in_features if self._split_dim == 0 else self.out_features

    def _check_split(self, kind: str) -> None:
        name, value = self._split_features()
        world_size = self.group.world_size
        divisor, what = world_size * self._parts, f"the group size {world_size}"
        if self._parts > 1:
            what = f"{divisor}, {what} times the {self._parts} parts that each rank holds a piece of"
        if value % divisor:
            raise ValueError(
                f"{kind}: {name} must be divisible by {what}, got {value}; {-(-value // divisor) * divisor} would do"
            )
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
            raise TypeError(f"{kind}: max_tokens must be an int, got {self.max_tokens!r}; int() makes it one")
        if self.max_tokens < 1 or self.max_tokens % world_size:
            raise ValueError(
                f"{kind}: max_tokens must be a positive multiple of the group size {world_size}, "
                f"got {self.max_tokens}; {max(1, -(-self.max_tokens // world_size)) * world_size} would do"
            )

    def _shard_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = shape
        world_size = self.group.world_size
        if self._split_dim is None:
            return shape
        return (rows // world_size, columns) if self._split_dim == 0 else (rows, columns // world_size)

    def _bias_shape(self) -> tuple[int]:
        return (self.out_features // self.group.world_size,) if self._split_dim == 0 else (self.out_features,)

    def _shard(self, full_weight: Tensor) -> Tensor:
        return take_shard(full_weight, self._split_dim, self._parts, self.group.rank, self.group.world_size)

    def _bias_shard(self, full_bias: Tensor) -> Tensor:
        dim = 0 if self._split_dim == 0 else None
        return take_shard(full_bias, dim, self._parts, self.group.rank, self.group.world_size)

    def _split_dims(self) -> dict[str, int | None]:
        """The dimension of each parameter that the ranks split. Subclasses add theirs."""
        return {"weight": self._split_dim, "bias": 0 if self._split_dim == 0 else None}

    def _marks_of(self, name: str) -> tuple[int | None, int, bool] | None:
        dims = self._split_dims()
        if name not in dims:
            return None
        # Whole on every rank and applied to this rank's rows. A row-parallel bias is not: it is added to the sum, and
        # its backward sees all rows.
        dim = dims[name]
        partial = self.sequence_parallel and dim is None and self._split_dim != 1
        return dim, 1 if dim is None else self._parts, partial

    def _user_buffer(self, dtype: torch.dtype, device_count: bool = False) -> UserBuffer | Communicator:
        buffer = self._registered.get((dtype, device_count))
        if buffer is None:
            if self.communicator is None or device_count:
                shape = self.max_tokens, self._hidden()
                buffer = self.group.user_buffer(*shape, dtype, device_count=device_count)
            else:
                buffer = self._fitting(self.communicator, dtype)
            self._registered[dtype, device_count] = buffer
        return buffer

    def _fitting(self, communicator: Communicator, dtype: torch.dtype) -> Communicator:
        """``communicator``, or ValueError unless the layer's activations fit its buffer."""
        max_tokens, hidden = communicator.capacity_shape
        needed = (self.max_tokens, self._hidden())
        if communicator.dtype != dtype or hidden != needed[1] or max_tokens < needed[0]:
            raise ValueError(
                f"{type(self).__name__}: the layer needs a buffer of {list(needed)} in {dtype}, and initialize_ub "
                f"registered {communicator.name} with {list(communicator.capacity_shape)} in {communicator.dtype}; "
                "give initialize_ub this shape and dtype=, build the layer with a group that has no such buffers, or "
                "leave out the overlap flags"
            )
        return communicator

    def _operands(self, x: Tensor, active_tokens: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        """``x`` as [rows, features], and the keyword arguments that all operations share."""
        kind = type(self).__name__
        check_input_of(kind, x, self.weight.shape[1], self.weight)
        if x.dim() < 2:
            raise ActiveShapeError(
                f"{kind}: the input must have at least 2 dimensions, tokens first, got {list(x.shape)}"
            )
        dtype = multiplied_dtype(self.weight.dtype, self.group)
        shared = {
            "buffer": self._user_buffer(dtype, device_count=active_tokens is not None),
            "bias": self.bias,
            "method": self.method,
            "main_grad": main_grad_of(kind, self.weight),
        }
        if active_tokens is not None:
            self._check_counted(x)
            shared.update(active_tokens=active_tokens, method="fused")
        return x if x.dim() == 2 else x.flatten(0, -2), shared

    @property
    def shards(self) -> int:
        """Ranks that the tokens outside the layer are split over."""
        return self.group.world_size if self.sequence_parallel else 1

    def _check_device_count(self) -> None:
        if self._split_dim is not None and not self.sequence_parallel:
            raise NotImplementedError(
                f"{type(self).__name__}: a token count on the device needs sequence_parallel=True in a layer that the "
                "ranks split, since its other products take their sizes from the host; leave out active_tokens and "
                "device_count"
            )

    def _check_counted(self, x: Tensor) -> None:
        self._check_device_count()
        if x.dim() != 2:
            raise ActiveShapeError(
                f"{type(self).__name__}: with active_tokens the tokens are packed, [C/W, features], got "
                f"{list(x.shape)}; flatten them"
            )

    def _column_forward(self, x: Tensor, active_tokens: Tensor | None) -> Tensor:
        rows, shared = self._operands(x, active_tokens)
        weight = self.weight.transpose(0, 1)
        if self.sequence_parallel:
            out = all_gather_matmul(rows, weight, save_gathered=self.save_gathered_input, **shared)
            return _unflatten(out, x, x.shape[0] * self.group.world_size)
        return _unflatten(replicated_matmul(rows, weight, **shared), x, x.shape[0])

    def _row_forward(self, x: Tensor, active_tokens: Tensor | None) -> Tensor:
        rows, shared = self._operands(x, active_tokens)
        weight = self.weight.transpose(0, 1)
        if self.sequence_parallel:
            if x.dim() > 2 and x.shape[0] % self.group.world_size:
                raise ActiveShapeError(
                    f"{type(self).__name__}: the first dimension of the input must be divisible by the group size "
                    f"{self.group.world_size}, got {list(x.shape)}; packing.pad_packed adds the missing pad tokens"
                )
            out = matmul_reduce_scatter(rows, weight, **shared)
            return _unflatten(out, x, x.shape[0] // self.group.world_size)
        return _unflatten(matmul_all_reduce(rows, weight, **shared), x, x.shape[0])


def _unflatten(out: Tensor, x: Tensor, first: int) -> Tensor:
    """``out`` [rows, features] as [first, the other leading dimensions of ``x`` .., features]."""
    return out if x.dim() == 2 else out.reshape(first, *x.shape[1:-1], out.shape[-1])
