"""Inputs of the modules that do not fit, as bodies for every backend (``tests.ops.cases``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triton_overlap as to
from tests.nn.use_bodies import collective_calls
from tests.ops.cases import assert_equal


def wrong_inputs(group: to.Group) -> None:
    """Each is refused by name before anything is communicated, and the next right call gives the bits of the first."""
    tokens, hidden, size = 4 * group.world_size, 8 * group.world_size, 4
    layer = to.nn.TransformerLayer(
        hidden, hidden, 2 * group.world_size, kv_channels=size, group=group, max_tokens=tokens, sequence_parallel=True
    )
    x = torch.randn(4, hidden, device=group.device)
    ends = torch.tensor([0, 3, tokens], dtype=torch.int32, device=group.device)
    angles = to.nn.RotaryPositionEmbedding(size, device=group.device)(tokens)
    packed: dict[str, Any] = {"cu_seqlens_q": ends, "max_seqlen_q": tokens - 3, "rotary_pos_emb": angles}
    plain = x.view(2, 2, hidden)
    of_packed, of_plain = layer(x, **packed), layer(plain, rotary_pos_emb=angles)
    table = r"rotary_pos_emb must be float32 \[positions, 1, 1, R\] with an even R up to the head size 4"
    wrong_packed: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "cu_seqlens_q must be a torch.Tensor, got list", {"cu_seqlens_q": [0, tokens]}),
        (ValueError, "cu_seqlens_q must be int32 or int64", {"cu_seqlens_q": ends.short()}),
        (ValueError, "cu_seqlens_q must be int32 or int64", {"cu_seqlens_q": ends[None]}),
        (ValueError, "cu_seqlens_q is on meta, the tokens are on .*; move it", {"cu_seqlens_q": ends.to("meta")}),
        *((TypeError, "max_seqlen_q must be an int", {"max_seqlen_q": longest}) for longest in ("5", 5.0, True)),
        (ValueError, "max_seqlen_q must be at least 1, got 0", {"max_seqlen_q": 0}),
    ]
    wrong_angles: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "rotary_pos_emb must be a torch.Tensor, got tuple", (angles, angles)),
        (ValueError, table, angles.half()),
        (ValueError, table, angles[..., :3]),
        (ValueError, table, torch.cat([angles, angles], -1)),
        (ValueError, table, angles[:, 0, 0]),
        (ValueError, table, angles.expand(-1, 2, 1, -1)),
        (ValueError, "rotary_pos_emb is on meta", angles.to("meta")),
    ]
    calls = collective_calls(group)
    for kind, words, change in wrong_packed:
        with pytest.raises(kind, match=f"MultiheadAttention: {words}"):
            layer(x, **{**packed, **change})
    for kind, words, other in wrong_angles:
        for call in ({"hidden_states": x, **packed}, {"hidden_states": plain}):
            with pytest.raises(kind, match=words):
                layer(**{**call, "rotary_pos_emb": other})
    with pytest.raises(ValueError, match="has 1 positions and the sequence"):
        layer(plain, rotary_pos_emb=angles[:1])
    for sparse in (x.to_sparse(), torch.nested.nested_tensor([x, x[:2]])):
        with pytest.raises(ValueError, match="hidden_states must be a dense tensor"):
            layer(sparse)
    column = to.nn.ColumnParallelLinear(hidden, hidden, group=group, max_tokens=tokens)
    row = to.nn.RowParallelLinear(hidden, hidden, group=group, max_tokens=tokens)
    for linear, given, words in (
        (column, x[:, 1:], rf"ColumnParallelLinear: the input must be \[.., {hidden}\], got \[4, {hidden - 1}\]"),
        (row, x, rf"RowParallelLinear: the input must be \[.., {hidden // group.world_size}\], got \[4, {hidden}\]"),
        (column, x.half(), "ColumnParallelLinear: the input is torch.float16, the parameters are torch.float32"),
    ):
        with pytest.raises(ValueError, match=words):
            linear(given)
    assert collective_calls(group) == calls, "something was communicated"
    with pytest.raises(ValueError, match=f"the longest document, {tokens - 3}, or more, got 2"):
        layer(x, **{**packed, "max_seqlen_q": 2})  # in float32 the lengths are read
    assert_equal("packed", layer(x, **packed), of_packed)
    assert_equal("plain", layer(plain, rotary_pos_emb=angles), of_plain)


def wrong_main_grads(group: to.Group) -> None:
    """What cannot take up a weight's gradient is refused, also where memory would be added to twice."""
    column = to.nn.ColumnParallelLinear(16, 8 * group.world_size, group=group, max_tokens=4 * group.world_size)
    experts = to.nn.MoE(16, 8, group.world_size, 1, group=group, num_max_tokens_per_rank=4)
    x = torch.randn(4, 16, device=group.device)
    for layer, weight in ((column, column.weight), (experts, experts.experts.fc1_weight)):
        zeros = torch.zeros_like(weight, dtype=torch.float32).requires_grad_(False)
        expected = layer(x)
        for kind, words, main_grad in (
            (TypeError, "main_grad of the weight must be a torch.Tensor, got str", "x"),
            (ValueError, r"must have its shape \[.*\], got \[", zeros[:1, :1]),
            (ValueError, r"must have its shape \[.*\], got \[3\]", torch.zeros(3)),
            (ValueError, "main_grad must be torch.float32, got torch.float16", zeros.half()),
            (ValueError, "main_grad must not require a gradient", zeros.clone().requires_grad_()),
            (ValueError, "main_grad must not be expanded", zeros[..., :1].expand(weight.shape)),
            (ValueError, "main_grad must hold data", zeros.to("meta")),
        ):
            weight.main_grad = main_grad  # type: ignore[attr-defined]
            with pytest.raises(kind, match=words):
                layer(x)
        del weight.main_grad  # type: ignore[attr-defined]
        assert_equal("output", layer(x), expected)


def wrong_tables(group: to.Group) -> None:
    """Of the rotary embedding: numbers that make no table."""
    rotary = to.nn.RotaryPositionEmbedding
    for kind, words, build in (
        (TypeError, "dim must be an int, got 8.0", lambda: rotary(8.0)),  # type: ignore[arg-type]
        (TypeError, "rotary_percent must be a number", lambda: rotary(8, "1")),  # type: ignore[arg-type]
        (ValueError, "must be an even number from 2 to 8, got 16", lambda: rotary(8, 2.0)),
        (ValueError, "rotary_base must be finite and positive, got 0", lambda: rotary(8, rotary_base=0)),
        (ValueError, "rotary_percent must be finite and positive, got nan", lambda: rotary(8, float("nan"))),
        (TypeError, "max_seq_len must be an int, got None", lambda: rotary(8)(None)),
        (ValueError, "max_seq_len must be at least 1, got 0", lambda: rotary(8)(0)),
        (ValueError, "offset must be at least 0, got -1", lambda: rotary(8)(4, -1)),
    ):
        with pytest.raises(kind, match=f"RotaryPositionEmbedding: .*{words}"):
            build()
