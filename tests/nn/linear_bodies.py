"""What the linear layers promise, as bodies for every backend (``tests.ops.cases``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triton_overlap as to
from tests.ops.cases import TOLERANCE, Sizes, assert_equal
from triton_overlap.reference import relative_error


def _features(group: to.Group, sizes: Sizes) -> int:
    return sizes.features * group.world_size


def _plain(group: to.Group, sizes: Sizes, dtype: torch.dtype, bias: bool) -> list[nn.Linear]:
    """The block as one process has it, in ``dtype``."""
    middle = _features(group, sizes)
    return [
        nn.Linear(sizes.hidden, middle, bias, device=group.device, dtype=dtype),
        nn.Linear(middle, sizes.hidden, bias, device=group.device, dtype=dtype),
    ]


def _parallel(group: to.Group, sizes: Sizes, dtype: torch.dtype, bias: bool, **kwargs: Any) -> list[Any]:
    middle = _features(group, sizes)
    shared: dict[str, Any] = {"group": group, "max_tokens": sizes.max_rows * group.world_size, "dtype": dtype, **kwargs}
    return [
        to.nn.ColumnParallelLinear(sizes.hidden, middle, bias, **shared),
        to.nn.RowParallelLinear(middle, sizes.hidden, bias, **shared),
    ]


def _shard(parameter: Tensor, layer: Any, name: str) -> Tensor:
    dim = getattr(layer.get_parameter(name), "tensor_parallel_dim")  # noqa: B009 - torch's types do not know it
    group = layer.group
    return parameter if dim is None else parameter.chunk(group.world_size, dim=dim)[group.rank]


def initialisation(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """The shards of layers built after one seed are those of ``nn.Linear`` after that seed, and so is what comes next.

    Where ranks' generators differ, rank 0's counts and the others stay where they are.
    """
    torch.manual_seed(17)
    plain, after = _plain(group, sizes, dtype, True), torch.rand(3, device=group.device)
    torch.manual_seed(17)
    parallel, also_after = _parallel(group, sizes, dtype, True), torch.rand(3, device=group.device)
    assert_equal("random numbers after the layers", also_after, after)
    for layer, linear in zip(parallel, plain, strict=True):
        for name, full in linear.named_parameters():
            assert_equal(f"initial {name}", layer.get_parameter(name).detach(), _shard(full.detach(), layer, name))

    torch.manual_seed(17 + group.rank)
    expected = torch.rand(3, device=group.device)
    torch.manual_seed(17 + group.rank)
    different = _parallel(group, sizes, dtype, True)
    for layer, same in zip(different, parallel, strict=True):
        for name, parameter in same.named_parameters():
            assert_equal(f"{name} from rank 0's seed", layer.get_parameter(name).detach(), parameter.detach())
    if group.rank:
        assert_equal("another rank's generator", torch.rand(3, device=group.device), expected)


def block(group: to.Group, sizes: Sizes, dtype: torch.dtype, sequence_parallel: bool = True, bias: bool = True) -> None:
    """Column, tanh and row layer at every row count, against the same block in one process in float64."""
    torch.manual_seed(3)
    plain = _plain(group, sizes, dtype, bias)
    parallel = [
        kind.from_linear(
            linear,
            group=group,
            max_tokens=sizes.max_rows * group.world_size,
            sequence_parallel=sequence_parallel,
        )
        for kind, linear in zip((to.nn.ColumnParallelLinear, to.nn.RowParallelLinear), plain, strict=True)
    ]
    reference = [copy.deepcopy(linear).double() for linear in plain]
    generator = torch.Generator().manual_seed(23)
    for rows in sizes.rows:
        tokens = rows * group.world_size
        mine = slice(group.rank * rows, (group.rank + 1) * rows) if sequence_parallel else slice(tokens)
        full_x, full_d = (
            torch.randn(tokens, sizes.hidden, generator=generator).to(device=group.device, dtype=dtype)
            for _ in range(2)
        )
        x = full_x[mine].clone().requires_grad_()
        # A smooth function: at ReLU's edge rounding would decide whether a gradient passes.
        out = parallel[1](torch.tanh(parallel[0](x)))
        out.backward(full_d[mine])

        x64 = full_x.double().requires_grad_()
        middle64 = reference[0](x64)
        expected = reference[1](torch.tanh(middle64))
        expected.backward(full_d.double())
        assert x64.grad is not None
        _assert_layer("output", out, expected[mine], dtype)
        _assert_layer("dx", x.grad, x64.grad[mine], dtype)
        for layer, linear in zip(parallel, reference, strict=True):
            for name, parameter in linear.named_parameters():
                assert parameter.grad is not None
                _assert_layer(name, layer.get_parameter(name).grad, _shard(parameter.grad, layer, name), dtype)
            layer.zero_grad()
            linear.zero_grad()


def _assert_layer(what: str, actual: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    """As ``assert_close``, with room for a second layer that starts from the first one's rounded output."""
    assert actual is not None
    assert actual.dtype == dtype
    error, limit = relative_error(actual, expected), 2 * TOLERANCE[dtype]
    assert error < limit, f"{what}: relative error {error:.2e}"


def shapes(group: to.Group, sizes: Sizes) -> None:
    """Inputs of more dimensions are flattened and restored; the first dimension is the one that is split."""
    dtype, world_size, batch = torch.float32, group.world_size, 2
    for sequence_parallel in (True, False):
        column, row = _parallel(group, sizes, dtype, True, sequence_parallel=sequence_parallel)
        rows = 2 if sequence_parallel else 2 * world_size
        x = torch.randn(rows, batch, 1, sizes.hidden, device=group.device, requires_grad=True)
        middle = column(x)
        assert middle.shape == (2 * world_size, batch, 1, sizes.features)
        out = row(middle)
        assert out.shape == x.shape
        flat = column(x.detach().reshape(-1, sizes.hidden))
        assert_equal("flattened", middle.detach().reshape(flat.shape), flat.detach())
        assert_equal("flattened", out.detach().reshape(-1, sizes.hidden), row(flat).detach())
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        with pytest.raises(to.ActiveShapeError, match="at least 2 dimensions"):
            column(x[0, 0, 0])


def main_grad(group: to.Group, sizes: Sizes, dtype: torch.dtype, sequence_parallel: bool = True) -> None:
    """A weight with a ``main_grad`` has its gradient added there, over microbatches of different length."""
    layers = _parallel(group, sizes, dtype, True, sequence_parallel=sequence_parallel)

    def run() -> None:
        generator = torch.Generator().manual_seed(5 + group.rank * sequence_parallel)
        for rows in sizes.rows[:2]:
            count = rows if sequence_parallel else rows * group.world_size
            x, d_out = (
                torch.randn(count, sizes.hidden, generator=generator).to(device=group.device, dtype=dtype)
                for _ in range(2)
            )
            layers[1](torch.relu(layers[0](x))).backward(d_out)

    run()
    expected = [layer.weight.grad.double() for layer in layers]
    for layer in layers:
        layer.zero_grad()
        layer.weight.main_grad = torch.full_like(layer.weight, 2.0, dtype=torch.float32)
    run()
    for layer, value in zip(layers, expected, strict=True):
        assert layer.weight.grad is None
        assert layer.bias.grad is not None
        error = relative_error(layer.weight.main_grad - 2.0, value)
        assert error < {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype], f"main_grad: relative error {error:.2e}"


def autocast(group: to.Group, sizes: Sizes) -> None:
    """float32 parameters under bfloat16 autocast: bfloat16 results, float32 gradients, one buffer in bfloat16."""
    for sequence_parallel in (True, False):
        with torch.autocast(group.device.type, dtype=torch.bfloat16):
            layers = _parallel(group, sizes, torch.float32, True, sequence_parallel=sequence_parallel)
        before = to.symmetric_allocations()
        rows = sizes.rows[0] * (1 if sequence_parallel else group.world_size)
        x = torch.randn(rows, sizes.hidden, device=group.device)
        expected = nn.Sequential(*layers)(x)
        allocated = to.symmetric_allocations()
        with torch.autocast(group.device.type, dtype=torch.bfloat16):
            out = nn.Sequential(*layers)(x)
        assert to.symmetric_allocations() == allocated, "registered again"
        assert allocated - before <= 1, "the float32 buffer is registered at its first use"
        assert out.dtype == torch.bfloat16
        assert relative_error(out, expected) < 2e-2
        out.float().sum().backward()
        for layer in layers:
            for parameter in layer.parameters():
                assert parameter.grad.dtype == torch.float32


def autocast_on_meta(group: to.Group, sizes: Sizes) -> None:
    """Modules built under autocast on the meta device, as ``from_linear`` does, register the buffer of their calls; so
    a compiler, which can register none, has it."""
    world_size, features = group.world_size, 4 * group.world_size
    torch.manual_seed(5)
    x = torch.randn(2, 16, device=group.device)
    plain = nn.Linear(16, features, device=group.device)

    def column(max_tokens: int) -> nn.Module:
        layer = to.nn.ColumnParallelLinear(16, features, group=group, max_tokens=max_tokens, device="meta")
        layer.to_empty(device=group.device).load_state_dict(to.nn.shard_state_dict(plain.state_dict(), layer, group))
        return layer

    def from_linear(max_tokens: int) -> nn.Module:
        return to.nn.ColumnParallelLinear.from_linear(plain, group=group, max_tokens=max_tokens)

    def moe(max_tokens: int) -> nn.Module:
        layer = to.nn.MoE(
            16, 8, 2 * world_size, 1, group=group, num_max_tokens_per_rank=max_tokens, device="meta"
        ).to_empty(device=group.device)
        layer.reset_parameters()
        return layer

    with torch.autocast(group.device.type, dtype=torch.bfloat16):
        for index, build in enumerate((column, from_linear, moe)):
            layer = build((2 + index) * world_size)  # a buffer of its own
            allocations = to.symmetric_allocations()
            assert layer(x).dtype == torch.bfloat16
            assert to.symmetric_allocations() == allocations, f"{build.__name__}: registered another buffer"
        torch._dynamo.reset()
        fast = torch.compile(from_linear(8 * world_size), fullgraph=True, backend="eager")
        assert relative_error(fast(x), plain(torch.cat([x] * world_size)).chunk(world_size, 1)[group.rank]) < 2e-2


def module_protocol(group: to.Group, sizes: Sizes) -> None:
    """Meta device, state_dict, freezing, repr, sharing of buffers, and settings that do not fit."""
    dtype = torch.float32
    layers = _parallel(group, sizes, dtype, True)
    allocations = to.symmetric_allocations()
    empty = _parallel(group, sizes, dtype, True, device="meta")
    assert to.symmetric_allocations() == allocations, "layers of one capacity share a buffer"
    for layer, other in zip(layers, empty, strict=True):
        assert other.weight.is_meta
        other.to_empty(device=group.device)
        other.load_state_dict(layer.state_dict())
        assert_equal("loaded weight", other.weight.detach(), layer.weight.detach())
        other.reset_parameters()
        assert other.weight.tensor_parallel_dim == layer.weight.tensor_parallel_dim
        for part in (f"rank={group.rank}", f"world_size={group.world_size}", "sequence_parallel=True"):
            assert part in repr(layer)

    clone = copy.deepcopy(layers[0])
    assert clone.group is group
    assert to.symmetric_allocations() == allocations
    assert clone.weight.tensor_parallel_dim == layers[0].weight.tensor_parallel_dim
    x = torch.randn(sizes.rows[0], sizes.hidden, device=group.device)
    before = layers[0](x).detach()
    assert_equal("copied layer", clone(x).detach(), before)
    with torch.no_grad():
        clone.weight.zero_()
    assert_equal("layer after its copy changed", layers[0](x).detach(), before)

    linear = nn.Linear(sizes.hidden, _features(group, sizes), bias=False, device=group.device)
    linear.weight.requires_grad_(False)
    linear.eval()
    column = to.nn.ColumnParallelLinear.from_linear(linear, group=group, max_tokens=sizes.max_rows * group.world_size)
    assert column.bias is None
    assert not column.weight.requires_grad
    assert not column.training
    assert column.weight.data_ptr() != linear.weight.data_ptr()

    world_size, tokens = group.world_size, sizes.max_rows * group.world_size
    good: dict[str, Any] = {"group": group, "max_tokens": tokens}
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: to.nn.ColumnParallelLinear(0, world_size, **good), "in_features must be at least 1"),
        (lambda: to.nn.ColumnParallelLinear(8, 8, **good, dtype=torch.float64), "dtype must be one of"),
        (lambda: to.nn.RowParallelLinear(8, 8, group=group, max_tokens=0), "max_tokens must be a positive"),
    ]
    if world_size > 1:
        odd = world_size + 1
        wrong += [
            (lambda: to.nn.ColumnParallelLinear(8, odd, **good), f"{2 * world_size} would do"),
            (lambda: to.nn.RowParallelLinear(odd, 8, **good), f"{2 * world_size} would do"),
            (lambda: to.nn.RowParallelLinear(8, 8, group=group, max_tokens=odd), f"{2 * world_size} would do"),
            (lambda: layers[1](torch.zeros(odd, sizes.features, device=group.device)), "divisible"),
        ]
    for call, words in wrong:
        with pytest.raises(ValueError, match=words):
            call()
    assert layers[0](torch.zeros(1, sizes.hidden, device=group.device)).shape == (world_size, sizes.features)


def compiled(group: to.Group, sizes: Sizes, sequence_parallel: bool) -> None:
    """``torch.compile(fullgraph=True)`` of a block: one graph for every token count, with and without main_grad."""
    from torch._dynamo.testing import CompileCounterWithBackend

    layers = _parallel(group, sizes, torch.float32, True, sequence_parallel=sequence_parallel)
    layers[1].weight.main_grad = torch.zeros_like(layers[1].weight)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for rows in sizes.rows:
        if rows == 1:
            continue  # torch.compile specialises a dimension of one
        count = rows if sequence_parallel else rows * group.world_size
        x = torch.randn(count, sizes.hidden, device=group.device)
        results = []
        for function in (model, fast):
            out = function(x)
            out.sum().backward()
            grads = [layers[0].weight.grad, layers[0].bias.grad, layers[1].bias.grad, layers[1].weight.main_grad]
            results.append([out.detach(), *(grad.clone() for grad in grads)])
            model.zero_grad()
            layers[1].weight.main_grad.zero_()
        for eager, got in zip(*results, strict=True):
            assert_equal("compiled", got, eager)
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"
