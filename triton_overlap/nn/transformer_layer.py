"""A transformer layer: ``h = x + attention(norm(x))``, ``out = h + mlp(norm(h))``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..activations import check_activation
from ..comm.group import Group
from ..ops import add, fork
from .arguments import agree, check_group, check_input, check_number, check_size, check_switches
from .layernorm_mlp import LayerNormMLP
from .multihead_attention import MultiheadAttention
from .settings import LayerSettings, check_settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["TransformerLayer"]

#: Overlap flags, and what each is under ``ub_tp_comm_overlap`` where nothing is said.
_FLAGS = {
    "ub_overlap_ag": True,
    "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True,
}


class TransformerLayer(nn.Module):
    """Pre-norm self-attention and feed-forward part, each with its residual, on tokens split over the ranks.

    Input and output are [T/W, hidden] with ``sequence_parallel``, so layers stack without any communication between
    them; T may change at every call, up to ``max_tokens``.

    ``state_dict``: ``self_attention`` (:class:`MultiheadAttention` with ``input_layernorm``) and ``layernorm_mlp``
    (:class:`LayerNormMLP`). ``nn.convert`` moves weights from and to Llama-style blocks and
    ``torch.nn.TransformerEncoderLayer``.

    Args:
        hidden_size: of input and output.
        ffn_hidden_size: of the feed-forward part, divisible by the group size.
        num_attention_heads: divisible by ``num_gqa_groups``.
        num_gqa_groups: key/value heads, divisible by the group size; ``num_attention_heads`` by default.
        layernorm_epsilon: of both normalisations.
        hidden_dropout: must be 0.
        attention_dropout: must be 0.
        kv_channels: size of a head, ``hidden_size / num_attention_heads`` by default.
        self_attn_mask_type: as ``attn_mask_type`` of :class:`MultiheadAttention`.
        bias: whether the linear layers add one.
        activation: as in :class:`LayerNormMLP`.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        group: the ranks; every one of them builds the layer. Collective.
        ub_tp_comm_overlap: switches all overlap flags; needs ``sequence_parallel``.
        settings: ``max_tokens`` (the largest S times batch for plain batches), ``sequence_parallel``,
            ``save_gathered_input``, ``device_count``, ``params_dtype``, ``device`` and the ``ub_`` flags of
            :class:`Linear`. Under ``ub_tp_comm_overlap`` flags are set by default, but for ``ub_overlap_rs_dgrad``;
            without it they count for nothing.

    Raises:
        TypeError: a setting is of another type. On every rank, as the others.
        ValueError: a setting does not fit, or the ranks' differ; the message says what would.
        NotImplementedError: dropout.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        *,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        group: Group,
        ub_tp_comm_overlap: bool = False,
        **settings: Unpack[LayerSettings],
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        check_group(kind, group)

        def judge() -> dict[str, Any]:
            # What the attention does not look at, which is built first; the rest is refused before it is built.
            check_settings(kind, settings)
            check_switches(kind, ub_tp_comm_overlap=ub_tp_comm_overlap)
            check_activation(kind, activation)
            check_size(kind, "ffn_hidden_size", ffn_hidden_size)
            check_number(kind, "hidden_dropout", hidden_dropout)
            if hidden_dropout:
                raise NotImplementedError(f"{kind}: hidden_dropout {hidden_dropout} is not supported; set 0.0")
            return {"ffn_hidden_size": ffn_hidden_size, "activation": activation, "overlap": ub_tp_comm_overlap}

        agree(kind, group, judge)
        shared: dict[str, Any] = {
            "bias": bias,
            "normalization": normalization,
            "group": group,
            **settings,
            **{flag: ub_tp_comm_overlap and settings.get(flag, default) for flag, default in _FLAGS.items()},
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            attn_mask_type=self_attn_mask_type,
            num_gqa_groups=num_gqa_groups,
            input_layernorm=True,
            **shared,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, **shared
        )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary_pos_emb: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        active_tokens: Tensor | None = None,
    ) -> Tensor:
        """``hidden_states`` [T/W, hidden] or [S/W, batch, hidden] -> the same; as ``MultiheadAttention.forward``."""
        check_input(type(self).__name__, "hidden_states", hidden_states)
        attention: dict[str, Any] = {
            "rotary_pos_emb": rotary_pos_emb,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
        }
        if active_tokens is not None:
            return self._forward_active(hidden_states, active_tokens, attention)
        h = hidden_states + self.self_attention(hidden_states, **attention)
        out: Tensor = h + self.layernorm_mlp(h)
        return out

    def _forward_active(self, x: Tensor, active_tokens: Tensor, attention: dict[str, Any]) -> Tensor:
        """Residual connections too cost what the active rows do: torch's sums, and autograd's, go over all rows."""
        shards = self.self_attention.qkv.shards
        x, residual = fork(x, active_tokens=active_tokens, shards=shards)
        attended = self.self_attention(x, active_tokens=active_tokens, **attention)
        # Under autocast the branches end in its dtype, and the residual keeps its own, as it does without a count.
        h = add(residual, attended.to(residual.dtype), active_tokens=active_tokens, shards=shards)
        h, residual = fork(h, active_tokens=active_tokens, shards=shards)
        transformed = self.layernorm_mlp(h, active_tokens=active_tokens)
        return add(residual, transformed.to(residual.dtype), active_tokens=active_tokens, shards=shards)
