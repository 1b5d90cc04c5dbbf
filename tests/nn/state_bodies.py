"""Parameters and settings of the transformer modules, as bodies for every backend (``tests.ops.cases``): conversion,
marks, gradients of replicated parameters, and settings that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import triton_overlap as to
from tests.nn.cases import Case, Draw, mine
from tests.nn.parallel import Parallel
from tests.ops.cases import assert_equal
from triton_overlap.reference import relative_error


def conversion(group: to.Group, case: Case) -> None:
    """A Llama-style block to the ranks and back, bit by bit; a torch encoder layer, which computes the same."""
    shape = replace(case.shape, rms=True, activation="swiglu", bias=False, rotary=True)
    parallel = Parallel(group, replace(case, shape=shape), torch.float32, "layer")
    heads: dict[str, Any] = {"num_attention_heads": shape.heads, "num_gqa_groups": shape.kv_heads}
    layer, block = parallel.modules[0], parallel.plain[0].state_dict()
    back = to.nn.to_llama_block(to.nn.gather_state_dict(layer, group), **heads)
    assert set(back) == set(block)
    for name, tensor in block.items():
        assert_equal(name, back[name], tensor.cpu())
        assert back[name].dtype == tensor.dtype

    torch.manual_seed(8)
    encoder = nn.TransformerEncoderLayer(
        shape.heads * shape.head_dim, shape.heads, shape.ffn, 0.0, "gelu", norm_first=True, device=group.device
    )
    for parameter in (encoder.norm1.weight, encoder.norm2.bias):
        nn.init.normal_(parameter)
    shared = case.shared(group, torch.float32)
    mine_too = to.nn.TransformerLayer(
        shape.heads * shape.head_dim,
        shape.ffn,
        shape.heads,
        activation="gelu_exact",
        self_attn_mask_type="no_mask",
        **{name: shared[name] for name in ("group", "max_tokens", "sequence_parallel")},
    )
    full = to.nn.from_encoder_layer(encoder.state_dict(), num_attention_heads=shape.heads)
    mine_too.load_state_dict(to.nn.shard_state_dict(full, mine_too, group))
    x = Draw(group, torch.float32, 4)(case.counts(group)[0], 1, shape.heads * shape.head_dim)
    error = relative_error(mine_too(parallel.own(x)), parallel.own(encoder(x)))
    assert error < 1e-4, f"encoder layer: relative error {error:.2e}"
    encoder_back = to.nn.to_encoder_layer(to.nn.gather_state_dict(mine_too, group), num_attention_heads=shape.heads)
    assert set(encoder_back) == set(encoder.state_dict())
    for name, tensor in encoder.state_dict().items():
        assert_equal(name, encoder_back[name], tensor.cpu())

    state = dict(full)
    state["more"] = state.pop("self_attention.proj.bias")
    with pytest.raises(ValueError, match=r"missing \['self_attention.proj.bias'\], unexpected \['more'\]"):
        to.nn.shard_state_dict(state, mine_too, group)
    with pytest.raises(ValueError, match="the full tensor must be"):
        to.nn.shard_state_dict({**full, "self_attention.proj.bias": torch.zeros(3)}, mine_too, group)


def marks(group: to.Group, case: Case) -> None:
    """Marks on parameters outlive copies, casts, meta devices and assigned state dicts."""
    shared = case.shared(group, torch.float32)
    shape = case.shape

    def build(**kwargs: Any) -> nn.Module:
        return to.nn.LayerNormMLP(shape.hidden, shape.ffn, activation="swiglu", **{**shared, **kwargs})

    def marked(module: nn.Module) -> dict[str, tuple[Any, ...]]:
        names = ("tensor_parallel_dim", "tensor_parallel_parts", "sequence_parallel")
        return {n: tuple(getattr(p, name) for name in names) for n, p in module.named_parameters()}

    layer = build()
    expected = {
        "fc1.layer_norm_weight": (None, 1, case.sequence_parallel),
        "fc1.layer_norm_bias": (None, 1, case.sequence_parallel),
        "fc1.weight": (0, 2, False),
        "fc1.bias": (0, 2, False),
        "fc2.weight": (1, 1, False),
        "fc2.bias": (None, 1, False),
    }
    assert marked(layer) == expected
    allocations = to.symmetric_allocations()
    clone = copy.deepcopy(layer)
    assert to.symmetric_allocations() == allocations
    with torch.device("meta"):
        empty = build()
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty = empty.to_empty(device=group.device)
    empty.load_state_dict(layer.state_dict())
    assigned = build(device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    x = parallel_x = Draw(group, torch.float32, 1)(case.counts(group)[0], shape.hidden)
    x = mine(parallel_x, group) if case.sequence_parallel else x
    for other in (clone, empty, assigned, copy.deepcopy(layer).to(torch.float64)):
        assert marked(other) == expected
    for other in (clone, empty, assigned):
        assert_equal("copy", other(x), layer(x))


def replicated_gradients(group: to.Group, case: Case) -> None:
    """Marked gradients are summed in float32 and rank order, others and absent ones are left alone."""
    world_size, rank = group.world_size, group.rank
    for dtype in (torch.float32, torch.bfloat16):
        module = nn.ModuleList([nn.LayerNorm(case.shape.hidden), nn.RMSNorm(7), nn.Linear(3, 3), nn.RMSNorm(5)]).to(
            device=group.device, dtype=dtype
        )
        for index in (0, 1, 3):
            to.nn.mark_sequence_parallel(module[index])
        draws = [Draw(group, dtype, r) for r in range(world_size)]
        all_grads = [[draw(*p.shape) for p in module[:3].parameters()] for draw in draws]
        for parameter, grad in zip(module[:3].parameters(), all_grads[rank], strict=True):
            parameter.grad = grad.clone()
        to.nn.all_reduce_replicated_gradients(module, group)
        allocations = to.symmetric_allocations()
        for index, parameter in enumerate(module[:3].parameters()):
            if index < 3:
                expected = torch.stack([grads[index] for grads in all_grads]).double().sum(0)
                assert parameter.grad is not None
                error = relative_error(parameter.grad, expected)
                assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype], f"relative error {error:.2e}"
                for other in group.all_gather_object(parameter.grad.cpu()):
                    assert_equal("gradient on another rank", parameter.grad.cpu(), other)
            else:
                assert parameter.grad is not None
                assert_equal("unmarked gradient", parameter.grad, all_grads[rank][index])
        assert module[3].weight.grad is None
        to.nn.all_reduce_replicated_gradients(module, group)
        assert to.symmetric_allocations() == allocations
        module.zero_grad()
        to.nn.all_reduce_replicated_gradients(module, group)  # nothing to do


def settings(group: to.Group, case: Case) -> None:
    """Settings that do not fit are errors before anything is communicated, and say what would fit."""
    shape, nn_ = case.shape, to.nn
    base: dict[str, Any] = {"group": group, "max_tokens": 4 * group.world_size}
    split: dict[str, Any] = {**base, "sequence_parallel": True}
    world_size, hidden, ffn = group.world_size, shape.hidden, shape.ffn
    attention = nn_.MultiheadAttention(hidden, shape.heads, **base)
    padded = nn_.MultiheadAttention(hidden, shape.heads, attn_mask_type="padding_causal", **base)
    x = torch.zeros(2 * world_size, hidden, device=group.device)
    cu = torch.tensor([0, len(x)], dtype=torch.int32, device=group.device)

    def wrong() -> Iterator[tuple[Callable[[], Any], str]]:
        for flag in ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"):
            flagged = {**split, flag: True}
            yield partial(nn_.Linear, hidden, ffn, **flagged), f'{flag} cannot .*choose parallel_mode="'
        yield lambda: nn_.Linear(hidden, ffn, parallel_mode="col", **split), '"column", "row" or None, got \'col\''
        yield (
            lambda: nn_.Linear(hidden, ffn, parallel_mode="column", ub_overlap_rs=True, **split),
            "ub_overlap_rs cannot .*allowed: ub_overlap_ag, ub_overlap_rs_dgrad",
        )
        yield (
            lambda: nn_.Linear(hidden, ffn, parallel_mode="row", ub_bulk_wgrad=True, **split),
            "ub_bulk_wgrad cannot .*allowed: ub_overlap_ag, ub_overlap_rs",
        )
        yield (
            lambda: nn_.Linear(hidden, ffn, parallel_mode="row", ub_overlap_rs=True, **base),
            "set sequence_parallel=True",
        )
        yield lambda: nn_.Linear(hidden, ffn, parallel_mode="row", ub_name="qkv", **split), "one of 'proj', 'fc2'"
        yield lambda: nn_.Linear(hidden, ffn, parallel_mode="column", group=group), "needs max_tokens"
        yield lambda: nn_.Linear(hidden, ffn, parallel_mode="row", row_parts=2, **base), "row_parts must be 1"
        yield (
            lambda: nn_.Linear(hidden, 2 * world_size + 1, parallel_mode="column", row_parts=2, **base),
            f"{4 * world_size} would do",
        )
        yield lambda: nn_.LayerNormLinear(hidden, ffn, parallel_mode="row", **split), "needs all of them"
        yield lambda: nn_.LayerNormLinear(hidden, ffn, normalization="BatchNorm", **base), "LayerNorm, RMSNorm, got"
        yield lambda: nn_.LayerNormMLP(hidden, ffn, activation="tanh", **base), "one of geglu, gelu, .*got 'tanh'"
        yield lambda: nn_.MultiheadAttention(hidden, 3, 4, num_gqa_groups=2, **base), "divisible by num_gqa_groups"
        yield lambda: nn_.MultiheadAttention(hidden, hidden - 1, **base), "or give kv_channels"
        yield (
            lambda: nn_.MultiheadAttention(hidden, shape.heads, attn_mask_type="arbitrary", **base),
            "no_mask, padding",
        )
        if world_size > 1:
            yield (
                lambda: nn_.MultiheadAttention(hidden, world_size, 4, num_gqa_groups=1, **base),
                f"use a group of 1 ranks, or repeat the heads in the checkpoint until there are {world_size}",
            )
        yield lambda: nn_.RotaryPositionEmbedding(5), "even number"
        yield lambda: attention(x[None, None]), r"\[S, batch, hidden\]"
        yield lambda: attention(x[:, None], cu_seqlens_q=cu), "flatten them"
        yield lambda: attention(x, cu_seqlens_q=cu, cu_seqlens_kv=cu.clone()), "the tensor given as cu_seqlens_q"
        yield lambda: attention(x, cu_seqlens_q=cu, max_seqlen_q=3, max_seqlen_kv=4), "must be max_seqlen_q 3"
        yield lambda: attention(x, cu_seqlens_q=cu.float()), "int32 or int64"
        few = to.nn.RotaryPositionEmbedding(attention.kv_channels, device=group.device)(1)
        yield lambda: attention(x, rotary_pos_emb=few), "has 1 positions and the sequence"
        yield lambda: padded(x), "needs cu_seqlens_q"
        if group.device.type == "cpu":
            yield lambda: attention(x, cu_seqlens_q=cu - 1), "rise from 0 to the token count"

    for call, words in wrong():
        with pytest.raises(ValueError, match=words):
            call()
    layer = nn_.Linear(hidden, ffn * world_size, parallel_mode="column", **split)
    layer.method = "telepathy"
    with pytest.raises(ValueError, match="unknown method 'telepathy'"):
        layer(x)
    for call in (
        lambda: nn_.MultiheadAttention(hidden, shape.heads, attention_dropout=0.1, **base),
        lambda: nn_.TransformerLayer(hidden, ffn, shape.heads, hidden_dropout=0.1, **base),
    ):
        with pytest.raises(NotImplementedError, match=r"set 0\.0"):
            call()
    assert f"num_local_heads={shape.heads // world_size}, num_local_gqa_groups=" in repr(attention)
    # The group still works.
    assert attention(x, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=len(x), max_seqlen_kv=len(x)).shape == x.shape
