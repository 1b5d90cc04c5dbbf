"""The operators under ``torch.library.opcheck`` and ``torch.compile``, as bodies for every backend (``cases``)."""

from __future__ import annotations

from typing import Any

import torch

import triton_overlap as to
from tests.ops.cases import Draw, Sizes, assert_equal, leaf
from tests.ops.pair import Pair


def opcheck(group: to.Group, sizes: Sizes) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch with dynamic shapes, of every operator."""
    dtype, world_size, hidden, features = torch.float32, group.world_size, sizes.hidden, sizes.features
    handle = sizes.buffer(group, dtype).handle
    draw = Draw(group, dtype, 51)
    rows, tokens = sizes.rows[0], sizes.rows[0] * world_size
    x, b = draw.mine(draw.per_rank(rows, hidden)), draw.mine(draw.per_rank(hidden, features))
    bias = draw.mine(draw.per_rank(features))
    a, c = draw.mine(draw.per_rank(tokens, features)), draw.mine(draw.per_rank(features, hidden))
    c_bias = leaf(draw.one(hidden))
    whole = leaf(draw.one(tokens, hidden))
    none = x.new_empty(0)
    ops = torch.ops.triton_overlap
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.all_gather_matmul, (x, b, bias, None, handle, True, "fused")),
        (ops.all_gather_matmul, (x, b, None, torch.zeros_like(b), handle, True, "fused")),
        (ops.all_gather_matmuls, (x, [b, b.detach() * 2], [bias, none], [], handle, False, "fused")),
        (ops.all_gather_matmuls, (x, [b], [], [torch.zeros_like(b)], handle, True, "fused")),
        (ops.matmul_reduce_scatter, (a, c, c_bias, None, handle, "fused")),
        (ops.matmul_reduce_scatter, (a, c, None, torch.zeros_like(c), handle, "fused")),
        (ops.all_gather, (x, handle)),
        (ops.reduce_scatter, (whole, handle)),
        (ops.matmul_all_reduce, (a, c, c_bias, None, handle, "fused")),
        (ops.replicated_matmul, (whole, b, bias, None, handle, "fused")),
        (ops.weight_gradient_, (whole.detach(), a.detach(), torch.zeros_like(b))),
    ]
    for op, args in cases:
        outcome = torch.library.opcheck(op.default, args)
        assert set(outcome.values()) == {"SUCCESS"}, f"{op}: {outcome}"


def opcheck_of_counts_and_epilogues(group: to.Group, sizes: Sizes) -> None:
    """The same of token counts on the device, activations and residuals."""
    dtype, world_size, hidden, features = torch.float32, group.world_size, sizes.hidden, sizes.features
    plain = sizes.buffer(group, dtype).handle
    capacity = sizes.max_rows * world_size
    handle = group.user_buffer(capacity, hidden, dtype, device_count=True).handle
    draw = Draw(group, dtype, 52)
    rows, tokens = sizes.rows[0], sizes.rows[0] * world_size
    count = torch.full((), tokens, dtype=torch.int32, device=group.device)
    x, b = draw.mine(draw.per_rank(rows, hidden)), draw.mine(draw.per_rank(hidden, 2 * features))
    bias = draw.mine(draw.per_rank(2 * features))
    a, c = draw.mine(draw.per_rank(tokens, features)), draw.mine(draw.per_rank(features, hidden))
    whole, residual = leaf(draw.one(tokens, hidden)), draw.mine(draw.per_rank(rows, hidden))
    ops = torch.ops.triton_overlap
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.all_gather_matmul, (x, b, bias, None, handle, True, "fused", count)),
        (ops.matmul_reduce_scatter, (a, c, None, None, handle, "fused", residual, count)),
        (ops.all_gather, (x, handle, count)),
        (ops.reduce_scatter, (whole, handle, count)),
        (ops.all_gather_matmul_activation, (x, b, bias, None, plain, True, "fused", "swiglu", True)),
        (ops.all_gather_matmul_activation, (x, b, None, None, handle, False, "fused", "gelu", True, count)),
        (ops.matmul_reduce_scatter, (a, c, None, None, plain, "fused", residual)),
        (ops.row_weight_gradient, (a.detach(), whole.detach(), count)),
        (ops.row_bias_gradient, (whole.detach(), count)),
    ]
    for op, args in cases:
        outcome = torch.library.opcheck(op.default, args)
        assert set(outcome.values()) == {"SUCCESS"}, f"{op}: {outcome}"


def reduce_overhead(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """CUDA graphs of what lies between the operations, which stay out of them: one for each count, right in any order
    and when it is replayed."""
    pair = Pair(group, sizes, dtype)
    torch._dynamo.reset()
    fast = torch.compile(pair.__call__, mode="reduce-overhead")
    for seed, rows in enumerate((*sizes.rows, *sizes.rows)):
        x, d_out = pair.inputs(rows, seed)
        results = []
        for function in (pair.__call__, fast):
            torch.compiler.cudagraph_mark_step_begin()
            out = function(x)
            out.backward(d_out)
            results.append([out.detach().clone(), *(grad.clone() for grad in pair.gradients(x))])
        for number, (eager, graphed) in enumerate(zip(*results, strict=True)):
            error = float((eager.double() - graphed.double()).norm() / eager.double().norm())
            assert error < 1e-2, f"result {number} at {rows} rows: relative error {error:.1e}"


def compiled(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """``fullgraph`` with dynamic shapes: one graph for every token count, bitwise what eager mode gives."""
    from torch._dynamo.testing import CompileCounterWithBackend

    pair = Pair(group, sizes, dtype)
    b, _, c, _ = pair.weights
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    fast = torch.compile(pair.__call__, fullgraph=True, dynamic=True, backend=counter)
    mains = (torch.zeros_like(b, dtype=torch.float32), torch.zeros_like(c, dtype=torch.float32))
    for rows in sizes.rows:
        if rows == 1:
            continue  # torch.compile specialises a dimension of one
        x, d_out = pair.inputs(rows, rows)
        results = []
        for function in (pair, fast):
            out = function(x)
            out.backward(d_out)
            results.append([out.detach(), *pair.gradients(x)])
        for eager, got in zip(*results, strict=True):
            assert_equal("compiled", got, eager)
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"
    for main in mains:
        assert not bool(main.any())
    x, d_out = pair.inputs(sizes.rows[0], 1)
    for factor, function in ((1, fast), (2, pair)):
        function(x, mains).backward(d_out)
        assert b.grad is None
        assert c.grad is None
        if factor == 1:
            once = [main.clone() for main in mains]
    for main, first in zip(mains, once, strict=True):
        assert_equal("main_grad added by compiled and eager code", main, 2 * first)
