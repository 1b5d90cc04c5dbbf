"""The operations with a token count on the device, against the same operations told the count by the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import Sizes, assert_close, assert_equal, assert_steady, counters
from tests.ops.pair import Pair


class CountedPair:
    """A column and a row product with GELU in between, forward and backward, on tensors at capacity.

    Attributes:
        pair: the same products with the host's count; the weights are shared.
        x, d_out: [max_rows, hidden], NaN past the active rows.
        main_grads: of the two weights.
    """

    def __init__(self, group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
        self.pair = Pair(group, sizes, dtype)
        self.group, self.sizes = group, sizes
        capacity = sizes.max_rows * group.world_size
        self.buffer = group.user_buffer(capacity, sizes.hidden, dtype, device_count=True)
        self.count = torch.full((), group.world_size, dtype=torch.int32, device=group.device)
        shape = (sizes.max_rows, sizes.hidden)
        self.x, self.d_out = (torch.zeros(shape, dtype=dtype, device=group.device) for _ in range(2))
        self.x.requires_grad_()
        weights = (self.pair.weights[0], self.pair.weights[2])
        self.main_grads = [torch.zeros(w.shape, dtype=torch.float32, device=w.device) for w in weights]

    def set(self, rows: int, seed: int) -> None:
        """Other inputs, of another count."""
        x, d_out = self.pair.inputs(rows, seed)
        for static, value in ((self.x, x), (self.d_out, d_out)):
            static.detach().fill_(float("nan"))[:rows] = value.detach()
        self.count.fill_(rows * self.group.world_size)

    def step(self, main_grads: bool) -> list[Tensor]:
        """The output, and the gradients of x, the weights and the biases; weights' in ``main_grads`` if wanted."""
        b, b_bias, c, c_bias = self.pair.weights
        b_main, c_main = self.main_grads if main_grads else (None, None)
        shared = {"buffer": self.buffer, "active_tokens": self.count}
        h = to.all_gather_matmul(self.x, b, bias=b_bias, main_grad=b_main, **shared)  # type: ignore[call-overload]
        h = to.gelu(h, active_tokens=self.count)
        out = to.matmul_reduce_scatter(h, c, bias=c_bias, main_grad=c_main, **shared)  # type: ignore[arg-type]
        wanted = [self.x, b_bias, c_bias] if main_grads else [self.x, b_bias, c_bias, b, c]
        return [out.detach(), *torch.autograd.grad(out, wanted, self.d_out)]

    def plain_step(self, rows: int, main_grads: list[Tensor] | None = None) -> list[Tensor]:
        """The same of the active rows alone, with the host's count."""
        b, b_bias, c, c_bias = self.pair.weights
        b_main, c_main = main_grads or (None, None)
        x = self.x.detach()[:rows].clone().requires_grad_()
        h = to.gelu(to.all_gather_matmul(x, b, bias=b_bias, buffer=self.pair.buffer, main_grad=b_main))
        out = to.matmul_reduce_scatter(h, c, bias=c_bias, buffer=self.pair.buffer, main_grad=c_main)
        wanted = [x, b_bias, c_bias] if main_grads else [x, b_bias, c_bias, b, c]
        return [out.detach(), *torch.autograd.grad(out, wanted, self.d_out[:rows])]

    def check(self, results: list[Tensor], rows: int) -> None:
        """Activations have the bits of the host's count; parameters' gradients, summed by other kernels, are close."""
        expected = self.plain_step(rows)
        for name, result, right in zip(("output", "dx"), results[:2], expected[:2], strict=True):
            assert_equal(f"{name} at {rows} rows", result[:rows], right)
            assert result[rows:].isnan().all(), f"{name} was written past {rows} rows"
        names = ("first bias", "second bias", "first weight", "second weight")
        for name, result, right in zip(names, results[2:], expected[2:], strict=False):
            assert_close(f"gradient of the {name} at {rows} rows", result, right.double(), result.dtype)


def values(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """At every count, up and down; weights' gradients as tensors and into main_grad."""
    counted = CountedPair(group, sizes, dtype)
    steady: dict[str, int] = {}
    for seed, rows in enumerate(sizes.rows):
        counted.set(rows, seed)
        counted.check(counted.step(main_grads=False), rows)
        for main_grad in counted.main_grads:
            main_grad.fill_(0.5)
        counted.check(counted.step(main_grads=True), rows)
        plain = [torch.full_like(main_grad, 0.5) for main_grad in counted.main_grads]
        counted.plain_step(rows, plain)
        for main_grad, right in zip(counted.main_grads, plain, strict=True):
            assert_equal(f"main_grad at {rows} rows", main_grad, right)
        steady = steady or counters()
    assert_steady("after the first count", steady)


def graph(group: to.Group, sizes: Sizes, dtype: torch.dtype, replays: int) -> None:
    """Forward and backward, captured once, give at every count the bits of the eager call, in any order."""
    counted = CountedPair(group, sizes, dtype)
    counted.set(sizes.rows[0], 0)
    counted.step(main_grads=False)  # compiles
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = counted.step(main_grads=False)
    rows_of = torch.randint(1, sizes.max_rows + 1, (replays,), generator=torch.Generator().manual_seed(replays))
    for seed, rows in enumerate([*sizes.rows, *rows_of.tolist()]):
        counted.set(rows, seed)
        for result in results:
            result.fill_(float("nan"))
        captured.replay()
        group.check()
        for number, (result, right) in enumerate(zip(results, counted.step(main_grads=False), strict=True)):
            active = rows if number < 2 else result.shape[0]
            assert_equal(f"result {number} at {rows} rows", result[:active], right[:active])
            assert result[active:].isnan().all(), f"result {number} was written past {rows} rows"
        counted.check(results, rows)


def errors(group: to.Group) -> None:
    """What a count on the device cannot be with is refused before the call, by name."""
    sizes = Sizes(hidden=16, features=16, rows=(2,), max_rows=4)
    counted = CountedPair(group, sizes, torch.float32)
    counted.set(2, 0)
    b, count = counted.pair.weights[0], counted.count
    x = counted.x.detach()
    whole = torch.zeros(x.shape[0] * group.world_size, x.shape[1], device=x.device)
    counted_buffer, plain = counted.buffer, counted.pair.buffer
    refused = (
        (ValueError, "active_tokens", lambda: to.all_gather_matmul(x, b, buffer=counted_buffer)),
        (ValueError, "device_count=True", lambda: to.all_gather(x, buffer=plain, active_tokens=count)),
        (ValueError, "torch.int32", lambda: to.all_gather(x, buffer=counted_buffer, active_tokens=count.long())),
        (TypeError, "active_tokens", lambda: to.all_gather(x, buffer=counted_buffer, active_tokens=8)),  # type: ignore[arg-type]
        (ValueError, "active_tokens", lambda: to.reduce_scatter(whole, buffer=counted_buffer)),
        (ValueError, "active_tokens", lambda: to.replicated_matmul(whole, b, buffer=counted_buffer)),
        (
            NotImplementedError,
            "'ring_exchange' takes its sizes from the host",
            lambda: to.all_gather_matmul(x, b, buffer=counted_buffer, active_tokens=count, method="ring_exchange"),
        ),
        (
            NotImplementedError,
            "'fused.use_ce=True.' takes its sizes from the host",
            lambda: to.all_gather_matmul(
                x, b, buffer=counted_buffer, active_tokens=count, method=to.Method("fused", use_ce=True)
            ),
        ),
        (
            NotImplementedError,
            "concatenate them along N",
            lambda: to.all_gather_matmul(x, [b, b], buffer=counted_buffer, active_tokens=count),  # type: ignore[call-overload]
        ),
    )
    epochs = counted_buffer.epoch, plain.epoch
    for kind, message, call in refused:
        with pytest.raises(kind, match=message):
            call()
    assert (counted_buffer.epoch, plain.epoch) == epochs
    by_name = [
        to.all_gather_matmul(x, b, buffer=counted_buffer, active_tokens=count, method=method)
        for method in ("fused", "auto")
    ]
    assert_equal("auto", by_name[1][: 2 * group.world_size], by_name[0][: 2 * group.world_size])
    # The count of a forward is its backward's too.
    h = to.all_gather_matmul(counted.x, b, buffer=counted_buffer, active_tokens=count)
    count.fill_(group.world_size)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()
    counted.set(2, 1)
    counted.check(counted.step(main_grads=False), 2)
