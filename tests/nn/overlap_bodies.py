"""Modules with overlap flags and configured user buffers, as bodies for every backend (``tests.ops.cases``)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import triton_overlap as to
from tests.nn.cases import BULK, ROW, RS_DGRAD, Case, assert_module_close
from tests.nn.parallel import Parallel
from tests.ops.cases import assert_equal

Configs = Mapping[str, Mapping[str, Any]] | None
Calls = list[tuple[str, str]]


@contextmanager
def user_buffers(group: to.Group, capacity: int, hidden: int, dtype: torch.dtype, ub_cfgs: Configs) -> Iterator[None]:
    """``initialize_ub`` for ``group``, with room for ``capacity`` tokens and a few more."""
    rounded = -(-capacity // group.world_size) * group.world_size
    to.initialize_ub([rounded, hidden], group.world_size, dtype=dtype, ub_cfgs=ub_cfgs, group=group)
    try:
        yield
    finally:
        to.destroy_ub(group=group)


def configured(
    group: to.Group, case: Case, dtype: torch.dtype, ub_cfgs: Configs, body: Callable[..., None], *args: Any
) -> None:
    """``body(group, case, dtype, *args)`` with user buffers that are the only ones."""
    tokens = max(1, case.batch) * case.capacity
    with user_buffers(group, tokens, case.shape.hidden, dtype, ub_cfgs):
        registered = len(group._buffers)
        body(group, case, dtype, *args)
        # Marked gradients are summed through a buffer of their own.
        assert len(group._buffers) - registered <= 1, f"a layer registered a buffer of its own: {list(group._buffers)}"


def against_no_overlap(group: to.Group, case: Case, dtype: torch.dtype, part: str) -> None:
    """The same weights with collectives one after the other: output and every gradient, and both near float64."""
    parallel = Parallel(group, case, dtype, part)
    tokens = case.counts(group)[0]
    x, d_out, cu_seqlens = parallel.inputs(tokens, 6)
    results = []
    for method in (None, "nccl"):
        for layer in parallel.modules.modules():
            if method is not None and isinstance(layer, to.nn.Linear):
                layer.method, layer.save_gathered_input = method, True
        own_x = parallel.own(x).clone().requires_grad_()
        out = parallel(own_x, cu_seqlens)
        out.backward(parallel.own(d_out))
        assert own_x.grad is not None
        results.append({"output": out.detach(), "dx": own_x.grad, **parallel.gradients()})
    exact_x = x.double().requires_grad_()
    exact_out = parallel.plain_forward(parallel.exact, exact_x, cu_seqlens)
    exact_out.backward(d_out.double())
    assert exact_x.grad is not None
    exact = {"output": parallel.own(exact_out), "dx": parallel.own(exact_x.grad)}
    exact.update(parallel.expected_gradients(parallel.exact))
    overlapped, plain = results
    assert set(overlapped) == set(exact)
    for name, value in overlapped.items():
        assert_module_close(f"{part}: {name} with and without overlap", value, plain[name], exact[name], dtype)


def column_layer(group: to.Group, case: Case, dtype: torch.dtype, settings: Mapping[str, Any]) -> to.nn.Linear:
    sizes = case.shape.hidden, case.shape.ffn
    shared: dict[str, Any] = {"sequence_parallel": True, "max_tokens": max(case.counts(group)), "params_dtype": dtype}
    return to.nn.Linear(*sizes, True, parallel_mode="column", group=group, **{**shared, **settings})


# Which methods --------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Operators of the library that are called inside, with their methods where they have one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "triton_overlap":
            names = [argument.name for argument in func._schema.arguments]
            method = args[names.index("method")] if "method" in names else ""
            self.calls.append((func._schema.name.removeprefix("triton_overlap::"), method))
        return func(*args, **(kwargs or {}))


def calls_of(function: Callable[[], object]) -> Calls:
    with Recorder() as recorder:
        function()
    return recorder.calls


_BULK_BACKWARD = [("all_gather_beside_matmul", "bulk"), ("reduce_scatter_beside_matmul", "bulk")]
#: For mode, settings and configuration: the forward operator's method, and what backward does.
CHOICES: list[tuple[str, dict[str, Any], Configs, str, Calls]] = [
    ("column", {**BULK, "ub_name": "qkv"}, {}, "ring_exchange; dgrad=bulk; wgrad=bulk", _BULK_BACKWARD),
    ("column", BULK, {}, "fused; dgrad=bulk; wgrad=bulk", _BULK_BACKWARD),
    ("column", {**BULK, "ub_name": "qkv"}, None, "fused; dgrad=bulk; wgrad=bulk", _BULK_BACKWARD),
    (
        "column",
        {**BULK, "ub_name": "fc1"},
        {
            "fc1_fprop": {"aggregate": 1, "cga_size": 2},
            "fc1_dgrad": {"use_ce": True, "num_splits": 2},
            "fc1_wgrad": {"num_sm": 3},
        },
        "ring_exchange(aggregate=True); dgrad=bulk(use_ce=True); wgrad=bulk(num_sm=3)",
        [("all_gather_beside_matmul", "bulk(use_ce=True)"), ("reduce_scatter_beside_matmul", "bulk(num_sm=3)")],
    ),
    (
        "column",
        {**RS_DGRAD, **BULK, "ub_name": "fc1"},
        {},
        "ring_exchange; dgrad=fused",
        [("matmul_reduce_scatter", "fused")],
    ),
    (
        "column",
        {**RS_DGRAD, "ub_name": "qkv"},
        {"qkv_fprop": {"method": "fused"}, "qkv_dgrad": {"method": "pipeline", "num_splits": 2}},
        "fused; dgrad=pipeline(num_splits=2)",
        [("matmul_reduce_scatter", "pipeline(num_splits=2)")],
    ),
    (
        "column",
        {"ub_bulk_dgrad": True, "ub_name": "qkv"},
        {},
        "fused; dgrad=bulk",
        [("all_gather_beside_matmul", "bulk"), ("reduce_scatter", "")],
    ),
    (
        "column",
        {"ub_bulk_wgrad": True, "save_gathered_input": False},
        {},
        "fused; wgrad=bulk",
        [("all_gather", ""), ("reduce_scatter_beside_matmul", "bulk")],
    ),
    ("column", {"ub_bulk_wgrad": True}, {}, "fused; wgrad=bulk", [("reduce_scatter_beside_matmul", "bulk")]),
    ("column", {"ub_name": "qkv"}, {}, "fused", [("matmul_reduce_scatter", "fused")]),
    (
        "row",
        {**ROW, "ub_name": "fc2"},
        {},
        "pipeline; dgrad=ring_exchange",
        [("all_gather_matmul", "ring_exchange")],
    ),
    (
        "row",
        {**ROW, "ub_name": "proj"},
        {"proj_fprop": {"method": "ring_exchange", "use_ce": False}, "proj_dgrad": {"method": "fused"}},
        "ring_exchange(use_ce=False); dgrad=fused",
        [("all_gather_matmul", "fused")],
    ),
    (
        "row",
        {**ROW, "ub_name": "fc2"},
        {"fc2_fprop": {"method": "auto"}, "fc2_dgrad": {"method": "auto", "num_sm": 2}},
        "auto; dgrad=auto",
        [("all_gather_matmul", "auto")],
    ),
    ("row", ROW, {}, "fused; dgrad=fused", [("all_gather_matmul", "fused")]),
    ("row", {"ub_overlap_rs": True, "ub_name": "proj"}, {}, "pipeline; dgrad=fused", [("all_gather_matmul", "fused")]),
]


def choices(group: to.Group, case: Case) -> None:
    """Flags, names and configurations choose the operators and methods of forward and backward, and those of forward
    are the same under ``no_grad`` and in recomputation."""
    shape, dtype = case.shape, torch.float32
    tokens = case.counts(group)[0]
    for mode, settings, ub_cfgs, fprop, backward in CHOICES:
        sizes = (shape.hidden, shape.ffn) if mode == "column" else (shape.ffn, shape.hidden)
        if ub_cfgs is not None:
            to.initialize_ub([tokens, shape.hidden], group.world_size, dtype=dtype, ub_cfgs=ub_cfgs, group=group)
        arguments = {"sequence_parallel": True, "params_dtype": dtype, "group": group, **settings}
        if ub_cfgs is None or "ub_name" not in settings or len(settings) == 1:
            arguments["max_tokens"] = tokens  # else that of the registered buffer
        layer = to.nn.Linear(*sizes, True, parallel_mode=mode, **arguments)
        rows, columns = (tokens // group.world_size, sizes[0]) if mode == "column" else (tokens, shape.ffn)
        if mode == "row":
            columns //= group.world_size
        x = torch.ones(rows, columns, device=group.device, requires_grad=True)
        operator = "all_gather_matmul" if mode == "column" else "matmul_reduce_scatter"
        what = f"{mode} {settings} {ub_cfgs}"

        assert calls_of(lambda: layer(x)) == [(operator, fprop)], what  # noqa: B023 - called at once
        out = layer(x)
        assert calls_of(out.sum().backward) == backward, what
        with torch.no_grad():
            assert calls_of(lambda: layer(x)) == [(operator, fprop)], f"{what} under no_grad"  # noqa: B023
        out = checkpoint(layer, x, use_reentrant=False)
        assert calls_of(out.sum().backward) == [(operator, fprop), *backward], f"{what} recomputed"
        to.destroy_ub(group=group)


def main_grad(group: to.Group, case: Case, dtype: torch.dtype) -> None:
    """A ``main_grad`` is added to in every way of the backward pass, over microbatches that are interleaved."""
    shape, tokens = case.shape, case.counts(group)
    again = {"ub_bulk_wgrad": True, "save_gathered_input": False}
    for settings in (BULK, again, {"ub_bulk_dgrad": True}, RS_DGRAD):
        layer = column_layer(group, case, dtype, settings)

        def run(layer: to.nn.Linear = layer) -> None:
            generator = torch.Generator().manual_seed(9 + group.rank)
            outs = []
            for count in tokens:
                x = torch.randn(count // group.world_size, shape.hidden, generator=generator, requires_grad=False)
                out = layer(x.to(group.device, dtype).requires_grad_())
                outs.append((out, torch.randn(out.shape, generator=generator).to(group.device, dtype)))
            for out, d_out in outs:  # all forward passes before the first backward pass
                out.backward(d_out)

        run()
        assert layer.weight.grad is not None
        expected = layer.weight.grad.double()
        layer.zero_grad()
        accumulated = torch.full_like(layer.weight, 2.0, dtype=torch.float32)
        setattr(layer.weight, "main_grad", accumulated)  # noqa: B010 - torch's types do not know it
        run()
        assert layer.weight.grad is None
        difference = (accumulated.double() - 2.0 - expected).norm() / expected.norm()
        assert difference < {torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype], f"{settings}: {float(difference):.2e}"


def active_shapes(group: to.Group, case: Case) -> None:
    """Modules follow the active shape of their communicator in forward, and their own forward's count in backward."""
    shape, dtype, world_size = case.shape, torch.float32, group.world_size
    tokens = [4 * world_size, 2 * world_size]
    with user_buffers(group, tokens[0], shape.hidden, dtype, {}):
        settings: dict[str, Any] = {"sequence_parallel": True, "params_dtype": dtype, "ub_name": "fc1", **BULK}
        layer = to.nn.LayerNormLinear(shape.hidden, shape.ffn, parallel_mode="column", group=group, **settings)
        assert layer.max_tokens == tokens[0]
        xs = [torch.randn(count // world_size, shape.hidden, device=group.device).requires_grad_() for count in tokens]
        outs = []
        for count, x in zip(tokens, xs, strict=True):
            to.set_ub_active_shape([count, shape.hidden], group=group)
            outs.append(layer(x))
        with pytest.raises(to.ActiveShapeError, match="active shape was set"):
            layer(xs[0])
        for out, x in zip(outs, xs, strict=True):
            out.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape
        grads = [x.grad for x in xs]
        to.get_ub("fc1_fprop", group=group).set_buffer_active_shape(None)
        for x, grad in zip(xs, grads, strict=True):
            x.grad = None
            layer(x).sum().backward()
            assert grad is not None
            assert x.grad is not None
            assert_equal("dx of a microbatch alone", x.grad, grad)


def refusals(group: to.Group, case: Case) -> None:
    """Flags, names, configurations and registered buffers that do not belong together are errors with the remedy."""
    shape, dtype, world_size = case.shape, torch.float32, group.world_size
    capacity = 4 * world_size
    split: dict[str, Any] = {"sequence_parallel": True, "group": group, "params_dtype": dtype, "max_tokens": capacity}
    linear = partial(to.nn.Linear, shape.hidden, world_size * shape.ffn, **split)
    cfgs = {"qkv_dgrad": {"method": "pipeline"}, "fc1_dgrad": {"method": "bulk"}}
    with user_buffers(group, capacity, shape.hidden, dtype, cfgs):
        column: dict[str, Any] = {"parallel_mode": "column"}
        fc1: dict[str, Any] = {**column, "ub_name": "fc1", "ub_overlap_ag": True}
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"ub_overlap_ag": True}, 'ub_overlap_ag cannot .*choose parallel_mode="column"'),
            ({**column, "ub_overlap_rs": True}, "ub_overlap_rs cannot .*allowed: ub_overlap_ag"),
            ({**column, **BULK, "sequence_parallel": False}, "set sequence_parallel=True"),
            ({**column, "ub_name": "proj"}, "one of 'qkv', 'fc1', got 'proj'"),
            (
                {**column, **BULK, "ub_name": "qkv"},
                "ub_bulk_dgrad needs method 'bulk', and ub_cfgs gives qkv_dgrad 'pip",
            ),
            ({**column, **RS_DGRAD, "ub_name": "fc1"}, "ub_overlap_rs_dgrad needs a method that reduce-scatters"),
            ({**column, **BULK, "save_gathered_input": True}, "ub_bulk_dgrad has nothing to gather"),
            ({"parallel_mode": "row", "save_gathered_input": False}, "save_gathered_input is for parallel_mode="),
            ({**fc1, "params_dtype": torch.float16}, rf"needs .*float16.*registered fc1_fprop with \[{capacity}, .*32"),
            (
                {**fc1, "max_tokens": 2 * capacity},
                f"needs a buffer of .{2 * capacity}, .*give initialize_ub this shape",
            ),
        ]
        for settings, words in wrong:
            with pytest.raises(ValueError, match=words):
                linear(**settings)
        with pytest.raises(ValueError, match=f"needs a buffer of .{capacity}, {shape.hidden + 8}."):
            to.nn.Linear(shape.hidden + 8, world_size * shape.ffn, **{**split, **fc1})
        # Without a flag the layer has a buffer of its own, of any shape.
        own = to.nn.Linear(shape.hidden + 8, world_size * shape.ffn, **split, **column, ub_name="fc1")
        assert own.communicator is None
        layer = linear(**fc1)
        assert layer.communicator is to.get_ub("fc1_fprop", group=group)
        assert "method=ring_exchange; dgrad=fused" in repr(layer)
    to.nn.LayerNormMLP(shape.hidden, shape.ffn * world_size, save_gathered_input=False, **split)
    with pytest.raises(ValueError, match="save_gathered_input is for"):
        to.nn.LayerNormMLP(
            shape.hidden, shape.ffn * world_size, save_gathered_input=False, **{**split, "sequence_parallel": False}
        )


def saved_memory(group: to.Group, case: Case) -> None:
    """What ``save_gathered_input`` keeps until backward: T rows of the input, or this rank's T/W of them."""
    shape, dtype, tokens = case.shape, torch.float32, case.counts(group)[0]
    rows = tokens // group.world_size
    for settings, kept in (
        ({}, tokens),
        ({"save_gathered_input": False}, rows),
        (BULK, rows),
        (RS_DGRAD, tokens),
        ({**RS_DGRAD, "save_gathered_input": False}, rows),
    ):
        layer = column_layer(group, case, dtype, settings)
        saved: list[tuple[int, ...]] = []

        def pack(x: Tensor, saved: list[tuple[int, ...]] = saved) -> Tensor:
            saved.append(tuple(x.shape))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            layer(torch.ones(rows, shape.hidden, device=group.device, requires_grad=True))
        activations = [size for size in saved if size[0] in (rows, tokens) and size[1] == shape.hidden]
        assert activations == [(kept, shape.hidden)], f"{settings}: saved {saved}"


# Groups ---------------------------------------------------------------------------------------------------------------


def separated_groups(case: Case, dtype: torch.dtype) -> None:
    """Ranks 0 and 2 of three have user buffers of their own while all three have theirs, and train layers in both."""
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    everyone = to.init_group(timeout_s=60)
    pair_ranks = dist.new_group([0, 2])
    pair = to.init_group(pair_ranks, timeout_s=60) if everyone.rank != 1 else None
    shape = case.shape
    groups = [group for group in (everyone, pair) if group is not None]
    for group in groups:
        to.initialize_ub([2 * group.world_size, shape.hidden], group.world_size, dtype=dtype, group=group)
    settings: dict[str, Any] = {"parallel_mode": "column", "sequence_parallel": True, "params_dtype": dtype}
    settings.update(BULK)
    layers = [to.nn.Linear(shape.hidden, shape.ffn, group=group, ub_name="fc1", **settings) for group in groups]
    for layer, group in zip(layers, groups, strict=True):
        assert layer.communicator is to.get_ub("fc1_fprop", group=group)
    for _ in range(2):
        for layer, group in zip(layers, groups, strict=True):
            x = torch.full((2, shape.hidden), 1.0 + group.rank).requires_grad_()
            out = layer(x)
            rows = torch.arange(group.world_size).repeat_interleave(2) + 1.0
            expected = rows[:, None] * layer.weight.detach().sum(dim=1) + layer.bias.detach()  # type: ignore[union-attr]
            torch.testing.assert_close(out, expected)
            out.sum().backward()
            columns = sum(group.all_gather_object(layer.weight.detach().sum(dim=0)))
            torch.testing.assert_close(x.grad, columns.expand(2, -1))
    for group in reversed(groups):
        to.destroy_ub(group=group)
        group.close()


def buffers_made_again(group: to.Group) -> None:
    """A layer keeps its own communicator when others of the same names come and go on the same buffer."""
    world_size = group.world_size
    shape = [4 * world_size, 16]
    to.initialize_ub(shape, world_size, dtype=torch.float32, group=group)
    layer = to.nn.Linear(
        16,
        8,
        parallel_mode="column",
        sequence_parallel=True,
        ub_overlap_ag=True,
        ub_name="fc1",
        group=group,
        params_dtype=torch.float32,
    )
    x = torch.ones(4, 16, device=group.device)
    out = layer(x)
    to.destroy_ub(group=group)
    to.initialize_ub(shape, world_size, dtype=torch.float32, group=group)
    to.set_ub_active_shape([2 * world_size, 16], group=group)
    assert torch.equal(layer(x), out), "another set's active shape is not this layer's"
    to.destroy_ub(group=group)
    gc.collect()
    assert torch.equal(layer(x), out)


def wrong_types(group: to.Group) -> None:
    """What is no group, module, tensor or setting is said in the module's name."""
    shared: dict[str, Any] = {"group": group, "max_tokens": 8 * group.world_size, "sequence_parallel": True}
    layer = to.nn.TransformerLayer(16, 32, 2 * group.world_size, **shared)
    column = to.nn.ColumnParallelLinear(16, 2 * group.world_size, group=group, max_tokens=8 * group.world_size)
    world: Any = "world"
    misspelt: dict[str, Any] = {**shared, "normalisation": "RMSNorm"}
    norm: Any = torch.nn.LayerNorm(4)
    made: list[tuple[str, Callable[[], Any]]] = [
        (
            r"ColumnParallelLinear: group must be a triton_overlap\.Group, got str; init_group",
            lambda: to.nn.ColumnParallelLinear(16, 8, group=world, max_tokens=8),
        ),
        (
            r"TransformerLayer: group must be a triton_overlap\.Group",
            lambda: to.nn.TransformerLayer(16, 32, 4, group=world),
        ),
        (
            r"linear must be a torch\.nn\.Linear, got LayerNorm",
            lambda: to.nn.ColumnParallelLinear.from_linear(norm, group=group, max_tokens=8),
        ),
        (
            "unexpected keyword arguments normalisation; what layers share is max_tokens",
            lambda: to.nn.TransformerLayer(16, 32, 2 * group.world_size, **misspelt),
        ),
    ]
    for message, make in made:
        with pytest.raises(TypeError, match=message):
            make()
    x = torch.ones(4, 16, device=group.device)
    for message, call in (
        ("ColumnParallelLinear: the input must be a torch.Tensor, got list", lambda: column([1.0])),
        ("TransformerLayer: hidden_states must be a torch.Tensor, got list", lambda: layer([1.0])),
        ("MultiheadAttention: cu_seqlens_q must be a torch.Tensor, got list", lambda: layer(x, cu_seqlens_q=[0, 4])),
    ):
        with pytest.raises(TypeError, match=message):
            call()
