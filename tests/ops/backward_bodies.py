"""Backward passes of the products by methods of their own, as bodies for every backend (``cases``)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import Draw, Sizes, assert_close, assert_equal, leaf, leaves64, poisoned
from triton_overlap import reference
from triton_overlap.comm.user_buffers import UserBuffer
from triton_overlap.ops.gemm_methods import GemmMethods

#: Of a column-parallel product: each way of its backward pass.
METHODS = [
    GemmMethods("ring_exchange", dgrad="bulk", wgrad="bulk"),
    GemmMethods("fused", dgrad="bulk"),
    GemmMethods("fused", wgrad="bulk(num_sm=2)"),
    GemmMethods("ring_exchange(aggregate=True)", dgrad="pipeline(num_splits=2)"),
    GemmMethods("fused", dgrad="bulk(use_ce=True)", wgrad="bulk(use_ce=True)"),
]


def column(group: to.Group, sizes: Sizes, dtype: torch.dtype, methods: list[GemmMethods]) -> None:
    """``all_gather_matmul`` by each of the methods, its gathered rows saved or not, with and without main_grad."""
    buffer = sizes.buffer(group, dtype)
    for seed, rows in enumerate(sizes.rows):
        for by, save, accumulate in itertools.product(methods, (False, True), (False, True)):
            with poisoned(buffer, rows * group.world_size):
                _one(buffer, sizes, rows, seed, by, save, accumulate)
        _several(buffer, sizes, rows, seed, methods[0])
        _some_gradients(buffer, sizes, rows, seed, methods[0])


def _one(buffer: UserBuffer, sizes: Sizes, rows: int, seed: int, by: GemmMethods, save: bool, accumulate: bool) -> None:
    group, dtype = buffer.group, buffer.dtype
    draw = Draw(group, dtype, seed)
    a, w = draw.per_rank(rows, sizes.hidden), draw.per_rank(sizes.features, sizes.hidden)
    d_out = draw.per_rank(rows * group.world_size, sizes.features)
    mine, weight = draw.mine(a), draw.mine(w)
    main_grad = torch.full(weight.shape, 3.0, dtype=torch.float32, device=group.device) if accumulate else None
    out = to.all_gather_matmul(
        mine,
        weight.t(),
        buffer=buffer,
        method=by,
        save_gathered=save,
        main_grad=None if main_grad is None else main_grad.t(),
    )
    out.backward(draw.constant(d_out))

    a64, w64 = leaves64(a), leaves64(w)
    outs = reference.all_gather_matmul(a64, [x.t() for x in w64])
    torch.autograd.backward(outs, [g.double() for g in d_out])
    what = f"{by}, saved {save}, main_grad {accumulate}"
    assert_close(f"{what}: output", out, outs[group.rank], dtype)
    assert_close(f"{what}: da", mine.grad, a64[group.rank].grad, dtype)
    expected = w64[group.rank].grad
    if main_grad is None:
        assert_close(f"{what}: dw", weight.grad, expected, dtype)
        assert weight.grad is not None
        assert weight.grad.is_contiguous()
    else:
        assert weight.grad is None
        assert_close(f"{what}: main_grad", (main_grad - 3.0).to(dtype), expected, dtype)


def _several(buffer: UserBuffer, sizes: Sizes, rows: int, seed: int, by: GemmMethods) -> None:
    """Two b, one of them [K, N] in memory, and a gradient of the gathered rows, all through one reduce-scatter."""
    group, dtype = buffer.group, buffer.dtype
    draw, tokens = Draw(group, dtype, seed), rows * group.world_size
    a, b = draw.per_rank(rows, sizes.hidden), draw.per_rank(sizes.hidden, sizes.features)
    w = draw.per_rank(4, sizes.hidden)
    d_b, d_w, d_g = (draw.per_rank(tokens, n) for n in (sizes.features, 4, sizes.hidden))
    mine, my_b, my_w = (draw.mine(x) for x in (a, b, w))
    epoch = buffer.epoch
    (out_b, out_w), gathered = to.all_gather_matmul(
        mine, [my_b, my_w.t()], buffer=buffer, method=by, return_gathered=True
    )
    torch.autograd.backward([out_b, out_w, gathered], [draw.constant(d) for d in (d_b, d_w, d_g)])
    assert buffer.epoch - epoch == 2, "the rows were there, and one reduce-scatter serves all"
    a64, b64, w64 = leaves64(a), leaves64(b), leaves64(w)
    outs = [
        *reference.all_gather_matmul(a64, b64),
        *reference.all_gather_matmul(a64, [x.t() for x in w64]),
        *reference.all_gather(a64),
    ]
    torch.autograd.backward(outs, [g.double() for d in (d_b, d_w, d_g) for g in d])
    for name, x, expected in (("a", mine, a64), ("b", my_b, b64), ("w", my_w, w64)):
        assert_close(f"several b by {by}: d{name}", x.grad, expected[group.rank].grad, dtype)


def _some_gradients(buffer: UserBuffer, sizes: Sizes, rows: int, seed: int, by: GemmMethods) -> None:
    """Where only some gradients are wanted there is less to hide a collective behind, and results are the same."""
    group, dtype = buffer.group, buffer.dtype
    draw = Draw(group, dtype, seed)
    a, b = draw.per_rank(rows, sizes.hidden), draw.per_rank(sizes.hidden, sizes.features)
    bias, d_out = draw.one(sizes.features), draw.per_rank(rows * group.world_size, sizes.features)
    a64, b64, (bias64,) = leaves64(a), leaves64(b), leaves64([bias])
    outs = reference.all_gather_matmul(a64, b64, [bias64] * group.world_size)
    torch.autograd.backward(outs, [g.double() for g in d_out])
    bias_grad = draw.constant(d_out).double().sum(dim=0)
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        inputs = [draw.mine(a), draw.mine(b), leaf(bias)]
        for x, want in zip(inputs, wanted, strict=True):
            x.requires_grad_(want)
        out = to.all_gather_matmul(inputs[0], inputs[1], bias=inputs[2], buffer=buffer, method=by, save_gathered=False)
        out.backward(draw.constant(d_out))
        expected: list[Tensor | None] = [a64[group.rank].grad, b64[group.rank].grad, bias_grad]
        for x, grad, want in zip(inputs, expected, wanted, strict=True):
            if want:
                assert_close(f"gradient {wanted} alone by {by}", x.grad, grad, dtype)
            else:
                assert x.grad is None


def row(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """``matmul_reduce_scatter`` with a gather of its own choice in backward."""
    buffer = sizes.buffer(group, dtype)
    for seed, rows in enumerate(sizes.rows):
        for by in (GemmMethods("pipeline", "ring_exchange(aggregate=True)"), GemmMethods("ring_exchange", "fused")):
            draw = Draw(group, dtype, seed)
            a = draw.per_rank(rows * group.world_size, sizes.features)
            b, d_out = draw.per_rank(sizes.features, sizes.hidden), draw.per_rank(rows, sizes.hidden)
            mine = [draw.mine(a), draw.mine(b)]
            out = to.matmul_reduce_scatter(mine[0], mine[1], buffer=buffer, method=by)
            out.backward(draw.constant(d_out))
            a64, b64 = leaves64(a), leaves64(b)
            outs = reference.matmul_reduce_scatter(a64, b64)
            torch.autograd.backward(outs, [g.double() for g in d_out])
            assert_close(f"{by}: output", out, outs[group.rank], dtype)
            for name, x, expected in zip("ab", mine, (a64, b64), strict=True):
                assert_close(f"{by}: d{name}", x.grad, expected[group.rank].grad, dtype)


def refusals(group: to.Group, sizes: Sizes) -> None:
    """A method of the backward pass that does not apply is an error of the forward pass."""
    buffer = sizes.buffer(group, torch.float32)
    x, b = torch.ones(sizes.rows[0], sizes.hidden), torch.ones(sizes.hidden, sizes.features)
    a = torch.ones(sizes.rows[0] * group.world_size, sizes.features)

    def gather(method: Any) -> Any:
        return to.all_gather_matmul(x, b, buffer=buffer, method=method)

    def reduce(method: Any) -> Any:
        return to.matmul_reduce_scatter(a, b.t(), buffer=buffer, method=method)

    for call, method, words in (
        (gather, GemmMethods("fused", "ring_exchange(aggregate=True)"), "aggregate applies to all_gather_matmul alone"),
        (gather, GemmMethods("fused", wgrad="fused"), "reduce_scatter_beside_matmul.*methods that apply: 'bulk'"),
        (gather, GemmMethods("bulk"), "all_gather_matmul: method 'bulk' does not apply"),
        (reduce, GemmMethods("pipeline", "pipeline"), "all_gather_matmul: method 'pipeline' does not apply"),
        (reduce, GemmMethods("pipeline", "bulk"), "all_gather_matmul: method 'bulk' does not apply"),
        (reduce, GemmMethods("pipeline", wgrad="bulk"), "communicates nothing"),
    ):
        epoch = buffer.epoch
        with pytest.raises(ValueError, match=words):
            call(method)
        assert buffer.epoch == epoch
    counted = group.user_buffer(sizes.max_rows * group.world_size, sizes.hidden, torch.float32, device_count=True)
    count = torch.tensor(len(a), dtype=torch.int32, device=group.device)
    for by in (METHODS[0], GemmMethods("fused", wgrad="bulk"), GemmMethods("fused", "ring_exchange")):
        with pytest.raises(NotImplementedError, match=r"takes its sizes from the host.*use 'fused'"):
            to.all_gather_matmul(x, b, buffer=counted, method=by, active_tokens=count)
    with pytest.raises(TypeError, match="save_gathered must be True or False, got 1"):
        to.all_gather_matmul(x, b, buffer=buffer, save_gathered=1)  # type: ignore[call-overload]


def compiled(group: to.Group, sizes: Sizes) -> None:
    """One graph for every token count, with bulk collectives in backward and a main_grad that they add to."""
    from torch._dynamo.testing import CompileCounterWithBackend

    buffer, draw = sizes.buffer(group, torch.float32), Draw(group, torch.float32, 31)
    w = draw.mine(draw.per_rank(sizes.features, sizes.hidden))
    v = draw.mine(draw.per_rank(sizes.features, sizes.hidden))
    main_grad = torch.zeros_like(v)
    by = METHODS[0]

    def block(x: Tensor) -> Tensor:
        h = to.all_gather_matmul(x, w.t(), buffer=buffer, method=by, save_gathered=False)
        g = to.all_gather_matmul(x, v.t(), buffer=buffer, method=by, save_gathered=False, main_grad=main_grad.t())
        return h * torch.tanh(g)

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    fast = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for seed, rows in enumerate((5, 3, 8)):
        x_of_all = Draw(group, torch.float32, seed).per_rank(rows, sizes.hidden)
        results: list[list[Tensor]] = []
        for function in (block, fast):
            x = draw.mine(x_of_all)
            w.grad = None
            main_grad.zero_()
            out = function(x)
            out.sum().backward()
            assert x.grad is not None
            assert w.grad is not None
            results.append([out.detach(), x.grad, w.grad, main_grad.clone()])
        for eager, got in zip(*results, strict=True):
            assert_equal("compiled", got, eager)
    assert counter.frame_count == 1
