"""Train a byte-level transformer with tensor and sequence parallelism on packed documents of any length.

    python examples/train_packed_lm.py --ranks 2                # starts its ranks itself (make demo)
    torchrun --nproc-per-node 2 examples/train_packed_lm.py     # or lets torchrun do it

Documents are packed one behind another without padding, so every step has another token count T. What a model of your
own needs is in three places:

    parallelize()               replaces four linear layers of each block; buffers are registered once, for the most
                                tokens a step can have
    pad_packed(..., multiple=W) adds at most W - 1 ignored tokens, so that T can be divided among W ranks
    sum_replicated_gradients()  after backward, for parameters of which every rank holds a copy and sees T/W tokens

Shapes, with W ranks, hidden size H and h heads of size d:

    tokens, labels          [T/W]           each rank's rows of the batch
    x between the layers    [T/W, H]        sequence parallel: norms and residuals work on a rank's rows only
    qkv(x)                  [T, 3 H/W]      gathers the rows, multiplies by a rank's columns: its h/W heads
    attention               [T, H/W]        of a rank's heads over all tokens, causal within each document
    proj(...)               [T/W, H]        multiplies by a rank's rows of the weight, sums and scatters the rows
    fc1, fc2                the same for the feed-forward part

After training, the same model is trained in one plain PyTorch process and the two loss curves are compared. The script
fails if they differ, or if a step after the first compiled a kernel or allocated symmetric memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import triton_overlap as to
from text_training import (
    Batch,
    Example,
    LanguageModel,
    Share,
    attention,
    batches,
    common_arguments,
    launch,
    rank_count,
    rank_group,
    read_documents,
    train_and_compare,
)

#: Defaults by device: small enough for Triton's interpreter on two cores, large enough to be worth a GPU's time.
CPU_DEFAULTS = {"blocks": 2, "hidden": 64, "heads": 4, "max_tokens": 512, "steps": 40, "lr": 3e-3, "dtype": "float32"}
GPU_DEFAULTS = {
    "blocks": 4,
    "hidden": 1024,
    "heads": 16,
    "max_tokens": 8192,
    "steps": 200,
    "lr": 3e-4,
    "dtype": "bfloat16",
}


# Model ----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and feed-forward part of a transformer. It does not ask whether its linear layers are parallel."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.norm1 = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm2 = nn.RMSNorm(hidden)
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.fc2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        # Head by head, query beside key beside value: a contiguous shard of the weight's rows is a set of whole heads.
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        x = x + self.proj(attention(query, key, value, batch).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def parallelize(model: LanguageModel, group: to.Group, max_tokens: int) -> None:
    """Replace every block's linear layers by this rank's shards of them."""
    layers = {
        "qkv": to.nn.ColumnParallelLinear,
        "proj": to.nn.RowParallelLinear,
        "fc1": to.nn.ColumnParallelLinear,
        "fc2": to.nn.RowParallelLinear,
    }
    for block in model.blocks:
        for name, parallel in layers.items():
            linear = block.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            setattr(block, name, parallel.from_linear(linear, group=group, max_tokens=max_tokens))


def sum_replicated_gradients(model: nn.Module) -> None:
    """Add up, over ranks, the gradients of parameters that every rank holds and has applied to its own rows only."""
    for parameter in model.parameters():
        # The parallel layers mark their parameters; those gradients are complete.
        if not hasattr(parameter, "tensor_parallel_dim") and parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def rows_of(batch: Batch, rank: int, world_size: int) -> Share:
    """A rank's rows; attention sees the whole batch."""
    rows = len(batch.tokens) // world_size
    mine = slice(rank * rows, (rank + 1) * rows)
    return Share(batch.tokens[mine], batch.positions[mine], batch.labels[mine], batch)


EXAMPLE = Example("train_packed_lm", "tensor and sequence parallel", rows_of, sum_replicated_gradients)


# Training -------------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    """One rank's part; returns its exit code."""
    with rank_group() as group:
        max_length = args.max_tokens // 2
        documents = read_documents(max_length)
        torch.manual_seed(args.seed)  # every rank makes the same model and keeps its shard of it
        dtype = getattr(torch, args.dtype)
        model, plain_model = (
            LanguageModel(args.hidden, max_length, [Block(args.hidden, args.heads) for _ in range(args.blocks)]).to(
                group.device, dtype
            )
            for _ in range(2)
        )
        plain_model.load_state_dict(model.state_dict())
        parallelize(model, group, args.max_tokens)

        def data() -> Iterator[Batch]:
            return batches(documents, args.steps, args.max_tokens, multiple=group.world_size, seed=args.seed)

        return train_and_compare(EXAMPLE, model, plain_model, data, args, group)


def parse_args(argv: list[str]) -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Train a small packed language model.", formatter_class=formatter)
    common_arguments(parser)
    parser.add_argument("--max-tokens", type=int, help="capacity of a step in tokens, a multiple of the ranks")
    parser.add_argument("--heads", type=int, help="attention heads, a multiple of the ranks")
    ranks = rank_count(parser, argv)
    parser.set_defaults(**(GPU_DEFAULTS if torch.cuda.device_count() >= ranks else CPU_DEFAULTS))
    args = parser.parse_args(argv)
    for name in ("heads", "max_tokens"):
        if getattr(args, name) % ranks:
            parser.error(
                f"--{name.replace('_', '-')} must be a multiple of the {ranks} ranks, got {getattr(args, name)}"
            )
    if args.hidden % args.heads:
        parser.error(f"--hidden must be a multiple of the {args.heads} heads, got {args.hidden}")
    return args


if __name__ == "__main__":
    parsed = parse_args(sys.argv[1:])
    if "RANK" in os.environ:
        sys.exit(main(parsed))
    launch(__file__, parsed.ranks, sys.argv[1:])
