"""One rank of a benchmark: its process group, its timer, and how fast the link to its peers is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import triton_overlap as to
from triton_overlap.timing import SLEEP_CYCLES, EventTimer, HostTimer, Timer


@contextmanager
def ranks(*, backend: str = "auto", share_gpus: bool = False) -> Iterator[to.Group]:
    """This rank's group, over the process group that torchrun's variables describe.

    Args:
        backend: of the group.
        share_gpus: ranks may be more than GPUs; they then share them, and times mean nothing.

    Raises:
        ValueError: more ranks than GPUs without ``share_gpus``.
    """
    _start(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), share_gpus)
    group = to.init_group(backend=backend)
    try:
        yield group
    finally:
        group.close()
        dist.destroy_process_group()


def _start(rank: int, local_rank: int, share_gpus: bool) -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group("gloo")
        return
    count = torch.cuda.device_count()
    if local_rank >= count and not share_gpus:
        raise ValueError(f"rank {rank} needs GPU {local_rank}, this machine has {count}")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    if int(os.environ["WORLD_SIZE"]) > count:
        dist.init_process_group("gloo")  # nccl refuses to share a GPU
    else:
        dist.init_process_group("nccl", device_id=device)


def gpus_are_shared(group: to.Group) -> bool:
    """Whether the ranks are more than the GPUs of this machine."""
    return group.device.type == "cuda" and group.world_size > torch.cuda.device_count()


def timer_of(group: to.Group, sleep_cycles: int = SLEEP_CYCLES) -> Timer:
    """How a call is timed on the group's device; ``sleep_cycles`` as in ``EventTimer``."""
    if group.device.type != "cuda":
        return HostTimer(dist.barrier)
    if dist.get_backend() != "nccl":
        return EventTimer(dist.barrier, lambda: None, sleep_cycles)
    one = torch.zeros(1, device=group.device)
    return EventTimer(dist.barrier, lambda: dist.all_reduce(one), sleep_cycles)


def copy_engine_gbps(device: torch.device, peer: torch.device, num_bytes: int = 1 << 28, repeats: int = 10) -> float:
    """10^9 bytes a second that the copy engine moves from ``device`` to ``peer``, the best of ``repeats``."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=peer)
    best_ms = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return num_bytes / best_ms / 1e6


@dataclass(frozen=True)
class Link:
    """What bytes of a call go over.

    Attributes:
        name: ``"link"`` to the next rank's GPU, or ``"memory"`` where no rank has a GPU of its own to send to.
        gbps: 10^9 bytes a second that are copied, the least over the ranks; None without GPUs.
    """

    name: str
    gbps: float | None

    def time_ms(self, num_bytes: float) -> float:
        """What ``num_bytes`` need; 0 where the rate is not known."""
        return num_bytes / self.gbps / 1e6 if self.gbps else 0.0


def measure_link(group: to.Group) -> Link:
    """Collective."""
    alone = group.world_size == 1 or gpus_are_shared(group)
    name = "memory" if alone else "link"
    if group.device.type != "cuda":
        return Link(name, None)
    index = group.device.index or 0
    peer = index if alone else (index + 1) % torch.cuda.device_count()
    rate = copy_engine_gbps(group.device, torch.device("cuda", peer))
    return Link(name, min(group.all_gather_object(rate)))
