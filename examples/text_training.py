"""What the training examples share: packed text, attention within documents, the training loop, and the closing report.

Both train a model on several ranks and again in one plain PyTorch process, on the same batches, and compare.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


class LanguageModel(nn.Module):
    """Predicts the next byte. ``tokens`` and ``positions`` are the rows of a rank, and ``batch`` the documents that the
    attention of its blocks works on."""

    def __init__(self, hidden: int, max_length: int, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.position = nn.Embedding(max_length, hidden)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, batch)
        return self.head(self.norm(x))


# Training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a rank's model sees of a batch: ``tokens``, ``positions`` and ``labels`` of its rows, and the documents that
    attention works on."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    documents: Batch


def _no_loss(model: nn.Module) -> Tensor:
    return torch.zeros((), device=next(model.parameters()).device)


@dataclass(frozen=True)
class Example:
    """What is an example's own.

    Attributes:
        name: of the script, and of the picture.
        parallelism: in words.
        split: the share of a rank, of so many ranks, in a batch.
        sum_gradients: after backward, add up over ranks what each has of its own rows only.
        auxiliary_loss: what is minimised beside the loss on the labels.
    """

    name: str
    parallelism: str
    split: Callable[[Batch, int, int], Share]
    sum_gradients: Callable[[nn.Module], None]
    auxiliary_loss: Callable[[nn.Module], Tensor] = _no_loss


@dataclass
class Run:
    """What a training run leaves behind: the loss of each step in nats, the token counts, and two counters that must
    not move after the first step."""

    losses: list[float]
    token_counts: list[int]
    specializations: int = 0
    symmetric_allocations: int = 0


def train(
    example: Example, model: nn.Module, data: Iterator[Batch], args: argparse.Namespace, group: to.Group | None
) -> Run:
    """Train on ``data``; with a group on this rank's share of each batch, without one on all of it."""
    rank, world_size = (group.rank, group.world_size) if group else (0, 1)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    run = Run([], [])
    counters = (0, 0)
    title = f"{world_size} ranks" if group else "one plain process"
    progress = tqdm(data, total=args.steps, desc=title, unit="step", disable=rank != 0, mininterval=0.5)
    for step, host_batch in enumerate(progress):
        start = time.perf_counter()
        share = example.split(host_batch.to(device), rank, world_size)

        logits = model(share.tokens, share.positions, share.documents)
        predicted = int((host_batch.labels != IGNORED).sum())
        loss = F.cross_entropy(logits.float(), share.labels, ignore_index=IGNORED, reduction="sum") / predicted
        optimizer.zero_grad()
        (loss + example.auxiliary_loss(model)).backward()
        loss = loss.detach()
        if group:
            example.sum_gradients(model)
            dist.all_reduce(loss)
        optimizer.step()

        run.losses.append(loss.item())
        run.token_counts.append(len(host_batch.tokens))
        speed = len(host_batch.tokens) / (time.perf_counter() - start)
        progress.set_postfix_str(f"loss {run.losses[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if step == 0:
            counters = (to.specializations(), to.symmetric_allocations())
    run.specializations = to.specializations() - counters[0]
    run.symmetric_allocations = to.symmetric_allocations() - counters[1]
    return run


def report(
    example: Example, parallel: Run, plain: Run, args: argparse.Namespace, world_size: int, device: torch.device
) -> list[str]:
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
    print(f"loss curve                                {draw(example, parallel, plain, args.out, world_size)}")
    broken = []
    if parallel.specializations:
        broken.append(f"{parallel.specializations} kernel specialisations after the first step, expected none")
    if parallel.symmetric_allocations:
        broken.append(f"{parallel.symmetric_allocations} symmetric allocations after the first step, expected none")
    if not difference <= tolerance:  # also when it is NaN
        broken.append(f"the loss curves differ by {difference:.2e}, more than {tolerance:.0e}")
    return broken


def draw(example: Example, parallel: Run, plain: Run, folder: Path, world_size: int) -> Path:
    # Imported here, since only one rank draws.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    axes.plot(plain.losses, linewidth=4, alpha=0.4, label="one plain PyTorch process")
    axes.plot(parallel.losses, linewidth=1.2, label=f"{world_size} ranks, {example.parallelism}")
    axes.legend()
    axes.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{example.name}.png"
    figure.savefig(path, dpi=150)
    return path


def train_and_compare(
    example: Example,
    parallel: nn.Module,
    plain: nn.Module,
    data: Callable[[], Iterator[Batch]],
    args: argparse.Namespace,
    group: to.Group,
) -> int:
    """Train ``parallel`` on all ranks and then ``plain`` on rank 0, report, and return the exit code."""
    run = train(example, parallel, data(), args, group)
    # Every rank counts its own compilations and allocations; the worst one decides.
    counts = group.all_gather_object((run.specializations, run.symmetric_allocations))
    run.specializations, run.symmetric_allocations = (max(column) for column in zip(*counts, strict=True))
    broken: list[str] = []
    if group.rank == 0:
        plain_run = train(example, plain, data(), args, None)
        broken = report(example, run, plain_run, args, group.world_size, group.device)
        for promise in broken:
            print(f"error: {promise}", file=sys.stderr)
    group.barrier()
    return 1 if broken else 0


# Ranks ----------------------------------------------------------------------------------------------------------------


@contextmanager
def rank_group() -> Iterator[to.Group]:
    """This rank's device, process group and group, as torchrun's environment says."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group("gloo")
    group = to.init_group()
    yield group
    group.close()
    dist.destroy_process_group()


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every example; those without a default have one for each kind of device."""
    parser.add_argument("--ranks", type=int, default=2, help="processes to start; torchrun's own number goes first")
    parser.add_argument("--steps", type=int, help="training steps, one packed microbatch each")
    parser.add_argument("--blocks", type=int, help="transformer blocks")
    parser.add_argument("--hidden", type=int, help="hidden size")
    parser.add_argument("--lr", type=float, help="learning rate of AdamW")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), help="of parameters and activations")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of documents")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the loss curve")


def rank_count(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Ranks that there are, or that are to be started."""
    return int(os.environ.get("WORLD_SIZE", 0)) or int(parser.parse_known_args(argv)[0].ranks)


def launch(script: str, ranks: int, argv: list[str]) -> None:
    """Start ``script`` once a rank, as torchrun would."""
    if torch.cuda.device_count() < ranks:
        # Too few GPUs for one a rank: CPU processes, with the same kernels under Triton's interpreter.
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.run import main as torchrun  # the ranks do not need it

    torchrun(["--standalone", f"--nproc-per-node={ranks}", script, *argv])
