"""``python -m triton_overlap.bench tp`` measures; ``... show FILE`` prints a kept file again."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from triton_overlap.bench import results, tp

FULL = {"tokens": [512, 1024, 2048, 4096, 8192, 16384], "k": 8192, "n": 4096, "rounds": 30, "warmup": 5}
SMOKE = {"tokens": [8, 64, 48], "k": 32, "n": 16, "rounds": 2, "warmup": 1}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m triton_overlap.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("tp", help="tensor-parallel operations against their rivals")
    measure.add_argument(
        "--ranks", type=int, default=2, help="processes to start (2); torchrun's own number goes first"
    )
    measure.add_argument("--smoke", action="store_true", help="tiny problems on CPU ranks; the times mean nothing")
    measure.add_argument("--tokens", type=int, nargs="+", help=f"gathered token counts ({FULL['tokens']})")
    measure.add_argument("--k", type=int, help=f"K of the layer ({FULL['k']})")
    measure.add_argument("--n", type=int, help=f"N of a rank's all-gather GEMM ({FULL['n']})")
    measure.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of the operands (bfloat16)")
    measure.add_argument("--rounds", type=int, help=f"timed calls of each rival ({FULL['rounds']})")
    measure.add_argument("--warmup", type=int, help=f"untimed calls before them ({FULL['warmup']})")
    measure.add_argument("--seed", type=int, default=0, help="of inputs and of the order of rivals (0)")
    measure.add_argument("--out", type=Path, help="folder for the data (benchmarks/results; none with --smoke)")
    measure.add_argument("--plot", type=Path, help="also draw a figure to this file")
    measure.add_argument("--commit", help="git commit to record where the source tree has no history")
    show = commands.add_parser("show", help="print the tables of a kept file")
    show.add_argument("file", type=Path)
    show.add_argument("--plot", type=Path, help="also draw a figure to this file")
    args = parser.parse_args(argv)
    if args.command == "tp":
        for name, value in (SMOKE if args.smoke else FULL).items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        if args.out is None and not args.smoke:
            args.out = Path("benchmarks/results")
    return args


def launch(args: argparse.Namespace, argv: list[str], console: Console) -> int:
    """Start this module once a rank, as torchrun would."""
    if args.smoke:
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
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
    """``argv`` without ``--out`` and ``--plot``: where results were put says nothing about them."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if not skip and not word.startswith(("--out=", "--plot=")) and word not in ("--out", "--plot"):
            kept.append(word)
        skip = word in ("--out", "--plot")
    return kept


def measure(args: argparse.Namespace, argv: list[str], console: Console) -> int:
    """One rank's part."""
    settings = tp.Settings(
        tokens=args.tokens,
        k=args.k,
        n=args.n,
        dtype=DTYPES[args.dtype],
        rounds=args.rounds,
        warmup=args.warmup,
        seed=args.seed,
        command=without_paths(argv),
        commit=args.commit,
    )
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


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    # A table does not fit into the 80 columns that a pipe or a log file pretends to have.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if args.command == "show":
        kept = results.Results.load(args.file)
        results.print_tables(kept, console)
        if args.plot is not None:
            results.draw(kept, args.plot)
        return 0
    if "RANK" in os.environ:
        return measure(args, argv, console)
    return launch(args, argv, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
