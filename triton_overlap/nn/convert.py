"""State dicts: between the ranks' shards and the full model, and between this library's names and others'.

Two steps, each with its inverse:

    block of another kind  --from_llama_block, from_encoder_layer-->  full layer  --shard_state_dict-->  a rank's layer
                           <--to_llama_block, to_encoder_layer------              <--gather_state_dict--

A full layer's state dict has the names of the module and the whole parameters; it is what the module itself has in a
group of one rank. The layouts of full parameters:

    self_attention.qkv.weight      [G (H/G + 2) D, hidden]   for each of G key/value heads its H/G query heads, the key
                                                             head and the value head, D rows each
    self_attention.proj.weight     [hidden, H D]
    layernorm_mlp.fc1.weight       [F, hidden], or gate [F, hidden] above up [F, hidden]
    layernorm_mlp.fc2.weight       [hidden, F]
    .._norm_weight, .._norm_bias   [hidden]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..comm.group import Group
from .arguments import check_group, check_input, check_module, check_size, check_switches
from .marks import MarkedModule, is_unmarked, mark_parameters
from .sharding import join_shards, take_shard

__all__ = [
    "from_encoder_layer",
    "from_llama_block",
    "gather_state_dict",
    "shard_state_dict",
    "to_encoder_layer",
    "to_llama_block",
]

#: Names of a full layer and of a Llama-style block (Transformers' names) whose tensors are the same.
_LLAMA = {
    "self_attention.qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.proj.weight": "self_attn.o_proj.weight",
    "self_attention.proj.bias": "self_attn.o_proj.bias",
    "layernorm_mlp.fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "layernorm_mlp.fc1.layer_norm_bias": "post_attention_layernorm.bias",
    "layernorm_mlp.fc2.weight": "mlp.down_proj.weight",
    "layernorm_mlp.fc2.bias": "mlp.down_proj.bias",
}
#: The same for ``torch.nn.TransformerEncoderLayer``.
_ENCODER = {
    "self_attention.qkv.layer_norm_weight": "norm1.weight",
    "self_attention.qkv.layer_norm_bias": "norm1.bias",
    "self_attention.proj.weight": "self_attn.out_proj.weight",
    "self_attention.proj.bias": "self_attn.out_proj.bias",
    "layernorm_mlp.fc1.layer_norm_weight": "norm2.weight",
    "layernorm_mlp.fc1.layer_norm_bias": "norm2.bias",
    "layernorm_mlp.fc1.weight": "linear1.weight",
    "layernorm_mlp.fc1.bias": "linear1.bias",
    "layernorm_mlp.fc2.weight": "linear2.weight",
    "layernorm_mlp.fc2.bias": "linear2.bias",
}
_QKV = "self_attention.qkv."
_FC1 = "layernorm_mlp.fc1."
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


# Shards --------------------------------------------------------------------------------------------------------------


def shard_state_dict(full: Mapping[str, Tensor], module: nn.Module, group: Group) -> dict[str, Tensor]:
    """This rank's part of a full state dict, for ``module.load_state_dict``. Local.

    Args:
        full: whole parameters under the names of ``module.state_dict()``; any device and dtype.
        module: any module; its parameters say how they are split (``tensor_parallel_dim``, ``tensor_parallel_parts``),
            and what has no such mark is taken whole. That another group shards them too, as ``fully_shard`` does,
            makes no difference: shapes and values are those before.
        group: the ranks that the module is split over.

    Returns:
        Views of ``full`` where possible, else copies.

    Raises:
        TypeError: an argument is of another type.
        ValueError: names or shapes do not match, the message lists them; a part of the module is split over another
            group; or a parametrisation hides how.
    """
    kind = "shard_state_dict"
    check_group(kind, group)
    _check_module(kind, module, group)
    _check_tensors(kind, full)
    own, marks = _tensors_of(module), _marks_of(module)
    missing, unexpected = sorted(set(own) - set(full)), sorted(set(full) - set(own))
    if missing or unexpected:
        raise ValueError(f"the state dict does not fit the module: missing {missing}, unexpected {unexpected}")
    result = {}
    for name, mine in own.items():
        dim, parts = _split_of(marks.get(name))
        expected = list(mine.shape)
        if dim is not None:
            expected[dim] *= group.world_size
        if list(full[name].shape) != expected:
            raise ValueError(f"{name}: the full tensor must be {expected}, got {list(full[name].shape)}")
        result[name] = take_shard(full[name], dim, parts, group.rank, group.world_size)
    return result


def gather_state_dict(module: nn.Module, group: Group) -> dict[str, Tensor]:
    """The full state dict, on the CPU of every rank. Collective, through the hosts: for checkpoints, not for steps.

    Args:
        module: any module, as in ``shard_state_dict``.
        group: the ranks that the module is split over.

    Raises:
        TypeError: ``module`` is no module, on every rank; or ``group`` no group.
        ValueError: on every rank, a tensor has no values, a part of the module is split over another group or in a way
            that a parametrisation hides, or the ranks' tensors differ in more than their values.
    """
    kind = "gather_state_dict"
    check_group(kind, group)
    group.before_call()

    def judge() -> dict[str, Tensor]:
        _check_module(kind, module, group)
        own = _tensors_of(module)
        empty = sorted(name for name, tensor in own.items() if tensor.is_meta)
        if empty:
            raise ValueError(
                f"{kind}: {empty} are on the meta device and have no values; load or initialise them first"
            )
        return own

    own = group.agree_on(
        "tensors of the module", judge, lambda own: {name: f"{x.dtype} {list(x.shape)}" for name, x in own.items()}
    )
    marks = _marks_of(module)
    result = {}
    for name, tensor in own.items():
        dim, parts = _split_of(marks.get(name))
        # Of a DTensor, whose class is slow to import, the values before it was sharded.
        mine = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()
        # One tensor at a time bounds the hosts' memory.
        result[name] = mine.clone() if dim is None else join_shards(group.all_gather_object(mine), dim, parts)
    return result


def _check_module(kind: str, module: object, group: Group) -> None:
    """TypeError or ValueError unless it is known how each parameter of ``module`` is split over ``group``."""
    check_module(kind, module)
    assert isinstance(module, nn.Module)
    mark_parameters(module)
    for name, part in module.named_modules():
        other = getattr(part, "group", None)
        if isinstance(other, Group) and (other.world_size, other.rank) != (group.world_size, group.rank):
            raise ValueError(
                f"{kind}: {name or 'the module'} is split over {other}, and not over {group}; convert what each group "
                "splits by itself"
            )
        if isinstance(part, MarkedModule) and group.world_size > 1:
            _check_all_known(kind, name, part)


def _check_all_known(kind: str, name: str, part: MarkedModule) -> None:
    """ValueError where a module that the ranks split has tensors of which nothing says how they are split."""
    known = {key for key, parameter in part.named_parameters(remove_duplicate=False) if not is_unmarked(parameter)}
    unknown = sorted(f"{name}.{key}".lstrip(".") for key in _tensors_of(part) if key not in known)
    if unknown:
        raise ValueError(
            f"{kind}: nothing says how the ranks split {unknown}; remove parametrizations and pruning first, with "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove, on a copy.deepcopy of "
            "the module if need be; of parameters of your own, set tensor_parallel_dim and tensor_parallel_parts"
        )


def _check_tensors(kind: str, tensors: object) -> None:
    """TypeError unless ``tensors`` is a mapping from names to tensors, ValueError unless those are dense."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{kind}: a state dict is needed, names and tensors, got {type(tensors).__name__}")
    for name, x in tensors.items():
        check_input(kind, name, x)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Those of the state dict; what else modules keep there, each keeps for itself."""
    return {name: x for name, x in module.state_dict().items() if isinstance(x, Tensor)}


def _marks_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters; one that has two names, as tied weights do, under both."""
    return dict(module.named_parameters(remove_duplicate=False))


def _split_of(parameter: nn.Parameter | None) -> tuple[int | None, int]:
    return getattr(parameter, "tensor_parallel_dim", None), getattr(parameter, "tensor_parallel_parts", 1)


# Names ---------------------------------------------------------------------------------------------------------------


def from_llama_block(
    block: Mapping[str, Tensor], *, num_attention_heads: int, num_gqa_groups: int
) -> dict[str, Tensor]:
    """A full ``TransformerLayer`` state dict from a Llama-style block's.

    The block has ``input_layernorm``, ``self_attn.{q,k,v,o}_proj``, ``post_attention_layernorm`` and
    ``mlp.{gate,up,down}_proj``, with or without biases; without a ``gate_proj`` the activation is not gated. Build the
    layer with ``normalization="RMSNorm"``, ``activation="swiglu"`` and ``bias=False`` for Llama itself, and give
    ``RotaryPositionEmbedding(head_dim)(max_length)`` to its forward.

    Args:
        block: names and tensors of one block; gradients, or anything else of the parameters' shapes, convert as well.
        num_attention_heads: H.
        num_gqa_groups: key/value heads G.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a name is missing or unknown, or shapes do not fit the heads or each other.
    """
    _check_heads("from_llama_block", num_attention_heads, num_gqa_groups)
    _check_tensors("from_llama_block", block)
    rest = dict(block)
    full = _rename(rest, {theirs: ours for ours, theirs in _LLAMA.items()})
    for kind in ("weight", "bias"):
        projections = [rest.pop(f"self_attn.{name}.{kind}", None) for name in _PROJECTIONS]
        if any(x is not None for x in projections):
            full[_QKV + kind] = _pack_qkv(projections, num_attention_heads, num_gqa_groups, kind)
        gate, up = rest.pop(f"mlp.gate_proj.{kind}", None), rest.pop(f"mlp.up_proj.{kind}", None)
        if up is not None and gate is not None and gate.shape != up.shape:
            raise ValueError(
                f"mlp.gate_proj.{kind} and mlp.up_proj.{kind} must have one shape, got {list(gate.shape)} and "
                f"{list(up.shape)}"
            )
        if up is not None:
            full[_FC1 + kind] = up if gate is None else torch.cat([gate, up])
        elif gate is not None:
            raise ValueError(f"mlp.gate_proj.{kind} is there, but not mlp.up_proj.{kind}")
    if rest:
        raise ValueError(f"unknown names in a Llama-style block: {sorted(rest)}")
    return full


def to_llama_block(
    full: Mapping[str, Tensor], *, num_attention_heads: int, num_gqa_groups: int, gated: bool = True
) -> dict[str, Tensor]:
    """The inverse of ``from_llama_block``; ``gated`` says whether ``fc1`` holds gate and up, or up alone.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a name is unknown, or a shape does not fit the heads or a gate and as large an up.
    """
    _check_heads("to_llama_block", num_attention_heads, num_gqa_groups)
    check_switches("to_llama_block", gated=gated)
    _check_tensors("to_llama_block", full)
    rest = dict(full)
    block = _rename(rest, _LLAMA)
    for kind in ("weight", "bias"):
        qkv, fc1 = rest.pop(_QKV + kind, None), rest.pop(_FC1 + kind, None)
        if qkv is not None:
            for name, x in zip(_PROJECTIONS, _unpack_qkv(qkv, num_attention_heads, num_gqa_groups), strict=True):
                block[f"self_attn.{name}.{kind}"] = x
        if fc1 is not None and gated and fc1.shape[0] % 2:
            raise ValueError(
                f"{_FC1 + kind} must be gate above up, an even number of rows, got {list(fc1.shape)}; give gated=False "
                "where there is no gate"
            )
        if fc1 is not None and gated:
            block[f"mlp.gate_proj.{kind}"], block[f"mlp.up_proj.{kind}"] = fc1.chunk(2)
        elif fc1 is not None:
            block[f"mlp.up_proj.{kind}"] = fc1
    if rest:
        raise ValueError(f"unknown names in a TransformerLayer: {sorted(rest)}")
    return block


def from_encoder_layer(block: Mapping[str, Tensor], *, num_attention_heads: int) -> dict[str, Tensor]:
    """A full ``TransformerLayer`` state dict from that of a ``torch.nn.TransformerEncoderLayer``.

    It computes the same for ``norm_first=True`` and no dropout, with ``activation="gelu_exact"`` for ``gelu``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a name is unknown, or a shape does not fit the heads.
    """
    _check_heads("from_encoder_layer", num_attention_heads, num_attention_heads)
    _check_tensors("from_encoder_layer", block)
    rest = dict(block)
    full = _rename(rest, {theirs: ours for ours, theirs in _ENCODER.items()})
    for kind in ("weight", "bias"):
        qkv = rest.pop(f"self_attn.in_proj_{kind}", None)
        if qkv is not None and (qkv.dim() == 0 or qkv.shape[0] % (3 * num_attention_heads)):
            raise ValueError(
                f"self_attn.in_proj_{kind} must be query, key and value of {num_attention_heads} heads each, a "
                f"multiple of {3 * num_attention_heads} rows, got {list(qkv.shape)}"
            )
        if qkv is not None:
            full[_QKV + kind] = _pack_qkv(list(qkv.chunk(3)), num_attention_heads, num_attention_heads, kind)
    if rest:
        raise ValueError(f"unknown names in a TransformerEncoderLayer: {sorted(rest)}")
    return full


def to_encoder_layer(full: Mapping[str, Tensor], *, num_attention_heads: int) -> dict[str, Tensor]:
    """The inverse of ``from_encoder_layer``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a name is unknown, or a shape does not fit the heads.
    """
    _check_heads("to_encoder_layer", num_attention_heads, num_attention_heads)
    _check_tensors("to_encoder_layer", full)
    rest = dict(full)
    block = _rename(rest, _ENCODER)
    for kind in ("weight", "bias"):
        qkv = rest.pop(_QKV + kind, None)
        if qkv is not None:
            block[f"self_attn.in_proj_{kind}"] = torch.cat(_unpack_qkv(qkv, num_attention_heads, num_attention_heads))
    if rest:
        raise ValueError(f"unknown names in a TransformerLayer: {sorted(rest)}")
    return block


def _rename(tensors: dict[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Take what ``names`` knows out of ``tensors``, under its new names."""
    return {new: tensors.pop(old) for old, new in names.items() if old in tensors}


def _pack_qkv(projections: list[Tensor | None], heads: int, kv_heads: int, kind: str) -> Tensor:
    present = [x for x in projections if x is not None]
    if len(present) != 3:
        raise ValueError(f"the {kind} of {', '.join(_PROJECTIONS)} must be there together, got {len(present)} of 3")
    query, key, value = present
    if 0 in (x.dim() for x in present):
        raise ValueError(f"the {kind} of {', '.join(_PROJECTIONS)} must have rows, got scalars")
    if (
        len({x.shape[1:] for x in present}) > 1
        or query.shape[0] % heads
        or key.shape != value.shape
        or key.shape[0] * heads != query.shape[0] * kv_heads
    ):
        raise ValueError(
            f"{heads} heads and {kv_heads} key/value heads of one size expected, got {kind}s of "
            f"{', '.join(str(list(x.shape)) for x in present)}"
        )
    size, rest = query.shape[0] // heads, query.shape[1:]
    grouped = [x.reshape(kv_heads, -1, size, *rest) for x in present]
    return torch.cat(grouped, dim=1).flatten(0, 2)


def _unpack_qkv(qkv: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    if qkv.dim() == 0 or qkv.shape[0] % (heads + 2 * kv_heads):
        raise ValueError(
            f"{heads} heads and {kv_heads} key/value heads must divide the rows of qkv: {heads + 2 * kv_heads} heads "
            f"in {list(qkv.shape)}"
        )
    per_group = heads // kv_heads
    grouped = qkv.unflatten(0, (kv_heads, per_group + 2, -1))
    return [x.flatten(0, 2) for x in grouped.split([per_group, 1, 1], dim=1)]


def _check_heads(kind: str, heads: int, kv_heads: int) -> None:
    check_size(kind, "num_attention_heads", heads)
    check_size(kind, "num_gqa_groups", kv_heads)
    if heads % kv_heads:
        raise ValueError(f"{kind}: num_attention_heads must be divisible by num_gqa_groups, got {heads} and {kv_heads}")
