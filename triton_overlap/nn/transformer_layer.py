"""A transformer layer: ``h = x + attention(norm(x))``, ``out = h + mlp(norm(h))``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..comm.group import Group
from .layernorm_mlp import LayerNormMLP
from .multihead_attention import MultiheadAttention

__all__ = ["TransformerLayer"]


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
        max_tokens: the largest T (for plain batches S times batch), a multiple of the group size.
        sequence_parallel: whether input and output hold this rank's tokens only.
        params_dtype: of the parameters; torch's default dtype by default.
        device: the group's device, or ``"meta"``.
        ub_tp_comm_overlap: switches all overlap flags; needs ``sequence_parallel``.
        ub_overlap_ag: overlap all-gathers, see :class:`Linear`.
        ub_overlap_rs: overlap reduce-scatters of outputs.
        ub_overlap_rs_dgrad: overlap reduce-scatters of gradients with their own product; goes before the bulk flags.
        ub_bulk_dgrad: gather inputs again beside the product of their gradient.
        ub_bulk_wgrad: reduce-scatter gradients beside the product of the weight's.

    Raises:
        ValueError: a setting does not fit; the message says what would.
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
        max_tokens: int,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
    ) -> None:
        super().__init__()
        if hidden_dropout:
            raise NotImplementedError(f"TransformerLayer: hidden_dropout {hidden_dropout} is not supported; set 0.0")
        shared: dict[str, Any] = {
            "bias": bias,
            "normalization": normalization,
            "group": group,
            "max_tokens": max_tokens,
            "sequence_parallel": sequence_parallel,
            "params_dtype": params_dtype,
            "device": device,
            "ub_overlap_ag": ub_tp_comm_overlap and ub_overlap_ag,
            "ub_overlap_rs": ub_tp_comm_overlap and ub_overlap_rs,
            "ub_overlap_rs_dgrad": ub_tp_comm_overlap and ub_overlap_rs_dgrad,
            "ub_bulk_dgrad": ub_tp_comm_overlap and ub_bulk_dgrad,
            "ub_bulk_wgrad": ub_tp_comm_overlap and ub_bulk_wgrad,
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
    ) -> Tensor:
        """``hidden_states`` [T/W, hidden] or [S/W, batch, hidden] -> the same; as ``MultiheadAttention.forward``."""
        attended = self.self_attention(
            hidden_states,
            rotary_pos_emb=rotary_pos_emb,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
        )
        h = hidden_states + attended
        out: Tensor = h + self.layernorm_mlp(h)
        return out
