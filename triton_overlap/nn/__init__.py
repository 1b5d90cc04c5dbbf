"""Modules: tensor-parallel replacements of ``torch.nn`` layers whose token count may change at every call.

Shapes and layouts stand at the top of each file; docs/modules.md is the guide.
"""

from .convert import (
    from_encoder_layer,
    from_llama_block,
    gather_state_dict,
    shard_state_dict,
    to_encoder_layer,
    to_llama_block,
)
from .gradients import all_reduce_replicated_gradients
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import ColumnParallelLinear, Linear, RowParallelLinear
from .marks import mark_parameters, mark_sequence_parallel
from .moe import MoE, RouterSettings
from .multihead_attention import MultiheadAttention
from .rotary import RotaryPositionEmbedding
from .transformer_layer import TransformerLayer

__all__ = [
    "ColumnParallelLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MoE",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "RouterSettings",
    "RowParallelLinear",
    "TransformerLayer",
    "all_reduce_replicated_gradients",
    "from_encoder_layer",
    "from_llama_block",
    "gather_state_dict",
    "mark_parameters",
    "mark_sequence_parallel",
    "shard_state_dict",
    "to_encoder_layer",
    "to_llama_block",
]
