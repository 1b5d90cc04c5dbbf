"""Values and gradients of the operations against float64, as bodies for every backend (``cases``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import Draw, Sizes, assert_close, assert_equal, assert_steady, counters, leaf, leaves64, poisoned
from triton_overlap import reference
from triton_overlap.comm.user_buffers import UserBuffer

Results = dict[str, Tensor]


def values(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Every operation at every row count, twice: right, reproducible, and blind to what lies past the prefix.

    After the first row count no kernel is specialised anew and no symmetric memory allocated.
    """
    buffer = sizes.buffer(group, dtype)
    steady: dict[str, int] = {}
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
        steady = steady or counters()
    assert_steady("after the first count", steady)


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


def _results(**tensors: Tensor | None) -> Results:
    """Detached, and none missing."""
    results = {}
    for name, tensor in tensors.items():
        assert tensor is not None, f"{name} is None"
        results[name] = tensor.detach().clone()
    return results
