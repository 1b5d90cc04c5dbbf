"""``python -m triton_overlap.bench COMMAND``: what is measured and how, each command's ``--help`` says."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import triton_overlap as to
from triton_overlap.bench import counts, ep, ep_puts, host, layer, reports, tasks, tp, train
from triton_overlap.bench.problems import MODELS, layer_problems, model_problems, random_problems
from triton_overlap.bench.ranks import ranks
from triton_overlap.bench.results import Kept, Results
from triton_overlap.bench.rivals import every_method
from triton_overlap.bench.session import Session, Settings
from triton_overlap.problems import Problem
from triton_overlap.sim import NetworkCost

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
METHODS = list(to.Method.NAMES)
#: What is measured where nothing is said, and in a smoke run, by command.
FULL: dict[str, dict[str, Any]] = {
    "tp": {
        "models": list(MODELS),
        "tokens": [128, 256, 512, 1024, 2048, 4096, 8192, 16384],
        "random_tokens": 20,
        "methods": METHODS,
        "rounds": 12,
        "warmup": 2,
    },
    "layer": {
        "models": ["llama3-8b", "llama3-70b"],
        "tokens": [8192],
        "methods": list(layer.RIVALS),
        "document": 4096,
        "rounds": 12,
        "warmup": 2,
    },
    "host": {"tokens": [128], "size": [2048, 1024], "rounds": 21, "warmup": 3},
    "train": {
        "models": ["llama3-8b"],
        "tokens": [16384],
        "methods": ["fused"],
        "document": 512,
        "layers": 2,
        "microbatches": 24,
        "rounds": 5,
        "warmup": 2,
    },
    # Problems are tokens of a rank x hidden x experts of a token x experts.
    "ep": {
        "problems": ["4096x7168x8x256", "128x7168x8x256", "4096x4096x1x8"],
        "num_sms": 24,
        "channels_per_sm": 2,
        "rounds": 30,
        "warmup": 5,
        "repetitions": 3,
    },
    "ep_puts": {"problems": ["128x7168x8x256", "8192x7168x8x256"], "num_sms": 24, "channels_per_sm": 2},
    # Powers of two and counts halfway between them.
    "tune": {
        "models": list(MODELS),
        "tokens": [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384],
        "rounds": 10,
        "warmup": 1,
        "max_seconds": 230.0,
    },
}
SMOKE: dict[str, dict[str, Any]] = {
    "tp": {
        "size": [32, 16],
        "tokens": [48],
        "random_tokens": 0,
        "methods": METHODS,
        "rounds": 1,
        "warmup": 0,
    },
    "layer": {
        "models": ["tiny"],
        "tokens": [48],
        "methods": list(layer.RIVALS),
        "document": 20,
        "rounds": 1,
        "warmup": 0,
    },
    "host": {"tokens": [48], "size": [32, 16], "rounds": 1, "warmup": 0},
    "train": {
        "models": ["tiny"],
        "tokens": [24],
        "methods": ["fused"],
        "document": 10,
        "layers": 1,
        "microbatches": 3,
        "rounds": 1,
        "warmup": 1,
    },
    "ep": {
        "problems": ["4x128x2x4"],
        "num_sms": 1,
        "channels_per_sm": 1,
        "rounds": 1,
        "warmup": 0,
        "repetitions": 1,
    },
    "ep_puts": {"problems": ["24x128x2x4"], "num_sms": 1, "channels_per_sm": 2},
    "tune": {"size": [32, 16], "tokens": [8], "rounds": 1, "warmup": 1, "max_seconds": 60.0},
}


def _every_argument() -> argparse.ArgumentParser:
    """What every command takes that starts ranks."""
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("--ranks", type=int, default=2, help="processes to start (2); torchrun's own number goes first")
    every.add_argument("--share-gpus", action="store_true", help="allow more ranks than GPUs; the times mean nothing")
    every.add_argument("--smoke", action="store_true", help="tiny problems on CPU ranks; the times mean nothing")
    every.add_argument("--rounds", type=int, help="timed calls of each method or rival")
    every.add_argument("--warmup", type=int, help="untimed calls before the timed ones")
    every.add_argument("--seed", type=int, default=0, help="of inputs and of the order of calls (0)")
    every.add_argument("--commit", help="git commit to record where the source tree has no history")
    return every


def _shared_arguments(every: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """What commands take that measure dense layers."""
    shared = argparse.ArgumentParser(add_help=False, parents=[every])
    shared.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of the operands (bfloat16)")
    shared.add_argument("--tokens", type=int, nargs="+", help="token counts of all ranks")
    shared.add_argument("--models", nargs="+", choices=sorted(MODELS), help="whose layers are measured")
    return shared


def _output_arguments() -> argparse.ArgumentParser:
    """What every command takes that keeps results."""
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--out", type=Path, help="folder for the data (benchmarks/results; none with --smoke)")
    output.add_argument("--plot", type=Path, help="also draw a figure to this file")
    return output


def _product_arguments() -> argparse.ArgumentParser:
    products = argparse.ArgumentParser(add_help=False)
    products.add_argument(
        "--size",
        type=int,
        nargs=2,
        metavar=("K", "N"),
        help="one layer instead of --models: K and N of its all-gather GEMM",
    )
    return products


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m triton_overlap.bench", description=__doc__)
    every, output, products = _every_argument(), _output_arguments(), _product_arguments()
    shared = _shared_arguments(every)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("tp", parents=[shared, output, products], help="products, by method, and rivals")
    measure.add_argument("--random-tokens", type=int, help="random counts beside --tokens, each for one of the models")
    measure.add_argument("--methods", nargs="+", help="of the library, as text, and bulk; all for every candidate")
    measure.add_argument(
        "--timeline", type=Path, metavar="FOLDER", help="instead: record the tasks of one call of each product, fused"
    )
    measure.add_argument("--table", type=Path, help="table for method auto, before those that it has anyway")
    measure.set_defaults(measure=measure_tp)
    layers = commands.add_parser("layer", parents=[shared, output], help="a transformer layer, forward and backward")
    layers.add_argument("--methods", nargs="+", choices=list(layer.RIVALS), help="of its products (all)")
    layers.add_argument("--document", type=int, help="tokens of a document")
    layers.add_argument(
        "--device-count", action="store_true", help="instead: one graph for all --tokens, captured at the largest"
    )
    layers.set_defaults(measure=measure_layer)
    trains = commands.add_parser("train", parents=[shared, output], help="tokens a second while token counts change")
    trains.add_argument("--methods", nargs=1, metavar="METHOD", help="of all products (fused)")
    trains.add_argument("--document", type=int, help="tokens of a document")
    trains.add_argument("--layers", type=int, help="of the stack")
    trains.add_argument("--microbatches", type=int, help="of a block; --rounds are blocks")
    trains.set_defaults(measure=measure_train)
    hosts = commands.add_parser("host", parents=[shared, output, products], help="microseconds of host time a call")
    hosts.set_defaults(measure=measure_host)
    experts = commands.add_parser("ep", parents=[every, output], help="expert-parallel dispatch and combine")
    experts.add_argument("--problems", nargs="+", help="tokens of a rank x hidden x top-k x experts")
    experts.add_argument(
        "--parts", nargs="+", choices=(ep.CALLS, ep.COMPARED), default=[ep.CALLS, ep.COMPARED],
        help="calls against an all-to-all, variants of the cut into puts, or both (both)",
    )  # fmt: skip
    experts.add_argument("--network", default="direct", help="of the variants: direct, simulated, nvshmem (direct)")
    experts.add_argument("--num-sms", type=int, help="of the variants")
    experts.add_argument("--channels-per-sm", type=int, help="of the variants")
    experts.add_argument("--repetitions", type=int, help="of the variants")
    experts.set_defaults(measure=measure_experts, dtype="bfloat16")
    puts = commands.add_parser("ep_puts", parents=[output], help="puts of a dispatch, and their cost to a network")
    puts.add_argument("--problems", nargs="+", help="tokens of a rank x hidden x top-k x experts")
    puts.add_argument("--per-put-ns", type=float, default=200.0, help="nanoseconds of a put (200: 5 million a second)")
    puts.add_argument("--per-byte-ns", type=float, default=0.02, help="and of each of its bytes (0.02: 50 GB/s)")
    puts.add_argument("--num-sms", type=int, help="of the buffers (24)")
    puts.add_argument("--channels-per-sm", type=int, help="of the buffers (2)")
    puts.add_argument("--seed", type=int, default=0, help="of inputs and of the schedule (0)")
    puts.add_argument("--processes", type=int, default=os.cpu_count(), help="simulations at a time (one a core)")
    puts.add_argument("--smoke", action="store_true", help="a tiny problem")
    puts.add_argument("--commit", help="git commit to record where the source tree has no history")
    tune = commands.add_parser("tune", parents=[shared, products], help="measure a table for auto (docs/choosing.md)")
    tune.add_argument("--max-seconds", type=float, help="begin no problem after these")
    tune.add_argument("--out", type=Path, default=Path("out"), help="folder for the table (out)")
    show = commands.add_parser("show", help="print the tables of a kept file")
    show.add_argument("file", type=Path)
    show.add_argument("--plot", type=Path, help="also draw a figure to this file")
    args = parser.parse_args(argv)
    if args.command != "show":
        _set_defaults(args, parser)
    return args


def _set_defaults(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in what was not given."""
    if args.command == "ep":
        args.share_gpus = True  # what it counts and checks holds then too, and its tables say that times do not
    if getattr(args, "device_count", False) and args.tokens is None and not args.smoke:
        args.tokens = [512, 2048, 8192, 16384]
    one_layer = getattr(args, "size", None) is not None
    models = getattr(args, "models", None)
    if one_layer and models:
        parser.error("--size is one layer, --models are those of models; give one of the two")
    for name, value in (SMOKE if args.smoke else FULL)[args.command].items():
        other_given = (name == "models" and one_layer) or (name == "size" and models)
        if getattr(args, name) is None and not other_given:
            setattr(args, name, value)
    if args.command != "tune" and args.out is None and not args.smoke:
        args.out = Path("benchmarks/results")


def launch(args: argparse.Namespace, argv: list[str], console: Console) -> int:
    """Start this module once a rank, as torchrun would."""
    if args.smoke:
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    elif args.share_gpus and 0 < torch.cuda.device_count() < args.ranks:
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
        if not skip and word.partition("=")[0] not in ("--out", "--plot", "--table", "--timeline"):
            kept.append(word)
        skip = word in ("--out", "--plot", "--table", "--timeline")
    return kept


def products_of(args: argparse.Namespace, world_size: int) -> list[Problem]:
    """The products that ``tp`` and ``tune`` measure."""
    dtype = DTYPES[args.dtype]
    if args.size is not None:
        k, n = args.size
        return layer_problems(args.tokens, k, n, world_size, dtype)
    problems = model_problems(args.models, args.tokens, world_size, dtype, backward=args.command == "tune")
    count = getattr(args, "random_tokens", 0)
    drawn = random_problems(args.models, count, max(args.tokens), world_size, dtype, args.seed)
    return list(dict.fromkeys([*problems, *drawn]))


def measure_tp(args: argparse.Namespace, session: Session) -> Results | None:
    if args.timeline is not None:
        for problem in products_of(args, session.group.world_size):
            tasks.record(problem, session, args.timeline, args.methods[0] if len(args.methods) == 1 else "fused")
        return None
    methods = every_method(session.settings.dtype) if args.methods == ["all"] else args.methods
    return tp.run(session, products_of(args, session.group.world_size), methods, args.table)


def measure_layer(args: argparse.Namespace, session: Session) -> Results:
    most = max(args.tokens)
    if args.device_count:
        return counts.run(
            session, [layer.Problem(name, most, args.document, most) for name in args.models], args.tokens
        )
    problems = [layer.Problem(name, t, args.document, most) for name in args.models for t in args.tokens]
    return layer.run(session, problems, args.methods)


def measure_train(args: argparse.Namespace, session: Session) -> Results:
    most = max(args.tokens)
    problems = [layer.Problem(name, most, args.document, most) for name in args.models]
    return train.run(session, problems, args.layers, args.microbatches, args.methods[0])


def measure_host(args: argparse.Namespace, session: Session) -> Results:
    return host.run(session, args.tokens[0], *args.size)


def measure_experts(args: argparse.Namespace, session: Session) -> Kept:
    plan = ep.Plan(
        problems=args.problems,
        parts=args.parts,
        network=args.network,
        num_sms=args.num_sms,
        channels_per_sm=args.channels_per_sm,
        repetitions=args.repetitions,
    )
    return ep.run(session, plan)


def simulate_puts(args: argparse.Namespace, argv: list[str], console: Console) -> Kept:
    """``ep_puts``, which takes no ranks."""
    # For the processes that simulate: Triton decides when it is imported.
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    settings = ep_puts.Settings(
        problems=args.problems,
        cost=NetworkCost(args.per_put_ns, args.per_byte_ns),
        num_sms=args.num_sms,
        channels_per_sm=args.channels_per_sm,
        seed=args.seed,
        processes=args.processes,
        command=without_paths(argv),
        commit=args.commit,
    )
    return ep_puts.run(settings, console)


def make_table(args: argparse.Namespace, session: Session) -> None:
    """One rank's part of ``tune``."""
    table = tp.tune(session, products_of(args, session.group.world_size), args.max_seconds)
    if session.group.rank != 0:
        return
    device = re.sub(r"[^a-z0-9]+", "-", table.device.lower()).strip("-")
    path = args.out / f"{device}_{table.world_size}_{args.dtype}.json"
    table.save(path)
    found = f"{len(table.rows)} rows, {table.about['measurement']['problems']} problems"
    session.console.print(f"{found}; table: {path}")


def report(found: Kept, args: argparse.Namespace, console: Console) -> None:
    """Print the results, and keep and draw them where the arguments say so."""
    reports.REPORTS[found.name].print_tables(found, console)
    if getattr(args, "out", None) is not None:
        path = args.out / found.file_name()
        found.save(path)
        console.print(f"data: {path}", soft_wrap=True)
    if args.plot is not None:
        reports.REPORTS[found.name].draw(found, args.plot)
        console.print(f"figure: {args.plot}", soft_wrap=True)


def run_rank(args: argparse.Namespace, argv: list[str], console: Console) -> None:
    """One rank's part of a command."""
    settings = Settings(
        dtype=DTYPES[args.dtype],
        rounds=args.rounds,
        warmup=args.warmup,
        seed=args.seed,
        command=without_paths(argv),
        commit=args.commit,
    )
    backend = "nvshmem" if getattr(args, "network", None) == "nvshmem" else "auto"
    with ranks(backend=backend, share_gpus=args.share_gpus) as group:
        session = Session(group, settings, console)
        if args.command == "tune":
            make_table(args, session)
            return
        measure: Callable[[argparse.Namespace, Session], Kept | None] = args.measure
        found = measure(args, session)
        if group.rank == 0 and found is not None:
            report(found, args, console)


def main(argv: Sequence[str]) -> int:
    args = parse_args(list(argv))
    # A table does not fit into the 80 columns that a pipe or a log file pretends to have.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if args.command == "show":
        report(reports.load(args.file), args, console)
        return 0
    if args.command == "ep_puts":
        report(simulate_puts(args, list(argv), console), args, console)
        return 0
    if "RANK" in os.environ:
        run_rank(args, list(argv), console)
        return 0
    return launch(args, list(argv), console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
