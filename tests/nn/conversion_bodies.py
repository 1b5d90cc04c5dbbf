"""State dicts and gradients that do not fit, or differ between ranks, and groups that were closed or recovered, as
bodies for every backend (``tests.ops.cases``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triton_overlap as to
from tests.ops.cases import assert_equal


def wrong_state_dicts(group: to.Group) -> None:
    """Arguments of the converters are judged by name; those of the collective ones on every rank."""
    world_size = group.world_size
    layer = to.nn.ColumnParallelLinear(8, 8 * world_size, group=group, max_tokens=world_size)
    full = to.nn.gather_state_dict(layer, group)
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_gqa_groups": 1}
    one = torch.zeros(4, 4)
    projections = {f"self_attn.{name}_proj.weight": one for name in "qkv"}
    to_llama, from_llama = to.nn.to_llama_block, to.nn.from_llama_block
    from_encoder, to_encoder = to.nn.from_encoder_layer, to.nn.to_encoder_layer
    wrong: list[tuple[type[Exception], Callable[[], Any], str]] = [
        (TypeError, lambda: to.nn.shard_state_dict([], layer, group), "a state dict is needed"),  # type: ignore[arg-type]
        (TypeError, lambda: to.nn.shard_state_dict({**full, "bias": 3}, layer, group), "bias must be"),  # type: ignore[dict-item]
        (ValueError, lambda: to.nn.shard_state_dict({"bias": one.to_sparse()}, layer, group), "bias must be a dense"),
        (TypeError, lambda: to.nn.shard_state_dict(full, layer.weight, group), "got Parameter"),  # type: ignore[arg-type]
        (TypeError, lambda: to.nn.shard_state_dict(full, layer, None), "must be a triton_overlap.Group"),  # type: ignore[arg-type]
        (TypeError, lambda: to.nn.mark_sequence_parallel(full), "must be a torch.nn.Module"),  # type: ignore[arg-type]
        (TypeError, lambda: from_llama({}, num_attention_heads="2", num_gqa_groups=1), "must be an int"),  # type: ignore[arg-type]
        (ValueError, lambda: from_llama({}, num_attention_heads=2, num_gqa_groups=0), "at least 1, got 0"),
        (TypeError, lambda: from_llama({"mlp.up_proj.weight": 1}, **heads), "must be a torch.Tensor, got int"),  # type: ignore[dict-item]
        (
            ValueError,
            lambda: from_llama({"mlp.gate_proj.weight": one, "mlp.up_proj.weight": one[:2]}, **heads),
            r"must have one shape, got \[4, 4\] and \[2, 4\]",
        ),
        (ValueError, lambda: from_llama({**projections, "self_attn.q_proj.weight": one[0, 0]}, **heads), "have rows"),
        (
            ValueError,
            lambda: from_llama({**projections, "self_attn.q_proj.weight": torch.zeros(8, 3)}, **heads),
            "heads of one size",
        ),
        (ValueError, lambda: to_llama({"layernorm_mlp.fc1.weight": one[:3]}, **heads), "an even number of rows"),
        (TypeError, lambda: to_llama({}, **heads, gated=1), "gated must be True or False"),  # type: ignore[arg-type]
        (
            ValueError,
            lambda: from_encoder({"self_attn.in_proj_weight": one}, num_attention_heads=1),
            r"a multiple of 3 rows, got \[4, 4\]",
        ),
        (ValueError, lambda: to_encoder({"self_attention.qkv.bias": one[0, 0]}, num_attention_heads=1), "must divide"),
    ]
    for kind, call, words in wrong:
        with pytest.raises(kind, match=words):
            call()
    odd = group.rank == world_size - 1
    meta = to.nn.ColumnParallelLinear(8, 8 * world_size, group=group, max_tokens=world_size, device="meta")
    with pytest.raises(TypeError, match="got dict"):
        to.nn.gather_state_dict(full if odd else layer, group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are on the meta device and have no values"):
        to.nn.gather_state_dict(meta if odd else layer, group)
    with pytest.raises(ValueError, match="tensors of the module must be the same on every rank"):
        to.nn.gather_state_dict(nn.Linear(3, 3) if odd else layer, group)
    with pytest.raises(ValueError, match="call to_empty"):
        meta.reset_parameters()


def tied_weights(group: to.Group) -> None:
    """A parameter with two names is split under both."""
    layers = [to.nn.ColumnParallelLinear(8, 8 * group.world_size, group=group, max_tokens=8) for _ in range(2)]
    layers[1].weight = layers[0].weight
    model = nn.ModuleList(layers)
    full = to.nn.gather_state_dict(model, group)
    assert_equal("second name", full["1.weight"], full["0.weight"])
    assert full["1.weight"].shape == (8 * group.world_size, 8)
    model.load_state_dict(to.nn.shard_state_dict(full, model, group))


def wrong_gradients(group: to.Group) -> None:
    """Ranks that would sum different gradients are told so, also in later steps and where sizes are equal."""

    def summed(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
        module = nn.ParameterDict({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})
        module.to(group.device, dtype)
        to.nn.mark_sequence_parallel(module)
        for parameter in module.values():
            parameter.grad = torch.ones_like(parameter)
        to.nn.all_reduce_replicated_gradients(module, group)
        return {name: parameter.grad for name, parameter in module.items()}

    summed(a=(8,), b=(8,))
    for shapes in ({"a": (8,)}, {"a": (8,), "c": (8,)}, {"a": (8,), "b": (4, 2)}, {}):
        with pytest.raises(ValueError, match=r"must be the same on every rank, got rank 0: .*'b'"):
            summed(**(shapes if group.rank == 1 else {"a": (8,), "b": (8,)}))
    with pytest.raises(ValueError, match=r"rank 0: {'a': 'torch.float16 \[8\]'}; rank 1: {'a': 'torch.float32 \[8\]'}"):
        summed(torch.float32 if group.rank else torch.float16, a=(8,))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
        to.nn.all_reduce_replicated_gradients([] if group.rank == 1 else nn.Linear(1, 1), group)  # type: ignore[arg-type]
    module = nn.Embedding(4, 4, sparse=True, device=group.device)
    to.nn.mark_sequence_parallel(module)
    module(torch.zeros(1, dtype=torch.int64, device=group.device)).sum().backward()
    with pytest.raises(ValueError, match="the gradient of weight must be dense"):
        to.nn.all_reduce_replicated_gradients(module, group)
    for grad in summed(a=(8,), b=(8,)).values():
        assert_equal("sum", grad, torch.full_like(grad, group.world_size))
