"""Activations and residuals inside the operations, against the same steps one after another, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import Draw, Sizes, assert_close, assert_equal, leaf
from triton_overlap import reference
from triton_overlap.kernels.activation import FUNCTIONS, GATED_FUNCTIONS

#: Names with whether they are gated.
ACTIVATIONS = {"gelu": False, "swiglu": True}


def _unfused(product: Tensor, name: str) -> Tensor:
    return to.gated_activation(product, name) if ACTIVATIONS[name] else to.activation(product, name)


def _gradients(out: Tensor, inputs: list[Tensor], d_out: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def activations(group: to.Group, sizes: Sizes, dtype: torch.dtype, method: str = "fused") -> None:
    """Output and all gradients have the bits of the activation taken of the product afterwards."""
    buffer = sizes.buffer(group, dtype)
    for seed, rows in enumerate(sizes.rows):
        for name, gated in ACTIVATIONS.items():
            draw = Draw(group, dtype, seed)
            n = 2 * sizes.features if gated else sizes.features
            x = draw.mine(draw.per_rank(rows, sizes.hidden))
            b, bias = leaf(draw.one(n, sizes.hidden) / sizes.hidden**0.5), leaf(draw.one(n))
            d_out = draw.one(rows * group.world_size, sizes.features)
            shared: dict[str, Any] = {"buffer": buffer, "bias": bias, "method": method}
            fused = to.all_gather_matmul(x, b.t(), activation=name, **shared)
            plain = _unfused(to.all_gather_matmul(x, b.t(), **shared), name)
            results, expected = (_gradients(out, [x, b, bias], d_out) for out in (fused, plain))
            for what, result, right in zip(("output", "dx", "db", "dbias"), results, expected, strict=True):
                assert_equal(f"{name}, {what} at {rows} rows", result, right)
            with torch.no_grad():
                out, gathered = to.all_gather_matmul(x, b.t(), activation=name, return_gathered=True, **shared)
            assert_equal(f"{name} without gradients", out, results[0])
            assert gathered.shape == (rows * group.world_size, sizes.hidden)


def saved(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Gradients do not depend on what forward kept: the gathered rows, returned or not, or the shard."""
    buffer, rows = sizes.buffer(group, dtype), sizes.rows[0]
    draw = Draw(group, dtype, 5)
    x, b = draw.mine(draw.per_rank(rows, sizes.hidden)), draw.mine(draw.per_rank(sizes.hidden, 2 * sizes.features))
    d_out = draw.one(rows * group.world_size, sizes.features)
    d_rows = draw.one(rows * group.world_size, sizes.hidden)
    results = []
    for method in ("fused", to.GemmMethods("fused", dgrad="bulk", wgrad="bulk")):
        for save in (True, False):
            out = to.all_gather_matmul(x, b, buffer=buffer, activation="swiglu", save_gathered=save, method=method)
            results.append(torch.autograd.grad(out, [x, b], d_out))
    for dx, db in results[1:]:
        assert_close("dx", dx, results[0][0].double(), dtype)
        assert_close("db", db, results[0][1].double(), dtype)
    out, gathered = to.all_gather_matmul(x, b, buffer=buffer, activation="swiglu", return_gathered=True)
    dx, db = torch.autograd.grad([out, gathered], [x, b], [d_out, d_rows])
    expected = results[0][0] + to.reduce_scatter(d_rows, buffer=buffer)
    assert_close("dx with gathered rows", dx, expected.double(), dtype)
    assert_close("db with gathered rows", db, results[0][1].double(), dtype)


def names(group: to.Group) -> None:
    """Every activation inside the kernel has the bits of its own kernel."""
    buffer = group.user_buffer(4 * group.world_size, 16, torch.float32)
    x, b = torch.randn(3, 16), torch.randn(16, 16)
    plain = to.all_gather_matmul(x, b, buffer=buffer)
    for name in FUNCTIONS:
        out = to.all_gather_matmul(x, b, buffer=buffer, activation=name)
        assert_equal(name, out, to.activation(plain, name))
    for name in GATED_FUNCTIONS:
        out = to.all_gather_matmul(x, b, buffer=buffer, activation=name)
        assert_equal(name, out, to.gated_activation(plain, name))


def residuals(group: to.Group, sizes: Sizes, dtype: torch.dtype, method: str = "fused") -> None:
    """A residual is added to this rank's rows, and its gradient is the output's."""
    buffer = sizes.buffer(group, dtype)
    for seed, rows in enumerate(sizes.rows):
        draw, tokens = Draw(group, dtype, seed), rows * group.world_size
        all_a, all_b = draw.per_rank(tokens, sizes.features), draw.per_rank(sizes.features, sizes.hidden)
        all_residuals = draw.per_rank(rows, sizes.hidden)
        a, b, residual = draw.mine(all_a), draw.mine(all_b), draw.mine(all_residuals)
        d_out = draw.one(rows, sizes.hidden)
        out = to.matmul_reduce_scatter(a, b, buffer=buffer, residual=residual, method=method)
        results = _gradients(out, [residual, a, b], d_out)
        plain = _gradients(to.matmul_reduce_scatter(a, b, buffer=buffer, method=method), [a, b], d_out)
        exact = reference.matmul_reduce_scatter([x.double() for x in all_a], [x.double() for x in all_b])
        assert_close("output", results[0], (exact[group.rank] + residual.double()).detach(), dtype)
        for what, result, right in zip(("residual", "a", "b"), results[1:], (d_out, *plain[1:]), strict=True):
            assert_equal(f"gradient of {what} at {rows} rows", result, right)


def counted(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Both with a count on the device: the bits of the active rows alone."""
    capacity, hidden = sizes.max_rows * group.world_size, sizes.hidden
    buffer, plain = (group.user_buffer(capacity, hidden, dtype, device_count=counts) for counts in (True, False))
    draw, rows = Draw(group, dtype, 1), sizes.rows[0]
    tokens = rows * group.world_size
    count = torch.full((), tokens, dtype=torch.int32, device=group.device)
    x, residual = draw.one(sizes.max_rows, hidden), draw.one(sizes.max_rows, hidden)
    b, c = draw.one(hidden, 2 * sizes.features), draw.one(sizes.features, hidden)

    d_out = draw.one(sizes.max_rows, hidden)
    for tensor in (x, residual, d_out):
        tensor[rows:] = float("nan")
    main_grads = [torch.zeros(w.shape, device=w.device) for w in (b, c)]

    def block(end: int, buffer: to.UserBuffer, active: Tensor | None) -> list[Tensor]:
        own, added = leaf(x[:end]), leaf(residual[:end])
        shared: dict[str, Any] = {"buffer": buffer, "active_tokens": active}
        wanted = [own, added]
        for main_grad in main_grads:
            main_grad.zero_()
        b_leaf, c_leaf = leaf(b), leaf(c)
        h = to.all_gather_matmul(own, b_leaf, activation="swiglu", main_grad=main_grads[0], **shared)
        out = to.matmul_reduce_scatter(h, c_leaf, residual=added, main_grad=main_grads[1], **shared)
        torch.autograd.backward(out, d_out[:end])
        grads = [tensor.grad for tensor in wanted]
        assert all(grad is not None for grad in grads)
        return [out.detach(), *(grad for grad in grads if grad is not None), *(m.clone() for m in main_grads)]

    results, expected = block(sizes.max_rows, buffer, count), block(rows, plain, None)
    for what, result, right in zip(("output", "dx", "dresidual", "db", "dc"), results, expected, strict=True):
        assert_equal(what, result[: right.shape[0]], right)
        if what == "output":
            assert bool(result[rows:].isnan().all())


def errors(group: to.Group) -> None:
    buffer = group.user_buffer(4 * group.world_size, 8, torch.float32)
    x, b = torch.zeros(2, 8, device=group.device), torch.zeros(8, 7, device=group.device)
    a, c = torch.zeros(2 * group.world_size, 5, device=group.device), torch.zeros(5, 8, device=group.device)
    epoch = buffer.epoch
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "activation must be one of .*swiglu, got 'tanh'", {"activation": "tanh"}),
        (TypeError, "activation must be one of .*, got 3", {"activation": 3}),
        (ValueError, "even number of columns with activation 'swiglu'", {"activation": "swiglu"}),
    ]
    for kind, message, arguments in refused:
        with pytest.raises(kind, match=message):
            to.all_gather_matmul(x, b, buffer=buffer, **arguments)
    with pytest.raises(NotImplementedError, match="activation is for one b"):
        to.all_gather_matmul(x, [b, b], buffer=buffer, activation="gelu")  # type: ignore[call-overload]
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"residual must be \[T/W, N\] = \[2, 8\], this rank's rows, got \[3, 8\]", x.new_zeros(3, 8)),
        (ValueError, "residual is torch.float16, the buffer is torch.float32", x.half()),
        (TypeError, "residual must be a torch.Tensor or None", "x"),
    ]
    for kind, message, residual in wrong:
        with pytest.raises(kind, match=message):
            to.matmul_reduce_scatter(a, c, buffer=buffer, residual=residual)
    assert buffer.epoch == epoch
