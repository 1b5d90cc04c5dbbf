"""Backends, loaded when asked for: none of them is imported with this package."""

from __future__ import annotations

import importlib
import os
from typing import cast

import torch
import torch.distributed as dist

from triton_overlap.comm.backend import Backend
from triton_overlap.comm.bootstrap import Bootstrap, LocalBootstrap, StoreBootstrap
from triton_overlap.errors import BackendError

#: Name to module and class. The simulator's backend is made by ``triton_overlap.sim.World``, not here.
_BACKENDS = {
    "cuda": ("cuda", "CudaBackend"),
    "nvshmem": ("cuda", "NvshmemBackend"),
    "shm": ("shm", "ShmBackend"),
}


def create(name: str, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> Backend:
    """A backend for the ranks of ``process_group``. Collective: every rank of the group calls it alike.

    Args:
        name: ``"cuda"``, ``"nvshmem"``, ``"shm"`` or ``"auto"``. ``"auto"`` is ``"cuda"`` where every rank sees a GPU
            and its kernels are compiled for it, else ``"shm"``; it is the same on every rank.
        process_group: the ranks. None means the world of ``torch.distributed`` where that is initialised, else a
            group of this process alone.
        timeout_s: how long construction waits for the other ranks, in seconds.

    Raises:
        ValueError: unknown name.
        BackendError: the backend cannot run here; says why and what would help.
        CommTimeoutError: names the ranks that did not come.
    """
    if name not in ("auto", *_BACKENDS):
        known = ", ".join(repr(known) for known in ("auto", *_BACKENDS))
        hint = "; a simulated group is made by triton_overlap.sim.World" if name == "sim" else ""
        raise ValueError(f"unknown backend {name!r}; known are {known}{hint}")
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    bootstrap: Bootstrap = LocalBootstrap() if process_group is None else StoreBootstrap(process_group)
    if name == "auto":
        name = _choose(bootstrap, timeout_s)
    module_name, class_name = _BACKENDS[name]
    try:
        module = importlib.import_module(f"{__name__}.{module_name}")
    except ImportError as error:
        raise BackendError(f"the {name} backend cannot be loaded: {type(error).__name__}: {error}") from error
    return cast(Backend, getattr(module, class_name)(bootstrap, timeout_s, process_group))


def _choose(bootstrap: Bootstrap, timeout_s: float) -> str:
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    usable = torch.cuda.is_available() and not interpreted
    return "cuda" if all(bootstrap.all_gather_object(usable, timeout_s)) else "shm"
