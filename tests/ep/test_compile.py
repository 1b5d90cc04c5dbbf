"""The expert-parallel kernels compile for a GPU on a machine without one, once for all token counts and routings."""

from __future__ import annotations

import atexit
import os
import tempfile
from typing import Any

import pytest
import torch

from tests.kernels.compiling import OneRankOfMany, compiled
from triton_overlap.comm.group import Group
from triton_overlap.comm.network import create_network
from triton_overlap.comm.networks import mover, nvshmem
from triton_overlap.comm.networks.ring import RingWord
from triton_overlap.expert_buffer import ExpertBuffer
from triton_overlap.kernels import ep_combine, ep_dispatch, ep_route, ep_unpack, launching
from triton_overlap.kernels.ep_partials import Partials

TOKENS = (0, 1, 15, 16, 100, 4096)
#: Rows with scales and without; expanded rows and others, whose experts and rows are written apart.
EXPECTED = {
    "ep_route_kernel": 1,
    "ep_dispatch_kernel": 2,
    "ep_unpack_kernel": 3,
    "ep_expand_kernel": 1,
    "ep_combine_kernel": 2,
}


def drive(world_size: int, num_scale_up: int, network: str = "direct", **settings: Any) -> None:
    buffer = ExpertBuffer(
        Group(OneRankOfMany(world_size)),
        num_max_tokens_per_rank=4096,
        hidden=1024,
        num_topk=8,
        num_experts=256,
        num_scale_up=num_scale_up,
        use_fp8_dispatch=True,
        **settings,
    )
    buffer.network = create_network(network)  # which need not run here
    if network == "nvshmem":
        buffer.network.compile_options = nvshmem.linked_with(stand_in_for_nvshmem())
    routing = torch.zeros(buffer.layout.routing_words, dtype=torch.int32)
    for tokens in TOKENS:
        x, scales = torch.zeros(tokens, 1024, dtype=torch.bfloat16), torch.zeros(tokens, 8)
        topk_idx, weights = torch.zeros(tokens, 8, dtype=torch.int64), torch.zeros(tokens, 8)
        ep_route.launch(buffer.layout, buffer.ep_tables["rows"], routing, topk_idx)
        payload = ep_dispatch.Payload(x, None, topk_idx, weights)
        ep_dispatch.launch(buffer, routing, payload, operation=5, counts=True, partials=Partials.TOGETHER)
        fp8 = x.to(torch.float8_e4m3fn)
        payload = ep_dispatch.Payload(fp8, scales, topk_idx, weights)
        ep_dispatch.launch(buffer, routing, payload, operation=6, counts=False, partials=Partials.TOGETHER)
        received = ep_unpack.Received(x, None, topk_idx, weights)
        for expand in (False, True):
            ep_unpack.launch(buffer, routing, received, expand=expand, alignment=max(tokens, 1))
            ep_combine.launch(buffer, routing, x, weights if expand else None, (), x, operation=7, expand=expand)


@pytest.mark.parametrize("world_size, num_scale_up", [(2, 2), pytest.param(4, 2, marks=pytest.mark.long)])
def test_one_compilation_serves_every_token_count(world_size: int, num_scale_up: int) -> None:
    compiled(drive, world_size, num_scale_up).check(EXPECTED)


def other_variants(world_size: int, num_scale_up: int) -> None:
    """Ordered kernels, and partial results that come back separate."""
    drive(world_size, num_scale_up, kernel="ordered", allow_multiple_reduction=False)


@pytest.mark.long
def test_the_other_variants_compile() -> None:
    compiled(other_variants, 2, 1).check(EXPECTED)


@pytest.mark.long
def test_puts_through_a_ring_compile() -> None:
    compiled(drive, 2, 1, "simulated").check(EXPECTED)


def stand_in_for_nvshmem() -> str:
    """A library with the function that puts call, as LLVM's text."""
    with tempfile.NamedTemporaryFile("w", suffix=".ll", delete=False) as file:
        file.write(
            "define void @nvshmemx_putmem_signal_block(ptr %a, ptr %b, i64 %c, ptr %d, i64 %e, i32 %f, i32 %g) {\n"
            '  call void asm sideeffect "// put", ""()\n'
            "  ret void\n"
            "}\n"
        )
    atexit.register(os.unlink, file.name)
    return file.name


@pytest.mark.long
def test_puts_of_nvshmem_compile() -> None:
    compiled(drive, 2, 1, "nvshmem").check(EXPECTED)


def drive_the_mover() -> None:
    table = torch.zeros(32, dtype=torch.int64)
    for in_order in (False, True):
        launching.launch_kernel(
            mover.mover_kernel,
            mover.NUM_PROGRAMS,
            mover.MOVER_OPTIONS,
            buffer_ptr=table,
            IN_ORDER=in_order,
            **mover.MOVER_SIZES,
        )
        launching.launch_kernel(mover.count_kernel, 1, {}, buffer_ptr=table, WORD=int(RingWord.OPENED))


def test_the_mover_compiles() -> None:
    compiled(drive_the_mover).check({"mover_kernel": 2, "count_kernel": 1})
