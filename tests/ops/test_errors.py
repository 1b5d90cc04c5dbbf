"""Arguments of the wrong type or kind: an error that says so, on one rank alone, before anything is sent.

Rank 0 makes every mistake while rank 1 does nothing; then both make a correct call, so whatever a mistake had announced
would be met there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import Sizes, assert_equal, in_simulator, on_ranks
from triton_overlap.ops.validation import PRODUCT_DTYPES

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
]

SIZES = Sizes(hidden=16, features=8, rows=(2,), max_rows=3)

#: Operation, its required tensors and its optional ones.
OPERATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all_gather_matmul": (("a_shard", "b"), ("bias", "main_grad")),
    "matmul_reduce_scatter": (("a", "b"), ("bias", "main_grad")),
    "matmul_all_reduce": (("a", "b"), ("bias", "main_grad")),
    "replicated_matmul": (("x", "b"), ("bias", "main_grad")),
    "all_gather": (("x_shard",), ()),
    "reduce_scatter": (("x",), ()),
    "all_gather_beside_matmul": (("x_shard", "a", "b"), ("bias",)),
    "reduce_scatter_beside_matmul": (("x", "a", "b"), ("bias",)),
}
WITHOUT_METHOD = ("all_gather", "reduce_scatter")


def _arguments(group: to.Group, operation: str) -> dict[str, Any]:
    """Correct ones, every tensor that the operation takes among them."""
    rows, tokens = SIZES.rows[0], SIZES.rows[0] * group.world_size
    hidden, features = SIZES.hidden, SIZES.features
    ones = torch.ones
    arguments: dict[str, Any] = {
        "all_gather_matmul": {"a_shard": ones(rows, hidden), "b": ones(hidden, features), "bias": ones(features)},
        "matmul_reduce_scatter": {"a": ones(tokens, features), "b": ones(features, hidden), "bias": ones(hidden)},
        "matmul_all_reduce": {"a": ones(tokens, features), "b": ones(features, hidden), "bias": ones(hidden)},
        "replicated_matmul": {"x": ones(tokens, hidden), "b": ones(hidden, features), "bias": ones(features)},
        "all_gather": {"x_shard": ones(rows, hidden)},
        "reduce_scatter": {"x": ones(tokens, hidden)},
        "all_gather_beside_matmul": {"x_shard": ones(rows, hidden), "a": ones(3, 4), "b": ones(4, 5), "bias": ones(5)},
        "reduce_scatter_beside_matmul": {"x": ones(tokens, hidden), "a": ones(3, 4), "b": ones(4, 5), "bias": ones(5)},
    }[operation]
    if "main_grad" in OPERATIONS[operation][1]:
        arguments["main_grad"] = torch.zeros_like(arguments["b"])
    return {**arguments, "buffer": SIZES.buffer(group, torch.float32)}


def _wrong_tensors(good: Tensor) -> list[tuple[Any, type[Exception], str]]:
    """What might be given in place of ``good``, the error and what it says."""
    return [
        (good.numpy(), TypeError, "numpy.ndarray; torch.from_numpy"),
        (3.5, TypeError, "got 3.5"),
        ("x", TypeError, "got 'x'"),
        (object(), TypeError, "got an object of type object"),
        (good.to_sparse(), ValueError, "its layout is torch.sparse_coo; x.to_dense() makes one"),
        (good.to("meta"), ValueError, "meta device; materialize it first"),
        (torch.nested.nested_tensor([good, good]), ValueError, "must be a dense tensor, got a nested one"),
        (torch.quantize_per_tensor(good, 1.0, 0, torch.qint8), ValueError, "torch.qint8"),
        (good.to(torch.complex64), ValueError, "torch.complex64"),
    ]


def _mistakes(operation: str, good: dict[str, Any]) -> list[tuple[dict[str, Any], type[Exception], list[str]]]:
    """Changes of the arguments ``good``, the error and what it says."""
    required, optional = OPERATIONS[operation]
    found: list[tuple[dict[str, Any], type[Exception], list[str]]] = []
    for name in (*required, *optional):
        for value, error, words in _wrong_tensors(good[name]):
            found.append(({name: value}, error, [name, words]))
    for name in required:
        found.append(({name: None}, TypeError, [f"{name} must be a torch.Tensor", "got None"]))
    handle = good["buffer"].handle
    for value, words in (
        (None, "got None; group.user_buffer(max_tokens, hidden, dtype) makes one"),
        (handle, f"got {handle!r}; user_buffer_by_handle({handle!r})"),
        (good["buffer"].group, "got an object of type triton_overlap.comm.group.Group"),
    ):
        found.append(({"buffer": value}, TypeError, ["buffer must be a UserBuffer or a communicator", words]))
    if operation not in WITHOUT_METHOD:
        for value, words in ((None, "got None"), (3, "got 3"), (["fused"], "got an object of type list")):
            found.append(({"method": value}, TypeError, ["method must be a Method", words, "that apply here: '"]))
    return found


def _one_tensor(group: to.Group, operation: str) -> None:
    good, function = _arguments(group, operation), getattr(to, operation)
    expected = function(**good)
    for change, error, words in _mistakes(operation, good) if group.rank == 0 else []:
        _refused(group, error, [f"{operation}: ", *words], function, **{**good, **change})
    again = function(**good)
    for before, after in zip(
        *((out,) if isinstance(out, Tensor) else out for out in (expected, again)),
        strict=True,
    ):
        assert_equal(f"{operation} after the mistakes", after, before)


def _refused(
    group: to.Group, error: type[Exception], words: list[str], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """The call raises exactly ``error``, with all of ``words``, and changes nothing."""
    buffer = SIZES.buffer(group, torch.float32)
    before = (buffer.epoch, buffer.active_shape)
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert caught.type is error
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert (buffer.epoch, buffer.active_shape) == before
    assert group.broken is None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_of_every_operation(operation: str) -> None:
    in_simulator(2, 0, _one_tensor, operation)


def _lists(group: to.Group) -> None:
    """``all_gather_matmul`` of several b."""
    one = _arguments(group, "all_gather_matmul")
    b, bias, main = one["b"], one["bias"], one["main_grad"]
    good = {**one, "b": [b, b], "bias": [bias, None], "main_grad": [None, main]}
    expected = to.all_gather_matmul(**good)
    mistakes: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"b": b.numpy()},
            TypeError,
            "b must be a torch.Tensor or a list of them, got an object of type numpy",
        ),
        ({"b": {"w": b}}, TypeError, "b must be a torch.Tensor or a list of them, got an object of type dict"),
        ({"b": [b, None]}, TypeError, "b[1] must be a torch.Tensor, got None"),
        ({"b": [b.numpy(), b]}, TypeError, "b[0] must be a torch.Tensor, got an object of type numpy.ndarray"),
        ({"b": [b, b.to("meta")]}, ValueError, "b[1] must hold data"),
        ({"b": [b, b.to_sparse()]}, ValueError, "b must be a dense tensor, its layout is torch.sparse_coo"),
        ({"bias": [None, 3]}, TypeError, "bias[1] must be a torch.Tensor or None, got 3"),
        ({"bias": "ab"}, TypeError, "bias must be a torch.Tensor or a list of them, got 'ab'"),
        ({"bias": bias}, ValueError, "bias must be a tensor where b is one, and a list where b is a list"),
        ({"bias": [bias]}, ValueError, "2 b were given but 1 bias"),
        ({"main_grad": 3}, TypeError, "main_grad must be a torch.Tensor or a list of them, got 3"),
        ({"main_grad": ["m", None]}, TypeError, "main_grad[0] must be a torch.Tensor or None, got 'm'"),
        ({"return_gathered": "no"}, TypeError, "return_gathered must be True or False, got 'no'"),
        ({"b": b, "main_grad": main}, ValueError, "bias must be a tensor where b is one"),
        ({"b": b, "bias": bias}, ValueError, "got a list of 2 for one b"),
    ]
    for change, error, words in mistakes if group.rank == 0 else []:
        _refused(group, error, ["all_gather_matmul: ", words], to.all_gather_matmul, **{**good, **change})
    for before, after in zip(expected, to.all_gather_matmul(**good), strict=True):
        assert_equal("after the mistakes", after, before)
    assert len(to.all_gather_matmul(**{**one, "b": torch.nn.ParameterList([b]), "bias": None, "main_grad": None})) == 1


def test_of_several_b() -> None:
    in_simulator(2, 0, _lists)


def _raw_operators(group: to.Group) -> None:
    """What reaches the real kernels without the functions' checks."""
    buffer = SIZES.buffer(group, torch.float32)
    x, b = torch.ones(SIZES.rows[0], SIZES.hidden), torch.ones(SIZES.hidden, SIZES.features)
    ops, handle = torch.ops.triton_overlap, buffer.handle
    for bad, words in ((x.to_sparse(), "torch.sparse_coo"), (x.to_sparse_csr(), "csr"), (x.to_mkldnn(), "mkldnn")):
        _refused(group, ValueError, ["x_shard must be a dense tensor", words], ops.all_gather, bad, handle)
    quantized = torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)
    _refused(group, ValueError, ["x_shard is torch.qint8", "dequantize it"], ops.all_gather, quantized, handle)
    for change in ("b", "bias", "main_grad"):
        given: dict[str, Any] = {"b": b, "bias": None, "main_grad": None, change: b.to_sparse()}
        words = f"all_gather_matmul: {change} must be a dense tensor"
        _refused(group, ValueError, [words], ops.all_gather_matmul, x, *given.values(), handle, False, "fused")


def test_of_raw_operators() -> None:
    in_simulator(1, 0, _raw_operators)


def _products(group: to.Group) -> None:
    """A product that torch could refuse only in the middle of the call is refused before it."""
    good = _arguments(group, "all_gather_beside_matmul")
    for dtype in (torch.bool, torch.int32, torch.float8_e4m3fn):
        bad = {name: good[name].to(dtype) for name in ("a", "b", "bias")}
        words = ["all_gather_beside_matmul: a must be one of torch.bfloat16", f"got {dtype}; cast it"]
        _refused(group, ValueError, words, to.all_gather_beside_matmul, **{**good, **bad})
    for dtype in PRODUCT_DTYPES:
        right = {name: good[name].to(dtype) for name in ("a", "b", "bias")}
        assert to.all_gather_beside_matmul(**{**good, **right})[1].dtype == dtype


def test_of_the_product_beside_a_collective() -> None:
    in_simulator(1, 0, _products)


def _activation(group: to.Group) -> None:
    """A broken rule of the active shape names the operation and the argument too."""
    good = _arguments(group, "matmul_reduce_scatter")
    wide = {**good, "a": torch.ones(SIZES.max_rows * group.world_size + group.world_size, SIZES.features)}
    words = ["matmul_reduce_scatter: a [", "within the capacity", "register a larger max_tokens"]
    _refused(group, to.ActiveShapeError, words, to.matmul_reduce_scatter, **wide)


def test_of_the_active_shape() -> None:
    in_simulator(1, 0, _activation)


def _compiled(group: to.Group) -> None:
    """The checks leave no trace in a graph, and a mistake is an error there too."""
    good = _arguments(group, "all_gather_matmul")
    x, b, buffer = good["a_shard"], good["b"], good["buffer"]

    def product(x: Tensor, bias: Any) -> Any:
        outs = to.all_gather_matmul(x, [b, b], bias=[bias, None], buffer=buffer, return_gathered=True)
        return outs, to.all_gather_beside_matmul(x, b, b.t(), buffer=buffer), to.reduce_scatter(outs[1], buffer=buffer)

    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, dynamic=True, backend="aot_eager")
    flat = torch.utils._pytree.tree_leaves
    for got, eager in zip(flat(compiled(x, good["bias"])), flat(product(x, good["bias"])), strict=True):
        assert_equal("compiled", got, eager)
    epoch = buffer.epoch
    with pytest.raises(Exception, match=r"bias\[0\] must be a torch\.Tensor or None, got 'bias'"):
        compiled(x, "bias")
    assert buffer.epoch == epoch


def test_of_compiled_code() -> None:
    on_ranks(1, _compiled)
