"""Every tile configuration that ``tune`` tries compiles for a GPU, without one, once for all token counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

ROWS = (1, 127, 128, 512)
#: Shared memory of one multiprocessor of compute capability 9.0, in bytes.
SHARED = 232448


def _drive(dtype_name: str) -> dict[str, Any]:
    """Runs in the child process: for each configuration and kernel its compilations, shared memory and spills."""
    from tests.kernels.compiling import Compiler, OneRankOfMany
    from triton_overlap.comm.group import Group
    from triton_overlap.kernels import all_gather_matmul, by_method, matmul_reduce_scatter
    from triton_overlap.kernels.methods import Method
    from triton_overlap.tuning import default_candidates

    dtype, report = getattr(torch, dtype_name), {}
    buffer = Group(OneRankOfMany(2)).user_buffer(1024, 512, dtype)
    candidates = default_candidates("matmul_reduce_scatter", dtype)
    for method in map(Method.parse, candidates):
        if method.name != "fused":
            continue
        compiler = Compiler()
        for module in (all_gather_matmul, matmul_reduce_scatter):
            module.launch_kernel = compiler  # type: ignore[attr-defined]
        for rows in ROWS:
            x, a = torch.zeros(rows, 512, dtype=dtype), torch.zeros(2 * rows, 256, dtype=dtype)
            weight = torch.zeros(256, 512, dtype=dtype)
            by_method.all_gather_matmul(buffer, x, [weight.t()], [None], method=method)
            by_method.matmul_reduce_scatter(buffer, a, weight.t().contiguous().t(), method=method)
        report[str(method)] = {
            name: [len(compiler.keys[name]), binary.metadata.shared, binary.asm["ptx"].count("st.local")]
            for name, binary in compiler.binaries
        }
    return report


def main(dtype: str) -> None:
    print(json.dumps(_drive(dtype)))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_tiles_fit_and_are_compiled_once(dtype: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", f"from tests.kernels.test_compile_tiles import main; main({dtype!r})"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    report = json.loads(child.stdout.splitlines()[-1])
    assert "fused" in report
    assert len(report) > 1
    for method, kernels in report.items():
        assert set(kernels) == {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel"}
        for name, (compilations, shared, spills) in kernels.items():
            assert compilations == 1, f"{method} {name}"
            assert shared <= SHARED, f"{method} {name} takes {shared} bytes of shared memory"
            assert spills == 0, f"{method} {name} spills registers"
