"""Transformer blocks in plain PyTorch, for one process: what the parallel modules are compared with.

Written for clarity in the way Llama is: separate query, key, value, gate and up weights, attention document by document
with explicit probabilities. Any floating-point dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a block, and the variant of it.

    Attributes:
        hidden: of input and output.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: size of a head.
        ffn: feed-forward size.
        rms: RMSNorm, else LayerNorm.
        activation: "gelu" (tanh approximation), "gelu_exact", "relu" or "swiglu".
        bias: of the linear layers.
        rotary: whether queries and keys are turned by their position.
        causal: mask.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rms: bool = False
    activation: str = "gelu"
    bias: bool = True
    rotary: bool = False
    causal: bool = True


def lengths_of(cu_seqlens: Tensor) -> list[int]:
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


class PlainAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, shape.bias)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, shape.bias)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, shape.bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, shape.bias)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """``x`` [T, hidden] -> the same."""
        size = self.shape.head_dim
        documents = zip(
            *(
                projection(x).unflatten(-1, (-1, size)).split(lengths)
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            ),
            strict=True,
        )
        return self.o_proj(torch.cat([self._document(q, k, v) for q, k, v in documents]).flatten(-2))

    def _document(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.shape.rotary:
            q, k = turn(q), turn(k)
        repeats = self.shape.heads // self.shape.kv_heads
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores = torch.einsum("lhd,mhd->hlm", q, k) / self.shape.head_dim**0.5
        if self.shape.causal:
            later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return torch.einsum(
            "hlm,mhd->lhd", scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q), v
        )


def turn(x: Tensor) -> Tensor:
    """Rotary embedding of one document: ``x`` [L, heads, D], as a complex product in float64."""
    half = x.shape[-1] // 2
    position = torch.arange(len(x), dtype=torch.float64, device=x.device)
    speed = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.outer(position, speed)[:, None, :]
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(x.dtype)


class PlainMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activation = shape.activation
        if shape.activation == "swiglu":
            self.gate_proj = nn.Linear(shape.hidden, shape.ffn, shape.bias)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, shape.bias)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up_proj(x)
        if self.activation == "swiglu":
            h = F.silu(self.gate_proj(x)) * h
        elif self.activation == "relu":
            h = F.relu(h)
        else:
            h = F.gelu(h, approximate="tanh" if self.activation == "gelu" else "none")
        return self.down_proj(h)


class PlainBlock(nn.Module):
    """Pre-norm block with the parameter names of Llama in Transformers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.rms else nn.LayerNorm
        self.input_layernorm = norm(shape.hidden, eps=1e-5)
        self.self_attn = PlainAttention(shape)
        self.post_attention_layernorm = norm(shape.hidden, eps=1e-5)
        self.mlp = PlainMLP(shape)
        for layer_norm in (self.input_layernorm, self.post_attention_layernorm):
            for parameter in layer_norm.parameters():  # not ones and zeros, which would hide a mix-up
                nn.init.normal_(parameter, mean=1.0, std=0.2)

    def attend(self, x: Tensor, lengths: list[int]) -> Tensor:
        return self.self_attn(self.input_layernorm(x), lengths)

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        h = x + self.attend(x, lengths)
        return h + self.feed(h)
