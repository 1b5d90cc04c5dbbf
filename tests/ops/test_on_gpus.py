"""The operations on GPUs: 2 ranks with one each, 4 and 8 ranks that share them."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import Ranks
from tests.ops import compiler_bodies, error_bodies, use_bodies, value_bodies
from tests.ops.cases import DTYPES, FULL_GPU, ODD_GPU, Body, Sizes, on_ranks, with_group_async

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sizes", (FULL_GPU, ODD_GPU), ids=("aligned", "unaligned"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(gpu_ranks: Ranks, dtype: torch.dtype, sizes: Sizes) -> None:
    on_ranks(gpu_ranks, value_bodies.values, sizes, dtype)


@pytest.mark.parametrize("body", (value_bodies.replicated, *use_bodies.USES), ids=lambda body: body.__name__)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_uses(gpu_ranks: Ranks, body: Body, dtype: torch.dtype) -> None:
    on_ranks(gpu_ranks, body, FULL_GPU, dtype)


def test_autocast(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, use_bodies.autocast, FULL_GPU)


def test_errors(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, error_bodies.errors, FULL_GPU)


def test_side_streams(gpu_ranks: Ranks) -> None:
    # Without the synchronisation that check="sync" does after every call.
    gpu_ranks.run(with_group_async, use_bodies.side_streams, FULL_GPU, torch.bfloat16)


def test_opcheck() -> None:
    on_ranks(Ranks(2, "cuda"), compiler_bodies.opcheck, FULL_GPU)


def test_compiled_for_every_token_count() -> None:
    on_ranks(Ranks(2, "cuda"), compiler_bodies.compiled, FULL_GPU, torch.bfloat16)


def test_opcheck_of_counts_and_epilogues() -> None:
    on_ranks(Ranks(2, "cuda"), compiler_bodies.opcheck_of_counts_and_epilogues, FULL_GPU)


def test_reduce_overhead() -> None:
    on_ranks(Ranks(2, "cuda"), compiler_bodies.reduce_overhead, FULL_GPU, torch.bfloat16)
