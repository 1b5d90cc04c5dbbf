"""Backends, loaded when asked for: none of them is imported with this package."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from triton_overlap.comm.agreement import agree_on
from triton_overlap.comm.backend import Backend
from triton_overlap.comm.bootstrap import Bootstrap, LocalBootstrap, StoreBootstrap
from triton_overlap.comm.rules import check_timeout
from triton_overlap.errors import BackendError, CommError

#: Name to module and class. The simulator's backend is made by ``triton_overlap.sim.World``, not here.
_BACKENDS = {
    "cuda": ("cuda", "CudaBackend"),
    "nvshmem": ("cuda", "NvshmemBackend"),
    "shm": ("shm", "ShmBackend"),
}


#: How long a rank whose own ``timeout_s`` is none waits to tell the others so, in seconds.
_TIMEOUT_S = 300.0


def create(
    name: str,
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float = _TIMEOUT_S,
    judge: Callable[[], Mapping[str, object]] = dict,
) -> Backend:
    """A backend for the ranks of ``process_group``. Collective: every rank of the group calls it alike.

    Args:
        name: ``"cuda"``, ``"nvshmem"``, ``"shm"`` or ``"auto"``. ``"auto"`` is ``"cuda"`` where every rank sees a GPU
            and its kernels are compiled for it, else ``"shm"``; it is the same on every rank.
        process_group: the ranks. None means the world of ``torch.distributed`` where that is initialised, else a
            group of this process alone.
        timeout_s: how long construction waits for the other ranks, in seconds.
        judge: checks the caller's further arguments, which must be the same on every rank, and returns them by name.

    Raises:
        BackendError: the backend cannot run here; says why and what would help.
        CommTimeoutError: names the ranks that did not come.
        TypeError, ValueError: an argument is wrong, differs between ranks, or is an unknown name.

    All of these on every rank, where the ranks can meet: where ``process_group`` is right on each.
    """
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    # First of all: ranks that do not all make a bootstrap of their process group never meet in it again.
    bootstrap: Bootstrap = LocalBootstrap() if process_group is None else StoreBootstrap(process_group)

    def gather(value: Any, purpose: str) -> list[Any]:
        try:
            return bootstrap.all_gather_object(value, timeout_s if _is_timeout(timeout_s) else _TIMEOUT_S)
        except CommError as error:
            raise type(error)(f"{error}, to {purpose}") from error

    def judge_all() -> dict[str, object]:
        _check_name(name)
        check_timeout(timeout_s)
        return {"backend": name, "timeout_s": timeout_s, **judge()}

    agree_on(gather, "the arguments of a group", judge_all)
    if name == "auto":
        name = _choose(bootstrap, timeout_s)
    chosen = agree_on(gather, "the chosen backend", lambda: _load(name), lambda loaded: loaded.__name__)
    return cast(Backend, chosen(bootstrap, timeout_s, process_group))


def _check_name(name: object) -> None:
    known = ", ".join(repr(known) for known in ("auto", *_BACKENDS))
    if not isinstance(name, str):
        raise TypeError(f"backend must be the name of one, got {name!r}; known are {known}")
    if name not in ("auto", *_BACKENDS):
        hint = "; a simulated group is made by triton_overlap.sim.World" if name == "sim" else ""
        raise ValueError(f"unknown backend {name!r}; known are {known}{hint}")


def _is_timeout(timeout_s: object) -> bool:
    try:
        check_timeout(timeout_s)
    except (TypeError, ValueError):
        return False
    return True


def _load(name: str) -> Callable[..., Any]:
    """The class of the backend ``name``."""
    module_name, class_name = _BACKENDS[name]
    try:
        module = importlib.import_module(f"{__name__}.{module_name}")
    except ImportError as error:
        raise BackendError(f"the {name} backend cannot be loaded: {type(error).__name__}: {error}") from error
    return cast(Callable[..., Any], getattr(module, class_name))


def _choose(bootstrap: Bootstrap, timeout_s: float) -> str:
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    usable = torch.cuda.is_available() and not interpreted
    return "cuda" if all(bootstrap.all_gather_object(usable, timeout_s)) else "shm"
