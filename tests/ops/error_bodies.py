"""What the operations refuse, as a body for every backend (``cases``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import Draw, Sizes, assert_equal, leaf


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
