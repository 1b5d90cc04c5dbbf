"""Normalisation and the feed-forward part of a transformer layer in one module.

Shape ledger (W ranks, T tokens, F the feed-forward size, ``sequence_parallel`` on)
    fc1        [F/W, hidden]; with a gated activation [2 F/W, hidden], this rank's gate rows, then its up rows
    fc2        [hidden, F/W]
    input      [T/W, hidden]
    fc1        gather(norm(x)) @ w^T              -> [T, F/W], or gate and up from one gather, [T, 2 F/W]
    activation local                              -> [T, F/W]
    output     reduce_scatter(.. @ fc2^T)         -> [T/W, hidden]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..activations import ACTIVATIONS, GATED_ACTIVATIONS, check_activation
from ..comm.group import Group
from ..ops import activation, gated_activation
from .arguments import agree, check_group, check_size
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .settings import LayerSettings, check_settings, settings_of, shared_by_ranks

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LayerNormMLP"]


class LayerNormMLP(nn.Module):
    """LayerNorm or RMSNorm, a column-parallel layer, an activation and a row-parallel layer.

    T may change at every call, up to ``max_tokens``. Gate and up of a gated activation are rows of one weight, so one
    product with one gather computes both.

    ``state_dict``: ``fc1`` (a :class:`LayerNormLinear`) and ``fc2`` (a :class:`Linear`). The full ``fc1.weight`` of a
    gated activation is the gate's [F, hidden] above up's [F, hidden].

    Args:
        hidden_size: of input and output.
        ffn_hidden_size: F, divisible by the group size.
        eps: of the normalisation.
        bias: whether the linear layers add one.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: a name in ``triton_overlap.activations``, by TransformerEngine's names.
        group: the ranks; every one of them builds the layer. Collective.
        settings: ``max_tokens``, ``sequence_parallel``, ``save_gathered_input``, ``device_count``, ``params_dtype``,
            ``device`` and the ``ub_`` flags of :class:`Linear`; each goes to the layers it is meant for, whose
            ``ub_name`` is ``"fc1"`` and ``"fc2"``.

    Raises:
        TypeError: a setting is of another type. On every rank, as the others.
        ValueError: a setting does not fit, or the ranks' differ; the message says what would.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        group: Group,
        **settings: Unpack[LayerSettings],
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        check_group(kind, group)

        def judge() -> dict[str, Any]:
            check_settings(kind, settings)
            check_activation(kind, activation)
            check_size(kind, "hidden_size", hidden_size)
            check_size(kind, "ffn_hidden_size", ffn_hidden_size)
            if ffn_hidden_size % group.world_size:
                raise ValueError(
                    f"{kind}: ffn_hidden_size must be divisible by the group size {group.world_size}, got "
                    f"{ffn_hidden_size}; {-(-ffn_hidden_size // group.world_size) * group.world_size} would do"
                )
            return {
                "hidden_size": hidden_size,
                "ffn_hidden_size": ffn_hidden_size,
                "activation": activation,
                **shared_by_ranks(settings),
            }

        agree(kind, group, judge)
        self.activation = activation
        parts = 2 if activation in GATED_ACTIVATIONS else 1
        self.fc1 = LayerNormLinear(
            hidden_size,
            parts * ffn_hidden_size,
            eps,
            bias,
            normalization=normalization,
            row_parts=parts,
            group=group,
            ub_name="fc1",
            **settings_of("column", settings),
        )
        self.fc2 = Linear(
            ffn_hidden_size, hidden_size, bias, group=group, ub_name="fc2", **settings_of("row", settings)
        )

    def forward(self, x: Tensor, *, active_tokens: Tensor | None = None) -> Tensor:
        """``x`` [T/W, hidden] or [S/W, batch, hidden] -> the same shape; T and S without ``sequence_parallel``.

        ``active_tokens`` as in :class:`Linear`.
        """
        h = self._activate(self.fc1(x, active_tokens=active_tokens), active_tokens)
        out: Tensor = self.fc2(h, active_tokens=active_tokens)
        return out

    def _activate(self, h: Tensor, active_tokens: Tensor | None) -> Tensor:
        # One pass over gate and up, where torch's functions make two; of a single matrix theirs is as good.
        if self.activation in GATED_ACTIVATIONS:
            rows = gated_activation(h.flatten(0, -2), self.activation, active_tokens=active_tokens)
            return rows.view(*h.shape[:-1], -1)
        if active_tokens is not None:
            return activation(h, self.activation, active_tokens=active_tokens)
        return ACTIVATIONS[self.activation](h)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
