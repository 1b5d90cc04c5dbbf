"""Thousands of seeded schedules of dispatch and combine, each compared bitwise with an all-to-all::

    python -m tests.ep.campaign --out tests/data/ep_campaign.json

Every schedule is a world of its own: seeded turns, landings and routing. Its calls follow each other without any host
barrier, and at the end every signal must stand at its base. Runs add to the file, which says how many of which ran; a
schedule that fails ends the run, named by its topology and seed. ``--planted`` then plants each mistake of
``faulty.py`` in the kernels and counts the schedules until one shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from tests.distributed import fill_uninitialized_memory
from tests.ep import bodies, faulty
from tests.ep.worlds import Case
from triton_overlap.comm.group import Group
from triton_overlap.errors import CommError, SimulationError
from triton_overlap.sim import Fault, LateBody, StallSource, World

#: Scale-out and scale-up ranks, and schedules of each: more where they are cheap. 2020 in all.
SCHEDULES = {(1, 2): 600, (2, 1): 800, (2, 2): 360, (4, 1): 140, (2, 4): 60, (4, 2): 60}
#: Steps of a schedule with a planted fault. One that waits for ever would poll until its time limit.
FAULTY_STEPS = 100_000
#: What a schedule does; it takes them in turn.
KINDS = (
    "random routing",
    "zero tokens on a rank",
    "all to one expert",
    "masked",
    "one source stalled",
    "ragged counts",
    "cached",
    "expanded",
    "ordered kernels",
    "late bodies",
)
_PARTS: tuple[dict[str, object], ...] = (
    {"num_sub_parts": 2, "min_tokens_per_part": 1},
    {"num_sub_parts": 3},
    {},
)


def case_of(topology: tuple[int, int], seed: int) -> tuple[str, Case]:
    """What schedule ``seed`` of a topology does. Few tokens: what matters is the order of events."""
    kind = KINDS[seed % len(KINDS)]
    # Each kind meets each cut into parts.
    settings = {"channels_per_sm": 1, **_PARTS[seed // len(KINDS) % len(_PARTS)]}
    case = Case(*topology, max_tokens=3, tokens=(2, 3, 1), masked=0.1, experts_per_rank=1, settings=settings)
    if kind == "ordered kernels":
        return kind, replace(case, settings={**settings, "kernel": "ordered"})
    changes: dict[str, dict[str, Any]] = {
        "zero tokens on a rank": {"tokens": (0, 3)},
        "all to one expert": {"one_expert": True},
        "masked": {"masked": (0.5, 1.0)[seed // len(KINDS) % 2]},
        "ragged counts": {"tokens": (3, 1, 2, 0, 3)},
    }
    return kind, replace(case, **changes.get(kind, {}))


def network_of(case: Case) -> str:
    """The weakest that the kernels may have; a topology without scale-out peers has none."""
    if case.scale_out == 1:
        return "direct"
    return "simulated_strong" if case.settings.get("kernel") == "ordered" else "simulated"


def calls(group: Group, kind: str, case: Case, seed: int) -> None:
    """The calls of one rank, and what must be true when all have ended."""
    buffer = bodies.make_buffer(group, case, network=network_of(case))
    if kind == "cached":
        bodies.cached_round_trip(buffer, case, seed)
    elif kind == "expanded":
        bodies.expanded_round_trip(buffer, case, seed)
    else:
        bodies.round_trip(buffer, case, seed)
    if kind != "cached":  # that has three calls already
        bodies.round_trip(buffer, case, seed + 1, combines=False)
    group.barrier()
    bodies.check_bases(buffer)


def run_schedule(topology: tuple[int, int], seed: int, **options: Any) -> str:
    """Run one, and return what it does. Whatever goes wrong is raised, with a note that names it.

    Args:
        topology: scale-out and scale-up ranks.
        seed: of the schedule and of what it does.
        options: more of ``World``.
    """
    kind, case = case_of(topology, seed)
    faults: dict[str, list[Fault]] = {
        "one source stalled": [StallSource(seed // len(KINDS) % case.world_size)],
        "late bodies": [LateBody(count=None, skip=seed // len(KINDS) % 3)],
    }
    try:
        # Programs of a rank wait for each other too, but most of what can go wrong needs two of them at most.
        world = World(case.world_size, seed, faults=faults.get(kind), num_programs=1 + (seed // 2) % 2, **options)
        world.run(partial(calls, kind=kind, case=case, seed=seed))
    except Exception as error:
        note = f"schedule {seed} of {topology[0]}x{topology[1]}: {kind}"
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
        raise
    return kind


def schedules_until_shown(fault: str) -> int:
    """Plant a fault, and return how many schedules of 2x1 it takes until one goes wrong."""
    with faulty.planted(fault):
        for seed in range(SCHEDULES[2, 1]):
            try:
                run_schedule((2, 1), seed, max_steps=FAULTY_STEPS)
            except (AssertionError, SimulationError, CommError) as error:
                print(f"{fault}: {seed + 1} schedules, {type(error).__name__}", flush=True)
                return seed + 1
    raise AssertionError(f"no schedule of 2x1 shows: {fault}")


def seeds_of(topology: tuple[int, int], first: int, stride: int) -> Iterator[int]:
    yield from range(first, SCHEDULES[topology], stride)


def summary(ran: Iterable[tuple[tuple[int, int], str]], seconds: float, commit: str | None) -> dict[str, Any]:
    """What is kept: how many schedules of each topology and kind ran, all of them right."""
    ran = list(ran)
    return {
        "command": ["python", "-m", "tests.ep.campaign"],
        "commit": commit,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("torch", "triton")}},
        "schedules": len(ran),
        "failures": 0,
        "seconds": round(seconds),
        "by_topology": dict(Counter(f"{out}x{up}" for (out, up), _ in ran)),
        "by_kind": dict(Counter(kind for _, kind in ran)),
        "by_topology_and_kind": dict(Counter(f"{out}x{up} {kind}" for (out, up), kind in ran)),
        "planted": {},
    }


def _version(package: str) -> str:
    module: Any = __import__(package)
    return str(module.__version__)


def _head() -> str | None:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _add(kept: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """``found`` with what an earlier run of the same commit kept."""
    if kept["commit"] != found["commit"]:
        raise SystemExit(f"the file is of commit {kept['commit']}, this is {found['commit']}; use another file")
    total = dict(found)
    for name, value in kept.items():
        if isinstance(value, int):
            total[name] = value + found[name]
        elif name == "planted":
            total[name] = {**value, **found[name]}
        elif name.startswith("by_"):
            total[name] = dict(Counter(value) + Counter(found[name]))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="*", default=[f"{out}x{up}" for out, up in SCHEDULES], help="such as 2x1")
    parser.add_argument("--first", type=int, default=0, help="seed to begin with (0)")
    parser.add_argument("--stride", type=int, default=1, help="run every so-maniest schedule (1)")
    parser.add_argument("--planted", action="store_true", help="also plant every fault")
    parser.add_argument("--commit", help="git commit to record where the source tree has no history")
    parser.add_argument("--out", type=Path, help="JSON file to add the summary to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fill_uninitialized_memory()
    started, ran = time.monotonic(), []
    for name in args.topology:
        topology = tuple(map(int, name.split("x")))
        assert len(topology) == 2
        before = time.monotonic()
        for seed in seeds_of(topology, args.first, args.stride):
            ran.append((topology, run_schedule(topology, seed)))
        print(f"{name}: {len(ran)} schedules so far, {time.monotonic() - before:.0f} s", flush=True)
    found = summary(ran, time.monotonic() - started, args.commit or _head())
    if args.planted:
        found["planted"] = {fault: schedules_until_shown(fault) for fault in faulty.FAULTS}
    if args.out is None:
        print(json.dumps(found, indent=1))
        return
    if args.out.exists():
        found = _add(json.loads(args.out.read_text()), found)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
