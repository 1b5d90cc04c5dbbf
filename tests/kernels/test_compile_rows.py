"""The token-wise kernels compile for a GPU, on a machine without one, once for all row counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.compiling import VECTOR_LOAD, compiled
from triton_overlap.kernels import activation, add, column_sum, cross_entropy, layer_norm, rotary

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


def drive(dtype_name: str, sizes: str, every: bool) -> None:
    """``every``: all activations, and launches without a count."""
    dtype, columns = getattr(torch, dtype_name), COLUMNS[sizes]
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


def expected(every: bool) -> dict[str, int]:
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
    return {name: count * (2 if every else 1) for name, count in choices.items()}  # with a count and without


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
    found = compiled(drive, dtype, sizes, every)
    # The slow path of cos and sin, for angles that no position has, keeps a table on the stack.
    found.check(expected(every), stack={"rotary_kernel"})
    if sizes == "aligned":
        assert found.having(VECTOR_LOAD) >= set(expected(every)) - {"sum_losses_kernel"}, "16 bytes a load"
