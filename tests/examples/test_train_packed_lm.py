"""The example, run as a user runs it, for a few steps on small ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["--steps", "4", "--blocks", "1", "--hidden", "32", "--heads", "4", "--max-tokens", "128"]


def run_example(arguments: list[str], out: Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),  # also where the library is not installed
        "TRITON_INTERPRET": "1",
    }
    return subprocess.run(
        [sys.executable, "examples/train_packed_lm.py", *arguments, "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def check_report(output: str, ranks: int) -> None:
    assert f"{ranks} ranks on cpu, float32, 4 steps" in output
    assert re.search(r"kernel specialisations after step 1 +0\n", output)
    assert re.search(r"symmetric allocations after step 1 +0\n", output)
    counts = re.search(r"different token counts +(\d+)", output)
    assert counts is not None
    assert int(counts[1]) > 1
    losses = re.search(r"first and last +([\d.]+) +([\d.]+)", output)
    assert losses is not None
    assert float(losses[2]) < float(losses[1])


def test_it_keeps_its_promises_on_two_ranks(tmp_path: Path) -> None:
    found = run_example([*SMALL, "--ranks", "2"], tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    check_report(found.stdout, ranks=2)
    assert (tmp_path / "train_packed_lm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_it_keeps_its_promises_on_four_ranks(tmp_path: Path) -> None:
    found = run_example([*SMALL, "--ranks", "4"], tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    check_report(found.stdout, ranks=4)


def test_it_refuses_heads_that_the_ranks_do_not_divide(tmp_path: Path) -> None:
    found = run_example([*SMALL, "--ranks", "3"], tmp_path)
    assert found.returncode == 2
    assert "--heads must be a multiple of the 3 ranks, got 4" in found.stderr
