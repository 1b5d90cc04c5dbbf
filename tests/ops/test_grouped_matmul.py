"""Grouped products against their twin: any counts, zeros and all in one among them, on CPUs and GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import assert_close, assert_equal
from triton_overlap import reference
from triton_overlap.sim import World

operation: Any = importlib.import_module("triton_overlap.ops.grouped_matmul")  # its function has the same name
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
K, N = 40, 24
#: Counts of three groups, and the alignment of their padding. One row more than a tile has under the interpreter.
COUNTS = [((3, 5, 2), 1), ((0, 0, 0), 1), ((257, 0, 1), 1), ((0, 6, 1), 4), ((4, 0, 8), 4)]


class Problem:
    """Operands with NaN in padding and past the groups. ``by_columns``: b is the transposed view of a weight."""

    def __init__(
        self, counts: tuple[int, ...], alignment: int, device: str, dtype: torch.dtype, by_columns: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

        self.counts, self.alignment = counts, alignment
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + -(-count // alignment) * alignment)
        rows = starts[-1] + 5
        self.inside = torch.zeros(rows, dtype=torch.bool, device=device)
        for start, count in zip(starts, counts, strict=False):
            self.inside[start : start + count] = True
        self.a, self.grad = draw(rows, K), draw(rows, N)
        self.a[~self.inside] = self.grad[~self.inside] = float("nan")
        self.weight = draw(len(counts), N, K) if by_columns else draw(len(counts), K, N).transpose(1, 2)
        self.device_counts = torch.tensor(counts, dtype=torch.int32, device=device)

    def run(self, main_grad: Tensor | None = None) -> list[Tensor | None]:
        """Output and gradients, cut to the rows of groups."""
        a, weight = self.a.clone().requires_grad_(), self.weight.detach().requires_grad_()
        out = to.grouped_matmul(
            a, weight.transpose(1, 2), self.device_counts, alignment=self.alignment, main_grad=main_grad
        )
        out.backward(self.grad)
        assert a.grad is not None
        return [out.detach()[self.inside], a.grad[self.inside], weight.grad]

    def twin(self) -> list[Tensor]:
        a, weight = self.a.double().requires_grad_(), self.weight.double().requires_grad_()
        out = reference.grouped_matmul(a, weight.transpose(1, 2), self.counts, self.alignment)
        out.backward(torch.where(self.inside[:, None], self.grad, 0).double())
        assert a.grad is not None
        assert weight.grad is not None
        return [out.detach()[self.inside], a.grad[self.inside], weight.grad]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize(("counts", "alignment"), COUNTS)
def test_values(counts: tuple[int, ...], alignment: int, dtype: torch.dtype, device: str) -> None:
    for by_columns in (True, False):
        problem = Problem(counts, alignment, device, dtype, by_columns)
        for name, actual, expected in zip(("out", "da", "db"), problem.run(), problem.twin(), strict=True):
            assert actual is not None
            if expected.any():
                assert_close(name, actual, expected, dtype)
            else:
                assert_equal(name, actual.double(), expected)


@pytest.mark.parametrize("counts", [counts for counts, alignment in COUNTS if alignment == 1])
def test_torch_s_own_product(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is given, with the product that torch has for CPUs."""
    monkeypatch.setattr(operation, "_torch_has_it", lambda a, k, n, alignment: True)
    monkeypatch.setattr(operation.kernel, "launch", None)
    for by_columns in (True, False):
        problem = Problem(counts, 1, "cpu", torch.bfloat16, by_columns)
        for name, actual, expected in zip(("out", "da", "db"), problem.run(), problem.twin(), strict=True):
            assert actual is not None
            if expected.any():
                assert_close(name, actual, expected, torch.bfloat16)
            else:
                assert_equal(name, actual.double(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_main_grad(device: str) -> None:
    problem = Problem((3, 0, 2), 4, device, torch.bfloat16)
    main = torch.ones(3, N, K, device=device)
    out = problem.run(main.transpose(1, 2))
    assert out[2] is None
    expected = problem.twin()[2] + 1
    assert_close("main_grad", main, expected, torch.float32) if device == "cpu" else torch.testing.assert_close(
        main, expected.float(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("device", DEVICES)
def test_counts_compile_nothing(device: str) -> None:
    Problem((3, 5, 2), 1, device, torch.float32).run()
    before = to.specializations()
    for counts, alignment in COUNTS:
        Problem(counts, alignment, device, torch.float32).run()
    assert to.specializations() == before


@pytest.mark.parametrize(
    "counts, groups", [((3, 10**6), [0, 0, 0, 1]), ((2**31 - 1, 2**31 - 1), [0, 0, 0, 0]), ((-5, 2), [1, 1])]
)
def test_more_rows_than_there_are(counts: tuple[int, int], groups: list[int]) -> None:
    """Counts of a call that failed may be anything; the simulator sees rows that do not exist."""
    a, b = torch.ones(4, 8), torch.stack([torch.full((8, 8), 1.0), torch.full((8, 8), 2.0)])
    rows = torch.tensor(counts, dtype=torch.int32)
    (out,) = World(1).run(lambda group: to.grouped_matmul(a, b, rows))
    for row, group in enumerate(groups):
        assert out[row].tolist() == [8.0 * (group + 1)] * 8


def test_opcheck() -> None:
    problem = Problem((3, 5, 2), 1, "cpu", torch.float32)
    rows = int(problem.inside.sum())  # the last group ends with the tensor: nothing is uninitialised
    a, grad, counts = problem.a[:rows].clone(), problem.grad[:rows], problem.device_counts
    b = problem.weight.transpose(1, 2).clone().requires_grad_()
    ops = torch.ops.triton_overlap
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.grouped_matmul, (a.requires_grad_(), b, counts, None, 1)),
        (ops.grouped_gradient, (a.detach(), grad, counts, 1, True)),
        (ops.grouped_gradient_, (a.detach(), grad, counts, 1, torch.zeros(3, K, N))),
    ]
    for op, args in cases:
        outcome = torch.library.opcheck(op.default, args)
        assert set(outcome.values()) == {"SUCCESS"}, f"{op}: {outcome}"


def test_errors() -> None:
    a, b, counts = torch.ones(4, 8), torch.ones(2, 8, 6), torch.ones(2, dtype=torch.int32)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, r"a \[R, K\] and b \[E, K, N\] expected", lambda: to.grouped_matmul(a[:, :7], b, counts)),
        (ValueError, "they must agree", lambda: to.grouped_matmul(a, b.half(), counts)),
        (ValueError, "a must be one of", lambda: to.grouped_matmul(a.double(), b.double(), counts)),
        (ValueError, r"counts must be torch.int32 \[2\]", lambda: to.grouped_matmul(a, b, counts.long())),
        (ValueError, "alignment must be at least 1, got 0", lambda: to.grouped_matmul(a, b, counts, alignment=0)),
        (ValueError, "main_grad must have b's shape", lambda: to.grouped_matmul(a, b, counts, main_grad=b[:1])),
        (
            ValueError,
            "must not be expanded",
            lambda: to.grouped_matmul(a, b, counts, main_grad=b[:, :1].expand(2, 8, 6)),
        ),
        (TypeError, "counts must be a torch.Tensor", lambda: to.grouped_matmul(a, b, [1, 2])),  # type: ignore[arg-type]
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
    leaf = a.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        torch.autograd.grad(to.grouped_matmul(leaf, b, counts).sum(), leaf, create_graph=True)
