"""``python -m triton_overlap.bench tp`` measures tensor-parallel operations, ``... ep`` expert-parallel ones;
``... show FILE`` prints a kept file again; ``... tune`` measures a table for method ``auto``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import triton_overlap as to
from triton_overlap.bench import ep, ep_results, results, tp
from triton_overlap.bench.problems import MODELS

FULL: dict[str, Any] = {"tokens": [512, 1024, 2048, 4096, 8192, 16384], "k": 8192, "n": 4096, "rounds": 30, "warmup": 5}
SMOKE: dict[str, Any] = {"tokens": [48], "k": 32, "n": 16, "rounds": 1, "warmup": 0}
#: What a table is measured at: powers of two and counts halfway between them.
TUNE: dict[str, Any] = {
    "tokens": [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384],
    "models": list(MODELS),
    "rounds": 10,
    "max_seconds": 230.0,
}
SMOKE_TUNE: dict[str, Any] = {"tokens": [8], "models": [], "rounds": 1, "max_seconds": 60.0}
#: Of expert parallelism: tokens of a rank x hidden x experts of a token x experts.
FULL_EP: dict[str, Any] = {
    "problems": ["4096x7168x8x256", "128x7168x8x256", "4096x4096x1x8"],
    "num_sms": 24,
    "channels_per_sm": 2,
    "rounds": 30,
    "warmup": 5,
    "repetitions": 3,
}
SMOKE_EP: dict[str, Any] = {
    "problems": ["4x128x2x4"],
    "num_sms": 1,
    "channels_per_sm": 1,
    "rounds": 1,
    "warmup": 0,
    "repetitions": 2,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m triton_overlap.bench", description=__doc__)
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("--ranks", type=int, default=2, help="processes to start (2); torchrun's own number goes first")
    every.add_argument("--smoke", action="store_true", help="tiny problems on CPU ranks; the times mean nothing")
    every.add_argument("--rounds", type=int, help="timed calls of each method or rival")
    every.add_argument("--seed", type=int, default=0, help="of inputs and of the order of calls (0)")
    every.add_argument("--commit", help="git commit to record where the source tree has no history")
    both = argparse.ArgumentParser(add_help=False, parents=[every])
    both.add_argument("--tokens", type=int, nargs="+", help="gathered token counts")
    both.add_argument("--models", nargs="+", choices=sorted(MODELS), help="measure the layers of these models")
    both.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of the operands (bfloat16)")
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("tp", parents=[both], help="tensor-parallel operations against their rivals")
    measure.add_argument("--k", type=int, help=f"K of the layer, where no models are named ({FULL['k']})")
    measure.add_argument("--n", type=int, help=f"N of a rank's all-gather GEMM there ({FULL['n']})")
    measure.add_argument("--warmup", type=int, help=f"untimed calls before the timed ones ({FULL['warmup']})")
    measure.add_argument("--table", type=Path, help="table for method auto, before those that it has anyway")
    measure.add_argument("--out", type=Path, help="folder for the data (benchmarks/results; none with --smoke)")
    measure.add_argument("--plot", type=Path, help="also draw a figure to this file")
    experts = commands.add_parser("ep", parents=[every], help="expert-parallel dispatch and combine")
    experts.add_argument(
        "--problems", nargs="+", help=f"tokens of a rank x hidden x top-k x experts ({' '.join(FULL_EP['problems'])})"
    )
    experts.add_argument(
        "--parts", nargs="+", choices=(ep.CALLS, ep.COMPARED), default=[ep.CALLS, ep.COMPARED],
        help="calls against an all-to-all, variants of the cut into puts, or both (both)",
    )  # fmt: skip
    experts.add_argument("--network", default="direct", help="of the variants: direct, simulated, nvshmem (direct)")
    experts.add_argument("--num-sms", type=int, help=f"of the variants ({FULL_EP['num_sms']})")
    experts.add_argument("--channels-per-sm", type=int, help=f"of the variants ({FULL_EP['channels_per_sm']})")
    experts.add_argument("--repetitions", type=int, help=f"of the variants ({FULL_EP['repetitions']})")
    experts.add_argument("--warmup", type=int, help=f"untimed calls before the timed ones ({FULL_EP['warmup']})")
    experts.add_argument("--out", type=Path, help="folder for the data (benchmarks/results; none with --smoke)")
    tune = commands.add_parser("tune", parents=[both], help="measure a table for method auto (docs/choosing.md)")
    tune.add_argument("--max-seconds", type=float, help=f"begin no problem after these ({TUNE['max_seconds']:g})")
    tune.add_argument("--out", type=Path, default=Path("out"), help="folder for the table (out)")
    show = commands.add_parser("show", help="print the tables of a kept file")
    show.add_argument("file", type=Path)
    show.add_argument("--plot", type=Path, help="also draw a figure to this file")
    args = parser.parse_args(argv)
    defaults = {"tp": (FULL, SMOKE), "ep": (FULL_EP, SMOKE_EP), "tune": (TUNE, SMOKE_TUNE), "show": ({}, {})}[
        args.command
    ]
    for name, value in defaults[args.command != "show" and args.smoke].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.command in ("tp", "ep") and args.out is None and not args.smoke:
        args.out = Path("benchmarks/results")
    return args


def launch(args: argparse.Namespace, argv: list[str], console: Console) -> int:
    """Start this module once a rank, as torchrun would."""
    if args.smoke:
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    elif args.command == "ep" and 0 < torch.cuda.device_count() < args.ranks:
        console.print(f"{args.ranks} ranks share {torch.cuda.device_count()} GPU: times will mean nothing", style="red")
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    elif torch.cuda.device_count() < args.ranks:
        console.print(
            f"error: {args.ranks} ranks need as many GPUs, found {torch.cuda.device_count()}; "
            "--smoke runs tiny problems on CPU ranks",
            style="red",
        )
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.run import main as torchrun  # the ranks do not need it

    torchrun(["--standalone", f"--nproc-per-node={args.ranks}", "-m", "triton_overlap.bench", *argv])
    return 0


def without_paths(argv: list[str]) -> list[str]:
    """``argv`` without the options that are paths: where files lie says nothing about results."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if not skip and word.partition("=")[0] not in ("--out", "--plot", "--table"):
            kept.append(word)
        skip = word in ("--out", "--plot", "--table")
    return kept


def settings_of(args: argparse.Namespace, argv: list[str]) -> tp.Settings:
    """What the arguments of ``tp`` and ``tune`` have in common; the layer of ``tune`` is the smoke run's."""
    return tp.Settings(
        tokens=args.tokens,
        k=getattr(args, "k", SMOKE["k"]),
        n=getattr(args, "n", SMOKE["n"]),
        models=args.models or [],
        table=getattr(args, "table", None),
        dtype=DTYPES[args.dtype],
        rounds=args.rounds,
        warmup=getattr(args, "warmup", 1),
        seed=args.seed,
        command=without_paths(argv),
        commit=args.commit,
    )


def make_table(args: argparse.Namespace, argv: list[str], console: Console) -> int:
    """One rank's part of ``tune``."""
    settings = settings_of(args, argv)
    effort = to.Effort(rounds=settings.rounds, warmup=settings.warmup, max_seconds=args.max_seconds, seed=settings.seed)
    table = tp.tune(settings, effort)
    if table is None:
        return 0
    device = re.sub(r"[^a-z0-9]+", "-", table.device.lower()).strip("-")
    path = args.out / f"{device}_{table.world_size}_{args.dtype}.json"
    table.save(path)
    console.print(f"{len(table.rows)} rows, {table.about['measurement']['problems']} problems; table: {path}")
    return 0


def measure(args: argparse.Namespace, argv: list[str], console: Console) -> int:
    """One rank's part."""
    settings = settings_of(args, argv)
    found = tp.run(settings, console)
    if found is None:
        return 0
    results.print_tables(found, console)
    if args.out is not None:
        path = args.out / found.file_name()
        found.save(path)
        console.print(f"data: {path}", soft_wrap=True)
    if args.plot is not None:
        results.draw(found, args.plot)
        console.print(f"figure: {args.plot}", soft_wrap=True)
    return 0


def measure_experts(args: argparse.Namespace, argv: list[str], console: Console) -> int:
    """One rank's part of ``ep``."""
    settings = ep.Settings(
        problems=args.problems,
        parts=args.parts,
        network=args.network,
        num_sms=args.num_sms,
        channels_per_sm=args.channels_per_sm,
        rounds=args.rounds,
        warmup=args.warmup,
        repetitions=args.repetitions,
        seed=args.seed,
        command=without_paths(argv),
        commit=args.commit,
    )
    found = ep.run(settings, console)
    if found is None:
        return 0
    ep_results.print_tables(found, console)
    if args.out is not None:
        path = args.out / found.file_name()
        found.save(path)
        console.print(f"data: {path}", soft_wrap=True)
    return 0


def show(path: Path, plot: Path | None, console: Console) -> int:
    """Print a kept file."""
    if json.loads(path.read_text())["command"][0] == "ep":
        ep_results.print_tables(ep_results.EpResults.load(path), console)
        return 0
    kept = results.Results.load(path)
    results.print_tables(kept, console)
    if plot is not None:
        results.draw(kept, plot)
    return 0


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    # A table does not fit into the 80 columns that a pipe or a log file pretends to have.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if args.command == "show":
        return show(args.file, args.plot, console)
    if "RANK" in os.environ:
        part_of_rank = {"tp": measure, "ep": measure_experts, "tune": make_table}[args.command]
        return part_of_rank(args, argv, console)
    return launch(args, argv, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
