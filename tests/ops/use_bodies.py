"""Ways to use the operations, as bodies for every backend (``cases``): microbatches, gradient modes, autocast,
gradient accumulation, strided operands, streams."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import triton_overlap as to
from tests.ops.cases import Body, Draw, Sizes, assert_close, assert_equal, leaf
from tests.ops.pair import Pair
from triton_overlap import reference


def microbatches(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Forward, forward, backward, backward, with another active shape set meanwhile, equals one after the other."""
    pair = Pair(group, sizes, dtype)
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
    pair = Pair(group, sizes, dtype)
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
    for pair in (Pair(group, sizes, dtype), Pair(group, sizes, dtype, sequence_parallel=False)):
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
        part = to.matmul_reduce_scatter(h, v, bias=v_bias, buffer=buffer)
        whole, product = to.all_gather_beside_matmul(part, x, w, bias=w_bias, buffer=buffer)
        again, _ = to.reduce_scatter_beside_matmul(whole, product, v, bias=v_bias, buffer=buffer)
        return again

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
    pair = Pair(group, sizes, dtype)
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


#: Bodies that take ``(group, sizes, dtype)``, for one buffer of any backend.
USES: tuple[Body, ...] = (
    microbatches,
    no_grad,
    checkpointing,
    main_grad,
    layouts,
    needed_gradients,
    raw_operator,
    fresh_outputs,
)
