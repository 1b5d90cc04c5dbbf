"""Arguments of the modules' constructors that are wrong, or differ between ranks, as bodies for every backend
(``tests.ops.cases``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import triton_overlap as to

Build = Callable[..., Any]


def _builds(group: to.Group) -> dict[str, Build]:
    """Each module with arguments that suit it, of which some may be changed."""
    tokens, world_size = 4 * group.world_size, group.world_size

    def build(make: Callable[..., Any], **usual: Any) -> Build:
        return lambda **changed: make(**{"group": group, **usual, **changed})

    features = {"in_features": 8, "out_features": 8 * world_size, "max_tokens": tokens}
    block = {"hidden_size": 8 * world_size, "max_tokens": tokens}
    heads = {"num_attention_heads": 2 * world_size}
    return {
        "column": build(to.nn.ColumnParallelLinear, **features),
        "row": build(to.nn.RowParallelLinear, in_features=8 * world_size, out_features=8, max_tokens=tokens),
        "linear": build(to.nn.Linear, **features),
        "split": build(to.nn.Linear, parallel_mode="column", sequence_parallel=True, **features),
        "norm": build(to.nn.LayerNormLinear, **features),
        "mlp": build(to.nn.LayerNormMLP, ffn_hidden_size=4 * world_size, **block),
        "attention": build(to.nn.MultiheadAttention, **heads, **block),
        "layer": build(to.nn.TransformerLayer, ffn_hidden_size=4 * world_size, **heads, **block),
        "moe": build(
            to.nn.MoE,
            hidden_size=16,
            ffn_hidden_size=8,
            num_experts=2 * world_size,
            top_k=2,
            num_max_tokens_per_rank=4,
        ),
    }


#: Module, change, and words of the TypeError.
_TYPES: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("column", {name: x}, f"{name} must be an int")
        for name in ("in_features", "max_tokens")
        for x in ("8", 8.0, True)
    ),
    ("row", {"out_features": None}, "out_features must be an int, got None"),
    ("column", {"bias": "no"}, "bias must be True or False, got 'no'"),
    ("row", {"sequence_parallel": 1}, "sequence_parallel must be True or False, got 1"),
    ("column", {"dtype": "float32"}, "must be a torch.dtype, got 'float32'; allowed"),
    ("column", {"device": 1.5}, "device must be the group's, .*got 1.5"),
    ("linear", {"parallel_mode": []}, r"parallel_mode must be a string or None, got \[\]"),
    ("linear", {"row_parts": 1.0}, "row_parts must be an int"),
    ("linear", {"max_tokens": "x"}, "max_tokens must be an int"),
    ("split", {"ub_overlap_ag": "no"}, "ub_overlap_ag must be True or False"),
    ("split", {"save_gathered_input": "no"}, "save_gathered_input must be True or False"),
    ("norm", {"eps": "x"}, "eps must be a number, got 'x'"),
    ("norm", {"normalization": None}, "normalization must be one of LayerNorm, RMSNorm, got None"),
    ("mlp", {"activation": []}, "activation must be one of geglu"),
    ("mlp", {"parallel_mode": "row"}, "LayerNormMLP: unexpected keyword arguments parallel_mode"),
    ("mlp", {"ffn_hidden_size": 8.0}, "LayerNormMLP: ffn_hidden_size must be an int"),
    ("attention", {"num_attention_heads": "2"}, "num_attention_heads must be an int"),
    ("attention", {"kv_channels": True}, "kv_channels must be an int"),
    ("attention", {"input_layernorm": "no"}, "input_layernorm must be True or False"),
    ("attention", {"softmax_scale": "x"}, "softmax_scale must be a number"),
    ("attention", {"attention_dropout": "x"}, "attention_dropout must be a number"),
    ("layer", {"ub_tp_comm_overlap": "no"}, "ub_tp_comm_overlap must be True or False"),
    ("layer", {"ub_overlap_ag": "no"}, "TransformerLayer: ub_overlap_ag must be True or False"),
    ("layer", {"num_gqa_groups": 2.0}, "num_gqa_groups must be an int"),
    *(("moe", {name: 2.0}, f"MoE: {name} must be an int") for name in ("top_k", "num_experts", "ffn_hidden_size")),
    ("moe", {"shared_ffn_hidden_size": None}, "shared_ffn_hidden_size must be an int"),
    ("moe", {"cpu_sync": "no"}, "cpu_sync must be True or False"),
    ("moe", {"router": {}}, "router must be a RouterSettings or None, got {}"),
    ("moe", {"buffer": "x"}, "buffer must be an ExpertBuffer or None, got str"),
    ("moe", {"params_dtype": "float32"}, "must be a torch.dtype"),
    ("moe", {"device": 1.5}, "device must be the group's"),
]
#: The same of ValueErrors.
_VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("column", {"device": "nowhere"}, "device must be the group's, .*got 'nowhere'; leave it out"),
    ("column", {"in_features": 2**31}, "at most 2147483647"),
    ("norm", {"eps": -1.0}, "eps must be finite and not negative, got -1"),
    ("norm", {"eps": float("nan")}, "eps must be finite"),
    ("mlp", {"hidden_size": 0}, "LayerNormMLP: hidden_size must be at least 1"),
    ("attention", {"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    ("attention", {"kv_channels": 0}, "kv_channels must be at least 1"),
    ("attention", {"softmax_scale": float("inf")}, "softmax_scale must be finite"),
    ("layer", {"activation": "tanh"}, "TransformerLayer: activation must be one of"),
    ("moe", {"hidden_size": 0}, "MoE: hidden_size must be at least 1"),
    ("moe", {"device": "nowhere"}, "device must be the group's"),
]
#: Module, and what rank 0 alone changes.
_DIFFERENT: list[tuple[str, dict[str, Any]]] = [
    ("column", {"in_features": 16}),
    ("column", {"bias": False}),
    ("column", {"dtype": torch.bfloat16}),
    ("row", {"sequence_parallel": False}),
    ("row", {"max_tokens": 64}),
    ("linear", {"device": "meta"}),
    ("linear", {"in_features": 4}),
    ("split", {"save_gathered_input": False}),
    ("split", {"ub_bulk_wgrad": True}),
    ("norm", {"eps": 0.5}),
    ("norm", {"normalization": "RMSNorm"}),
    ("mlp", {"activation": "relu"}),
    ("attention", {"attn_mask_type": "no_mask"}),
    ("attention", {"softmax_scale": 0.5}),
    ("moe", {"ffn_hidden_size": 16}),
    ("moe", {"router": to.nn.RouterSettings(balance_coefficient=0.5)}),
    ("moe", {"shared_ffn_hidden_size": 8}),
    ("moe", {"cpu_sync": False}),
    ("moe", {"device": "meta"}),
    ("layer", {"ub_overlap_rs": True, "ub_tp_comm_overlap": True, "sequence_parallel": True}),
]


def wrong(group: to.Group) -> None:
    """A wrong argument of one rank or of all is the same error on every rank, before anything is registered."""
    builds = _builds(group)
    allocations = to.symmetric_allocations()
    for kind, cases in ((TypeError, _TYPES), (ValueError, _VALUES)):
        for module, change, words in cases:
            with pytest.raises(kind, match=words):
                builds[module](**change)
            with pytest.raises(kind, match=words):
                builds[module](**(change if group.rank == group.world_size - 1 else {}))
    plain = nn.Linear(8, 8 * group.world_size, device=group.device)
    column, more = to.nn.ColumnParallelLinear, {"group": group, "max_tokens": group.world_size}
    for linear in (nn.LazyLinear(8), nn.Linear(8, 8, device="meta")):
        with pytest.raises(ValueError, match="linear has no values yet"):
            column.from_linear(linear if group.rank == 0 else plain, **more)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch.nn.Linear, got ReLU"):
        column.from_linear(nn.ReLU() if group.rank == 0 else plain, **more)  # type: ignore[arg-type]
    assert to.symmetric_allocations() == allocations
    assert column(8, 8 * group.world_size, device=group.device.type, **more).weight.device == group.device  # type: ignore[arg-type]


def different(group: to.Group) -> None:
    """Ranks whose arguments differ are told what each gave, before anything is registered."""
    builds = _builds(group)
    allocations = to.symmetric_allocations()

    def gather() -> Any:
        return to.nn.gather_state_dict(nn.Linear(1, 1), group)

    for module, change in _DIFFERENT:
        with pytest.raises(ValueError, match=r"must be the same on every rank, got rank 0: {.*rank 1: {") as caught:
            builds[module](**(change if group.rank == 0 else {}))
        assert group.all_gather_object(str(caught.value)) == [str(caught.value)] * group.world_size
    assert to.symmetric_allocations() == allocations
    with pytest.raises(ValueError, match=r"rank 0: {'eps': 0.5}; rank 1: {'eps': 1e-05}$"):
        builds["norm"](eps=0.5 if group.rank == 0 else 1e-5)
    with pytest.raises(ValueError, match=r"rank 0: arguments of ColumnParallelLinear; rank 1: arguments of Row"):
        builds["column" if group.rank == 0 else "row"](in_features=8 * group.world_size)
    with pytest.raises(ValueError, match=r"rank 0: arguments of ColumnParallelLinear; rank 1: tensors of the module"):
        (builds["column"] if group.rank == 0 else gather)()
    builds["layer"]()
