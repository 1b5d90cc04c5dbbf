"""Shared by the tests of operations and modules: sizes, data, runners, poison.

A body is a top-level function ``body(group, sizes, ...)`` that every rank runs and that asserts for itself. The same
bodies run in the simulator, on rank processes over shared memory, and on GPUs, with sizes that fit each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triton_overlap as to
from tests.distributed import Ranks, run_ranks
from triton_overlap.comm.user_buffers import UserBuffer
from triton_overlap.reference import relative_error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Relative Frobenius error that outputs and gradients must stay below.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Sizes:
    """What a body runs on.

    Attributes:
        hidden: of the buffer.
        features: the other dimension of the products, for one rank.
        rows: T/W of successive calls.
        max_rows: capacity over W.
    """

    hidden: int
    features: int
    rows: tuple[int, ...]
    max_rows: int

    def buffer(self, group: to.Group, dtype: torch.dtype) -> UserBuffer:
        return group.user_buffer(self.max_rows * group.world_size, self.hidden, dtype)


#: Up and down between one row a rank and the capacity; 127 and 129 end inside a tile.
FULL_CPU = Sizes(hidden=48, features=40, rows=(3, 1, 127, 16, 129), max_rows=129)
SMALL_CPU = Sizes(hidden=32, features=24, rows=(5, 1, 8), max_rows=8)
FULL_GPU = Sizes(hidden=512, features=1024, rows=(96, 1, 127, 256, 129, 16, 128), max_rows=256)
ODD_GPU = Sizes(hidden=260, features=330, rows=(64, 1, 127, 129), max_rows=129)

Body = Callable[..., Any]


def counters() -> dict[str, int]:
    """Compilation keys of each kernel, and symmetric allocations, of this process so far."""
    return {**to.specializations_by_kernel(), "symmetric allocations": to.symmetric_allocations()}


def assert_steady(what: str, before: dict[str, int]) -> None:
    """No kernel was specialised anew, and nothing registered, since ``before``."""
    anew = {name: count - before.get(name, 0) for name, count in counters().items() if count != before.get(name, 0)}
    assert not anew, f"{what}: specialised or allocated anew: {anew}"


def on_ranks(ranks: Ranks | int, body: Body, *args: Any) -> list[Any]:
    """Run ``body(group, *args)`` on rank processes."""
    if isinstance(ranks, int):
        return run_ranks(ranks, with_group, body, *args)
    return ranks.run(with_group, body, *args)


def with_group(body: Body, *args: Any) -> Any:
    return _with_group("sync", body, *args)


def with_group_async(body: Body, *args: Any) -> Any:
    """Calls return before the device has finished them, as they do in use; a failure is raised at the end."""
    return _with_group("async", body, *args)


def _with_group(check: str, body: Body, *args: Any) -> Any:
    group = to.init_group(timeout_s=60, check=check)
    try:
        result = body(group, *args)
        group.check()
        return result
    finally:
        group.close()


def in_simulator(world_size: int, seed: int, body: Body, *args: Any) -> list[Any]:
    """Run ``body(group, *args)`` on simulated ranks."""
    return to.sim.World(world_size, seed=seed).run(lambda group: body(group, *args))


class Draw:
    """The same random tensors on every rank: reproducible from a seed, of every rank's data at once.

    Values are drawn in float32 and rounded to ``dtype``, so that a float64 reference starts from what kernels get.
    """

    def __init__(self, group: to.Group, dtype: torch.dtype, seed: int = 0) -> None:
        self.group = group
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def one(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(device=self.group.device, dtype=self.dtype)

    def per_rank(self, *shape: int) -> list[Tensor]:
        return [self.one(*shape) for _ in range(self.group.world_size)]

    def mine(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of this rank's tensor, as a leaf that asks for a gradient."""
        return leaf(tensors[self.group.rank])

    def constant(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[self.group.rank]


def leaf(tensor: Tensor) -> Tensor:
    """A copy that asks for a gradient."""
    return tensor.detach().clone().requires_grad_()


def leaves64(tensors: Sequence[Tensor]) -> list[Tensor]:
    """float64 copies that ask for gradients."""
    return [x.to(torch.float64).requires_grad_() for x in tensors]


def assert_close(what: str, actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert actual is not None, f"{what} is None"
    assert expected is not None, f"the reference of {what} is None"
    assert actual.dtype == dtype, f"{what} is {actual.dtype}, not {dtype}"
    error = relative_error(actual, expected)
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.2e} in {dtype}, shape {list(actual.shape)}"


def assert_equal(what: str, actual: Tensor, expected: Tensor) -> None:
    """Bitwise; NaN never passes."""
    assert torch.equal(actual, expected), f"{what}: largest difference {(actual - expected).abs().max().item()}"


@contextmanager
def poisoned(buffer: UserBuffer, tokens: int) -> Iterator[None]:
    """NaN in both slots before the calls inside; past the prefix it must still be there afterwards.

    That results are right shows that nothing read it.
    """
    group = buffer.group
    group.backend.synchronize()
    group.barrier()  # the peers' earlier calls have ended too
    for slot in (0, 1):
        buffer.slot(slot).fill_(float("nan"))
    group.backend.synchronize()
    group.barrier()
    yield
    group.backend.synchronize()
    group.barrier()
    for slot in (0, 1):
        assert bool(buffer.slot(slot)[tokens:].isnan().all()), f"slot {slot} was written past row {tokens}"
