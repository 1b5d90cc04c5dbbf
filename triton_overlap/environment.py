"""What a result was measured on: hardware, versions, commit and clocks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout, or no git: the caller records that there is no commit
    return found.stdout.strip()


def commit() -> str | None:
    """The commit of this checkout, marked where tracked files differ from it; None outside a checkout."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}-modified" if _git("status", "--porcelain", "--untracked-files=no") else head


def versions() -> dict[str, str | None]:
    """Versions of whatever takes part."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "triton-overlap"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None  # run from a source tree that was not installed
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def _nvml(index: int) -> dict[str, Any]:
    """Driver, clocks and power of a GPU; in place of what cannot be read, why. The timings are worth keeping."""
    try:
        import pynvml
    except ImportError as error:
        return {"driver": f"not read: {error}; install nvidia-ml-py"}

    def read(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except pynvml.NVMLError as error:
            return f"not read: {error}"

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return {"driver": f"not read: {error}"}
    found = {
        "driver": str(read(pynvml.nvmlSystemGetDriverVersion)),
        "sm_clock_mhz": read(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": read(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": read(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        "power_mw": read(pynvml.nvmlDeviceGetPowerUsage, handle),
    }
    pynvml.nvmlShutdown()
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """The device, its driver and, while it is warm, its clocks. Call it right after the timings."""
    if device.type != "cuda":
        return {"device": f"{platform.machine()} CPU", "cores": os.cpu_count()}
    properties = torch.cuda.get_device_properties(device)
    found: dict[str, Any] = {
        "device": properties.name,
        "count": torch.cuda.device_count(),
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "capability": list(torch.cuda.get_device_capability(device)),
    }
    return found | _nvml(device.index or 0)
