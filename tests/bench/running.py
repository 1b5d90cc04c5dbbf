"""Runs a benchmark's command, in processes of its own or as one rank in this one."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from triton_overlap.bench.__main__ import main
from triton_overlap.bench.reports import load
from triton_overlap.bench.results import Results

ROOT = Path(__file__).resolve().parent.parent.parent


def run_bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "triton_overlap.bench", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """The variables of a group of one, as torchrun sets them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, rank):
        yield


def smoke_run(command: str, folder: Path, *arguments: str) -> tuple[Results, str]:
    """What a smoke run with one rank, in this process, keeps, and what it prints; it draws a figure too."""
    figure = folder / "figure.png"
    printed = io.StringIO()
    with one_rank(), contextlib.redirect_stdout(printed):
        assert main([command, "--smoke", "--out", str(folder), "--plot", str(figure), *arguments]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    (path,) = folder.glob("*.json")
    assert str(folder) not in path.read_text(), "results do not name places"
    kept = load(path)
    assert isinstance(kept, Results)
    return kept, printed.getvalue()
