"""Normalisation and a column-parallel linear layer in one module.

Shape ledger (W ranks, T tokens, ``sequence_parallel`` on)
    layer_norm_weight  [in]         on every rank; gradient is a partial sum over this rank's rows
    layer_norm_bias    [in]         likewise; LayerNorm only
    weight, bias       as ``Linear`` in column mode
    input              [T/W, in]
    forward            gather(norm(x)) @ w^T + bias  -> [T, out/W]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..comm.group import Group
from .arguments import check_choice, check_input_of, check_number
from .linear import Linear
from .norms import NORMALIZATIONS, normalize

__all__ = ["LayerNormLinear"]


class LayerNormLinear(Linear):
    """LayerNorm or RMSNorm of this rank's tokens, then a :class:`Linear` whose output features are split.

    ``state_dict``: ``layer_norm_weight``, ``layer_norm_bias`` (LayerNorm only), both whole on every rank, and
    ``Linear``'s. Under ``sequence_parallel`` the norm's parameters act on this rank's tokens only: they are marked with
    ``sequence_parallel = True``, and ``all_reduce_replicated_gradients`` completes their gradients before the
    optimizer steps.

    Args:
        in_features: columns of the full weight, and the size that is normalised.
        out_features: rows of the full weight.
        eps: added to the variance, or to the mean square.
        bias: whether the linear layer adds one.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        parallel_mode: ``"column"`` or None. In row mode no rank would hold whole rows to normalise.
        group: the ranks.
        settings: the other keyword arguments of :class:`Linear`.

    Raises:
        TypeError: as ``Linear``.
        ValueError: as ``Linear``, an unknown normalisation, or row mode.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        parallel_mode: str | None = None,
        group: Group,
        **settings: Any,
    ) -> None:
        self.normalization = normalization
        self._given_eps = eps
        super().__init__(in_features, out_features, bias, parallel_mode=parallel_mode, group=group, **settings)

    def _settle(
        self, bias: object, dtype: torch.dtype, device: torch.device | str | None, device_count: bool
    ) -> dict[str, Any]:
        kind = type(self).__name__
        check_choice(kind, "normalization", self.normalization, NORMALIZATIONS)
        check_number(kind, "eps", self._given_eps)
        if self.parallel_mode == "row":
            raise ValueError(
                f'{kind}: parallel_mode must be "column" or None, got "row": its input\'s features are split over the '
                "ranks, and the normalisation needs all of them; use a norm of your own before nn.Linear"
            )
        self._eps = repr(float(self._given_eps))
        del self._given_eps
        settled = super()._settle(bias, dtype, device, device_count)
        return {**settled, "normalization": self.normalization, "eps": self.eps}

    @property
    def eps(self) -> float:
        # Kept as text, a constant to torch.compile, which with dynamic shapes takes a float attribute for an input that
        # may change, and compiles a second time when it finds that it does not.
        return float(self._eps)

    def _make_parameters(self, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.layer_norm_weight = nn.Parameter(torch.empty(self.in_features, device=device, dtype=dtype))
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.empty(self.in_features, device=device, dtype=dtype))
        else:
            self.register_parameter("layer_norm_bias", None)
        super()._make_parameters(bias, device, dtype)

    def _split_dims(self) -> dict[str, int | None]:
        return {**super()._split_dims(), "layer_norm_weight": None, "layer_norm_bias": None}

    def reset_parameters(self) -> None:
        """Draw the linear layer as :class:`Linear` does; the norm starts as the identity. Collective."""
        super().reset_parameters()
        nn.init.ones_(self.layer_norm_weight)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def forward(self, x: Tensor, *, active_tokens: Tensor | None = None) -> Tensor:
        """``x`` -> the linear layer of its norm; ``active_tokens`` as in :class:`Linear`."""
        check_input_of(type(self).__name__, x, self.in_features, self.weight)
        if active_tokens is not None:
            self._check_counted(x)
        normalized = normalize(
            self.normalization,
            x,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.eps,
            active_tokens,
            self.shards,
        )
        return super().forward(normalized, active_tokens=active_tokens)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, normalization={self.normalization}, eps={self.eps}"
