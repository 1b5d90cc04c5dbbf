"""What all token-wise operations promise: right on the active rows, blind to the others, one compilation, one graph."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import assert_equal
from tests.ops.row_operations import (
    HIDDEN,
    MAIN,
    MORE,
    Captured,
    Problem,
    RowOperation,
    check_values,
    count_of,
    no_new_specializations,
)
from triton_overlap import reference
from triton_overlap.ops.rows import check_active_tokens

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: More rows than two blocks have under the interpreter, and capacity that ends inside a block.
LARGE, CAPACITY = 270, 281


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operation", MAIN, ids=str)
def test_values(operation: RowOperation, device: str) -> None:
    check_values(operation, Problem(LARGE, CAPACITY, device, torch.float32), shards=1)
    check_values(operation, Problem(1, 9, device, torch.float32), shards=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operation", MORE, ids=str)
def test_values_of_variants(operation: RowOperation, device: str) -> None:
    check_values(operation, Problem(6, 8, device, torch.float32), shards=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("operation", MAIN, ids=str)
def test_two_byte_dtypes(operation: RowOperation, dtype: torch.dtype, device: str) -> None:
    check_values(operation, Problem(13, 17, device, dtype), shards=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operation", MAIN, ids=str)
def test_counts_and_capacities_specialise_nothing(operation: RowOperation, device: str) -> None:
    def call(rows: int, capacity: int, shards: int) -> None:
        problem = Problem(rows, capacity, device, torch.float32)
        operation.run(problem, count_of(operation, problem, shards))
        operation.run(problem, {}, cut=True)

    call(5, 17, 1)
    with no_new_specializations():
        for rows, capacity, shards in ((16, 17, 1), (1, 17, 2), (17, 32, 3)):
            call(rows, capacity, shards)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("operation", MAIN, ids=str)
def test_one_graph_serves_every_count(operation: RowOperation, dtype: torch.dtype) -> None:
    capacity, shards = 1000, 2 if operation.sharded else 1
    captured = Captured(operation, Problem(700, capacity, "cuda", dtype), shards)
    for rows in (1000, 1, 999, 512, 64, 333, 17, 16, 128, random.Random(0).randrange(1, capacity)):
        problem = Problem(rows, capacity, "cuda", dtype)
        replayed = captured.replay(problem)
        eager = operation.run(problem, {}, cut=True)
        for got, expected in zip(replayed, eager, strict=True):
            for value, right in zip(got, expected, strict=True):
                if value.shape != right.shape:
                    assert bool(value[rows:].isnan().all()), f"{operation} wrote past row {rows}"
                    value = value[:rows]
                assert_equal(f"{operation} replayed at {rows} rows", value, right)


def _page_examples() -> list[str]:
    page = Path(__file__).parents[2] / "docs" / "device_count.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("device", DEVICES)
def test_the_example_of_the_page(device: str) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"device": device}
    step, capture = _page_examples()
    exec(step, names)
    if device == "cuda":
        exec(capture, names)  # ends with a replay of the last batch, of 40 rows
        replayed = (names["loss"], *names["gradients"])
    else:
        names["load"](torch.randn(40, 48), torch.arange(40))
        loss, gradients = names["step"]()
        replayed = (loss, *gradients)
    rows = {name: names[name][:40].detach() for name in ("x", "labels")}
    w1, w2, w3 = (names[name].detach() for name in ("w1", "w2", "w3"))
    x, scale = rows["x"].requires_grad_(), names["scale"].detach().requires_grad_()
    y = reference.gated_activation(reference.rms_norm(x, scale) @ w1, "swiglu") @ w2 + x
    loss = reference.cross_entropy(y @ w3, rows["labels"])
    expected = (loss, *torch.autograd.grad(loss, [x, scale]))
    for got, right in zip(replayed, expected, strict=True):
        torch.testing.assert_close(got[:40] if got.dim() == 2 else got, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str) -> None:
    nothing = torch.zeros(1, dtype=torch.int32, device=device)  # a vector of one will do
    x = torch.full((4, 8), float("nan"), device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    out = to.rms_norm(to.add(x, x, active_tokens=nothing), weight, active_tokens=nothing)
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    loss = to.cross_entropy(out, labels, active_tokens=nothing)
    loss.backward()
    assert float(loss.detach()) == 0
    assert weight.grad is not None
    assert not bool(weight.grad.any()), "the sum over no rows is 0"


def _arguments(operation: RowOperation, rows: int = 6) -> tuple[list[Tensor], dict[str, Any]]:
    problem = Problem(rows, rows, "cpu", torch.float32)
    inputs = [x.requires_grad_() for x in (*operation.inputs(problem), *operation.parameter_values(problem))]
    return inputs, {**operation.extras(problem), **count_of(operation, problem)}


@pytest.mark.parametrize("operation", MAIN, ids=str)
def test_counts_that_do_not_fit(operation: RowOperation) -> None:
    inputs, keywords = _arguments(operation)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"active_tokens": torch.tensor(3)}, r"active_tokens must be torch\.int32, got torch\.int64"),
        ({"active_tokens": torch.ones(2, dtype=torch.int32)}, r"one element.*got \[2\]"),
        ({"active_tokens": torch.ones((), dtype=torch.int32, device="meta")}, "active_tokens must hold data"),
    ]
    if operation.sharded:
        bad.append(({"shards": 0}, "at least 1, got 0"))
    for wrong, message in bad:
        with pytest.raises(ValueError, match=message):
            operation.function(*inputs, **{**keywords, **wrong})
    with pytest.raises(TypeError, match=r"active_tokens must be a torch\.Tensor or None, got 3"):
        operation.function(*inputs, **{**keywords, "active_tokens": 3})


def test_count_on_another_device() -> None:
    # Called directly, since torch would not dispatch to a kernel with an operand on this one.
    count = torch.ones((), dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="add: active_tokens must be on cpu, got meta; move it there"):
        check_active_tokens("add", torch.ones(2, 2), count, 1)


def _raw(operation: RowOperation) -> tuple[Any, tuple[Any, ...]]:
    """The operator behind a function, and its arguments."""
    inputs, keywords = _arguments(operation)
    count = (keywords["active_tokens"], 1)
    operators = torch.ops.triton_overlap
    match operation.name:
        case "layer_norm":
            return operators.layer_norm, (*inputs, 1e-5, *count)
        case "rms_norm":
            return operators.rms_norm, (*inputs, 1e-5, *count)
        case "gelu":
            return operators.activation, (*inputs, "gelu", False, *count)
        case "swiglu":
            return operators.activation, (*inputs, "swiglu", True, *count)
        case "matmul":
            return operators.matmul, (*inputs, None, *count)
        case "add":
            return operators.add, (*inputs, *count)
        case "rotary":
            return operators.rotary, (*inputs, keywords["angles"], keywords["cu_seqlens"], False, count[0])
        case "rotary_qkv":
            return operators.rotary_qkv, (*inputs, keywords["angles"], keywords["cu_seqlens"], count[0])
        case _:
            return operators.cross_entropy, (*inputs, keywords["labels"], -100, "mean", *count)


@pytest.mark.parametrize("operation", [operation for operation in MAIN if operation.name != "fork"], ids=str)
def test_opcheck(operation: RowOperation) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch with dynamic shapes."""
    operator, arguments = _raw(operation)
    outcome = torch.library.opcheck(operator.default, arguments)
    assert set(outcome.values()) == {"SUCCESS"}, outcome


def test_compiled_once_for_all_capacities_and_counts() -> None:
    """``fullgraph`` with dynamic shapes, forward and backward: one graph, bitwise what eager mode gives."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def block(x: Tensor, weight: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
        residual, y = to.fork(x, active_tokens=tokens)
        y = to.rms_norm(y, weight, active_tokens=tokens)
        y = to.swiglu(torch.cat([y, residual], dim=1), active_tokens=tokens)
        return to.cross_entropy(to.add(y, residual, active_tokens=tokens), labels, active_tokens=tokens)

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for rows, capacity in ((5, 8), (3, 8), (11, 20), (20, 20)):
        problem = Problem(rows, capacity, "cpu", torch.float32)
        tokens = torch.tensor(rows, dtype=torch.int32)
        labels = torch.arange(capacity) % HIDDEN
        results = []
        for function in (block, compiled):
            x, weight = problem.poisoned(HIDDEN, seed=1).requires_grad_(), problem.draw(HIDDEN, seed=2).requires_grad_()
            loss = function(x, weight, labels, tokens)
            loss.backward()
            assert x.grad is not None
            assert weight.grad is not None
            results.append((loss.detach(), x.grad[:rows], weight.grad))
        for eager, got in zip(*results, strict=True):
            assert_equal("compiled", got, eager)
        graphs.add(counter.frame_count)
    assert graphs == {2}, "the function, and the empty graph that dynamo counts for the backward of fork"
