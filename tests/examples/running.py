"""Examples run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def run_example(
    script: str, arguments: list[str], out: Path, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),  # also where the library is not installed
        "TRITON_INTERPRET": "1",
    }
    return subprocess.run(
        [sys.executable, f"examples/{script}", *arguments, "--out", str(out)],
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
