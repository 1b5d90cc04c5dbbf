"""Multi-head self-attention whose heads are split over the ranks.

Shape ledger (W ranks, T tokens, H heads and G key/value heads of size D, ``sequence_parallel`` on)
    qkv weight [(H + 2 G) D / W, hidden]   groups of (H/G query heads, a key head, a value head), one after another
    proj       [hidden, H D / W]
    input      [T/W, hidden], or [S/W, batch, hidden]
    qkv        gather(norm(x)) @ w^T       -> [T, (H + 2 G) D / W]
    attention  local, this rank's heads    -> [T, H D / W]
    output     reduce_scatter(.. @ proj^T) -> [T/W, hidden]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..comm.group import Group
from ..ops import rotary_qkv
from .arguments import agree, check_choice, check_group, check_input, check_number, check_size, check_switches
from .attention import check_documents, packed_attention, plain_attention
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .norms import NORMALIZATIONS
from .rotary import apply_rotary
from .settings import LayerSettings, check_settings, settings_of, shared_by_ranks

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MultiheadAttention"]

#: Whether each mask of TransformerEngine's is causal. The "padding" ones mean that sequences end where cu_seqlens says.
_MASKS = {"causal": True, "padding_causal": True, "no_mask": False, "padding": False}


class MultiheadAttention(nn.Module):
    """Self-attention within documents (packed, ``cu_seqlens_q``) or within sequences (plain batches).

    Heads and key/value heads are split over the ranks; the product with the query, key and value weights gathers the
    tokens, the output projection scatters them. T may change at every call, up to ``max_tokens``.

    ``state_dict``: ``qkv`` (a :class:`LayerNormLinear` with ``input_layernorm``, else a :class:`Linear`) and ``proj``.
    The rows of the full ``qkv.weight`` are [num_gqa_groups, heads per group + 2, kv_channels]: for each key/value head
    its query heads, then the key head, then the value head. ``nn.convert`` makes them from separate weights.

    Args:
        hidden_size: of input and output.
        num_attention_heads: H, divisible by the group size and by ``num_gqa_groups``.
        kv_channels: D, ``hidden_size / num_attention_heads`` by default.
        attention_dropout: must be 0.
        layernorm_epsilon: of the normalisation.
        attn_mask_type: ``"causal"`` or ``"no_mask"``, and for packed batches also ``"padding_causal"`` and
            ``"padding"``, which say the same.
        num_gqa_groups: G, key/value heads, divisible by the group size; H by default.
        input_layernorm: whether to normalise the input first.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        bias: whether the linear layers add one.
        softmax_scale: of the scores; ``1 / sqrt(kv_channels)`` by default.
        group: the ranks; every one of them builds the layer. Collective.
        settings: ``max_tokens`` (the largest S times batch for plain batches), ``sequence_parallel``,
            ``save_gathered_input``, ``device_count``, ``params_dtype``, ``device`` and the ``ub_`` flags of
            :class:`Linear`; each goes to the layers it is meant for, whose ``ub_name`` is ``"qkv"`` and ``"proj"``.

    Raises:
        TypeError: a setting is of another type. On every rank, as the others.
        ValueError: a setting does not fit, or the ranks' differ; the message says what would.
        NotImplementedError: dropout.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        *,
        attn_mask_type: str = "causal",
        num_gqa_groups: int | None = None,
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        bias: bool = True,
        softmax_scale: float | None = None,
        group: Group,
        **settings: Unpack[LayerSettings],
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        check_group(kind, group)
        kv_heads = num_attention_heads if num_gqa_groups is None else num_gqa_groups

        def judge() -> dict[str, Any]:
            check_settings(kind, settings)
            check_switches(kind, input_layernorm=input_layernorm, bias=bias)
            check_size(kind, "hidden_size", hidden_size)
            check_size(kind, "num_attention_heads", num_attention_heads)
            if kv_channels is not None:
                check_size(kind, "kv_channels", kv_channels)
            elif hidden_size % num_attention_heads:
                raise ValueError(
                    f"{kind}: hidden_size must be divisible by num_attention_heads {num_attention_heads}, "
                    f"got {hidden_size}; or give kv_channels, the size of a head"
                )
            _check_heads(kind, num_attention_heads, kv_heads, group.world_size)
            check_choice(kind, "attn_mask_type", attn_mask_type, _MASKS)
            check_choice(kind, "normalization", normalization, NORMALIZATIONS)
            check_number(kind, "layernorm_epsilon", layernorm_epsilon)
            if softmax_scale is not None:
                check_number(kind, "softmax_scale", softmax_scale)
            check_number(kind, "attention_dropout", attention_dropout)
            if attention_dropout:
                raise NotImplementedError(
                    f"{kind}: attention_dropout {attention_dropout} is not supported, since PyTorch's variable-length "
                    "kernel has none; set 0.0"
                )
            return {
                "hidden_size": hidden_size,
                "num_attention_heads": num_attention_heads,
                "num_gqa_groups": kv_heads,
                "kv_channels": kv_channels,
                "attn_mask_type": attn_mask_type,
                "input_layernorm": input_layernorm,
                "softmax_scale": softmax_scale,
                "bias": bias,
                **shared_by_ranks(settings),
            }

        agree(kind, group, judge)
        if kv_channels is None:
            kv_channels = hidden_size // num_attention_heads
        self.attn_mask_type = attn_mask_type
        self.kv_channels = kv_channels
        self.kv_heads = kv_heads // group.world_size
        self.heads_per_group = num_attention_heads // kv_heads
        self._softmax_scale = repr(1 / math.sqrt(kv_channels) if softmax_scale is None else float(softmax_scale))

        column: dict[str, Any] = {"bias": bias, "group": group, "ub_name": "qkv", **settings_of("column", settings)}
        qkv_features = (num_attention_heads + 2 * kv_heads) * kv_channels
        self.qkv: Linear
        if input_layernorm:
            self.qkv = LayerNormLinear(
                hidden_size, qkv_features, layernorm_epsilon, normalization=normalization, **column
            )
        else:
            self.qkv = Linear(hidden_size, qkv_features, **column)
        self.proj = Linear(
            num_attention_heads * kv_channels,
            hidden_size,
            bias,
            group=group,
            ub_name="proj",
            **settings_of("row", settings),
        )

    @property
    def softmax_scale(self) -> float:
        return float(self._softmax_scale)  # kept as text for the reason given at LayerNormLinear.eps

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
        """Attend.

        Args:
            hidden_states: packed [T/W, hidden], or a plain batch [S/W, batch, hidden]; T and S instead of T/W and S/W
                without ``sequence_parallel``. Two dimensions without ``cu_seqlens_q`` are one document.
            rotary_pos_emb: float32 [positions, 1, 1, R] from :class:`RotaryPositionEmbedding`, with as many positions
                as the longest document has; positions start at 0 in each document. A document that is longer gets NaN
                in the rows beyond: nothing is read back from the device to see it.
            cu_seqlens_q: [documents + 1], int32 or int64, on the group's device, the same on every rank: where each
                document starts, counted over all T tokens, and T at the end. A pad document at the end
                (``packing.pad_packed``) is a document like any other.
            cu_seqlens_kv: for callers of TransformerEngine; the same tensor, or None.
            max_seqlen_q: length of the longest document or more; T where it is None, which is right and on GPUs a
                little slower.
            max_seqlen_kv: for callers of TransformerEngine; the same number, or None.
            active_tokens: T on the device, as in :class:`Linear`; ``cu_seqlens_q`` ends with it, repeated to fill a
                tensor of fixed size.

        Returns:
            The shape and tokens of ``hidden_states``.

        Raises:
            ActiveShapeError: T breaks a rule of the active shape.
            ValueError: the arguments do not belong together.
        """
        self._check_inputs(hidden_states, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        if rotary_pos_emb is not None:
            one_sequence = cu_seqlens_q is None and active_tokens is None
            self._check_angles(rotary_pos_emb, hidden_states, one_sequence)
        qkv = self.qkv(hidden_states, active_tokens=active_tokens)
        qkv = qkv.unflatten(-1, (self.kv_heads, self.heads_per_group + 2, self.kv_channels))
        if active_tokens is not None:
            return self._attend_active(qkv, rotary_pos_emb, cu_seqlens_q, max_seqlen_q, active_tokens)
        query, key, value = self._split_heads(qkv, rotary_pos_emb, cu_seqlens_q)
        settings = self._attention_settings()
        if cu_seqlens_q is not None:
            out = packed_attention(query, key, value, cu_seqlens_q, max_seqlen=max_seqlen_q, **settings)
        elif hidden_states.dim() == 2:
            out = plain_attention(*(x.unsqueeze(1) for x in (query, key, value)), **settings).squeeze(1)
        else:
            out = plain_attention(query, key, value, **settings)
        projected: Tensor = self.proj(out.flatten(-2))
        return projected

    def extra_repr(self) -> str:
        heads = f"num_local_heads={self.kv_heads * self.heads_per_group}, num_local_gqa_groups={self.kv_heads}"
        return f"{heads}, kv_channels={self.kv_channels}, attn_mask_type={self.attn_mask_type}"

    def _split_heads(
        self, qkv: Tensor, angles: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value heads [.., heads, D] of ``qkv`` [.., G, H/G + 2, D], the first two turned."""
        if angles is not None and cu_seqlens is None:
            angles = angles.narrow(0, 0, qkv.shape[0])
        if angles is not None and qkv.dim() == 4:
            return rotary_qkv(qkv, angles, cu_seqlens=cu_seqlens)
        query, key, value = qkv.split([self.heads_per_group, 1, 1], dim=-2)
        query, key, value = query.flatten(-3, -2), key.squeeze(-2), value.squeeze(-2)
        if angles is not None:  # of a plain batch, whose sequences share the positions
            query, key = apply_rotary(query, angles), apply_rotary(key, angles)
        return query, key, value

    def _attend_active(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        active_tokens: Tensor,
    ) -> Tensor:
        """From [C, G, H/G + 2, D], the projection of tokens whose count is on the device."""
        query, key, value = rotary_qkv(qkv, angles, cu_seqlens=cu_seqlens, active_tokens=active_tokens)
        if cu_seqlens is None:  # one document
            end = active_tokens.reshape(1)
            cu_seqlens = torch.cat([torch.zeros_like(end), end])
        settings = self._attention_settings()
        out = packed_attention(
            query, key, value, cu_seqlens, max_seqlen=max_seqlen, active_tokens=active_tokens, **settings
        )
        projected: Tensor = self.proj(out.flatten(-2), active_tokens=active_tokens)
        return projected

    def _attention_settings(self) -> dict[str, Any]:
        return {"causal": _MASKS[self.attn_mask_type], "scale": self.softmax_scale}

    def _check_inputs(
        self,
        x: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_kv: int | None,
    ) -> None:
        kind = type(self).__name__
        check_input(kind, "hidden_states", x)
        if cu_seqlens_q is not None:
            check_input(kind, "cu_seqlens_q", cu_seqlens_q)
            check_documents(kind, cu_seqlens_q, x)
        if max_seqlen_q is not None:
            check_size(kind, "max_seqlen_q", max_seqlen_q)
        if x.dim() not in (2, 3):
            raise ValueError(f"{kind}: hidden_states must be [T, hidden] or [S, batch, hidden], got {list(x.shape)}")
        if cu_seqlens_kv is not None and cu_seqlens_kv is not cu_seqlens_q:
            raise ValueError(
                f"{kind}: in self-attention cu_seqlens_kv must be the tensor given as cu_seqlens_q, or None"
            )
        if max_seqlen_kv is not None and max_seqlen_kv != max_seqlen_q:
            raise ValueError(
                f"{kind}: in self-attention max_seqlen_kv must be max_seqlen_q {max_seqlen_q}, or None, "
                f"got {max_seqlen_kv}"
            )
        if cu_seqlens_q is not None and x.dim() != 2:
            raise ValueError(
                f"{kind}: with cu_seqlens_q the tokens are packed, [T, hidden], got {list(x.shape)}; flatten them"
            )
        if cu_seqlens_q is None and self.attn_mask_type.startswith("padding"):
            raise ValueError(
                f"{kind}: attn_mask_type {self.attn_mask_type!r} needs cu_seqlens_q; pack the batch, or use "
                '"causal" or "no_mask" for sequences of one length'
            )

    def _check_angles(self, angles: Tensor, x: Tensor, one_sequence: bool) -> None:
        """Also that there are enough, where the length of the longest sequence is known here."""
        kind, size = type(self).__name__, self.kv_channels
        check_input(kind, "rotary_pos_emb", angles)
        features = angles.shape[-1] if angles.dim() == 4 and angles.shape[1:3] == (1, 1) else 0
        if angles.dtype != torch.float32 or not 0 < features <= size or features % 2:
            raise ValueError(
                f"{kind}: rotary_pos_emb must be float32 [positions, 1, 1, R] with an even R up to the head size "
                f"{size}, as RotaryPositionEmbedding makes it, got {angles.dtype} {list(angles.shape)}"
            )
        if angles.device != x.device:
            raise ValueError(
                f"{kind}: rotary_pos_emb is on {angles.device}, the tokens are on {x.device}; move it there"
            )
        positions = x.shape[0] * self.qkv.shards
        if one_sequence and angles.shape[0] < positions:
            raise ValueError(
                f"{kind}: rotary_pos_emb has {angles.shape[0]} positions and the sequence {positions}; make it with as "
                "many as the longest sequence has"
            )


def _check_heads(kind: str, heads: int, kv_heads: int, world_size: int) -> None:
    check_size(kind, "num_gqa_groups", kv_heads)
    if heads % kv_heads:
        raise ValueError(f"{kind}: num_attention_heads must be divisible by num_gqa_groups, got {heads} and {kv_heads}")
    if kv_heads % world_size:
        raise ValueError(
            f"{kind}: num_gqa_groups must be divisible by the group size {world_size}, so that each rank "
            f"gets whole key/value heads, got {kv_heads}; use a group of {math.gcd(kv_heads, world_size)} ranks, or "
            f"repeat the heads in the checkpoint until there are {math.lcm(kv_heads, world_size)}"
        )
