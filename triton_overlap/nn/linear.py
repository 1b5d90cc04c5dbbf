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

from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm.communicators import communicators_of
from ..comm.gemm_configs import STEPS
from ..comm.group import Group
from ..ops import matmul
from .arguments import agree, check_group, check_input_of, check_size, check_switches
from .overlap import PARALLEL_MODES, Overlap, gemm_methods
from .parallel_linear import ParallelLinear

__all__ = ["ColumnParallelLinear", "Linear", "RowParallelLinear"]

_Replacement = TypeVar("_Replacement", bound="_LinearReplacement")


class _LinearReplacement(ParallelLinear):
    """A layer that can be made from the ``nn.Linear`` that it replaces."""

    @classmethod
    def from_linear(
        cls: type[_Replacement], linear: nn.Linear, *, group: Group, max_tokens: int, sequence_parallel: bool = True
    ) -> _Replacement:
        """This rank's shard of a plain ``nn.Linear`` that holds the same weights on every rank.

        Parameters are copied to the group's device and keep dtype and ``requires_grad``; ``linear`` is not changed.

        Raises:
            TypeError: ``linear`` is another module, or ``group`` no group of this library.
            ValueError: ``linear`` has no values yet; or as the constructor.
        """
        kind = f"{cls.__name__}.from_linear"
        check_group(kind, group)
        agree(kind, group, lambda: _check_plain(kind, linear))
        out_features, in_features = linear.weight.shape
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


def _check_plain(kind: str, linear: object) -> dict[str, Any]:
    """Empty, or TypeError or ValueError unless ``linear`` is an ``nn.Linear`` with values. Its sizes are the
    constructor's to check."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"{kind}: linear must be a torch.nn.Linear, got {type(linear).__name__}")
    if nn.parameter.is_lazy(linear.weight) or linear.weight.is_meta:
        raise ValueError(
            f"{kind}: linear has no values yet, since it is lazy or on the meta device; fill it first, or build a "
            f"{kind.partition('.')[0]} and load a state dict of shard_state_dict"
        )
    return {}


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
        device_count: which calls the constructor registers the buffer for, those with ``active_tokens`` or those
            without. The other kind's is registered at the first of them, which torch.compile and captures cannot do.
        device: the group's device, or ``"meta"`` to fill the parameters later. By default the group's device, but
            ``"meta"`` under ``torch.device("meta")``.
        dtype: of the parameters; bfloat16, float16 or float32. Torch's default dtype by default. Build the layer under
            ``torch.autocast`` where it will run under it, so that the buffer is registered in the autocast dtype.

    Raises:
        TypeError: a setting is of another type. On every rank, as the others.
        ValueError: a setting does not fit, or the ranks' differ; the message says what would.
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
        device_count: which calls the constructor registers the buffer for, those with ``active_tokens`` or those
            without. The other kind's is registered at the first of them, which torch.compile and captures cannot do.
        device: the group's device, or ``"meta"`` to fill the parameters later. By default the group's device, but
            ``"meta"`` under ``torch.device("meta")``.
        dtype: of the parameters; bfloat16, float16 or float32. Torch's default dtype by default. Build the layer under
            ``torch.autocast`` where it will run under it, so that the buffer is registered in the autocast dtype.

    Raises:
        TypeError: a setting is of another type. On every rank, as the others.
        ValueError: a setting does not fit, or the ranks' differ; the message says what would.
    """

    _split_dim = 1

    def forward(self, x: Tensor, *, active_tokens: Tensor | None = None) -> Tensor:
        """``x`` -> ``x @ weight^T + bias``; with ``active_tokens`` as in :class:`Linear`."""
        return self._row_forward(x, active_tokens)


class Linear(ParallelLinear):
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
        device_count: which calls the constructor registers the buffer for, those with ``active_tokens`` or those
            without. The other kind's is registered at the first of them, which torch.compile and captures cannot do.
        params_dtype: of the parameters; bfloat16, float16 or float32. Torch's default dtype by default.
        device: the group's device, or ``"meta"`` to fill the parameters later. By default the group's device, but
            ``"meta"`` under ``torch.device("meta")``.
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
        TypeError: a setting is of another type. On every rank, as the others.
        ValueError: a setting does not fit, or the ranks' differ; an overlap flag has no meaning for the
            ``parallel_mode`` or lacks ``sequence_parallel``, or the registered buffer or its configuration does not
            suit the layer; the message says what would do.
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
        device_count: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        self.parallel_mode = parallel_mode
        self.overlap = Overlap(ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        self.ub_name = ub_name
        self._parts = row_parts
        self._save = save_gathered_input
        super().__init__(
            in_features,
            out_features,
            bias,
            group=group,
            max_tokens=max_tokens,  # type: ignore[arg-type]  # chosen where it is open
            sequence_parallel=sequence_parallel,
            device_count=device_count,
            device=device,
            dtype=params_dtype,
        )

    def _settle(
        self, bias: object, dtype: torch.dtype, device: torch.device | str | None, device_count: bool
    ) -> dict[str, Any]:
        kind, group, overlap, ub_name, mode = (
            type(self).__name__,
            self.group,
            self.overlap,
            self.ub_name,
            self.parallel_mode,
        )
        check_switches(kind, sequence_parallel=self.sequence_parallel, **asdict(overlap))
        overlap.check(kind, mode, self.sequence_parallel, ub_name)
        registered = communicators_of(group) if ub_name is not None and overlap.given else None
        gemms = {} if registered is None else {step: registered.communicators[f"{ub_name}_{step}"] for step in STEPS}
        if gemms:
            self.communicator = gemms["fprop"]
            self.max_tokens = self.communicator.capacity_shape[0] if self.max_tokens is None else self.max_tokens
        if self.max_tokens is None and mode is not None:
            raise ValueError(f'{kind}: parallel_mode="{mode}" needs max_tokens, the largest token count')
        if self.max_tokens is None:
            self.max_tokens = 0
        check_size(kind, "max_tokens", self.max_tokens, 0)
        check_size(kind, "row_parts", self._parts)
        if self._parts > 1 and mode != "column":
            raise ValueError(f'{kind}: row_parts must be 1, or more with parallel_mode="column", got {self._parts}')
        self._settle_gathered(kind)
        # Before the base class checks the shards, which depend on it.
        self._split_dim = PARALLEL_MODES[mode]
        self.method = str(gemm_methods(mode, overlap, {step: gemm.config for step, gemm in gemms.items()}))
        return {
            **super()._settle(bias, dtype, device, device_count),
            "parallel_mode": mode,
            "row_parts": self._parts,
            "save_gathered_input": self.save_gathered_input,
            "method": self.method,
            "ub_name": ub_name,
            "in a buffer of initialize_ub": self.communicator is not None,
        }

    def _settle_gathered(self, kind: str) -> None:
        """Whether the gathered input is saved."""
        save, beside_dgrad = self._save, self.overlap.gathers_beside_dgrad
        if save is None:
            self.save_gathered_input = not beside_dgrad
            return
        check_switches(kind, save_gathered_input=save)
        if self.parallel_mode != "column" or not self.sequence_parallel:
            raise ValueError(
                f'{kind}: save_gathered_input is for parallel_mode="column" with sequence_parallel, which gathers the '
                f"input; got parallel_mode={self.parallel_mode!r} and sequence_parallel={self.sequence_parallel}"
            )
        if save and beside_dgrad:
            raise ValueError(
                f"{kind}: with save_gathered_input ub_bulk_dgrad has nothing to gather; leave out one of the two"
            )
        self.save_gathered_input = save

    def forward(self, x: Tensor, *, active_tokens: Tensor | None = None) -> Tensor:
        """``x`` -> ``x @ weight^T + bias``.

        Args:
            x: shapes as for the class that ``parallel_mode`` names.
            active_tokens: T on the device, int32, one element. ``x`` has room for C tokens then, of which T are active,
                and so has the result. By the fused method, whatever flags and configurations say, on the buffer that
                ``device_count`` is about. See docs/device_count.md.
        """
        if self._split_dim == 0:
            return self._column_forward(x, active_tokens)
        if self._split_dim == 1:
            return self._row_forward(x, active_tokens)
        check_input_of(type(self).__name__, x, self.in_features, self.weight)
        if active_tokens is None:
            return F.linear(x, self.weight, self.bias)
        self._check_counted(x)
        return matmul(x, self.weight.t(), bias=self.bias, active_tokens=active_tokens, shards=self.shards)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parallel_mode={self.parallel_mode}, method={self.method}"
