"""What the operations promise, as bodies for every backend (``cases``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import triton_overlap as to
from tests.ops.cases import Draw, Sizes, assert_close, assert_equal, leaf, leaves64, poisoned
from triton_overlap import reference
from triton_overlap.comm.user_buffers import UserBuffer

Body = Callable[..., Any]
Results = dict[str, Tensor]


# Values and gradients against float64 --------------------------------------------------------------------------------


def values(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Every operation at every row count, twice: right, reproducible, and blind to what lies past the prefix.

    After the first row count no kernel is specialised anew and no symmetric memory allocated.
    """
    buffer = sizes.buffer(group, dtype)
    counters: list[tuple[int, int]] = []
    checks: list[Callable[..., Results]] = [
        all_gather_matmul,
        several_b,
        matmul_reduce_scatter,
        all_gather,
        reduce_scatter,
    ]
    for seed, rows in enumerate(sizes.rows):
        for check in checks:
            with poisoned(buffer, rows * group.world_size):
                first = check(buffer, sizes, rows, seed)
            again = check(buffer, sizes, rows, seed)
            for name, value in first.items():
                assert_equal(f"{check.__name__} {name}, second run", again[name], value)
        counters.append((to.specializations(), to.symmetric_allocations()))
    assert len(set(counters)) == 1, f"specialisations and allocations after each row count: {counters}"


def products(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """The two products alone, once at every row count."""
    buffer = sizes.buffer(group, dtype)
    for seed, rows in enumerate(sizes.rows):
        for check in (all_gather_matmul, matmul_reduce_scatter):
            with poisoned(buffer, rows * group.world_size):
                check(buffer, sizes, rows, seed)


def all_gather_matmul(
    buffer: UserBuffer, sizes: Sizes, rows: int, seed: int, method: str | to.Method = "fused"
) -> Results:
    group, dtype = buffer.group, buffer.dtype
    draw = Draw(group, dtype, seed)
    a, b = draw.per_rank(rows, sizes.hidden), draw.per_rank(sizes.hidden, sizes.features)
    bias, d_out = draw.per_rank(sizes.features), draw.per_rank(rows * group.world_size, sizes.features)
    mine = [draw.mine(a), draw.mine(b), draw.mine(bias)]
    out = to.all_gather_matmul(mine[0], mine[1], bias=mine[2], buffer=buffer, method=method)
    out.backward(draw.constant(d_out))

    a64, b64, bias64 = leaves64(a), leaves64(b), leaves64(bias)
    outs = reference.all_gather_matmul(a64, b64, bias64)
    torch.autograd.backward(outs, [g.double() for g in d_out])
    assert_close("all_gather_matmul", out, outs[group.rank], dtype)
    for name, x, expected in zip(("a", "b", "bias"), mine, (a64, b64, bias64), strict=True):
        assert_close(f"all_gather_matmul d{name}", x.grad, expected[group.rank].grad, dtype)
    return _results(out=out, a=mine[0].grad, b=mine[1].grad, bias=mine[2].grad)


def several_b(buffer: UserBuffer, sizes: Sizes, rows: int, seed: int, method: str | to.Method = "fused") -> Results:
    """Two b share a gather, the second without bias; the gathered rows get a gradient of their own."""
    group, dtype = buffer.group, buffer.dtype
    tokens, narrow = rows * group.world_size, sizes.features // 2
    draw = Draw(group, dtype, seed)
    a = draw.per_rank(rows, sizes.hidden)
    b, c = draw.per_rank(sizes.hidden, sizes.features), draw.per_rank(sizes.hidden, narrow)
    bias = draw.per_rank(sizes.features)
    d_b, d_c, d_g = (draw.per_rank(tokens, n) for n in (sizes.features, narrow, sizes.hidden))
    mine = [draw.mine(a), draw.mine(b), draw.mine(c), draw.mine(bias)]
    outs, gathered = to.all_gather_matmul(
        mine[0], [mine[1], mine[2]], bias=[mine[3], None], buffer=buffer, return_gathered=True, method=method
    )
    torch.autograd.backward([*outs, gathered], [draw.constant(d) for d in (d_b, d_c, d_g)])

    a64, b64, c64, bias64 = leaves64(a), leaves64(b), leaves64(c), leaves64(bias)
    expected = [
        *reference.all_gather_matmul(a64, b64, bias64),
        *reference.all_gather_matmul(a64, c64),
        *reference.all_gather(a64),
    ]
    torch.autograd.backward(expected, [g.double() for d in (d_b, d_c, d_g) for g in d])
    for name, out, value in zip(
        ("b", "c", "gathered"), [*outs, gathered], expected[group.rank :: group.world_size], strict=True
    ):
        assert_close(f"several_b {name}", out, value, dtype)
    for name, x, expected64 in zip(("a", "b", "c", "bias"), mine, (a64, b64, c64, bias64), strict=True):
        assert_close(f"several_b d{name}", x.grad, expected64[group.rank].grad, dtype)
    return _results(b=outs[0], c=outs[1], gathered=gathered, da=mine[0].grad, db=mine[1].grad, dc=mine[2].grad)


def matmul_reduce_scatter(
    buffer: UserBuffer, sizes: Sizes, rows: int, seed: int, method: str | to.Method = "fused"
) -> Results:
    group, dtype = buffer.group, buffer.dtype
    draw = Draw(group, dtype, seed)
    a = draw.per_rank(rows * group.world_size, sizes.features)
    b = draw.per_rank(sizes.features, sizes.hidden)
    bias, d_out = draw.one(sizes.hidden), draw.per_rank(rows, sizes.hidden)
    mine = [draw.mine(a), draw.mine(b), leaf(bias)]
    out = to.matmul_reduce_scatter(mine[0], mine[1], bias=mine[2], buffer=buffer, method=method)
    out.backward(draw.constant(d_out))

    a64, b64, (bias64,) = leaves64(a), leaves64(b), leaves64([bias])
    outs = reference.matmul_reduce_scatter(a64, b64, bias64)
    torch.autograd.backward(outs, [g.double() for g in d_out])
    assert_close("matmul_reduce_scatter", out, outs[group.rank], dtype)
    for name, x, expected in zip(("a", "b", "bias"), mine, (a64[group.rank], b64[group.rank], bias64), strict=True):
        assert_close(f"matmul_reduce_scatter d{name}", x.grad, expected.grad, dtype)
    return _results(out=out, a=mine[0].grad, b=mine[1].grad, bias=mine[2].grad)


def all_gather(buffer: UserBuffer, sizes: Sizes, rows: int, seed: int) -> Results:
    group, dtype = buffer.group, buffer.dtype
    draw = Draw(group, dtype, seed)
    x, d_out = draw.per_rank(rows, sizes.hidden), draw.per_rank(rows * group.world_size, sizes.hidden)
    mine = draw.mine(x)
    out = to.all_gather(mine, buffer=buffer)
    out.backward(draw.constant(d_out))
    x64 = leaves64(x)
    outs = reference.all_gather(x64)
    torch.autograd.backward(outs, [g.double() for g in d_out])
    assert_equal("all_gather", out.double(), outs[group.rank])
    assert_close("all_gather dx", mine.grad, x64[group.rank].grad, dtype)
    return _results(out=out, x=mine.grad)


def reduce_scatter(buffer: UserBuffer, sizes: Sizes, rows: int, seed: int) -> Results:
    group, dtype = buffer.group, buffer.dtype
    draw = Draw(group, dtype, seed)
    x, d_out = draw.per_rank(rows * group.world_size, sizes.hidden), draw.per_rank(rows, sizes.hidden)
    mine = draw.mine(x)
    out = to.reduce_scatter(mine, buffer=buffer)
    out.backward(draw.constant(d_out))
    x64 = leaves64(x)
    outs = reference.reduce_scatter(x64)
    torch.autograd.backward(outs, [g.double() for g in d_out])
    assert_close("reduce_scatter", out, outs[group.rank], dtype)
    grad, expected = mine.grad, x64[group.rank].grad
    assert grad is not None
    assert expected is not None
    assert_equal("reduce_scatter dx", grad.double(), expected)
    return _results(out=out, x=grad)


def replicated(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """``replicated_matmul`` into ``matmul_all_reduce``, as in a block without sequence parallelism."""
    buffer = sizes.buffer(group, dtype)
    for seed, rows in enumerate(sizes.rows):
        draw = Draw(group, dtype, seed)
        tokens = rows * group.world_size
        x, d_out = draw.one(tokens, sizes.hidden), draw.one(tokens, sizes.hidden)
        b, c = draw.per_rank(sizes.hidden, sizes.features), draw.per_rank(sizes.features, sizes.hidden)
        b_bias, c_bias = draw.per_rank(sizes.features), draw.one(sizes.hidden)
        # Of the size that keeps the second product's rounding in proportion.
        c = [w / sizes.features**0.5 for w in c]
        mine = [leaf(x), draw.mine(b), draw.mine(b_bias), draw.mine(c), leaf(c_bias)]
        with poisoned(buffer, tokens):
            middle = to.replicated_matmul(mine[0], mine[1], bias=mine[2], buffer=buffer)
            middle.retain_grad()
            out = to.matmul_all_reduce(middle, mine[3], bias=mine[4], buffer=buffer)
            out.backward(d_out)
        peers = [other.to(group.device) for other in group.all_gather_object(out.detach().cpu())]
        for other in peers:
            assert_equal("matmul_all_reduce on another rank", out.detach(), other)

        # The second product starts from the rounded result of the first, and so does its reference.
        middles = leaves64([other.to(group.device) for other in group.all_gather_object(middle.detach().cpu())])
        (x64, c_bias64), b64, b_bias64, c64 = leaves64([x, c_bias]), leaves64(b), leaves64(b_bias), leaves64(c)
        expected = reference.matmul_all_reduce(middles, c64, c_bias64)[0]
        expected.backward(d_out.double())
        first = reference.replicated_matmul(x64, b64, b_bias64)
        assert middle.grad is not None
        middle_grads = group.all_gather_object(middle.grad.cpu())
        torch.autograd.backward(first, [other.to(group.device).double() for other in middle_grads])
        rank = group.rank
        assert_close("replicated_matmul", middle, first[rank], dtype)
        assert_close("matmul_all_reduce", out, expected, dtype)
        assert_close("matmul_all_reduce da", middle.grad, middles[rank].grad, dtype)
        for name, actual, expected64 in (
            ("replicated_matmul dx", mine[0], x64),
            ("replicated_matmul db", mine[1], b64[rank]),
            ("replicated_matmul dbias", mine[2], b_bias64[rank]),
            ("matmul_all_reduce db", mine[3], c64[rank]),
            ("matmul_all_reduce dbias", mine[4], c_bias64),
        ):
            assert_close(name, actual.grad, expected64.grad, dtype)


# Microbatches, modes, layouts ----------------------------------------------------------------------------------------


class _Pair:
    """A column and a row product in one, as a transformer block has them."""

    def __init__(self, group: to.Group, sizes: Sizes, dtype: torch.dtype, sequence_parallel: bool = True) -> None:
        self.sizes = sizes
        self.sequence_parallel = sequence_parallel
        self.buffer = sizes.buffer(group, dtype)
        draw = Draw(group, dtype, 99)
        scale = sizes.features**-0.5
        self.weights = [
            draw.mine(draw.per_rank(sizes.hidden, sizes.features)),
            draw.mine(draw.per_rank(sizes.features)),
            draw.mine([w * scale for w in draw.per_rank(sizes.features, sizes.hidden)]),
            leaf(draw.one(sizes.hidden)),
        ]

    def __call__(self, x: Tensor, main_grads: tuple[Tensor, Tensor] | None = None) -> Tensor:
        b, b_bias, c, c_bias = self.weights
        b_main, c_main = main_grads or (None, None)
        first, second = (
            (to.all_gather_matmul, to.matmul_reduce_scatter)
            if self.sequence_parallel
            else (to.replicated_matmul, to.matmul_all_reduce)
        )
        h = first(x, b, bias=b_bias, buffer=self.buffer, main_grad=b_main)
        return second(torch.relu(h), c, bias=c_bias, buffer=self.buffer, main_grad=c_main)

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        draw = Draw(self.buffer.group, self.buffer.dtype, seed)
        if not self.sequence_parallel:
            tokens = rows * self.buffer.group.world_size
            return leaf(draw.one(tokens, self.sizes.hidden)), draw.one(tokens, self.sizes.hidden)
        return (
            draw.mine(draw.per_rank(rows, self.sizes.hidden)),
            draw.constant(draw.per_rank(rows, self.sizes.hidden)),
        )

    def gradients(self, x: Tensor) -> list[Tensor]:
        """Taken and cleared."""
        grads = []
        for tensor in [x, *self.weights]:
            assert tensor.grad is not None
            grads.append(tensor.grad)
            tensor.grad = None
        return grads


def microbatches(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Forward, forward, backward, backward, with another active shape set meanwhile, equals one after the other."""
    pair = _Pair(group, sizes, dtype)
    counts = [rows * group.world_size for rows in sizes.rows[:2]]
    batches = [pair.inputs(rows, seed) for seed, rows in enumerate(sizes.rows[:2])]
    alone = []
    for x, d_out in batches:
        out = pair(x)
        out.backward(d_out)
        alone.append((out.detach().clone(), pair.gradients(x)))

    outs = []
    for tokens, (x, _) in zip(counts, batches, strict=True):
        pair.buffer.set_active_shape((tokens, sizes.hidden))
        outs.append(pair(x))
    for (x, d_out), out, (expected, grads) in zip(batches, outs, alone, strict=True):
        # The active shape is the last one all the while.
        out.backward(d_out)
        assert_equal("interleaved output", out.detach(), expected)
        for grad, value in zip(pair.gradients(x), grads, strict=True):
            assert_equal("interleaved gradient", grad, value)
    pair.buffer.set_active_shape(None)


def no_grad(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    pair = _Pair(group, sizes, dtype)
    for rows in sizes.rows[:3]:
        x, _ = pair.inputs(rows, rows)
        expected = pair(x).detach()
        with torch.no_grad():
            out = pair(x)
        assert not out.requires_grad
        assert_equal("output under no_grad", out, expected)
        with torch.inference_mode():
            assert_equal("output under inference_mode", pair(x), expected)


def checkpointing(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Recomputation uses the count of its own forward, whatever is set by then."""
    rows, other = sizes.rows[0], sizes.rows[1]
    for pair in (_Pair(group, sizes, dtype), _Pair(group, sizes, dtype, sequence_parallel=False)):
        x, d_out = pair.inputs(rows, 1)
        pair(x).backward(d_out)
        expected = pair.gradients(x)
        for reentrant in (False, True):
            pair.buffer.set_active_shape((rows * group.world_size, sizes.hidden))
            out = checkpoint(pair, x, use_reentrant=reentrant)
            pair.buffer.set_active_shape((other * group.world_size, sizes.hidden))
            out.backward(d_out)
            for grad, value in zip(pair.gradients(x), expected, strict=True):
                assert_equal(f"gradient with checkpointing, reentrant={reentrant}", grad, value)
        pair.buffer.set_active_shape(None)


def autocast(group: to.Group, sizes: Sizes) -> None:
    """float32 operands under autocast give what operands cast by hand give, and float32 gradients."""
    low = torch.bfloat16
    buffer = sizes.buffer(group, low)
    rows = sizes.rows[0]
    draw = Draw(group, torch.float32, 5)
    a, b = draw.mine(draw.per_rank(rows, sizes.hidden)), draw.mine(draw.per_rank(sizes.hidden, sizes.features))
    bias = draw.mine(draw.per_rank(sizes.features))
    c, c_bias = draw.mine(draw.per_rank(sizes.features, sizes.hidden)), leaf(draw.one(sizes.hidden))
    d_out = draw.constant(draw.per_rank(rows, sizes.hidden)).to(low)
    leaves = [a, b, bias, c, c_bias]

    def run(operands: list[Tensor]) -> Tensor:
        x, w, w_bias, v, v_bias = operands
        h = to.all_gather_matmul(x, w, bias=w_bias, buffer=buffer)
        return to.matmul_reduce_scatter(h, v, bias=v_bias, buffer=buffer)

    expected = run([x.to(low) for x in leaves])
    expected.backward(d_out)
    grads = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    with torch.autocast(group.device.type, dtype=low):
        out = run(leaves)
    out.backward(d_out)
    assert out.dtype == low
    assert_equal("output under autocast", out.detach(), expected.detach())
    for x, grad in zip(leaves, grads, strict=True):
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        assert grad is not None
        assert_equal("gradient under autocast", x.grad, grad)


def main_grad(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Weight gradients of two interleaved microbatches are added to float32 tensors of any strides."""
    pair = _Pair(group, sizes, dtype)
    b, _, c, _ = pair.weights
    batches = [pair.inputs(rows, seed) for seed, rows in enumerate(sizes.rows[:2])]
    total = [torch.zeros_like(w, dtype=torch.float64) for w in (b, c)]
    others = []
    for x, d_out in batches:
        pair(x).backward(d_out)
        grads = pair.gradients(x)
        others.append([grads[0], grads[2], grads[4]])
        for sum_, grad in zip(total, (grads[1], grads[3]), strict=True):
            sum_ += grad.double()

    # One contiguous, one a transposed view inside a larger tensor whose other half must stay as it is.
    start = torch.full((2, sizes.hidden, sizes.features), 0.5, device=group.device)
    wide = torch.full((sizes.hidden, 2 * sizes.features), 0.5, device=group.device)
    b_main, c_main = start[0], wide[:, : sizes.features].t()
    outs = [pair(x, (b_main, c_main)) for x, _ in batches]
    for (x, d_out), out, other in zip(batches, outs, others, strict=True):
        out.backward(d_out)
        assert b.grad is None
        assert c.grad is None
        for tensor, value in zip((x, pair.weights[1], pair.weights[3]), other, strict=True):
            assert tensor.grad is not None
            assert_equal("gradient beside main_grad", tensor.grad, value)
            tensor.grad = None
    for name, main, sum_ in zip(("b", "c"), (b_main, c_main), total, strict=True):
        # The reference was rounded to the operands' dtype for each microbatch, so its precision is the limit.
        error = reference.relative_error(main - 0.5, sum_)
        limit = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
        assert error < limit, f"main_grad of {name}: relative error {error:.2e}"
    assert bool((wide[:, sizes.features :] == 0.5).all()), "written outside main_grad"


def layouts(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Transposed, sliced and strided operands and an expanded gradient give what contiguous copies give."""
    buffer = sizes.buffer(group, dtype)
    rows, tokens = sizes.rows[0], sizes.rows[0] * group.world_size
    draw = Draw(group, dtype, 11)

    def views(height: int, width: int) -> list[Tensor]:
        return [
            draw.one(width, height).t(),
            draw.one(height, 2 * width)[:, :width],
            draw.one(height, 2 * width)[:, ::2],
            draw.one(2 * height, width + 3)[::2, 3:],
        ]

    def compare(name: str, function: Callable[..., Tensor], a: Tensor, b: Tensor, d_out: Tensor) -> None:
        strided = [x.detach().requires_grad_() for x in (a, b)]
        plain = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in (a, b)]
        out, expected = (function(*pair, buffer=buffer) for pair in (strided, plain))
        out.backward(d_out)
        expected.backward(d_out.contiguous())
        assert_close(name, out, expected, dtype)
        for x, y in zip(strided, plain, strict=True):
            assert x.grad is not None
            assert_close(f"gradient of {name}", x.grad, y.grad, dtype)

    for a, b in zip(views(rows, sizes.hidden), views(sizes.hidden, sizes.features), strict=True):
        d_out = draw.one(1, sizes.features).expand(tokens, -1)
        compare("all_gather_matmul of strided operands", to.all_gather_matmul, a, b, d_out)
    for a, b in zip(views(tokens, sizes.features), views(sizes.features, sizes.hidden), strict=True):
        d_out = draw.one(1, sizes.hidden).expand(rows, -1)
        compare("matmul_reduce_scatter of strided operands", to.matmul_reduce_scatter, a, b, d_out)


def needed_gradients(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Each input alone: its gradient is right, and backward makes no call that it does not need."""
    buffer = sizes.buffer(group, dtype)
    rows, tokens = sizes.rows[0], sizes.rows[0] * group.world_size
    draw = Draw(group, dtype, 21)
    gathers = [draw.per_rank(rows, sizes.hidden), draw.per_rank(sizes.hidden, sizes.features)]
    gathers.append(draw.per_rank(sizes.features))
    reduces = [draw.per_rank(tokens, sizes.features), draw.per_rank(sizes.features, sizes.hidden)]
    reduces.append([draw.one(sizes.hidden)] * group.world_size)
    d_gather = draw.constant(draw.per_rank(tokens, sizes.features))
    d_reduce = draw.constant(draw.per_rank(rows, sizes.hidden))
    # Communicating calls of backward for a, b and bias alone.
    for function, operands, d_out, calls in (
        (to.all_gather_matmul, gathers, d_gather, (1, 0, 0)),
        (to.matmul_reduce_scatter, reduces, d_reduce, (1, 1, 1)),
    ):
        everything = [draw.mine(x) for x in operands]
        function(everything[0], everything[1], bias=everything[2], buffer=buffer).backward(d_out)
        for i, count in enumerate(calls):
            some = [draw.constant(x).detach() for x in operands]
            some[i].requires_grad_()
            out = function(some[0], some[1], bias=some[2], buffer=buffer)
            before = buffer.epoch
            out.backward(d_out)
            assert buffer.epoch - before == count, f"{function.__name__}, input {i}: {buffer.epoch - before} calls"
            grad, expected = some[i].grad, everything[i].grad
            assert grad is not None
            assert expected is not None
            assert_equal(f"{function.__name__}, gradient of input {i} alone", grad, expected)


def raw_operator(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """``torch.ops`` without the gathered rows: backward gathers again, with the same result."""
    buffer = sizes.buffer(group, dtype)
    draw = Draw(group, dtype, 31)
    rows, ops = sizes.rows[0], torch.ops.triton_overlap
    a, b = draw.per_rank(rows, sizes.hidden), draw.per_rank(sizes.hidden, sizes.features)
    d_out = draw.constant(draw.per_rank(rows * group.world_size, sizes.features))
    results = []
    for gather in (True, False):
        for several in (True, False):
            leaves = [draw.mine(a), draw.mine(b)]
            if several:
                outs = ops.all_gather_matmuls(leaves[0], [leaves[1]], [], [], buffer.handle, gather, "fused")
                assert len(outs) == 1 + gather
            else:
                outs = ops.all_gather_matmul(*leaves, None, None, buffer.handle, gather, "fused")
                assert outs[1].shape[0] == (rows * group.world_size if gather else 0)
            outs[0].backward(d_out)
            results.append([outs[0].detach(), *(x.grad for x in leaves)])
    for result in results[1:]:
        for first, other in zip(results[0], result, strict=True):
            assert first is not None
            assert other is not None
            assert_equal("result with a second gather, or through the list operator", other, first)


def fresh_outputs(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """No output lies in symmetric memory, and later calls leave earlier outputs alone."""
    buffer = sizes.buffer(group, dtype)
    begin = buffer.memory.local.data_ptr()
    end = begin + buffer.memory.local.numel()
    kept: list[tuple[Tensor, Tensor]] = []
    for seed in range(4):
        draw = Draw(group, dtype, seed)
        x = draw.constant(draw.per_rank(sizes.rows[0], sizes.hidden))
        b = draw.constant(draw.per_rank(sizes.hidden, sizes.features))
        out, gathered = to.all_gather_matmul(x, b, buffer=buffer, return_gathered=True)
        for tensor in (
            out,
            gathered,
            to.all_gather(x, buffer=buffer),
            to.matmul_reduce_scatter(out, b.t(), buffer=buffer),
        ):
            assert not begin <= tensor.data_ptr() < end, "an output lies in the buffer"
            kept.append((tensor, tensor.clone()))
    for tensor, copy in kept:
        assert_equal("an earlier output", tensor, copy)


def side_streams(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Calls on one buffer from two streams in turn, with nothing between them but the library's own events.

    The reads that follow a gather (a second b, the copy of the gathered rows) belong to the call as well.
    """
    buffer = sizes.buffer(group, dtype)
    draw = Draw(group, dtype, 61)
    shards = [draw.per_rank(sizes.rows[i % len(sizes.rows)], sizes.hidden) for i in range(24)]
    b, c = draw.constant(draw.per_rank(sizes.hidden, sizes.features)), draw.one(sizes.hidden, 4 * sizes.hidden)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for i, xs in enumerate(shards):
        with torch.cuda.stream(streams[i % 2]):
            outs, gathered = to.all_gather_matmul(draw.constant(xs), [b, c], buffer=buffer, return_gathered=True)
            results.append((outs[1], gathered))
    torch.cuda.synchronize()
    for xs, (out, gathered) in zip(shards, results, strict=True):
        whole = torch.cat(xs)
        assert_equal("gathered on a side stream", gathered, whole)
        assert_close("second product on a side stream", out, whole @ c, dtype)


# Errors --------------------------------------------------------------------------------------------------------------


def errors(group: to.Group, sizes: Sizes) -> None:
    """Each mistake is its documented error on every rank, changes nothing, and the next correct call works."""
    dtype, world_size, hidden, features = torch.float32, group.world_size, sizes.hidden, sizes.features
    buffer = sizes.buffer(group, dtype)
    rows = sizes.rows[0]
    draw = Draw(group, dtype, 41)
    x, a = draw.constant(draw.per_rank(rows, hidden)), draw.constant(draw.per_rank(rows * world_size, features))
    b, c = draw.constant(draw.per_rank(hidden, features)), draw.constant(draw.per_rank(features, hidden))
    expected = [to.all_gather_matmul(x, b, buffer=buffer), to.matmul_reduce_scatter(a, c, buffer=buffer)]

    def gather(x: Tensor = x, b: Any = b, **kwargs: Any) -> Callable[[], Any]:
        return lambda: to.all_gather_matmul(x, b, **{"buffer": buffer, **kwargs})

    def reduce(a: Tensor = a, c: Tensor = c, **kwargs: Any) -> Callable[[], Any]:
        return lambda: to.matmul_reduce_scatter(a, c, **{"buffer": buffer, **kwargs})

    new = a.new_zeros
    over = sizes.max_rows + 1
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (gather(x.half()), ValueError, "dtype"),
        (gather(b=b.half()), ValueError, "float16"),
        (reduce(a.half()), ValueError, "dtype"),
        (gather(new(rows, hidden + 1), new(hidden + 1, features)), to.ActiveShapeError, f"{hidden}"),
        (reduce(c=new(features, hidden + 1)), ValueError, f"{hidden}"),
        (gather(new(over, hidden)), to.ActiveShapeError, "capacity"),
        (reduce(new(over * world_size, features)), to.ActiveShapeError, "capacity"),
        (gather(new(0, hidden)), to.ActiveShapeError, "nonzero"),
        (reduce(new(0, features)), to.ActiveShapeError, "nonzero"),
        (gather(x[None]), to.ActiveShapeError, "2 dimensions"),
        (reduce(a[0]), to.ActiveShapeError, "2 dimensions"),
        (gather(b=b[None]), ValueError, "2 dimensions"),
        (gather(b=b[1:]), ValueError, "must agree"),
        (reduce(c=c[1:]), ValueError, "must agree"),
        (gather(b=[]), ValueError, "at least one"),
        (gather(bias=new(features + 1)), ValueError, "bias"),
        (reduce(bias=new(1, hidden)), ValueError, "bias"),
        (gather(b=[b, b], bias=[None]), ValueError, "one for each"),
        (gather(b=[b], bias=new(features)), ValueError, "list"),
        (gather(main_grad=b.half()), ValueError, "float32"),
        (reduce(main_grad=new(hidden, features)), ValueError, "shape"),
        (gather(method="ring"), ValueError, "'fused'"),
        (reduce(method="ring"), ValueError, "'fused'"),
        (lambda: to.all_gather(x.half(), buffer=buffer), ValueError, "dtype"),
        (lambda: to.all_gather(new(over, hidden), buffer=buffer), to.ActiveShapeError, "capacity"),
        (lambda: to.matmul_all_reduce(a.half(), c, buffer=buffer), ValueError, "dtype"),
        (lambda: to.replicated_matmul(new(world_size, hidden), b.half(), buffer=buffer), ValueError, "float16"),
    ]
    if group.device.type == "cuda":
        wrong += [(gather(x.cpu()), ValueError, "cpu"), (gather(b=b.cpu()), ValueError, "cpu")]
    if world_size > 1:
        odd = rows * world_size + 1
        wrong += [
            (reduce(new(odd, features)), to.ActiveShapeError, "divisible"),
            (lambda: to.matmul_all_reduce(new(odd, features), c, buffer=buffer), to.ActiveShapeError, "divisible"),
            (lambda: to.replicated_matmul(new(odd, hidden), b, buffer=buffer), to.ActiveShapeError, "divisible"),
        ]
    for call, kind, words in wrong:
        before = (buffer.epoch, buffer.active_shape)
        _assert_raises(call, kind, words)
        assert (buffer.epoch, buffer.active_shape) == before, "a refused call changed the buffer"
        assert_equal("the next call", to.all_gather_matmul(x, b, buffer=buffer), expected[0])
    assert_equal("the next call", to.matmul_reduce_scatter(a, c, buffer=buffer), expected[1])

    buffer.set_active_shape((world_size, hidden))
    for call in (gather(), reduce(), lambda: to.all_gather(x, buffer=buffer)):
        _assert_raises(call, to.ActiveShapeError, "set_active_shape")
    assert buffer.active_shape == (world_size, hidden)
    buffer.set_active_shape((rows * world_size, hidden))
    assert_equal("with the right shape", to.all_gather_matmul(x, b, buffer=buffer), expected[0])
    buffer.set_active_shape(None)

    x_leaf = leaf(x)
    out = to.all_gather_matmul(x_leaf, b, buffer=buffer)
    _assert_raises(
        lambda: torch.autograd.grad(out.sum(), x_leaf, create_graph=True), NotImplementedError, "differentiated twice"
    )
    assert_equal("after a refused double backward", to.all_gather_matmul(x, b, buffer=buffer), expected[0])

    other = group.user_buffer(2 * world_size, hidden, dtype)
    group.barrier()
    other.close()
    _assert_raises(lambda: to.all_gather_matmul(x[:1], b, buffer=other), to.ClosedError, "closed")
    _assert_raises(lambda: to.all_gather(x[:1], buffer=other), to.ClosedError, "closed")
    assert_equal("beside a closed buffer", to.all_gather_matmul(x, b, buffer=buffer), expected[0])


def _assert_raises(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


# torch.library and torch.compile -------------------------------------------------------------------------------------


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


def compiled(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """``fullgraph`` with dynamic shapes: one graph for every token count, bitwise what eager mode gives."""
    from torch._dynamo.testing import CompileCounterWithBackend

    pair = _Pair(group, sizes, dtype)
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


def _results(**tensors: Tensor | None) -> Results:
    """Detached, and none missing."""
    results = {}
    for name, tensor in tensors.items():
        assert tensor is not None, f"{name} is None"
        results[name] = tensor.detach().clone()
    return results
