"""What every method promises, as bodies for every backend (``cases``): what
``value_bodies`` and the others check for the fused one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import triton_overlap as to
from tests.ops import value_bodies
from tests.ops.cases import Draw, Sizes, assert_close, assert_equal, assert_steady, counters, leaf, leaves64, poisoned
from triton_overlap import reference
from triton_overlap.kernels import ring_exchange, steps

Check = Callable[..., value_bodies.Results]


def _checks(gather: list[str], reduce: list[str]) -> list[Check]:
    return [
        *(partial(value_bodies.all_gather_matmul, method=method) for method in gather),
        *(partial(value_bodies.several_b, method=method) for method in gather[:1]),
        *(partial(value_bodies.matmul_reduce_scatter, method=method) for method in reduce),
    ]


def values(group: to.Group, sizes: Sizes, dtype: torch.dtype, gather: list[str], reduce: list[str]) -> None:
    """Values and gradients by each of the methods at every row count, twice: right, reproducible, and blind to what
    lies past the prefix. After the first row count no kernel is specialised anew and no symmetric memory allocated."""
    buffer = sizes.buffer(group, dtype)
    steady: dict[str, int] = {}
    for seed, rows in enumerate(sizes.rows):
        for check in _checks(gather, reduce):
            with poisoned(buffer, rows * group.world_size):
                first = check(buffer, sizes, rows, seed)
            again = check(buffer, sizes, rows, seed)
            for name, value in first.items():
                assert_equal(f"{check} {name}, second run", again[name], value)
        steady = steady or counters()
    assert_steady("after the first count", steady)


def beside(group: to.Group, sizes: Sizes, dtype: torch.dtype, methods: list[str]) -> None:
    """Both collectives beside a product of other sizes: values, every gradient, each input alone, reproducible."""
    buffer = sizes.buffer(group, dtype)
    for seed, rows in enumerate(sizes.rows):
        tokens = rows * group.world_size
        for method in methods:
            for function, reference_of, before, after in (
                (to.all_gather_beside_matmul, reference.all_gather, rows, tokens),
                (to.reduce_scatter_beside_matmul, reference.reduce_scatter, tokens, rows),
            ):
                # The product is of each rank's own sizes.
                m, k, n = 5 + group.rank, sizes.features, 7
                draw = Draw(group, dtype, seed)
                x, d_moved = draw.per_rank(before, sizes.hidden), draw.per_rank(after, sizes.hidden)
                operands = [draw.one(m, k), draw.one(n, k).t() / k**0.5, draw.one(n)]
                d_product = draw.one(m, n)
                mine = [draw.mine(x), *map(leaf, operands)]

                def run(inputs: list[torch.Tensor], call: Any = function, by: str = method) -> list[torch.Tensor]:
                    return list(call(inputs[0], inputs[1], inputs[2], bias=inputs[3], buffer=buffer, method=by))

                with poisoned(buffer, tokens):
                    outs = run(mine)
                    torch.autograd.backward(outs, [draw.constant(d_moved), d_product])
                x64, (a64, b64, bias64) = leaves64(x), leaves64(operands)
                moved = reference_of(x64)
                product = a64 @ b64 + bias64
                torch.autograd.backward([*moved, product], [*(d.double() for d in d_moved), d_product.double()])
                assert_close("moved", outs[0], moved[group.rank], dtype)
                assert_close("product", outs[1], product, dtype)
                for tensor, expected in zip(mine, (x64[group.rank], a64, b64, bias64), strict=True):
                    assert_close("gradient", tensor.grad, expected.grad, dtype)
                for again, first in zip(run(mine), outs, strict=True):
                    assert_equal("second run", again, first)
                for i, tensor in enumerate(mine):
                    alone = [t.detach() for t in mine]
                    alone[i] = leaf(tensor)
                    torch.autograd.backward(run(alone)[int(i > 0)], draw.constant(d_moved) if i == 0 else d_product)
                    assert_close("gradient of one input alone", alone[i].grad, tensor.grad, dtype)


def either_sender(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """What the copy engine sent once, programs send later without compiling anything: the rows decide who sends."""
    buffer = sizes.buffer(group, dtype)
    rows = sizes.rows[0]

    def by(use_ce: bool) -> None:
        a, b = torch.ones(2, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype)
        method = to.Method("bulk", use_ce=use_ce)
        to.all_gather_beside_matmul(torch.ones(rows, sizes.hidden, dtype=dtype), a, b, buffer=buffer, method=method)
        whole = torch.ones(rows * group.world_size, sizes.hidden, dtype=dtype)
        to.reduce_scatter_beside_matmul(whole, a, b, buffer=buffer, method=method)

    by(use_ce=True)
    before = counters()
    by(use_ce=False)
    assert_steady("programs after the copy engine", before)


def beside_errors(group: to.Group, sizes: Sizes) -> None:
    """What is wrong with the product or the method is said before anything is sent."""
    buffer = sizes.buffer(group, torch.float32)
    x, a, b = torch.ones(sizes.rows[0], sizes.hidden), torch.ones(3, 4), torch.ones(4, 5)

    def call(a: Any = a, b: Any = b, **kwargs: Any) -> Callable[[], Any]:
        return lambda: to.all_gather_beside_matmul(x, a, b, **{"buffer": buffer, **kwargs})

    for wrong, words in (
        (call(a=torch.ones(3, 3)), "[3, 3] and [4, 5]"),
        (call(b=b[0]), "[3, 4] and [5]"),
        (call(b=b.half()), "b is torch.float16"),
        (call(bias=torch.ones(4)), "bias must have shape [5], got [4]"),
        (call(method="fused"), "methods that apply: 'bulk'"),
        (call(method="bulk(aggregate=True)"), "it has: 'use_ce', 'num_sm'"),
    ):
        epoch = buffer.epoch
        with pytest.raises(ValueError) as caught:
            wrong()
        assert words in str(caught.value), str(caught.value)
        assert buffer.epoch == epoch


def no_collectives(group: to.Group, sizes: Sizes) -> None:
    """Where there is no process group, method nccl says so."""
    buffer = sizes.buffer(group, torch.float32)
    x, b = torch.ones(sizes.rows[0], sizes.hidden), torch.ones(sizes.hidden, sizes.features)
    with pytest.raises(NotImplementedError, match="the sim backend has none; use 'ring_exchange'"):
        to.all_gather_matmul(x, b, buffer=buffer, method="nccl")
    assert buffer.epoch == 0


def all_reduce(group: to.Group, sizes: Sizes, dtype: torch.dtype, methods: list[str]) -> None:
    """``matmul_all_reduce`` and the backward pass of ``replicated_matmul`` by each method."""
    buffer = sizes.buffer(group, dtype)
    for method in methods:
        draw = Draw(group, dtype, 17)
        tokens = sizes.rows[0] * group.world_size
        a, b = draw.per_rank(tokens, sizes.features), draw.per_rank(sizes.features, sizes.hidden)
        out = to.matmul_all_reduce(draw.constant(a), draw.constant(b), buffer=buffer, method=method)
        expected = reference.matmul_all_reduce([t.double() for t in a], [t.double() for t in b])[0]
        assert_close(f"matmul_all_reduce by {method}", out, expected, dtype)
        x, c = leaf(draw.one(tokens, sizes.hidden)), draw.per_rank(sizes.hidden, sizes.features)
        d_out = draw.per_rank(tokens, sizes.features)
        product = to.replicated_matmul(x, draw.constant(c), buffer=buffer, method=method)
        product.backward(draw.constant(d_out))
        x64 = leaves64([x.detach()])[0]
        products = reference.replicated_matmul(x64, [t.double() for t in c])
        torch.autograd.backward(products, [g.double() for g in d_out])
        assert_close(f"dx of replicated_matmul by {method}", x.grad, x64.grad, dtype)


def opcheck(group: to.Group, sizes: Sizes) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch with dynamic shapes, of the bulk operators and of a
    method with options."""
    dtype, rows, tokens = torch.float32, sizes.rows[0], sizes.rows[0] * group.world_size
    handle = sizes.buffer(group, dtype).handle
    draw = Draw(group, dtype, 23)
    x, whole = leaf(draw.one(rows, sizes.hidden)), leaf(draw.one(tokens, sizes.hidden))
    a, b, bias = leaf(draw.one(3, 4)), leaf(draw.one(4, 5)), leaf(draw.one(5))
    w = leaf(draw.one(sizes.hidden, sizes.features))
    ops = torch.ops.triton_overlap
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.all_gather_beside_matmul, (x, a, b, bias, handle, "bulk")),
        (ops.reduce_scatter_beside_matmul, (whole, a, b, None, handle, "bulk(use_ce=True)")),
        (ops.all_gather_matmul, (x, w, None, None, handle, True, "ring_exchange(aggregate=True)")),
    ]
    for op, args in cases:
        outcome = torch.library.opcheck(op.default, args)
        assert set(outcome.values()) == {"SUCCESS"}, f"{op}: {outcome}"


def compiled(group: to.Group, sizes: Sizes) -> None:
    """One graph for every token count, with a ``Method`` in the traced code."""
    from torch._dynamo.testing import CompileCounterWithBackend

    buffer = sizes.buffer(group, torch.float32)
    draw = Draw(group, torch.float32, 29)
    b, c = (
        draw.mine(draw.per_rank(sizes.hidden, sizes.features)),
        draw.mine(draw.per_rank(sizes.features, sizes.hidden)),
    )
    gather, reduce = to.Method("ring_exchange", aggregate=True), to.Method("pipeline", num_splits=2)

    def block(x: torch.Tensor) -> torch.Tensor:
        h = to.all_gather_matmul(x, b, buffer=buffer, method=gather)
        return to.matmul_reduce_scatter(torch.relu(h), c, buffer=buffer, method=reduce)

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    fast = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for rows in (5, 3, 8):
        results = []
        for function in (block, fast):
            x = draw.mine([torch.ones(rows, sizes.hidden, device=group.device)] * group.world_size)
            out = function(x)
            out.sum().backward()
            assert x.grad is not None
            results.append([out.detach(), x.grad])
        for eager, got in zip(*results, strict=True):
            assert_equal("compiled", got, eager)
    assert counter.frame_count == 1


def once(group: to.Group, sizes: Sizes, dtype: torch.dtype, gather: list[str], reduce: list[str]) -> None:
    """As ``values``, once at every row count."""
    buffer = sizes.buffer(group, dtype)
    for seed, rows in enumerate(sizes.rows):
        for check in _checks(gather, reduce):
            with poisoned(buffer, rows * group.world_size):
                check(buffer, sizes, rows, seed)


def mixed(group: to.Group, sizes: Sizes, dtype: torch.dtype, gather: list[str], reduce: list[str]) -> None:
    """Forward passes by different methods one after the other on one buffer, then their backward passes in reverse,
    with nothing between the calls but the protocol."""
    buffer = sizes.buffer(group, dtype)
    draw = Draw(group, dtype, 7)
    pending = []
    for step in range(2 * max(len(gather), len(reduce))):
        rows = sizes.rows[step % len(sizes.rows)]
        x, b = draw.per_rank(rows, sizes.hidden), draw.per_rank(sizes.hidden, sizes.features)
        c = [w / sizes.features**0.5 for w in draw.per_rank(sizes.features, sizes.hidden)]
        d_out = draw.per_rank(rows, sizes.hidden)
        mine = [draw.mine(t) for t in (x, b, c)]
        h = to.all_gather_matmul(mine[0], mine[1], buffer=buffer, method=gather[step % len(gather)])
        out = to.matmul_reduce_scatter(h, mine[2], buffer=buffer, method=reduce[step % len(reduce)])
        pending.append((x, b, c, d_out, mine, h, out))
    for x, b, c, d_out, mine, h, out in reversed(pending):
        out.backward(draw.constant(d_out))
        x64, b64 = leaves64(x), leaves64(b)
        # The second product starts from the rounded result of the first, and so does its reference.
        hs = leaves64([other.to(group.device) for other in group.all_gather_object(h.detach().cpu())])
        outs = reference.matmul_reduce_scatter(hs, leaves64(c))
        assert_close("output of the pair", out, outs[group.rank], dtype)
        torch.autograd.backward(outs, [g.double() for g in d_out])
        h_grads = [y.grad.to(dtype).double() for y in hs if y.grad is not None]
        torch.autograd.backward(reference.all_gather_matmul(x64, b64), h_grads)
        assert_close("gradient of x", mine[0].grad, x64[group.rank].grad, dtype)
        assert_close("gradient of b", mine[1].grad, b64[group.rank].grad, dtype)


def mixed_asynchronously(
    group: to.Group, sizes: Sizes, dtype: torch.dtype, gather: list[str], reduce: list[str]
) -> None:
    """``mixed``, where calls return before the device has finished them."""
    group.check_mode = "async"
    mixed(group, sizes, dtype, gather, reduce)


def other_method(group: to.Group, sizes: Sizes, mine: tuple[str, str]) -> str:
    """Rank 0 takes the first method and the others the second: an error on every rank that names both."""
    buffer = sizes.buffer(group, torch.float32)
    draw = Draw(group, torch.float32, 3)
    x = draw.one(sizes.rows[0], sizes.hidden)
    b = draw.one(sizes.hidden, sizes.features)

    def call() -> None:
        to.all_gather_matmul(x, b, buffer=buffer, method=mine[min(group.rank, 1)])
        group.check()

    with pytest.raises(to.CommMismatchError) as caught:
        call()
    message = str(caught.value)
    for method in mine:
        assert f"method {method}" in message, message
    group.recover()
    expected = reference.all_gather_matmul([x.double()] * group.world_size, [b.double()] * group.world_size)
    out = to.all_gather_matmul(x, b, buffer=buffer, method=mine[0])
    assert_close("after recovery", out, expected[group.rank], torch.float32)
    return message


def other_method_found_by_the_peer(group: to.Group, sizes: Sizes) -> None:
    """Rank 0 compares the headers after its peer has reported the mismatch: no collective is begun."""
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 0:
            agree = steps.Steps.agree

            def late(self: steps.Steps) -> None:
                time.sleep(0.5)
                agree(self)

            patch.setattr(steps.Steps, "agree", late)
        other_method(group, sizes, ("nccl", "fused"))


def errors(group: to.Group, sizes: Sizes) -> None:
    """Methods and options that do not fit are errors that say what does, and change nothing."""
    buffer = sizes.buffer(group, torch.float32)
    draw = Draw(group, torch.float32, 5)
    rows = sizes.rows[0]
    x, b = draw.one(rows, sizes.hidden), draw.one(sizes.hidden, sizes.features)
    a, c = draw.one(rows * group.world_size, sizes.features), draw.one(sizes.features, sizes.hidden)

    def gather(method: Any) -> Callable[[], Any]:
        return lambda: to.all_gather_matmul(x, b, buffer=buffer, method=method)

    def reduce(method: Any) -> Callable[[], Any]:
        return lambda: to.matmul_reduce_scatter(a, c, buffer=buffer, method=method)

    for call, words in (
        (gather("ring"), "methods that apply here: 'fused', 'ring_exchange', 'nccl'"),
        (gather("pipeline"), "does not apply here; methods that apply: 'fused', 'ring_exchange', 'nccl'"),
        (reduce("bulk"), "methods that apply: 'fused', 'ring_exchange', 'pipeline', 'nccl'"),
        (reduce("ring_exchange(aggregate=True)"), "all_gather_matmul alone"),
        (gather("ring_exchange(num_splits=2)"), "it has: 'aggregate', 'use_ce', 'num_sm'"),
        (gather("fused(num_sm=2)"), "it has: 'use_ce', 'tiles'"),
        (gather("fused(tiles=3x3)"), "such as '128x256x64x8x3', got '3x3'"),
        (gather("auto(tiles=128x256x64x8x3)"), "it has: none"),
        (gather("ring_exchange(num_sm=0)"), "at least 1, got 0"),
        (gather("ring_exchange(use_ce=2)"), "True or False, got 2"),
        (gather("ring_exchange(speed=2)"), "unknown option 'speed'"),
        (gather("ring_exchange(num_sm"), "must be a name"),
    ):
        before = buffer.epoch
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value), str(caught.value)
        assert buffer.epoch == before


def half_done(group: to.Group, sizes: Sizes) -> None:
    """An exception of the host in the middle of a call breaks the group, and no peer gets wrong data."""
    buffer = sizes.buffer(group, torch.float32)
    x, b = torch.ones(sizes.rows[0], sizes.hidden), torch.ones(sizes.hidden, sizes.features)
    a = x.repeat(group.world_size, 1) @ b

    def reduce_scatter() -> torch.Tensor:
        return to.matmul_reduce_scatter(a, b.t(), buffer=buffer, method="ring_exchange")

    if group.rank == 0:
        # Past the checks of the operation: torch refuses these shapes once the call is open.
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ring_exchange.matmul_reduce_scatter(buffer, a, b.t()[1:], method=to.Method("ring_exchange"))
        with pytest.raises(to.GroupBrokenError, match="raised RuntimeError"):
            reduce_scatter()
    else:
        with pytest.raises(to.CommTimeoutError, match="waited"):
            reduce_scatter()
    group.recover()
    expected = torch.full((sizes.rows[0], sizes.hidden), float(group.world_size * sizes.hidden * sizes.features))
    assert_equal("after recovery", reduce_scatter(), expected)


def poisoned_outputs(group: to.Group, sizes: Sizes, method: str) -> None:
    """Where rank 1 does not come, the others' outputs are NaN, the gathered rows too."""
    buffer = sizes.buffer(group, torch.float32)
    group.check_mode = "async"  # so that the failed call returns
    rows = sizes.rows[0]
    x, b = torch.ones(rows, sizes.hidden), torch.ones(sizes.hidden, sizes.features)
    if group.rank != 1:
        out, gathered = to.all_gather_matmul(x, b, buffer=buffer, method=method, return_gathered=True)
        assert bool(out.isnan().all())
        assert bool(gathered.isnan().all())
        with pytest.raises(to.CommTimeoutError, match=r"for rank 1: header|\(reported by"):
            group.check()
    group.backend.barrier(4 * group.timeout_s)
    with pytest.raises(to.CommError):
        group.check()
    group.recover()
    a = x.repeat(group.world_size, 1)
    c = torch.ones(sizes.hidden, sizes.hidden)
    if group.rank != 1:
        reduce_method = method.replace("aggregate=True", "use_ce=False")
        part = to.matmul_reduce_scatter(a, c, buffer=buffer, method=reduce_method)
        assert bool(part.isnan().all())
    group.backend.barrier(4 * group.timeout_s)
    with pytest.raises(to.CommError):
        group.check()
