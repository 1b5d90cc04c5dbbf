"""Train a byte-level transformer whose feed-forward parts are mixtures of experts, spread over the ranks.

    python examples/train_moe_lm.py --ranks 2                # starts its ranks itself (make demo-moe)
    torchrun --nproc-per-node 2 examples/train_moe_lm.py     # or lets torchrun do it

Each rank has documents of its own, so its token count differs from its peers' and from step to step. Attention stays on
the rank; the experts of a token may be anywhere. What a model of your own needs is in three places:

    parallelize()         replaces each block's mixture by ``to.nn.MoE``, with this rank's share of the experts
    balance_loss()        what the routers add to the loss, so that all experts get work
    sum_gradients()       after backward, for parameters of which every rank holds a copy

Shapes, with W ranks, T tokens of a rank, E experts, K of a token, hidden size H and feed-forward size F:

    tokens, labels            [T]
    router                    [T, H] -> K experts and weights of each token
    dispatch                  each token to the ranks of its experts: [rows that came in, H], grouped by expert
    experts                   E/W of them, [2 F, H] and [H, F] each, on their rows
    combine                   [T, H], the weighted sum at each token's own rank

After training, the same model is trained in one plain PyTorch process on the documents of all ranks, and the two loss
curves are compared. The script fails if they differ, or if a step after the first compiled a kernel or allocated
symmetric memory.
"""

from __future__ import annotations

import argparse
import os
import random
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
CPU_DEFAULTS = {
    "blocks": 1,
    "hidden": 32,
    "heads": 4,
    "experts": 4,
    "max_tokens": 64,
    "steps": 20,
    "lr": 1e-2,
    "dtype": "float32",
}
GPU_DEFAULTS = {
    "blocks": 4,
    "hidden": 1024,
    "heads": 16,
    "experts": 16,
    "max_tokens": 8192,
    "steps": 200,
    "lr": 3e-4,
    "dtype": "bfloat16",
}
TOP_K = 2
ROUTER = to.nn.RouterSettings("softmax", normalize=True, balance_coefficient=0.01)


# Model ----------------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """K experts and weights of each token, [T, H] -> [T, K] twice; the plain twin of what ``to.nn.MoE`` has."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden).uniform_(-(hidden**-0.5), hidden**-0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight.float()).softmax(dim=1)
        weights, idx = scores.topk(TOP_K, dim=1)
        shares = F.one_hot(idx, len(self.weight)).sum(dim=(0, 1)) / idx.numel()
        loss = ROUTER.balance_coefficient * len(self.weight) * (shares * scores.mean(dim=0)).sum()
        return idx, weights / weights.sum(dim=1, keepdim=True), loss


class Experts(nn.Module):
    """Gated feed-forward parts, one for each expert."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.fc1_weight = nn.Parameter(torch.empty(experts, 2 * ffn, hidden).uniform_(-(hidden**-0.5), hidden**-0.5))
        self.fc2_weight = nn.Parameter(torch.empty(experts, hidden, ffn).uniform_(-(ffn**-0.5), ffn**-0.5))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        gate, up = F.linear(x, self.fc1_weight[expert]).chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, self.fc2_weight[expert])


class PlainMoE(nn.Module):
    """A mixture of experts in one process, [T, H] -> [T, H]. Its state dict is the full one of ``to.nn.MoE``."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.router = Router(hidden, experts)
        self.experts = Experts(hidden, ffn, experts)
        self.balance_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        idx, weights, self.balance_loss = self.router(x)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(self.router.weight)):
            token, k = (idx == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.experts(x[token], expert) * weights[token, k, None])
        return out.to(x.dtype)


class Block(nn.Module):
    """Attention and a mixture of experts. It does not ask where the experts are."""

    def __init__(self, hidden: int, heads: int, experts: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.norm1 = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm2 = nn.RMSNorm(hidden)
        self.moe: nn.Module = PlainMoE(hidden, 2 * hidden, experts)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        x = x + self.proj(attention(query, key, value, batch).flatten(-2))
        return x + self.moe(self.norm2(x))


def parallelize(model: LanguageModel, group: to.Group, max_tokens: int) -> None:
    """Replace every block's mixture by one whose experts are spread over the ranks."""
    for block in model.blocks:
        plain = block.moe
        assert isinstance(plain, PlainMoE)
        experts, hidden, ffn = plain.experts.fc2_weight.shape
        moe = to.nn.MoE(
            hidden,
            ffn,
            experts,
            TOP_K,
            group=group,
            num_max_tokens_per_rank=max_tokens,
            router=ROUTER,
            activation="swiglu",
            params_dtype=plain.experts.fc1_weight.dtype,
        )
        moe.load_state_dict(to.nn.shard_state_dict(plain.state_dict(), moe, group))
        block.moe = moe


def balance_loss(model: nn.Module) -> Tensor:
    """Of all routers: with experts on the ranks, this rank's share."""
    losses = [module.balance_loss for module in model.modules() if isinstance(module, (to.nn.MoE, PlainMoE))]
    return torch.stack([loss for loss in losses if loss is not None]).sum()


def sum_gradients(model: nn.Module) -> None:
    """Add up, over ranks, the gradients of parameters that every rank holds and has applied to its own tokens only."""
    for parameter in model.parameters():
        # Experts are split along their first dimension; all tokens have come to them.
        if getattr(parameter, "tensor_parallel_dim", None) is None and parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def documents_of(batch: Batch, rank: int, world_size: int) -> Share:
    """Every W-th document of the batch."""
    lengths = batch.lengths
    own = torch.arange(len(lengths)) % world_size == rank
    rows = own.repeat_interleave(torch.tensor(lengths)).to(batch.tokens.device)
    ends = F.pad(torch.tensor(lengths)[own].cumsum(0), (1, 0)).to(torch.int32)
    part = Batch(batch.tokens[rows], batch.labels[rows], batch.positions[rows], ends)
    return Share(part.tokens, part.positions, part.labels, part)


EXAMPLE = Example("train_moe_lm", "experts on all of them", documents_of, sum_gradients, balance_loss)


# Training -------------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    """One rank's part; returns its exit code."""
    with rank_group() as group:
        max_length = args.max_tokens // group.world_size  # so that a step has a document for each rank at least
        lengths = random.Random(args.seed)  # of every size, so that no two ranks and no two steps have the same
        documents = [document[: lengths.randint(2, max_length)] for document in read_documents(max_length)]
        torch.manual_seed(args.seed)  # every rank makes the same model and keeps its share of the experts
        dtype = getattr(torch, args.dtype)
        model, plain_model = (
            LanguageModel(
                args.hidden, max_length, [Block(args.hidden, args.heads, args.experts) for _ in range(args.blocks)]
            ).to(group.device, dtype)
            for _ in range(2)
        )
        plain_model.load_state_dict(model.state_dict())
        parallelize(model, group, args.max_tokens)

        def data() -> Iterator[Batch]:
            return batches(documents, args.steps, args.max_tokens, multiple=1, seed=args.seed)

        return train_and_compare(EXAMPLE, model, plain_model, data, args, group)


def parse_args(argv: list[str]) -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Train a small mixture-of-experts model.", formatter_class=formatter)
    common_arguments(parser)
    parser.add_argument("--max-tokens", type=int, help="capacity of a step in tokens, over all ranks")
    parser.add_argument("--heads", type=int, help="attention heads")
    parser.add_argument("--experts", type=int, help="experts of a block, a multiple of the ranks")
    ranks = rank_count(parser, argv)
    parser.set_defaults(**(GPU_DEFAULTS if torch.cuda.device_count() >= ranks else CPU_DEFAULTS))
    args = parser.parse_args(argv)
    if args.max_tokens < 2 * ranks:
        parser.error(f"--max-tokens must be at least 2 for each of the {ranks} ranks, got {args.max_tokens}")
    if args.experts % ranks or args.experts < TOP_K:
        parser.error(f"--experts must be a multiple of the {ranks} ranks, at least {TOP_K}, got {args.experts}")
    if args.hidden % args.heads:
        parser.error(f"--hidden must be a multiple of the {args.heads} heads, got {args.hidden}")
    return args


if __name__ == "__main__":
    parsed = parse_args(sys.argv[1:])
    if "RANK" in os.environ:
        sys.exit(main(parsed))
    launch(__file__, parsed.ranks, sys.argv[1:])
