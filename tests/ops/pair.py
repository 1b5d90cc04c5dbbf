"""A column and a row product in one, for the bodies that use operations as a model does."""

from __future__ import annotations

import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import Draw, Sizes, leaf


class Pair:
    """A column and a row product in one, as a transformer block has them."""

    def __init__(self, group: to.Group, sizes: Sizes, dtype: torch.dtype, sequence_parallel: bool = True) -> None:
        self.sizes = sizes
        self.sequence_parallel = sequence_parallel
        self.buffer = sizes.buffer(group, dtype)
        draw = Draw(group, dtype, 99)
        scale = sizes.features**-0.5
        self.weights = [
            draw.mine(draw.per_rank(sizes.hidden, sizes.features)),
            draw.mine(draw.per_rank(sizes.features)),
            draw.mine([w * scale for w in draw.per_rank(sizes.features, sizes.hidden)]),
            leaf(draw.one(sizes.hidden)),
        ]

    def __call__(self, x: Tensor, main_grads: tuple[Tensor, Tensor] | None = None) -> Tensor:
        b, b_bias, c, c_bias = self.weights
        b_main, c_main = main_grads or (None, None)
        first, second = (
            (to.all_gather_matmul, to.matmul_reduce_scatter)
            if self.sequence_parallel
            else (to.replicated_matmul, to.matmul_all_reduce)
        )
        h = first(x, b, bias=b_bias, buffer=self.buffer, main_grad=b_main)
        return second(torch.relu(h), c, bias=c_bias, buffer=self.buffer, main_grad=c_main)

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        draw = Draw(self.buffer.group, self.buffer.dtype, seed)
        if not self.sequence_parallel:
            tokens = rows * self.buffer.group.world_size
            return leaf(draw.one(tokens, self.sizes.hidden)), draw.one(tokens, self.sizes.hidden)
        return (
            draw.mine(draw.per_rank(rows, self.sizes.hidden)),
            draw.constant(draw.per_rank(rows, self.sizes.hidden)),
        )

    def gradients(self, x: Tensor) -> list[Tensor]:
        """Taken and cleared."""
        grads = []
        for tensor in [x, *self.weights]:
            assert tensor.grad is not None
            grads.append(tensor.grad)
            tensor.grad = None
        return grads
