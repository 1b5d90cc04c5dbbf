"""The naive twins against what they stand for, written out by index."""

from __future__ import annotations

import math

import pytest
import torch

from triton_overlap import reference

W, ROWS, K, N = 3, 2, 5, 4
T = W * ROWS


def _draw(*shape: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(W)]


def test_all_gather_is_rank_order_and_its_gradient_the_sum() -> None:
    shards = _draw(ROWS, K)
    outs = reference.all_gather(shards)
    for out in outs:
        for row in range(T):
            assert torch.equal(out[row], shards[row // ROWS][row % ROWS])
    grads = [torch.full_like(out, rank + 1.0) for rank, out in enumerate(outs)]
    for grad in torch.autograd.grad(outs, shards, grads):
        assert bool((grad == 1 + 2 + 3).all())


def test_reduce_scatter_is_the_own_chunk_of_the_sum() -> None:
    xs = _draw(T, K)
    outs = reference.reduce_scatter(xs)
    for rank, out in enumerate(outs):
        for row in range(ROWS):
            assert torch.allclose(out[row], sum(x[rank * ROWS + row] for x in xs))  # type: ignore[arg-type]
    grads = [torch.full_like(out, rank + 1.0) for rank, out in enumerate(outs)]
    for grad in torch.autograd.grad(outs, xs, grads):
        assert torch.equal(grad, torch.arange(1.0, W + 1).double().repeat_interleave(ROWS)[:, None].expand(T, K))


def test_all_gather_matmul() -> None:
    shards, bs, biases = _draw(ROWS, K), _draw(K, N, seed=1), _draw(N, seed=2)
    outs = reference.all_gather_matmul(shards, bs, [biases[0], None, biases[2]])
    for rank in range(W):
        for row in range(T):
            expected = shards[row // ROWS][row % ROWS] @ bs[rank]
            if rank != 1:
                expected = expected + biases[rank]
            torch.testing.assert_close(outs[rank][row], expected)


def test_matmul_reduce_scatter_adds_the_bias_once() -> None:
    as_, bs, bias = _draw(T, K), _draw(K, N, seed=1), _draw(N, seed=2)[0]
    outs = reference.matmul_reduce_scatter(as_, bs, bias)
    assert len(outs) == W
    for rank, out in enumerate(outs):
        assert out.shape == (ROWS, N)
        for row in range(ROWS):
            products = torch.stack([a[rank * ROWS + row] @ b for a, b in zip(as_, bs, strict=True)])
            torch.testing.assert_close(out[row], products.sum(dim=0) + bias)
    (grad,) = torch.autograd.grad(outs, bias, [torch.ones_like(out) for out in outs])
    assert bool((grad == T).all())


def test_all_reduce_is_the_scattered_sum_put_together() -> None:
    as_, bs, bias = _draw(T, K), _draw(K, N, seed=1), _draw(N, seed=2)[0]
    whole = torch.cat(reference.matmul_reduce_scatter(as_, bs, bias))
    for out in reference.matmul_all_reduce(as_, bs, bias):
        torch.testing.assert_close(out, whole)


def test_replicated_matmul() -> None:
    x, bs, biases = _draw(T, K)[0], _draw(K, N, seed=1), _draw(N, seed=2)
    for out, b, bias in zip(reference.replicated_matmul(x, bs, biases), bs, biases, strict=True):
        torch.testing.assert_close(out, torch.nn.functional.linear(x, b.t(), bias))


def test_weight_gradient_is_the_product_s_gradient() -> None:
    a, b, g = _draw(T, K)[0], _draw(K, N, seed=1)[0], _draw(T, N, seed=2)[0]
    (expected,) = torch.autograd.grad(a @ b, b, g)
    torch.testing.assert_close(reference.weight_gradient(a, g), expected)
    start = torch.ones(K, N, dtype=torch.float64)
    torch.testing.assert_close(reference.weight_gradient(a, g, start), expected + 1)


def test_relative_error() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert reference.relative_error(expected, expected) == 0
    assert math.isclose(reference.relative_error(expected + torch.tensor([0.0, 0.5]), expected), 0.1)
    assert reference.relative_error(torch.tensor([3.0, math.nan]), expected) == math.inf
    assert reference.relative_error(expected, torch.tensor([3.0, math.inf])) == math.inf
    assert reference.relative_error(torch.ones(2), torch.zeros(2)) > 1e100
    with pytest.raises(ValueError, match="shapes differ"):
        reference.relative_error(expected, expected[:1])


def test_norms_are_torch_s() -> None:
    x, weight, bias = _draw(ROWS, K)[0], _draw(K, seed=1)[0], _draw(K, seed=2)[0]
    functional = torch.nn.functional
    torch.testing.assert_close(
        reference.layer_norm(x, weight, bias, 1e-3), functional.layer_norm(x, [K], weight, bias, 1e-3)
    )
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-3), functional.rms_norm(x, [K], weight, 1e-3))


def test_rotary_turns_pairs_by_the_position_in_the_document() -> None:
    x = _draw(5, 2, 6)[0]
    angles = torch.tensor([[0.0, 0.0], [0.3, 0.3], [0.6, 0.6]], dtype=torch.float64)
    out = reference.rotary(x, angles, torch.tensor([0, 3, 5]))
    for token, position in enumerate((0, 1, 2, 0, 1)):
        cos, sin = math.cos(0.3 * position), math.sin(0.3 * position)
        for head in range(2):
            first, second, *rest = x[token, head].tolist()
            expected = [first * cos - second * sin, second * cos + first * sin, *rest]
            assert out[token, head].tolist() == pytest.approx(expected)


def test_rotary_qkv_takes_heads_group_by_group() -> None:
    groups, heads = 2, 3
    qkv = torch.arange(groups * (heads + 2.0)).view(1, groups, heads + 2, 1)
    query, key, value = reference.rotary_qkv(qkv, None, torch.tensor([0, 1]))
    assert (query.flatten().tolist(), key.flatten().tolist(), value.flatten().tolist()) == (
        [0, 1, 2, 5, 6, 7],
        [3, 8],
        [4, 9],
    )


def test_cross_entropy_is_torch_s_where_a_label_counts() -> None:
    logits, labels = _draw(4, K)[0], torch.tensor([2, -100, 0, 4])
    for reduction in ("mean", "sum"):
        expected = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        torch.testing.assert_close(reference.cross_entropy(logits, labels, reduction=reduction), expected)
    assert float(reference.cross_entropy(logits.detach(), torch.full((4,), -100))) == 0
