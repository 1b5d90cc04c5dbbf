"""The kernels between ordinary GEMMs compile for a GPU, on a machine without one, once for all token counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

ROWS = (1, 2, 15, 16, 127, 128, 129, 512)  # of a chunk: 1, multiples of 16, and neither
#: Rows on 16 bytes, and not.
HIDDEN = {"aligned": 256, "unaligned": 251}


def _drive(dtype_name: str, hidden: int) -> dict[str, Any]:
    """Runs in the child process."""
    from tests.kernels.compiling import Compiler, OneRankOfMany
    from triton_overlap.comm.group import Group
    from triton_overlap.kernels import bulk, pipeline, ring_exchange, steps
    from triton_overlap.kernels.methods import Method

    compiler = Compiler()
    steps.launch_kernel = compiler  # type: ignore[attr-defined]
    dtype = getattr(torch, dtype_name)
    for world_size in (2, 3):
        buffer = Group(OneRankOfMany(world_size)).user_buffer(512 * world_size, hidden, dtype)
        b, c = torch.zeros(hidden, 64, dtype=dtype), torch.zeros(64, hidden, dtype=dtype)
        bias = torch.zeros(hidden, dtype=dtype)
        for rows in ROWS:
            x, a = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(rows * world_size, 64, dtype=dtype)
            for aggregate in (None, True):
                method = Method("ring_exchange", aggregate=aggregate)
                ring_exchange.all_gather_matmul(buffer, x, [b], [None], gather=rows % 2 == 0, method=method)
            ring_exchange.matmul_reduce_scatter(buffer, a, c, bias, method=Method("ring_exchange"))
            ring_exchange.matmul_reduce_scatter(buffer, a, c, method=Method("ring_exchange"))
            pipeline.matmul_reduce_scatter(buffer, a, c, bias, method=Method("pipeline"))
            bulk.all_gather(buffer, x, b, c, method=Method("bulk"))
            bulk.reduce_scatter(buffer, x.new_zeros(rows * world_size, hidden), b, c, method=Method("bulk"))
    return {
        "keys": {name: len(keys) for name, keys in compiler.keys.items()},
        "ours": {name: len(keys) for name, keys in compiler.own_keys.items()},
        "spills": {name: binary.asm["ptx"].count("st.local") for name, binary in compiler.binaries},
        "vectors": sorted({name for name, binary in compiler.binaries if "ld.global.v4" in binary.asm["ptx"]}),
    }


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", "aligned"),
        pytest.param("bfloat16", "unaligned", marks=pytest.mark.long),
        pytest.param("float32", "aligned", marks=pytest.mark.long),
    ],
)
def test_one_compilation_serves_every_token_count(dtype: str, sizes: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", f"from tests.kernels.test_compile_methods import main; main({dtype!r}, {sizes!r})"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    report = json.loads(child.stdout.splitlines()[-1])
    expected = {  # none for a token count
        "open_kernel": 1,
        "arrival_kernel": 1,
        "push_kernel": 2,  # one chunk for all, or one for each owner
        "reduce_kernel": 2,  # with a bias and without
        "close_kernel": 1,
        "fill_kernel": 1,
    }
    assert report["keys"] == expected
    assert report["ours"] == expected, "what specializations() counts is what Triton compiles"
    assert not any(report["spills"].values())
    if sizes == "aligned":
        assert {"push_kernel", "reduce_kernel"} <= set(report["vectors"]), "16 bytes a load"


def main(dtype: str, sizes: str) -> None:
    print(json.dumps(_drive(dtype, HIDDEN[sizes])))
