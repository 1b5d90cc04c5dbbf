"""The token-wise operations with their twins, in one form, and the checks that all of them must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import assert_close, assert_equal, assert_steady, counters
from triton_overlap import reference
from triton_overlap.kernels.activation import FUNCTIONS, GATED_FUNCTIONS

HIDDEN = 80  # not a power of two
#: Documents, one of them empty, and the count repeated to a fixed size. The last document takes all rows that are left.
_STARTS = (0, 2, 2, 5)
_FIXED_DOCUMENTS = 7


@dataclass(frozen=True)
class Problem:
    """Rows of which a prefix is active.

    Attributes:
        rows: active rows.
        capacity: rows there is room for.
        device: of all tensors.
        dtype: of the floating-point inputs.
    """

    rows: int
    capacity: int
    device: str
    dtype: torch.dtype

    def draw(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(device=self.device, dtype=self.dtype)

    def poisoned(self, *trailing: int, seed: int) -> Tensor:
        """[capacity, ..], NaN past the active rows; those are the same whatever the capacity."""
        x = torch.full((self.capacity, *trailing), float("nan"), device=self.device, dtype=self.dtype)
        x[: self.rows] = self.draw(self.rows, *trailing, seed=seed)
        return x


Extras = Callable[[Problem], dict[str, Tensor]]


def _labels(problem: Problem) -> dict[str, Tensor]:
    """Every third label is ignored, and past the active rows there is none."""
    labels = torch.arange(problem.capacity, device=problem.device) * 7 % HIDDEN
    labels[1::3] = -100
    labels[problem.rows :] = 10**12
    return {"labels": labels}


def _documents(problem: Problem) -> dict[str, Tensor]:
    starts = [min(start, problem.rows) for start in _STARTS]
    ends = [problem.rows] * (_FIXED_DOCUMENTS + 1 - len(starts))
    angles = torch.arange(problem.capacity)[:, None] * 0.7 ** torch.arange(8)
    return {
        "angles": torch.cat([angles, angles], dim=1).to(problem.device),
        "cu_seqlens": torch.tensor(starts + ends, dtype=torch.int32, device=problem.device),
    }


def _nothing(problem: Problem) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class RowOperation:
    """A token-wise operation.

    Attributes:
        name: of the case.
        function: of row inputs, parameters, and by keyword of extras and the count.
        twin: the same without the count.
        rows: trailing shapes of the inputs that have rows.
        parameters: shapes of those that have none.
        extras: inputs without a gradient, by name; those with an entry for each row are cut to the active ones for the
            twin.
        sharded: whether it takes ``shards``.
    """

    name: str
    function: Callable[..., Any]
    twin: Callable[..., Any]
    rows: tuple[tuple[int, ...], ...] = ((HIDDEN,),)
    parameters: tuple[tuple[int, ...], ...] = ()
    extras: Extras = field(default=_nothing)
    sharded: bool = True

    def __str__(self) -> str:
        return self.name

    def run(self, problem: Problem, count: dict[str, Any], *, cut: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients, of ``problem`` as it is, or ``cut`` to its active rows."""
        end = problem.rows if cut else problem.capacity
        inputs = [x[:end].detach().requires_grad_() for x in self.inputs(problem)]
        parameters = [x.requires_grad_() for x in self.parameter_values(problem)]
        outputs = as_list(self.function(*inputs, *parameters, **self.cut_extras(problem, end), **count))
        grads = [grad[:end] if grad.dim() else grad for grad in self.grads(problem, outputs)]
        gradients = torch.autograd.grad(outputs, [*inputs, *parameters], grads)
        return [output.detach() for output in outputs], list(gradients)

    def inputs(self, problem: Problem) -> list[Tensor]:
        return [problem.poisoned(*shape, seed=seed) for seed, shape in enumerate(self.rows)]

    def parameter_values(self, problem: Problem) -> list[Tensor]:
        return [problem.draw(*shape, seed=50 + seed) for seed, shape in enumerate(self.parameters)]

    def grads(self, problem: Problem, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Of the outputs, poisoned as the inputs are; a loss has 1.5, and no rows."""
        return [
            problem.poisoned(*out.shape[1:], seed=90 + seed) if out.dim() else torch.full_like(out, 1.5)
            for seed, out in enumerate(outputs)
        ]

    def cut_extras(self, problem: Problem, end: int) -> dict[str, Tensor]:
        extras = self.extras(problem)
        return {name: extra[:end] if extra.shape[0] == problem.capacity else extra for name, extra in extras.items()}

    def expected(self, problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
        """What the twin makes of the active rows, in float64."""
        inputs = [x[: problem.rows].double().requires_grad_() for x in self.inputs(problem)]
        parameters = [x.double().requires_grad_() for x in self.parameter_values(problem)]
        outputs = as_list(self.twin(*inputs, *parameters, **self.cut_extras(problem, problem.rows)))
        grads = [grad[: problem.rows] if grad.dim() else grad for grad in self.grads(problem, outputs)]
        gradients = torch.autograd.grad(outputs, [*inputs, *parameters], [grad.double() for grad in grads])
        return [output.detach() for output in outputs], list(gradients)


def as_list(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _forked(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1, x * 1


def _product(a: Tensor, b: Tensor, bias: Tensor, **count: Any) -> Tensor:
    return to.matmul(a, b, bias=bias, **count)


_QKV: dict[str, Any] = {"rows": ((2, 5, 20),), "extras": _documents, "sharded": False}
MAIN = (
    RowOperation("layer_norm", to.layer_norm, reference.layer_norm, parameters=((HIDDEN,), (HIDDEN,))),
    RowOperation("rms_norm", to.rms_norm, reference.rms_norm, parameters=((HIDDEN,),)),
    RowOperation("gelu", to.gelu, partial(reference.activation, name="gelu")),
    RowOperation("swiglu", to.swiglu, partial(reference.gated_activation, name="swiglu"), rows=((2 * HIDDEN,),)),
    RowOperation("matmul", _product, reference.matmul, parameters=((HIDDEN, 48), (48,))),
    RowOperation("add", to.add, reference.add, rows=((HIDDEN,), (HIDDEN,))),
    RowOperation("fork", to.fork, _forked),
    RowOperation("rotary", to.rotary, reference.rotary, rows=((3, 20),), extras=_documents, sharded=False),
    RowOperation("rotary_qkv", to.rotary_qkv, reference.rotary_qkv, **_QKV),
    RowOperation("cross_entropy", to.cross_entropy, reference.cross_entropy, extras=_labels),
)
MORE = (
    RowOperation("layer_norm_without_bias", to.layer_norm, reference.layer_norm, parameters=((HIDDEN,),)),
    RowOperation(
        "cross_entropy_sum",
        partial(to.cross_entropy, reduction="sum"),
        partial(reference.cross_entropy, reduction="sum"),
        extras=_labels,
    ),
    *(
        RowOperation(name, partial(to.activation, name=name), partial(reference.activation, name=name))
        for name in FUNCTIONS
        if name != "gelu"
    ),
    *(
        RowOperation(
            name,
            partial(to.gated_activation, name=name),
            partial(reference.gated_activation, name=name),
            rows=((2 * HIDDEN,),),
        )
        for name in GATED_FUNCTIONS
        if name != "swiglu"
    ),
)


def count_of(operation: RowOperation, problem: Problem, shards: int = 1) -> dict[str, Any]:
    """The keyword arguments that say how many rows are active."""
    tokens = torch.tensor(problem.rows * shards, dtype=torch.int32, device=problem.device)
    return {"active_tokens": tokens, "shards": shards} if operation.sharded else {"active_tokens": tokens}


def check_values(operation: RowOperation, problem: Problem, shards: int) -> None:
    """Values and gradients with a count are the twin's, bitwise those of the active rows alone, and end with them."""
    outputs, gradients = operation.run(problem, count_of(operation, problem, shards))
    alone = operation.run(problem, {}, cut=True)
    expected = operation.expected(problem)
    for kind, got, cut, right in zip(("output", "gradient"), (outputs, gradients), alone, expected, strict=True):
        for index, (value, same, twin) in enumerate(zip(got, cut, right, strict=True)):
            what = f"{operation} {kind} {index}"
            if value.shape != same.shape:
                assert bool(value[problem.rows :].isnan().all()), f"{what} was written past row {problem.rows}"
                value = value[: problem.rows]
            assert_equal(f"{what} with a count", value, same)
            dtype = problem.dtype if value.dim() else torch.float32
            assert_close(what, value, twin, dtype)


@contextmanager
def no_new_specializations() -> Iterator[None]:
    before = counters()
    yield
    assert_steady("a call", before)


class Captured:
    """A CUDA graph of forward and backward at capacity, with a count that is set between replays."""

    def __init__(self, operation: RowOperation, problem: Problem, shards: int) -> None:
        self.operation = operation
        self.shards = shards
        self.inputs = [x.requires_grad_() for x in operation.inputs(problem)]
        self.parameters = [x.requires_grad_() for x in operation.parameter_values(problem)]
        self.extras = operation.extras(problem)
        self.count = count_of(operation, problem, shards)
        self.grads: list[Tensor] = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.grads = operation.grads(problem, self._forward())
            self._call()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs, self.gradients = self._call()

    def replay(self, problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients for other rows, labels, documents and gradients, of the same capacity."""
        with torch.no_grad():
            for static, value in zip(self.inputs, self.operation.inputs(problem), strict=True):
                static.copy_(value)
            for static, value in zip(self.grads, self.operation.grads(problem, self.outputs), strict=True):
                static.copy_(value)
            for name, value in self.operation.extras(problem).items():
                self.extras[name].copy_(value)
            self.count["active_tokens"].fill_(problem.rows * self.shards)
        self.graph.replay()
        return self.outputs, self.gradients

    def _forward(self) -> list[Tensor]:
        return as_list(self.operation.function(*self.inputs, *self.parameters, **self.extras, **self.count))

    def _call(self) -> tuple[list[Tensor], list[Tensor]]:
        outputs = self._forward()
        gradients = torch.autograd.grad(outputs, [*self.inputs, *self.parameters], self.grads)
        return [output.detach() for output in outputs], list(gradients)
