"""What a dispatch's cut into puts costs a network that charges for each put and for each byte, by simulation.

Two ranks, each a scale-out rank of its own, dispatch once in the simulator, with the real kernels. The network
interface of a rank sends one put after the other, so what a put costs adds up, in whatever order puts land. The counts
of puts and bytes are exact; the time is theirs at the costs that are given, not a measurement.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track

from triton_overlap import ExpertBuffer, Group, environment, reference
from triton_overlap.bench.ep import VARIANTS
from triton_overlap.bench.ep_problems import EpProblem
from triton_overlap.bench.reports.ep_puts import Row
from triton_overlap.bench.results import Results, now
from triton_overlap.problems import WrongResult
from triton_overlap.sim import NetworkCost, NetworkUse, World

#: Scale-out ranks, one scale-up rank each.
WORLD_SIZE = 2
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """What is simulated.

    Attributes:
        problems: as ``EpProblem.parse`` reads them.
        cost: of a put.
        num_sms, channels_per_sm: their product is the number of channels.
        seed: of inputs and of the schedule.
        processes: simulations at a time.
        command, commit: kept with the results.
    """

    problems: Sequence[str]
    cost: NetworkCost
    num_sms: int
    channels_per_sm: int
    seed: int
    processes: int
    command: list[str]
    commit: str | None


def simulate(problem: EpProblem, variant: tuple[int, int], settings: Settings) -> Row:
    """One dispatch of every rank, compared with the twin, and what it has put.

    Raises:
        WrongResult: a row was not received as it was sent.
    """
    min_tokens_per_part, num_sub_parts = variant

    def dispatch(group: Group) -> list[list[int]]:
        buffer = ExpertBuffer(
            group,
            num_max_tokens_per_rank=problem.tokens,
            hidden=problem.hidden,
            num_topk=problem.topk,
            num_experts=problem.experts,
            num_scale_up=1,
            network="simulated",
            num_sms=settings.num_sms,
            channels_per_sm=settings.channels_per_sm,
            min_tokens_per_part=min_tokens_per_part,
            num_sub_parts=num_sub_parts,
        )
        everyone = [problem.inputs(rank, settings.seed, _CPU) for rank in range(WORLD_SIZE)]
        mine = everyone[group.rank]
        received, _, _, _, _ = buffer.dispatch(mine.x, mine.topk_idx)
        twin = reference.ep_dispatch([one.x for one in everyone], [one.topk_idx for one in everyone], problem.experts)
        if not isinstance(received, torch.Tensor) or not torch.equal(received, twin[group.rank][0]):
            raise WrongResult(f"{problem}: rank {group.rank} has not received what was sent")
        return [list(sizes) for sizes in buffer.layout.geometry.sub_part_sizes]

    world = World(WORLD_SIZE, settings.seed, check_races=False, network_cost=settings.cost)
    sub_parts = world.run(dispatch)[0]
    used = [sum(peers.values(), NetworkUse()) for peers in world.network]
    return Row(
        tokens=problem.tokens,
        hidden=problem.hidden,
        topk=problem.topk,
        experts=problem.experts,
        world_size=WORLD_SIZE,
        min_tokens_per_part=min_tokens_per_part,
        num_sub_parts=num_sub_parts,
        sub_parts=sub_parts,
        puts=[one.puts for one in used],
        num_bytes=[one.num_bytes for one in used],
        times_us=[one.time_ns / 1e3 for one in used],
    )


def run(settings: Settings, console: Console) -> Results:
    """Every variant of every problem, in processes of their own."""
    problems = [EpProblem.parse(text, WORLD_SIZE) for text in settings.problems]
    jobs = [(problem, variant) for problem in problems for variant in VARIANTS]
    with ProcessPoolExecutor(settings.processes, multiprocessing.get_context("spawn")) as pool:
        simulated = pool.map(functools.partial(simulate, settings=settings), *zip(*jobs, strict=True))
        rows = list(track(simulated, "dispatches", total=len(jobs), console=console))
    return Results(
        kind="ep_puts",
        created=now(),
        command=settings.command,
        commit=settings.commit or environment.commit(),
        hardware={"device": "simulated network"},
        versions=environment.versions(),
        method={
            "per_put_ns": settings.cost.per_put_ns,
            "per_byte_ns": settings.cost.per_byte_ns,
            "channels": settings.num_sms * settings.channels_per_sm,
            "seed": settings.seed,
            "time": "of a rank's network interface, which sends one put after the other, at these costs",
        },
        rows=rows,
    )
