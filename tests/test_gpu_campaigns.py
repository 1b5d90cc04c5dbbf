"""Campaigns on GPUs: other work beside the fused operations, and what a process compiles in the long run."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

import triton_overlap as to
from tests.distributed import Ranks
from tests.ops.cases import Draw, assert_equal
from triton_overlap.kernels import all_gather, all_gather_matmul, matmul_reduce_scatter, reduce_scatter

HIDDEN, FEATURES, MAX_ROWS = 2048, 1024, 2048


def _beside_a_collective(seconds: float) -> tuple[int, int]:
    """Fused calls on the current stream, NCCL on another one, started at random moments that differ by rank.

    The collectives hold multiprocessors that a persistent kernel's programs need, on one rank earlier than on the
    other: a kernel that waited for programs that had not started would wait for ever.
    """
    group = to.init_group(timeout_s=30)
    rank, world_size, dtype = group.rank, group.world_size, torch.bfloat16
    nccl = dist.new_group(backend="nccl")
    buffer = group.user_buffer(MAX_ROWS * world_size, HIDDEN, dtype)
    draw = Draw(group, dtype, 1)
    shards, weights = draw.per_rank(MAX_ROWS, HIDDEN), draw.per_rank(HIDDEN, FEATURES)
    back = [weight.t().contiguous() for weight in weights]
    side = torch.cuda.Stream()
    large = torch.ones(16 * 1024 * 1024, device=group.device)
    ours, theirs = random.Random(5), random.Random(rank)
    expected: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fused(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = all_gather_matmul.launch(buffer, shards[rank][:rows], weights[rank])
        return out, matmul_reduce_scatter.launch(buffer, out, back[rank])

    calls = collectives = 0
    stop = torch.zeros(1)
    started = time.monotonic()
    while True:
        for _ in range(20):
            rows = ours.choice((1, 64, 129, 512, 1000, MAX_ROWS))
            if theirs.random() < 0.7:
                time.sleep(theirs.random() * 2e-3)
            before = theirs.random() < 0.5
            for turn in (True, False):
                if turn == before:
                    with torch.cuda.stream(side):
                        dist.all_reduce(large, group=nccl)
                    collectives += 1
                else:
                    results = fused(rows)
                    calls += 2
            if rows not in expected:
                expected[rows] = results
            for got, value in zip(results, expected[rows], strict=True):
                assert_equal(f"{rows} rows beside a collective", got, value)
        stop[0] = float(time.monotonic() - started > seconds)
        dist.all_reduce(stop)  # through gloo: every rank stops after the same round
        if stop[0] > 0:
            break
    group.check()
    torch.cuda.synchronize()
    group.close()
    return calls, collectives


@pytest.mark.gpu(2)
@pytest.mark.timeout(200)
@pytest.mark.long
def test_a_minute_beside_nccl_on_another_stream() -> None:
    outcomes = Ranks(2, "cuda").run(_beside_a_collective, 60.0, timeout_s=150)
    print("fused calls and collectives a rank:", outcomes)
    assert all(calls > 100 and collectives > 50 for calls, collectives in outcomes)


def _compilations() -> None:
    """What Triton itself has in its caches is what ``specializations`` counted, whatever the token counts."""
    group = to.init_group(timeout_s=60)
    # fp16, which no other test of these processes uses at a size divisible by 16: no cache has such kernels yet.
    buffer = group.user_buffer(MAX_ROWS * group.world_size, HIDDEN, torch.float16)
    draw = Draw(group, torch.float16, 2)
    x, w = draw.one(MAX_ROWS, HIDDEN), draw.one(HIDDEN, FEATURES)
    kernels = (
        all_gather.all_gather_kernel,
        all_gather_matmul.all_gather_matmul_kernel,
        matmul_reduce_scatter.matmul_reduce_scatter_kernel,
        reduce_scatter.reduce_scatter_kernel,
    )

    def counts() -> tuple[int, int, int]:
        cached = sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)
        return cached, to.specializations(), to.symmetric_allocations()

    first: tuple[int, int, int] | None = None
    start = counts()
    for rows in (1024, 1, 2, 127, 128, 129, 1000, 2048, 16, 640):
        out = all_gather_matmul.launch(buffer, x[:rows], w)
        matmul_reduce_scatter.launch(buffer, out, w.t())
        all_gather.launch(buffer, x[:rows])
        reduce_scatter.launch(buffer, buffer.gathered(rows * group.world_size).clone())
        first = first or counts()
        assert counts() == first, f"after {rows} rows a rank"
    assert first is not None
    assert first[0] - start[0] == first[1] - start[1] == len(kernels)
    group.check()
    group.close()


@pytest.mark.gpu
def test_one_compilation_serves_every_token_count() -> None:
    Ranks(2, "cuda").run(_compilations)


def _microbatches(count: int) -> dict[str, float]:
    """Forward and backward of a layer registered once at 16384 tokens, at random token counts: after the first few
    nothing is compiled, registered or waited for, and memory does not grow."""
    group = to.init_group(timeout_s=60)
    world_size, hidden, capacity = group.world_size, 2048, 16384
    layer = to.nn.TransformerLayer(
        hidden,
        4 * hidden,
        16,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        group=group,
        max_tokens=capacity,
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
    )
    parameters = list(layer.parameters())
    x = torch.randn(capacity // world_size, hidden, device=group.device, dtype=torch.bfloat16)
    d_out = torch.randn_like(x)
    angles = to.nn.RotaryPositionEmbedding(hidden // 16, device=group.device)(capacity)
    rows_of = random.Random(7)  # the same on every rank

    def microbatch(rows: int) -> None:
        tokens = rows * world_size
        own = x[:rows].detach().requires_grad_()
        documents = torch.arange(3, device=group.device, dtype=torch.int32) * (tokens // 2)
        documents[2:].fill_(tokens)  # where it is odd; an assignment would wait for the device
        out = layer(own, rotary_pos_emb=angles, cu_seqlens_q=documents, max_seqlen_q=tokens - tokens // 2)
        torch.autograd.grad(out, [own, *parameters], d_out[:rows])

    for rows in (capacity // world_size, 1, 1000):
        microbatch(rows)
    group.check()
    torch.cuda.reset_peak_memory_stats()
    microbatch(capacity // world_size)
    before = to.specializations(), to.symmetric_allocations(), torch.cuda.max_memory_allocated()
    tokens = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(count):
            rows = rows_of.randint(1, capacity // world_size)
            microbatch(rows)
            tokens += rows * world_size
    finally:
        torch.cuda.set_sync_debug_mode("default")
    group.check()
    after = to.specializations(), to.symmetric_allocations(), torch.cuda.max_memory_allocated()
    group.close()
    return {
        "tokens": tokens,
        "specializations": after[0] - before[0],
        "symmetric allocations": after[1] - before[1],
        "peak bytes before": before[2],
        "peak bytes more": after[2] - before[2],
    }


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.long
def test_1000_microbatches_of_random_token_counts() -> None:
    outcomes = Ranks(2, "cuda").run(_microbatches, 1000, timeout_s=350)
    print("1000 microbatches:", outcomes)
    for outcome in outcomes:
        assert outcome["specializations"] == outcome["symmetric allocations"] == 0
        # PyTorch's attention rounds its statistics up by the documents' lengths: kilobytes in 1.5 GB.
        assert outcome["peak bytes more"] < 2**20
