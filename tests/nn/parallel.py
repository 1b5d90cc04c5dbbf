"""Parallel modules with the weights of plain blocks (``plain``), for the bodies that compare the two."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import triton_overlap as to
from tests.nn.cases import Case, Draw, gradients_of, mine
from tests.nn.plain import PlainBlock, lengths_of


class Parallel:
    """Modules of ``part``, "attention", "mlp", "layer" or "stack", with the weights of plain blocks."""

    def __init__(self, group: to.Group, case: Case, dtype: torch.dtype, part: str) -> None:
        torch.manual_seed(3)
        self.group, self.case, self.dtype, self.part = group, case, dtype, part
        count = 2 if part == "stack" else 1
        self.plain = [PlainBlock(case.shape).to(device=group.device, dtype=dtype) for _ in range(count)]
        self.exact = [copy.deepcopy(block).double() for block in self.plain]
        self.modules = nn.ModuleList(self._module() for _ in range(count))
        for module, block in zip(self.modules, self.plain, strict=True):
            module.load_state_dict(to.nn.shard_state_dict(self._full(block.state_dict()), module, group))
        self.rotary = to.nn.RotaryPositionEmbedding(case.shape.head_dim, device=group.device)

    def _module(self) -> nn.Module:
        shape, shared = self.case.shape, self.case.shared(self.group, self.dtype)
        shared.update(normalization="RMSNorm" if shape.rms else "LayerNorm", bias=shape.bias)
        mask = "causal" if shape.causal else "no_mask"
        if self.part == "mlp":
            return to.nn.LayerNormMLP(shape.hidden, shape.ffn, activation=shape.activation, **shared)
        heads: dict[str, Any] = {"num_gqa_groups": shape.kv_heads, "kv_channels": shape.head_dim}
        if self.part == "attention":
            return to.nn.MultiheadAttention(
                shape.hidden, shape.heads, input_layernorm=True, attn_mask_type=mask, **heads, **shared
            )
        return to.nn.TransformerLayer(
            shape.hidden,
            shape.ffn,
            shape.heads,
            self_attn_mask_type=mask,
            activation=shape.activation,
            ub_tp_comm_overlap=self.case.sequence_parallel,
            **heads,
            **shared,
        )

    def _full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a plain block under the names of the module."""
        shape = self.case.shape
        full = to.nn.from_llama_block(tensors, num_attention_heads=shape.heads, num_gqa_groups=shape.kv_heads)
        prefix = {"attention": "self_attention.", "mlp": "layernorm_mlp."}.get(self.part, "")
        return {name.removeprefix(prefix): x for name, x in full.items() if name.startswith(prefix)}

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """``x`` and the output's gradient, whole, and ``cu_seqlens`` or None."""
        draw, hidden, batch = Draw(self.group, self.dtype, seed), self.case.shape.hidden, self.case.batch
        if batch:
            return draw(tokens, batch, hidden), draw(tokens, batch, hidden), None
        return draw(tokens, hidden), draw(tokens, hidden), draw.cu_seqlens(tokens)

    def own(self, x: Tensor) -> Tensor:
        return mine(x, self.group) if self.case.sequence_parallel else x

    def __call__(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        settings: dict[str, Any] = {}
        longest = x.shape[0] * (self.group.world_size if self.case.sequence_parallel else 1)
        if cu_seqlens is not None:
            longest = max(lengths_of(cu_seqlens))
            settings.update(cu_seqlens_q=cu_seqlens, max_seqlen_q=longest)
        if self.case.shape.rotary:
            settings["rotary_pos_emb"] = self.rotary(longest)  # no angles for a position past the longest document
        for module in self.modules:
            x = module(x) if self.part == "mlp" else module(x, **settings)
        return x

    def plain_forward(self, blocks: list[PlainBlock], x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """In one process; sequences of a plain batch are documents of one length."""
        if cu_seqlens is None:
            packed = x.transpose(0, 1).flatten(0, 1)
            lengths = [x.shape[0]] * x.shape[1]
        else:
            packed, lengths = x, lengths_of(cu_seqlens)
        for block in blocks:
            if self.part == "mlp":
                packed = block.feed(packed)
            elif self.part == "attention":
                packed = block.attend(packed, lengths)
            else:
                packed = block(packed, lengths)
        return packed if cu_seqlens is not None else packed.unflatten(0, (x.shape[1], -1)).transpose(0, 1)

    def gradients(self) -> dict[str, Tensor]:
        """Of the modules' parameters, complete; taken and cleared."""
        if self.case.sequence_parallel:
            to.nn.all_reduce_replicated_gradients(self.modules, self.group)
        grads = gradients_of(self.modules)
        self.modules.zero_grad()
        return grads

    def expected_gradients(self, blocks: list[PlainBlock]) -> dict[str, Tensor]:
        """This rank's part of the plain blocks' gradients; taken and cleared."""
        expected = {}
        for index, (module, block) in enumerate(zip(self.modules, blocks, strict=True)):
            grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
            shard = to.nn.shard_state_dict(self._full(grads), module, self.group)
            expected.update({f"{index}.{name}": grad for name, grad in shard.items()})
            block.zero_grad()
        return expected
