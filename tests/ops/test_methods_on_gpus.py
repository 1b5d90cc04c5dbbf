"""Methods other than the fused one on GPUs: 2 ranks with one each, 4 and 8 ranks that share them."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import Ranks
from tests.ops import method_bodies
from tests.ops.cases import DTYPES, FULL_GPU, ODD_GPU, Sizes, on_ranks, with_group_async

pytestmark = pytest.mark.gpu

GATHER = [
    "ring_exchange(use_ce=False)",
    "ring_exchange(aggregate=True,use_ce=False)",
    "ring_exchange(use_ce=True)",
    "ring_exchange(aggregate=True,use_ce=True)",
    "nccl",
]
REDUCE = [
    "ring_exchange(use_ce=False)",
    "ring_exchange(use_ce=True)",
    "pipeline",
    "pipeline(num_splits=3,num_sm=4)",
    "nccl",
]
BULK = ["bulk(use_ce=False)", "bulk(use_ce=True)"]
#: The copy engine sends by default from 512 rows of a chunk on.
LONG_CHUNKS = Sizes(hidden=512, features=384, rows=(700, 512, 511), max_rows=700)


@pytest.mark.parametrize("sizes", (FULL_GPU, ODD_GPU), ids=("aligned", "unaligned"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(gpu_ranks: Ranks, dtype: torch.dtype, sizes: Sizes) -> None:
    on_ranks(gpu_ranks, method_bodies.values, sizes, dtype, GATHER, REDUCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collective_beside_a_product(gpu_ranks: Ranks, dtype: torch.dtype) -> None:
    on_ranks(gpu_ranks, method_bodies.beside, ODD_GPU, dtype, BULK)


def test_default_sender() -> None:
    on_ranks(Ranks(2, "cuda"), method_bodies.values, LONG_CHUNKS, torch.bfloat16, ["ring_exchange"], ["ring_exchange"])


def test_methods_in_turn(gpu_ranks: Ranks) -> None:
    # Without the synchronisation that check="sync" does after every call.
    gpu_ranks.run(
        with_group_async, method_bodies.mixed, FULL_GPU, torch.bfloat16, ["fused", *GATHER], ["fused", *REDUCE]
    )


def test_without_sequence_parallelism(gpu_ranks: Ranks) -> None:
    on_ranks(gpu_ranks, method_bodies.all_reduce, FULL_GPU, torch.bfloat16, REDUCE)


@pytest.mark.parametrize(
    "mine", (("ring_exchange", "fused"), ("nccl", "fused"), ("nccl", "ring_exchange")), ids="-".join
)
def test_ranks_with_different_methods(gpu_ranks: Ranks, mine: tuple[str, str]) -> None:
    on_ranks(gpu_ranks, method_bodies.other_method, ODD_GPU, mine)
