"""The operations on GPUs: 2 ranks with one each, 4 and 8 ranks that share them."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import Ranks
from tests.ops import bodies
from tests.ops.cases import DTYPES, FULL_GPU, ODD_GPU, Sizes, on_ranks, with_group_async

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sizes", (FULL_GPU, ODD_GPU), ids=("aligned", "unaligned"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(gpu_ranks: Ranks, dtype: torch.dtype, sizes: Sizes) -> None:
    on_ranks(gpu_ranks, bodies.values, sizes, dtype)


@pytest.mark.parametrize(
    "body",
    (
        bodies.replicated,
        bodies.microbatches,
        bodies.no_grad,
        bodies.checkpointing,
        bodies.main_grad,
        bodies.layouts,
        bodies.needed_gradients,
        bodies.raw_operator,
        bodies.fresh_outputs,
    ),
    ids=lambda body: body.__name__,
)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_uses(gpu_ranks: Ranks, body: bodies.Body, dtype: torch.dtype) -> None:
    on_ranks(gpu_ranks, body, FULL_GPU, dtype)


def test_autocast(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, bodies.autocast, FULL_GPU)


def test_errors(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, bodies.errors, FULL_GPU)


def test_side_streams(gpu_ranks: Ranks) -> None:
    # Without the synchronisation that check="sync" does after every call.
    gpu_ranks.run(with_group_async, bodies.side_streams, FULL_GPU, torch.bfloat16)


def test_opcheck() -> None:
    on_ranks(Ranks(2, "cuda"), bodies.opcheck, FULL_GPU)


def test_compiled_for_every_token_count() -> None:
    on_ranks(Ranks(2, "cuda"), bodies.compiled, FULL_GPU, torch.bfloat16)
