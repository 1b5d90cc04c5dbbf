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
import math
import os
import pydoc_data.topics
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import triton_overlap as to
from triton_overlap.packing import pad_packed

IGNORED = -100
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
#: Largest allowed difference between the two loss curves, in nats. Sums are taken in another order, nothing else.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1}


# Data -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One packed microbatch: ``tokens``, ``labels`` and ``positions`` [T]; ``cu_seqlens`` [documents + 1], int32."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    def to(self, device: torch.device) -> Batch:
        # The lengths stay on the host, where the attention needs them.
        return Batch(self.tokens.to(device), self.labels.to(device), self.positions.to(device), self.cu_seqlens)


def read_documents(max_length: int) -> list[Tensor]:
    """The sections of Python's own reference as byte strings [length], at most ``max_length`` long.

    Longer sections are cut between paragraphs; a paragraph that is too long by itself loses its end.
    """
    documents: list[Tensor] = []
    for topic in pydoc_data.topics.topics.values():
        for section in re.split(r"\n\n(?=[^\n]+\n[=\-~*]{4,}\n)", topic):
            piece = b""
            for paragraph in section.encode().split(b"\n\n"):
                if piece and len(piece) + len(paragraph) + 2 > max_length:
                    documents.append(torch.tensor(list(piece)))
                    piece = b""
                piece = (piece + b"\n\n" + paragraph if piece else paragraph)[:max_length]
            documents.append(torch.tensor(list(piece)))
    return [document for document in documents if len(document) > 1]


def pack(documents: list[Tensor]) -> Batch:
    """Lay documents one behind another; each token's label is the next token of its own document."""
    labels = [torch.cat([document[1:], document.new_tensor([IGNORED])]) for document in documents]
    ends = torch.tensor([0, *(len(document) for document in documents)]).cumsum(0)
    return Batch(
        tokens=torch.cat(documents),
        labels=torch.cat(labels),
        positions=torch.cat([torch.arange(len(document)) for document in documents]),
        cu_seqlens=ends.to(torch.int32),
    )


def batches(documents: list[Tensor], steps: int, max_tokens: int, multiple: int, seed: int) -> Iterator[Batch]:
    """``steps`` microbatches, the same on every rank, of at most ``max_tokens`` tokens, divisible by ``multiple``."""
    shuffle = random.Random(seed)
    queue: list[Tensor] = []
    for _ in range(steps):
        chosen: list[Tensor] = []
        while True:
            if not queue:
                queue = shuffle.sample(documents, len(documents))
            if sum(len(document) for document in chosen) + len(queue[-1]) > max_tokens:
                break
            chosen.append(queue.pop())
        batch = pack(chosen)
        tokens, labels, cu_seqlens = pad_packed(batch.tokens, batch.labels, batch.cu_seqlens, multiple=multiple)
        positions = F.pad(batch.positions, (0, len(tokens) - len(batch.tokens)))
        yield Batch(tokens, labels, positions, cu_seqlens)


# Model ----------------------------------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
    """Causal attention within each document: [T, heads, head_dim] each, and the result."""
    lengths = batch.lengths
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        # Imported here: it brings torch's compiler with it, which the CPU ranks can do without.
        from torch.nn.attention.varlen import varlen_attn

        ends = batch.cu_seqlens.to(query.device, non_blocking=True)
        out = varlen_attn(query, key, value, ends, ends, max(lengths), max(lengths), window_size=(-1, 0))
        assert isinstance(out, Tensor)  # a tuple only where auxiliary outputs are asked for
        return out
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return torch.cat(outputs)


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


class LanguageModel(nn.Module):
    """Predicts the next byte. ``tokens`` and ``positions`` are the rows of a rank; attention sees the whole batch."""

    def __init__(self, blocks: int, hidden: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.position = nn.Embedding(max_length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, batch)
        return self.head(self.norm(x))


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


# Training -------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a training run leaves behind: the loss of each step in nats, the token counts, and two counters that must
    not move after the first step."""

    losses: list[float]
    token_counts: list[int]
    specializations: int = 0
    symmetric_allocations: int = 0


def train(model: LanguageModel, data: Iterator[Batch], args: argparse.Namespace, group: to.Group | None) -> Run:
    """Train on ``data``; with a group on this rank's rows of each batch, without one on all of them."""
    rank, world_size = (group.rank, group.world_size) if group else (0, 1)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    run = Run([], [])
    counters = (0, 0)
    title = f"{world_size} ranks" if group else "one plain process"
    progress = tqdm(data, total=args.steps, desc=title, unit="step", disable=rank != 0, mininterval=0.5)
    for step, host_batch in enumerate(progress):
        start = time.perf_counter()
        batch = host_batch.to(device)
        rows = len(batch.tokens) // world_size
        mine = slice(rank * rows, (rank + 1) * rows)

        logits = model(batch.tokens[mine], batch.positions[mine], batch)
        predicted = int((host_batch.labels != IGNORED).sum())
        loss = F.cross_entropy(logits.float(), batch.labels[mine], ignore_index=IGNORED, reduction="sum") / predicted
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if group:
            sum_replicated_gradients(model)
            dist.all_reduce(loss)
        optimizer.step()

        run.losses.append(loss.item())
        run.token_counts.append(len(batch.tokens))
        speed = len(batch.tokens) / (time.perf_counter() - start)
        progress.set_postfix_str(f"loss {run.losses[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if step == 0:
            counters = (to.specializations(), to.symmetric_allocations())
    run.specializations = to.specializations() - counters[0]
    run.symmetric_allocations = to.symmetric_allocations() - counters[1]
    return run


def report(parallel: Run, plain: Run, args: argparse.Namespace, world_size: int, device: torch.device) -> list[str]:
    """Print what came out, draw both curves, and return the promises that were broken."""
    differences = [abs(a - b) for a, b in zip(parallel.losses, plain.losses, strict=True)]
    # max() would pass over a NaN that is not the first.
    difference = math.nan if any(math.isnan(d) for d in differences) else max(differences)
    tolerance = TOLERANCE[args.dtype]
    counts = sorted(set(parallel.token_counts))
    print(f"\n{world_size} ranks on {device.type}, {args.dtype}, {len(parallel.losses)} steps")
    print(f"loss, first and last                      {parallel.losses[0]:.4f}  {parallel.losses[-1]:.4f}")
    print(f"different token counts                    {len(counts)}  ({counts[0]} to {counts[-1]})")
    print(f"kernel specialisations after step 1       {parallel.specializations}")
    print(f"symmetric allocations after step 1        {parallel.symmetric_allocations}")
    print(f"largest difference from one plain process {difference:.2e}  (allowed {tolerance:.0e})")
    print(f"loss curve                                {draw(parallel, plain, args.out, world_size)}")
    broken = []
    if parallel.specializations:
        broken.append(f"{parallel.specializations} kernel specialisations after the first step, expected none")
    if parallel.symmetric_allocations:
        broken.append(f"{parallel.symmetric_allocations} symmetric allocations after the first step, expected none")
    if not difference <= tolerance:  # also when it is NaN
        broken.append(f"the loss curves differ by {difference:.2e}, more than {tolerance:.0e}")
    return broken


def draw(parallel: Run, plain: Run, folder: Path, world_size: int) -> Path:
    # Imported here, since only one rank draws.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    axes.plot(plain.losses, linewidth=4, alpha=0.4, label="one plain PyTorch process")
    axes.plot(parallel.losses, linewidth=1.2, label=f"{world_size} ranks, tensor and sequence parallel")
    axes.legend()
    axes.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train_packed_lm.png"
    figure.savefig(path, dpi=150)
    return path


def main(args: argparse.Namespace) -> int:
    """One rank's part; returns its exit code."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group("gloo")
    group = to.init_group()

    max_length = args.max_tokens // 2
    documents = read_documents(max_length)
    torch.manual_seed(args.seed)  # every rank makes the same model and keeps its shard of it
    model = LanguageModel(args.blocks, args.hidden, args.heads, max_length).to(device, getattr(torch, args.dtype))
    plain_model = LanguageModel(args.blocks, args.hidden, args.heads, max_length).to(device, getattr(torch, args.dtype))
    plain_model.load_state_dict(model.state_dict())
    parallelize(model, group, args.max_tokens)

    def data() -> Iterator[Batch]:
        return batches(documents, args.steps, args.max_tokens, multiple=world_size, seed=args.seed)

    run = train(model, data(), args, group)
    # Every rank counts its own compilations and allocations; the worst one decides.
    counts = group.all_gather_object((run.specializations, run.symmetric_allocations))
    run.specializations, run.symmetric_allocations = (max(column) for column in zip(*counts, strict=True))

    broken: list[str] = []
    if rank == 0:
        broken = report(run, train(plain_model, data(), args, None), args, world_size, device)
        for promise in broken:
            print(f"error: {promise}", file=sys.stderr)
    group.barrier()
    group.close()
    dist.destroy_process_group()
    return 1 if broken else 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Train a small packed language model.", formatter_class=formatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start; torchrun's own number goes first")
    parser.add_argument("--steps", type=int, help="training steps, one packed microbatch each")
    parser.add_argument("--max-tokens", type=int, help="capacity of a step in tokens, a multiple of the ranks")
    parser.add_argument("--blocks", type=int, help="transformer blocks")
    parser.add_argument("--hidden", type=int, help="hidden size")
    parser.add_argument("--heads", type=int, help="attention heads, a multiple of the ranks")
    parser.add_argument("--lr", type=float, help="learning rate of AdamW")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), help="of parameters and activations")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of documents")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the loss curve")
    ranks = int(os.environ.get("WORLD_SIZE", 0)) or parser.parse_known_args(argv)[0].ranks
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


def launch(ranks: int, argv: list[str]) -> None:
    """Start this script once a rank, as torchrun would."""
    if torch.cuda.device_count() < ranks:
        # Too few GPUs for one a rank: CPU processes, with the same kernels under Triton's interpreter.
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.run import main as torchrun  # the ranks do not need it

    torchrun(["--standalone", f"--nproc-per-node={ranks}", __file__, *argv])


if __name__ == "__main__":
    parsed = parse_args(sys.argv[1:])
    if "RANK" in os.environ:
        sys.exit(main(parsed))
    launch(parsed.ranks, sys.argv[1:])
