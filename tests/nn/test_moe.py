"""``nn.MoE`` on rank processes, in the simulator and on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import triton_overlap as to
from tests.distributed import Ranks
from tests.nn import moe_bodies
from tests.nn.moe_bodies import Case
from tests.ops.cases import in_simulator, on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BALANCED = to.nn.RouterSettings("softmax", balance_coefficient=0.1)
SIGMOID = to.nn.RouterSettings("sigmoid", normalize=True, scale=2.5, balance_coefficient=0.1)
#: Down to no token on a rank, and on all.
RAGGED = ((5, 3), (0, 8), (1, 0), (0,))
CASES = {
    "softmax": (FP32, Case(tokens=RAGGED)),
    "sigmoid": (FP32, Case(router=SIGMOID, shared=16, activation="gelu", tokens=RAGGED[:2])),
    "balanced": (FP32, Case(router=BALANCED, experts_per_rank=3, top_k=3, cpu_sync=False, tokens=RAGGED[:3])),
    "one expert": (FP32, Case(top_k=1, one_expert=True)),
    "bfloat16": (BF16, Case(shared=16)),
    "float16": (FP16, Case(activation="geglu")),
}
GPU = Case(hidden=256, ffn=192, experts_per_rank=4, top_k=3, max_tokens=160, tokens=((100, 37), (0, 160), (1, 0)))
#: Cases of every run; the others are like one of them in all but one setting.
FIRST = ("balanced", "one expert", "bfloat16")


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_values(name: str) -> None:
    dtype, case = CASES[name]
    on_ranks(2, moe_bodies.values, case, dtype)


@pytest.mark.long
@pytest.mark.parametrize("ranks", (1, 4))
@pytest.mark.parametrize("name", CASES)
def test_values_at_other_group_sizes(name: str, ranks: int) -> None:
    dtype, case = CASES[name]
    on_ranks(ranks, moe_bodies.values, case, dtype)


@pytest.mark.parametrize("cpu_sync", (True, pytest.param(False, marks=pytest.mark.long)))
def test_no_specialisation_after_the_first_call(cpu_sync: bool) -> None:
    case = Case(router=BALANCED, shared=16, cpu_sync=cpu_sync, tokens=(*RAGGED, (7, 2)))
    on_ranks(2, moe_bodies.steady, case, BF16)


@pytest.mark.parametrize(
    "body",
    (
        moe_bodies.state,
        moe_bodies.main_grad,
        moe_bodies.autocast,
        moe_bodies.beside_tensor_parallelism,
        moe_bodies.settings,
    ),
    ids=lambda body: body.__name__,
)
def test_uses(body: object) -> None:
    on_ranks(2, body, Case(router=BALANCED if body is moe_bodies.state else Case().router))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("cpu_sync", (True, False))
def test_compiled_for_every_count(cpu_sync: bool) -> None:
    # torch.compile specialises dimensions of 0 and 1.
    on_ranks(2, moe_bodies.compiled, Case(shared=16, cpu_sync=cpu_sync, tokens=((5, 3), (2, 8), (7, 4))))


def test_in_the_simulator() -> None:
    in_simulator(2, 0, moe_bodies.values, Case(router=BALANCED, tokens=((2, 0),)), FP32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_on_gpus(gpu_ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    sizes = {"hidden": 256, "ffn": 192, "max_tokens": 160, "tokens": GPU.tokens}
    on_ranks(gpu_ranks, moe_bodies.values, replace(CASES[name][1], **sizes), dtype)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("cpu_sync", (True, False))
def test_uses_on_gpus(gpu_ranks: Ranks, cpu_sync: bool) -> None:
    on_ranks(gpu_ranks, moe_bodies.steady, replace(GPU, cpu_sync=cpu_sync), BF16)
    on_ranks(gpu_ranks, moe_bodies.main_grad, replace(GPU, cpu_sync=cpu_sync))
