"""Every kernel compiles for a GPU, on a machine without one, once for all token counts.

The interpreter accepts much that the compiler does not, and never specialises. So a fresh process, without
TRITON_INTERPRET, drives the launchers at many token counts, binds the arguments as Triton's own launcher would,
compiles for compute capability 9.0 and reports what was compiled for how many keys.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

ROWS = (1, 2, 15, 16, 127, 128, 129, 512, 1000, 1024)  # of a chunk: 1, multiples of 16, and neither
#: (hidden, other) sizes: rows on 16 bytes, which go through descriptors, and not
SIZES = {"descriptors": (512, 256), "pointers": (509, 251)}


def _drive(dtype_name: str, sizes: str) -> dict[str, Any]:
    """Runs in the child process."""
    from tests.kernels.compiling import Compiler, OneRankOfMany
    from triton_overlap.comm.group import Group
    from triton_overlap.kernels import (
        all_gather,
        all_gather_matmul,
        matmul_reduce_scatter,
        reduce_scatter,
        weight_gradient,
    )

    compiler = Compiler()
    for module in (all_gather, all_gather_matmul, matmul_reduce_scatter, reduce_scatter, weight_gradient):
        module.launch_kernel = compiler  # type: ignore[attr-defined]
    dtype = getattr(torch, dtype_name)
    hidden, other = SIZES[sizes]
    for world_size in (2, 8):
        buffer = Group(OneRankOfMany(world_size)).user_buffer(1024 * world_size, hidden, dtype)
        for rows in ROWS:
            tokens = rows * world_size
            x, a = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(tokens, other, dtype=dtype)
            weight = torch.zeros(other, hidden, dtype=dtype)
            all_gather_matmul.launch(buffer, x, weight.t(), gather=rows % 2 == 0)
            all_gather_matmul.launch(buffer, x, weight.t().contiguous(), torch.zeros(other, dtype=dtype))
            matmul_reduce_scatter.launch(buffer, a, weight)
            matmul_reduce_scatter.launch(buffer, a, weight.t().contiguous().t(), torch.zeros(hidden, dtype=dtype))
            all_gather.launch(buffer, x)
            gradient = torch.zeros(tokens, hidden, dtype=dtype)
            reduce_scatter.launch(buffer, gradient)
            weight_gradient.launch(a, gradient)
            weight_gradient.launch(a, gradient, torch.zeros(other, hidden))
    return {
        "keys": {name: len(keys) for name, keys in compiler.keys.items()},
        "ours": {name: len(keys) for name, keys in compiler.own_keys.items()},
        "spills": {name: binary.asm["ptx"].count("st.local") for name, binary in compiler.binaries},
        "shared": max(binary.metadata.shared for _, binary in compiler.binaries),
        "tensor_cores": sorted({name for name, binary in compiler.binaries if "wgmma" in binary.asm["ptx"]}),
        "descriptors": sorted(
            {name for name, binary in compiler.binaries if "cp.async.bulk.tensor" in binary.asm["ptx"]}
        ),
        "proxy_fences": sorted({name for name, b in compiler.binaries if "fence.proxy.async;" in b.asm["ptx"]}),
    }


GEMMS = {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel", "weight_gradient_kernel"}


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", "descriptors"),
        ("float32", "descriptors"),
        ("bfloat16", "pointers"),
        pytest.param("float16", "descriptors", marks=pytest.mark.long),
        pytest.param("float16", "pointers", marks=pytest.mark.long),
        pytest.param("float32", "pointers", marks=pytest.mark.long),
    ],
)
def test_one_compilation_serves_every_token_count(dtype: str, sizes: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", f"from tests.kernels.test_compile import main; main({dtype!r}, {sizes!r})"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    report = json.loads(child.stdout.splitlines()[-1])
    # One for each way B may be stored, with a bias and without one; none for a token count.
    expected = {
        "all_gather_matmul_kernel": 2,
        "matmul_reduce_scatter_kernel": 2,
        "all_gather_kernel": 1,
        "reduce_scatter_kernel": 1,
        "weight_gradient_kernel": 2,
    }
    assert report["keys"] == expected
    assert report["ours"] == expected, "what specializations() counts is what Triton compiles"
    assert report["shared"] <= 232448, "shared memory of one multiprocessor of compute capability 9.0"
    assert not any(report["spills"].values())
    if sizes == "descriptors":
        assert set(report["descriptors"]) == GEMMS
        # Both read through descriptors what a peer stored.
        assert {"all_gather_matmul_kernel", "matmul_reduce_scatter_kernel"} <= set(report["proxy_fences"])
        assert set(report["tensor_cores"]) == (set() if dtype == "float32" else GEMMS)


def main(dtype: str, sizes: str) -> None:
    print(json.dumps(_drive(dtype, sizes)))
