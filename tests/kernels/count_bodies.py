"""What ranks do in the tests of token counts on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import triton_overlap as to
from triton_overlap.comm.group import Group
from triton_overlap.comm.layout import StateWord
from triton_overlap.comm.user_buffers import UserBuffer
from triton_overlap.kernels import (
    all_gather,
    all_gather_matmul,
    gathered,
    matmul_reduce_scatter,
    reduce_scatter,
    weight_gradient,
)
from triton_overlap.kernels.epilogue import Epilogue


@dataclass(frozen=True)
class Problem:
    """x [T/W, k] and a [T, k] times b [k, n], with T up to ``rows`` a rank."""

    rows: int
    k: int
    n: int
    dtype: torch.dtype


class Inputs(NamedTuple):
    """x and a at capacity, b, and a bias that is the same on every rank."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor


class Kernels:
    """Every kernel that takes a count, on two buffers, as one function of inputs at capacity."""

    def __init__(self, group: Group, problem: Problem, *, device_count: bool) -> None:
        self.group = group
        capacity = problem.rows * group.world_size
        self.gather_buffer, self.scatter_buffer = (
            group.user_buffer(capacity, hidden, problem.dtype, device_count=device_count)
            for hidden in (problem.k, problem.n)
        )

    def once(self, given: Inputs, count: torch.Tensor) -> None:
        """One call, and what is wrong with it."""
        all_gather_matmul.launch(self.gather_buffer, given.x, given.b, active_tokens=count)
        self.group.check()

    def __call__(self, given: Inputs, count: torch.Tensor | None) -> dict[str, torch.Tensor]:
        x, a, b, bias = given
        buffer, tokens = self.gather_buffer, a.shape[0]
        results = {}
        product = all_gather_matmul.launch(buffer, x, b, bias, gather=True, use_ce=False, active_tokens=count)
        results["all_gather_matmul"] = product
        results["gathered"] = gathered.launch(buffer, tokens, count)
        results["matmul_reduce_scatter"] = matmul_reduce_scatter.launch(
            self.scatter_buffer, a, b, bias, active_tokens=count
        )
        all_gather.launch(buffer, x, active_tokens=count)
        results["all_gather"] = gathered.launch(buffer, tokens, count)
        results["reduce_scatter"] = reduce_scatter.launch(buffer, a, active_tokens=count)
        results["weight_gradient"] = weight_gradient.launch(a, product, active_tokens=count)
        return results


def inputs(group: Group, problem: Problem, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * seed + group.rank)
    shapes = ((problem.rows, problem.k), (problem.rows * group.world_size, problem.k), (problem.k, problem.n))
    own = [torch.randn(shape, generator=generator) for shape in shapes]
    own.append(torch.randn(problem.n, generator=generator.manual_seed(seed)))
    return Inputs(*(tensor.to(group.device, problem.dtype) for tensor in own))


def check_against_host_count(
    results: dict[str, torch.Tensor], plain: Kernels, given: Inputs, tokens: int, world_size: int
) -> None:
    """The bits of the same kernels at a count of the host's, and NaN, as memory was filled, past the active rows."""
    active = given._replace(x=given.x[: tokens // world_size], a=given.a[:tokens])
    expected = plain(active, None)
    for name, result in results.items():
        rows = expected[name].shape[0]
        assert torch.equal(result[:rows], expected[name]), f"{name} at {tokens} tokens"
        assert result[rows:].isnan().all(), f"{name} wrote past {tokens} tokens"


def poison(given: Inputs, tokens: int, world_size: int) -> None:
    """NaN past the active rows of x and a."""
    given.x[tokens // world_size :] = float("nan")
    given.a[tokens:] = float("nan")


def values(group: Group, problem: Problem, rows: list[int]) -> None:
    """At each count, up and down: the bits of the call that the host tells the count, and no more compilations."""
    counted = Kernels(group, problem, device_count=True)
    plain = Kernels(group, problem, device_count=False)
    count = torch.zeros((), dtype=torch.int32, device=group.device)
    specializations = 0
    for seed, rows_now in enumerate(rows):
        tokens = rows_now * group.world_size
        given = inputs(group, problem, seed)
        poison(given, tokens, group.world_size)
        count.fill_(tokens)
        check_against_host_count(counted(given, count), plain, given, tokens, group.world_size)
        if seed == 0:
            specializations = to.specializations()
    assert to.specializations() == specializations


def graph(group: Group, problem: Problem, rows: list[int]) -> None:
    """One captured graph gives, at every count and in any order, the bits of the call that the host tells the count."""
    counted = Kernels(group, problem, device_count=True)
    plain = Kernels(group, problem, device_count=False)
    count = torch.full((), group.world_size, dtype=torch.int32, device=group.device)
    static = inputs(group, problem, 0)
    counted(static, count)  # compiles
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = counted(static, count)
    specializations = to.specializations()
    for seed, rows_now in enumerate(rows):
        tokens = rows_now * group.world_size
        given = inputs(group, problem, seed)
        poison(given, tokens, group.world_size)
        for into, value in zip(static, given, strict=True):
            into.copy_(value)
        for result in results.values():
            result.fill_(float("nan"))
        count.fill_(tokens)
        captured.replay()
        check_against_host_count(results, plain, given, tokens, group.world_size)
        group.check()
    # The calls with the host's count compile once each as well.
    assert to.specializations() <= 2 * specializations


def broken_rules(group: Group, cases: int = 4) -> None:
    """A count that a rule forbids: the error on every rank, NaN in the outputs, and the group works after recover()."""
    world_size = group.world_size
    problem = Problem(rows=8, k=32, n=16, dtype=torch.float32)
    counted, plain = (Kernels(group, problem, device_count=device_count) for device_count in (True, False))
    count = torch.full((), world_size, dtype=torch.int32, device=group.device)
    given = inputs(group, problem, 0)
    counted(given, count)
    allowed = f"0 < T <= {8 * world_size}, divisible by {world_size}"
    wrong = (0, -world_size, 9 * world_size, 4 * world_size + 1)
    for number, tokens in enumerate(wrong[: cases if world_size > 1 else 3]):
        # One rank alone reads the wrong count in every second round.
        mine = world_size if number % 2 and group.rank != world_size - 1 else tokens
        count.fill_(mine)
        group.barrier()  # a failure fails what a peer is still in, too
        with pytest.raises(to.CommError) as caught:
            counted.once(given, count)
        assert isinstance(caught.value, to.ActiveCountError), caught.value
        assert f"read T = {tokens} on its device" in str(caught.value)
        assert allowed in str(caught.value)
        with pytest.raises(to.GroupBrokenError):
            counted(given, count)
        group.recover()
        for tokens_now in (8 * world_size, world_size):
            count.fill_(tokens_now)
            check_against_host_count(counted(given, count), plain, given, tokens_now, world_size)


def disagreement(group: Group) -> None:
    """Ranks that read different counts hear of it, all of them."""
    problem = Problem(rows=8, k=32, n=16, dtype=torch.float32)
    counted, given = Kernels(group, problem, device_count=True), inputs(group, problem, 0)
    tokens = (2 if group.rank == 0 else 3) * group.world_size
    count = torch.full((), tokens, dtype=torch.int32, device=group.device)
    with pytest.raises(to.CommMismatchError, match="T = "):
        counted.once(given, count)
    group.recover()
    count.fill_(group.world_size)
    counted.once(given, count)


def graph_survives_recovery(group: Group) -> None:
    """A buffer that counts on the device keeps its memory, so a graph captured before a failure is good after it."""
    world_size = group.world_size
    problem = Problem(rows=64, k=128, n=64, dtype=torch.bfloat16)
    counted, plain = (Kernels(group, problem, device_count=device_count) for device_count in (True, False))
    count = torch.full((), world_size, dtype=torch.int32, device=group.device)
    static = inputs(group, problem, 0)
    counted(static, count)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = counted(static, count)
    for _ in range(3):
        group.barrier()
        count.fill_(0 if group.rank == world_size - 1 else world_size)
        captured.replay()
        with pytest.raises(to.CommError):
            group.check()
        assert results["all_gather_matmul"].isnan().all()
        group.recover()
        for rows in (64, 1, 33):
            count.fill_(rows * world_size)
            for result in results.values():
                result.fill_(float("nan"))
            captured.replay()
            group.check()
            check_against_host_count(results, plain, static, rows * world_size, world_size)


def wrapped_epochs(group: Group) -> None:
    """Calls before and after the epoch on the device has wrapped, and recovery there."""
    problem, world_size = Problem(rows=4, k=32, n=16, dtype=torch.float32), group.world_size
    counted, plain = (Kernels(group, problem, device_count=device_count) for device_count in (True, False))
    count = torch.zeros((), dtype=torch.int32, device=group.device)
    for buffer in (counted.gather_buffer, counted.scatter_buffer):
        buffer._state[StateWord.EPOCH] = 0x7FFFFFFC  # the gathers' buffer sees three calls a round
    group.backend.synchronize()
    group.barrier()
    for seed, rows in enumerate((4, 1, 3)):
        given = inputs(group, problem, seed)
        count.fill_(rows * world_size)
        check_against_host_count(counted(given, count), plain, given, rows * world_size, world_size)
    assert int(counted.gather_buffer._state[StateWord.EPOCH]) == 0x7FFFFFFC + 9 - 0x7FFFFFFE
    assert int(counted.scatter_buffer._state[StateWord.EPOCH]) == 1


def failed_outputs(group: Group) -> None:
    """After a count that a rule forbids, every output is NaN as a whole, in memory that held something else."""
    problem = Problem(rows=4, k=32, n=16, dtype=torch.float32)
    counted, given = Kernels(group, problem, device_count=True), inputs(group, problem, 0)
    count = torch.zeros((), dtype=torch.int32, device=group.device)
    product = torch.zeros(4 * group.world_size, 16, device=group.device)
    group.check_mode = "async"
    group._raise_failure = lambda: None  # type: ignore[method-assign]  # as a host that is far ahead
    results = counted(given, count)
    epilogue = Epilogue("gelu_tanh", False, product)
    results["activation"] = all_gather_matmul.launch(
        counted.gather_buffer, given.x, given.b, epilogue=epilogue, active_tokens=count
    )
    results["product"] = product
    del results["weight_gradient"]  # of this rank alone
    for name, result in results.items():
        assert result.isnan().all(), name


def modes(group: Group) -> None:
    """A buffer is for counts on the device or for those of the host; a wrong scalar is refused before the call."""
    counted = group.user_buffer(8 * group.world_size, 32, torch.float32, device_count=True)
    plain = group.user_buffer(8 * group.world_size, 32, torch.float32)
    assert counted is not plain
    count = torch.full((), group.world_size, dtype=torch.int32, device=group.device)
    cases: list[tuple[UserBuffer, torch.Tensor | None, str]] = [
        (counted, None, "for operations that take active_tokens"),
        (plain, count, "needs a buffer with device_count=True"),
        (counted, count.long(), r"must be torch\.int32, got torch\.int64; cast it"),
        (counted, count.expand(2), r"must have one element, the count of tokens, got \[2\]"),
        (counted, count.to("meta"), "must be on .*, got meta; move it there"),
    ]
    for buffer, scalar, message in cases:
        with pytest.raises(ValueError, match=message):
            buffer.check_count(scalar)
