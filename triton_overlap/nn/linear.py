"""Tensor-parallel linear layers.

Shape ledger (W ranks, T tokens, ``sequence_parallel`` on)
                      ColumnParallelLinear            RowParallelLinear
    weight            [out/W, in]                     [out, in/W]
    bias              [out/W]                         [out], the same on every rank
    input             [T/W, in]                       [T, in/W]
    forward           gather(x) @ w^T + bias          reduce_scatter(x @ w^T) + bias
    output            [T, out/W]                      [T/W, out]
    dgrad             reduce_scatter(dOut @ w)        gather(dOut) @ w
    wgrad             dOut^T @ gather(x), local       gather(dOut)^T @ x, local
    saved             gather(x) or x, weight          x, weight
    buffer            hidden = in                     hidden = out

With ``sequence_parallel=False`` activations outside the pair of layers are whole on every rank: a column-parallel layer
takes [T, in], computes without communication and sums its input's gradient over the ranks; a row-parallel layer returns
[T, out], the sum over the ranks. That sum is a reduce-scatter and an all-gather, so T must be divisible by W here too.

``Linear`` is either of them, or neither, by its ``parallel_mode``, with TransformerEngine's argument names.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm.communicators import communicators_of
from ..comm.gemm_configs import STEPS
from ..comm.group import Group
from ..comm.user_buffers import Communicator, UserBuffer
from ..errors import ActiveShapeError
from ..ops import all_gather_matmul, matmul, matmul_all_reduce, matmul_reduce_scatter, replicated_matmul
from .initialization import common_generator
from .overlap import LIBRARY_CHOICE, PARALLEL_MODES, Overlap, gemm_methods
from .settings import check_group, check_input
from .sharding import take_shard

__all__ = ["ColumnParallelLinear", "Linear", "RowParallelLinear"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_Parallel = TypeVar("_Parallel", bound="_ParallelLinear")
_Replacement = TypeVar("_Replacement", bound="_LinearReplacement")


class _ParallelLinear(nn.Module):
    """What the layers share: sharding, initialisation, buffers, flattening.

    A subclass says which dimension of the full [out_features, in_features] weight is split.
    """

    #: Dimension of the weight that the ranks split, or None where every rank holds all of it.
    _split_dim: int | None
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_group(type(self).__name__, group)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        device = group.device if device is None else torch.device(device)
        self.in_features = in_features
        self.out_features = out_features
        self.group = group
        self.max_tokens = max_tokens
        self.sequence_parallel = sequence_parallel
        self._check_settings(device, dtype)

        self._make_parameters(bias, device, dtype)
        self._mark_parameters()
        self._registered: dict[tuple[torch.dtype, bool], UserBuffer | Communicator] = {}
        # Registered here, in the order in which all ranks build their model. The buffer of calls with active_tokens is
        # registered at the first of them, since few layers have any; a first call inside a graph capture is refused.
        # Under autocast the parameters' dtype is not the one that is multiplied.
        autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
        if self._split_dim is not None:
            self._user_buffer(torch.get_autocast_dtype(device.type) if autocast else dtype)
        if device.type != "meta":
            self.reset_parameters()

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
        layer = type(self).__new__(type(self))
        memo[id(self)] = layer
        layer.__dict__.update(copy.deepcopy(self.__dict__, memo))
        layer._mark_parameters()
        return layer

    def _apply(self: _Parallel, fn: Callable[..., Any], recurse: bool = True) -> _Parallel:
        super()._apply(fn, recurse)
        self._mark_parameters()  # to_empty and dtype changes may make new parameters
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_parameters()  # load_state_dict(assign=True) makes new parameters

    def reset_parameters(self) -> None:
        """Draw the parameters as ``nn.Linear`` of the full size does, and keep this rank's part. Collective.

        All ranks draw the full tensors from rank 0's default generator of the device and each keeps its own slice, so
        the model is the one a single process would build from rank 0's seed. A rank whose generator stood where rank
        0's did moves on as rank 0's does; other generators are left alone.
        """
        self._mark_parameters()
        device = self.weight.device
        bound = 1 / math.sqrt(self.in_features)
        full = torch.empty((self.out_features, self.in_features), device=device, dtype=self.weight.dtype)
        with torch.no_grad(), common_generator(self.group, device) as generator:
            # kaiming_uniform_ with a = sqrt(5), as in nn.Linear, is uniform in +-1/sqrt(in_features).
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
            self.weight.copy_(self._shard(full))
            if self.bias is not None:
                full_bias = torch.empty((self.out_features,), device=device, dtype=self.bias.dtype)
                nn.init.uniform_(full_bias, -bound, bound, generator=generator)
                self.bias.copy_(self._bias_shard(full_bias))

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

    def _check_settings(self, device: torch.device, dtype: torch.dtype) -> None:
        kind = type(self).__name__
        for name, value in (("in_features", self.in_features), ("out_features", self.out_features)):
            if value < 1:
                raise ValueError(f"{kind}: {name} must be at least 1, got {value}")
        if self._split_dim is not None:
            self._check_split(kind)
        if dtype not in _DTYPES:
            raise ValueError(f"{kind}: dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
        if device.type != "meta" and device != self.group.device:
            raise ValueError(
                f"{kind}: device must be the group's, {self.group.device}, or meta, got {device}; leave it out"
            )

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

    def _mark_parameters(self) -> None:
        """Say on each parameter how it is split and whether its gradient is a partial sum. Subclasses add theirs."""
        self._mark(self.weight, self._split_dim)
        if self.bias is not None:
            self._mark(self.bias, 0 if self._split_dim == 0 else None)

    def _mark(self, parameter: Any, dim: int | None) -> None:
        parameter.tensor_parallel_dim = dim
        parameter.tensor_parallel_parts = 1 if dim is None else self._parts
        # Whole on every rank and applied to this rank's rows. A row-parallel bias is not: it is added to the sum, and
        # its backward sees all rows.
        parameter.sequence_parallel = self.sequence_parallel and dim is None and self._split_dim != 1

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
        check_input(type(self).__name__, "the input", x)
        if x.dim() < 2:
            raise ActiveShapeError(
                f"{type(self).__name__}: the input must have at least 2 dimensions, tokens first, got {list(x.shape)}"
            )
        main_grad = getattr(self.weight, "main_grad", None)
        device_type = x.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else self.weight.dtype
        shared = {
            "buffer": self._user_buffer(dtype, device_count=active_tokens is not None),
            "bias": self.bias,
            "method": self.method,
            "main_grad": None if main_grad is None else main_grad.transpose(0, 1),
        }
        if active_tokens is not None:
            self._check_device_count(x)
            shared.update(active_tokens=active_tokens, method="fused")
        return x if x.dim() == 2 else x.flatten(0, -2), shared

    @property
    def shards(self) -> int:
        """Ranks that the tokens outside the layer are split over."""
        return self.group.world_size if self.sequence_parallel else 1

    def _check_device_count(self, x: Tensor) -> None:
        kind = type(self).__name__
        if self._split_dim is not None and not self.sequence_parallel:
            raise NotImplementedError(
                f"{kind}: active_tokens needs sequence_parallel=True in a layer that the ranks split, since its other "
                "products take their sizes from the host; call without active_tokens"
            )
        if x.dim() != 2:
            raise ActiveShapeError(
                f"{kind}: with active_tokens the tokens are packed, [C/W, features], got {list(x.shape)}; flatten them"
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


class _LinearReplacement(_ParallelLinear):
    """A layer that can be made from the ``nn.Linear`` that it replaces."""

    @classmethod
    def from_linear(
        cls: type[_Replacement], linear: nn.Linear, *, group: Group, max_tokens: int, sequence_parallel: bool = True
    ) -> _Replacement:
        """This rank's shard of a plain ``nn.Linear`` that holds the same weights on every rank.

        Parameters are copied to the group's device and keep dtype and ``requires_grad``; ``linear`` is not changed.

        Raises:
            TypeError: ``linear`` is another module, or ``group`` no group of this library.
            ValueError: as the constructor.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(
                f"{cls.__name__}.from_linear: linear must be a torch.nn.Linear, got {type(linear).__name__}"
            )
        out_features, in_features = linear.weight.shape
        check_group(f"{cls.__name__}.from_linear", group)
        layer = cls(
            in_features,
            out_features,
            linear.bias is not None,
            group=group,
            max_tokens=max_tokens,
            sequence_parallel=sequence_parallel,
            device="meta",
            dtype=linear.weight.dtype,
        )
        layer.to_empty(device=group.device)
        with torch.no_grad():
            layer.weight.copy_(layer._shard(linear.weight))
            if layer.bias is not None:
                layer.bias.copy_(layer._bias_shard(linear.bias))
        layer.weight.requires_grad_(linear.weight.requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(linear.bias.requires_grad)
        layer.train(linear.training)
        return layer


class ColumnParallelLinear(_LinearReplacement):
    """``nn.Linear`` whose output features are split over the ranks of a group.

    With ``sequence_parallel`` the input holds this rank's tokens and is gathered while it is multiplied, [T/W, in] ->
    [T, out/W]; without, the input is whole on every rank, [T, in] -> [T, out/W]. T may change from call to call, up to
    ``max_tokens``. Inputs of more dimensions are flattened to [rows, in] and restored; their first dimension is the one
    that the ranks split, as in [sequence/W, batch, in] -> [sequence, batch, out/W].

    Every rank calls forward and backward in the same order. Layers of a group with the same ``max_tokens``, buffer
    hidden size and dtype share one registered buffer. ``state_dict`` holds this rank's shard.

    For optimizers: ``weight.tensor_parallel_dim`` and ``bias.tensor_parallel_dim`` are 0, the dimension that the ranks
    split. Where ``weight.main_grad`` exists (float32, the weight's shape), backward adds the weight gradient to it
    with float32 accumulation and leaves ``weight.grad`` alone, so hooks on the weight's gradient do not run.

    Args:
        in_features: columns of the full weight, the hidden size of the buffer.
        out_features: rows of the full weight, divisible by the group size.
        bias: whether to add one; this rank holds its part.
        group: the ranks; every one of them builds the layer. The constructor is collective.
        max_tokens: the largest T, a multiple of the group size.
        sequence_parallel: whether the input is split by tokens.
        device: the group's device, or ``"meta"`` to fill the parameters later. The group's device by default.
        dtype: of the parameters; bfloat16, float16 or float32. Torch's default dtype by default. Build the layer under
            ``torch.autocast`` where it will run under it, so that the buffer is registered in the autocast dtype.

    Raises:
        ValueError: a setting does not fit; the message says what would.
    """

    _split_dim = 0

    def forward(self, x: Tensor, *, active_tokens: Tensor | None = None) -> Tensor:
        """``x`` -> ``x @ weight^T + bias``; with ``active_tokens`` as in :class:`Linear`."""
        return self._column_forward(x, active_tokens)


class RowParallelLinear(_LinearReplacement):
    """``nn.Linear`` whose input features are split over the ranks of a group.

    The ranks' products are summed. With ``sequence_parallel`` each rank keeps its own tokens of the sum, [T, in/W] ->
    [T/W, out]; without, every rank gets all of it, [T, in/W] -> [T, out]. T may change from call to call, up to
    ``max_tokens``, and is divisible by the group size either way. Inputs of more dimensions are flattened to
    [rows, in/W] and restored; their first dimension is the one that the ranks split, as in [sequence, batch, in/W] ->
    [sequence/W, batch, out].

    Every rank calls forward and backward in the same order. Layers of a group with the same ``max_tokens``, buffer
    hidden size and dtype share one registered buffer. ``state_dict`` holds this rank's shard.

    For optimizers: ``weight.tensor_parallel_dim`` is 1, the dimension that the ranks split. The bias is the same on
    every rank, and so is its gradient, which needs no further reduction: ``bias.tensor_parallel_dim`` is None. Where
    ``weight.main_grad`` exists (float32, the weight's shape), backward adds the weight gradient to it with float32
    accumulation and leaves ``weight.grad`` alone, so hooks on the weight's gradient do not run.

    Args:
        in_features: columns of the full weight, divisible by the group size.
        out_features: rows of the full weight, the hidden size of the buffer.
        bias: whether to add one, once, after the sum.
        group: the ranks; every one of them builds the layer. The constructor is collective.
        max_tokens: the largest T, a multiple of the group size.
        sequence_parallel: whether the output is split by tokens.
        device: the group's device, or ``"meta"`` to fill the parameters later. The group's device by default.
        dtype: of the parameters; bfloat16, float16 or float32. Torch's default dtype by default. Build the layer under
            ``torch.autocast`` where it will run under it, so that the buffer is registered in the autocast dtype.

    Raises:
        ValueError: a setting does not fit; the message says what would.
    """

    _split_dim = 1

    def forward(self, x: Tensor, *, active_tokens: Tensor | None = None) -> Tensor:
        """``x`` -> ``x @ weight^T + bias``; with ``active_tokens`` as in :class:`Linear`."""
        return self._row_forward(x, active_tokens)


class Linear(_ParallelLinear):
    """A linear layer with TransformerEngine's argument names: ``parallel_mode`` says how the ranks share it.

    ``"column"``: :class:`ColumnParallelLinear`, ``"row"``: :class:`RowParallelLinear`; shapes, token counts, buffers
    and ``main_grad`` are theirs. ``None``: every rank holds the whole layer and nothing is communicated; with
    ``sequence_parallel`` it acts on this rank's tokens, so its gradients are partial sums and its parameters are marked
    for ``all_reduce_replicated_gradients``.

    ``state_dict``: ``weight``, and ``bias`` if there is one, this rank's shard; ``shard_state_dict`` makes it from the
    full one.

    Args:
        in_features: columns of the full weight.
        out_features: rows of the full weight.
        bias: whether to add one.
        parallel_mode: ``"column"``, ``"row"`` or None.
        sequence_parallel: whether activations outside a column and row pair are split by tokens.
        group: the ranks (TransformerEngine's ``tp_group``); every one of them builds the layer. Collective.
        max_tokens: the largest T, a multiple of the group size; not needed without a ``parallel_mode``, and where the
            layer uses a buffer of ``initialize_ub`` that one's capacity by default.
        save_gathered_input: column mode with ``sequence_parallel``: whether the gathered input, T ``in_features``
            elements, is kept until backward, or this rank's T/W rows of it, which are gathered again there. By default
            it is kept, unless ``ub_bulk_dgrad`` hides the second gather.
        row_parts: equal parts that ``out_features`` is stacked from, such as gate and up; every rank holds a piece of
            each. Column mode only.
        params_dtype: of the parameters; bfloat16, float16 or float32. Torch's default dtype by default.
        device: the group's device, or ``"meta"`` to fill the parameters later.
        ub_overlap_ag: overlap the all-gather of the input (column), or that of the output's gradient (row).
        ub_overlap_rs: row mode: overlap the reduce-scatter of the output.
        ub_overlap_rs_dgrad: column mode: overlap the reduce-scatter of the input's gradient with its own product. The
            bulk flags then count for nothing.
        ub_bulk_dgrad: column mode: gather the input again beside the product of its gradient.
        ub_bulk_wgrad: column mode: reduce-scatter the input's gradient beside the product of the weight's.
        ub_name: ``"qkv"`` or ``"fc1"`` for a column, ``"proj"`` or ``"fc2"`` for a row. With an overlap flag, and after
            ``initialize_ub`` for the group, the layer uses the buffer registered there, and the methods that its
            ``ub_cfgs`` has for the layer's GEMMs, ``qkv_fprop`` and so on.

    The flags choose the methods of the layer's operations (``nn.overlap``) and never what is computed. Without
    ``ub_name`` or ``initialize_ub``, and where no flag is set, the methods are the library's choice.

    Raises:
        ValueError: a setting does not fit, an overlap flag has no meaning for the ``parallel_mode`` or lacks
            ``sequence_parallel``, or the registered buffer or its configuration does not suit the layer; the message
            says what would do.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        group: Group,
        max_tokens: int | None = None,
        save_gathered_input: bool | None = None,
        row_parts: int = 1,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        kind = type(self).__name__
        overlap = Overlap(ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        overlap.check(kind, parallel_mode, sequence_parallel, ub_name)
        check_group(kind, group)
        registered = communicators_of(group) if ub_name is not None and overlap.given else None
        gemms = {} if registered is None else {step: registered.communicators[f"{ub_name}_{step}"] for step in STEPS}
        if gemms:
            self.communicator = gemms["fprop"]
            max_tokens = self.communicator.capacity_shape[0] if max_tokens is None else max_tokens
        if parallel_mode is not None and max_tokens is None:
            raise ValueError(f'{kind}: parallel_mode="{parallel_mode}" needs max_tokens, the largest token count')
        if row_parts < 1 or (row_parts > 1 and parallel_mode != "column"):
            raise ValueError(f'{kind}: row_parts must be 1, or more with parallel_mode="column", got {row_parts}')
        if save_gathered_input is None:
            save_gathered_input = not overlap.gathers_beside_dgrad
        elif parallel_mode != "column" or not sequence_parallel:
            raise ValueError(
                f'{kind}: save_gathered_input is for parallel_mode="column" with sequence_parallel, which gathers the '
                f"input; got parallel_mode={parallel_mode!r} and sequence_parallel={sequence_parallel}"
            )
        elif save_gathered_input and overlap.gathers_beside_dgrad:
            raise ValueError(
                f"{kind}: with save_gathered_input ub_bulk_dgrad has nothing to gather; leave out one of the two"
            )
        # Before the base class builds the shards, which depend on them.
        self._split_dim = PARALLEL_MODES[parallel_mode]
        self._parts = row_parts
        self.method = str(gemm_methods(parallel_mode, overlap, {step: gemm.config for step, gemm in gemms.items()}))
        self.save_gathered_input = save_gathered_input
        self.parallel_mode = parallel_mode
        self.overlap = overlap
        self.ub_name = ub_name
        super().__init__(
            in_features,
            out_features,
            bias,
            group=group,
            max_tokens=0 if max_tokens is None else max_tokens,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=params_dtype,
        )

    def forward(self, x: Tensor, *, active_tokens: Tensor | None = None) -> Tensor:
        """``x`` -> ``x @ weight^T + bias``.

        Args:
            x: shapes as for the class that ``parallel_mode`` names.
            active_tokens: T on the device, int32, one element. ``x`` has room for C tokens then, of which T are active,
                and so has the result. By the fused method, whatever flags and configurations say, on a buffer of the
                layer's own that is registered at the first such call: outside torch.compile and graph captures. See
                docs/device_count.md.
        """
        if self._split_dim == 0:
            return self._column_forward(x, active_tokens)
        if self._split_dim == 1:
            return self._row_forward(x, active_tokens)
        if active_tokens is None:
            return F.linear(x, self.weight, self.bias)
        self._check_device_count(x)
        return matmul(x, self.weight.t(), bias=self.bias, active_tokens=active_tokens, shards=self.shards)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parallel_mode={self.parallel_mode}, method={self.method}"


def _unflatten(out: Tensor, x: Tensor, first: int) -> Tensor:
    """``out`` [rows, features] as [first, the other leading dimensions of ``x`` .., features]."""
    return out if x.dim() == 2 else out.reshape(first, *x.shape[1:-1], out.shape[-1])
