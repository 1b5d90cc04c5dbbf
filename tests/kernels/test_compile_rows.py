"""The token-wise kernels compile for a GPU, on a machine without one, once for all row counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

ROWS = (1, 2, 16, 127, 128)  # 1, multiples of 16, and neither
#: Columns: rows on 16 bytes, and not.
COLUMNS = {"aligned": 256, "unaligned": 251}
FUNCTIONS = ("gelu_tanh", "gelu_erf", "gelu_sigmoid", "relu", "silu", "squared_relu", "sigmoid")


def _counts(capacity: int, every: bool) -> Iterator[tuple[torch.Tensor | None, int]]:
    """A count aligned to 16 bytes or not, as one of several in a tensor is not; other shards; perhaps none."""
    if every:
        yield None, 1
    several = torch.full((4,), capacity, dtype=torch.int32)
    yield several[0], 1
    yield several[1], 2


def _drive(dtype_name: str, columns: int, every: bool) -> dict[str, Any]:
    """Runs in the child process; ``every``: all activations, and launches without a count."""
    from tests.kernels.compiling import Compiler
    from triton_overlap.kernels import activation, add, column_sum, cross_entropy, layer_norm, rotary, rows

    compiler = Compiler()
    rows.launch_kernel = compiler  # type: ignore[attr-defined]
    dtype = getattr(torch, dtype_name)
    weight, angles = torch.zeros(columns, dtype=dtype), torch.zeros(64, 32)
    for count in ROWS:
        x, wide = torch.zeros(count, columns, dtype=dtype), torch.zeros(count, 2 * columns, dtype=dtype)
        qkv = torch.zeros(count, 2, 4, 48, dtype=dtype)
        labels, cu_seqlens = torch.zeros(count, dtype=torch.int64), torch.zeros(count + 1, dtype=torch.int32)
        for active_tokens, shards in _counts(count, every):
            active: dict[str, Any] = {"active_tokens": active_tokens, "shards": shards}
            add.launch(x, x, **active)
            column_sum.launch(x, **active)
            for function in FUNCTIONS if every else FUNCTIONS[:1]:
                activation.launch(x, function, gated=False, **active)
                activation.launch_gradient(x, x, function, gated=False, **active)
            activation.launch(wide, "silu", gated=True, **active)
            activation.launch_gradient(x, wide, "silu", gated=True, **active)
            for centred in (True, False):
                _, statistics = layer_norm.launch(
                    x, weight, weight if centred else None, 1e-5, centred=centred, **active
                )
                layer_norm.launch_input_gradient(x, x, weight, statistics, **active)
                layer_norm.launch_parameter_gradient(x, x, statistics, with_bias=centred, **active)
            layer_norm.launch(x, weight, None, 1e-6, centred=True, **active)  # another eps is no other kernel
            loss, normalizers, scale = cross_entropy.launch(x, labels, -100, mean=True, **active)
            cross_entropy.launch(x, labels, 0, mean=True, **active)
            cross_entropy.launch_gradient(loss, x, labels, -100, normalizers, scale, **active)
            for turn, inverse in ((angles, False), (angles, True), (None, False)):
                rotary.launch_into(
                    torch.empty_like(qkv), qkv, turn, cu_seqlens, inverse=inverse, active_tokens=active_tokens
                )
    return {
        "keys": {name: len(keys) for name, keys in compiler.keys.items()},
        "ours": {name: len(keys) for name, keys in compiler.own_keys.items()},
        # The slow path of cos and sin, for angles that are no positions, has a table on the stack.
        "spills": [name for name, b in compiler.binaries if "st.local" in b.asm["ptx"] and name != "rotary_kernel"],
        "vectors": sorted({name for name, b in compiler.binaries if "ld.global.v4" in b.asm["ptx"]}),
    }


@pytest.mark.parametrize(
    ("dtype", "sizes", "every"),
    [
        ("bfloat16", "aligned", False),
        pytest.param("bfloat16", "unaligned", True, marks=pytest.mark.long),
        pytest.param("float16", "aligned", True, marks=pytest.mark.long),
        pytest.param("float32", "aligned", True, marks=pytest.mark.long),
    ],
)
def test_one_compilation_serves_every_row_count(dtype: str, sizes: str, every: bool) -> None:
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.kernels.test_compile_rows import main; main({dtype!r}, {sizes!r}, {every})",
        ],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    report = json.loads(child.stdout.splitlines()[-1])
    functions = len(FUNCTIONS) if every else 1
    choices = {  # what a caller may choose; a row count is not among it
        "add_kernel": 1,
        "column_sum_kernel": 1,
        "activation_kernel": functions + 1,  # and one that is gated
        "activation_gradient_kernel": functions + 1,
        "layer_norm_kernel": 2 + 1,  # RMSNorm, and LayerNorm with a bias and without
        "layer_norm_input_gradient_kernel": 2,
        "layer_norm_parameter_gradient_kernel": 2,
        "cross_entropy_kernel": 1,
        "sum_losses_kernel": 1,
        "cross_entropy_gradient_kernel": 1,
        "rotary_kernel": 3,  # turned either way, or copied
    }
    expected = {name: count * (2 if every else 1) for name, count in choices.items()}  # with a count and without
    assert report["keys"] == expected
    assert report["ours"] == expected, "what specializations() counts is what Triton compiles"
    assert not report["spills"]
    if sizes == "aligned":
        assert set(report["vectors"]) >= set(expected) - {"sum_losses_kernel"}, "16 bytes a load"


def main(dtype: str, sizes: str, every: bool) -> None:
    print(json.dumps(_drive(dtype, COLUMNS[sizes], every)))
