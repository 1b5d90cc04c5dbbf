"""Modules told their token count by a scalar on the device, against the same modules told it by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.nn.cases import Case, assert_module_close
from tests.nn.parallel import Parallel
from tests.ops.cases import assert_steady, counters


class Counted:
    """Modules on tensors at capacity, forward and backward, and what they are compared with.

    Attributes:
        parallel: the modules and their inputs.
        x, d_out: [capacity / W, hidden], NaN past the active rows.
        cu_seqlens: of fixed size, its last entry repeated.
    """

    def __init__(self, group: to.Group, case: Case, dtype: torch.dtype, part: str) -> None:
        self.group, self.parallel = group, Parallel(group, case, dtype, part)
        capacity = -(-case.capacity // group.world_size)
        self.x, self.d_out = (
            torch.zeros(capacity, case.shape.hidden, dtype=dtype, device=group.device) for _ in range(2)
        )
        self.x.requires_grad_()
        self.count = torch.zeros((), dtype=torch.int32, device=group.device)
        self.cu_seqlens = torch.zeros(16, dtype=torch.int32, device=group.device)
        self.settings: dict[str, Any] = {"active_tokens": self.count}
        if part != "mlp":
            self.settings.update(cu_seqlens_q=self.cu_seqlens, max_seqlen_q=capacity * group.world_size)
            if case.shape.rotary:
                self.settings["rotary_pos_emb"] = self.parallel.rotary(capacity * group.world_size)
        self.parameters = list(self.parallel.modules.parameters())

    def set(self, tokens: int, seed: int) -> None:
        """Other inputs, of another count."""
        x, d_out, cu_seqlens = self.parallel.inputs(tokens, seed)
        rows = tokens // self.group.world_size
        for static, value in ((self.x, x), (self.d_out, d_out)):
            static.detach().fill_(float("nan"))[:rows] = self.parallel.own(value).detach()
        if cu_seqlens is not None:
            self.cu_seqlens.fill_(tokens)[: cu_seqlens.numel()] = cu_seqlens
        self.count.fill_(tokens)

    def step(self) -> list[Tensor]:
        """The output, the input's gradient, and every parameter's on this rank."""
        out: Tensor = self.x
        for module in self.parallel.modules:
            out = module(out, **self.settings)
        return [out.detach(), *torch.autograd.grad(out, [self.x, *self.parameters], self.d_out)]

    def expected(self, tokens: int, seed: int) -> list[Tensor]:
        """The same, told by the host."""
        x, d_out, cu_seqlens = self.parallel.inputs(tokens, seed)
        own = self.parallel.own(x).clone().requires_grad_()
        out = self.parallel(own, cu_seqlens)
        return [out.detach(), *torch.autograd.grad(out, [own, *self.parameters], self.parallel.own(d_out))]

    def exact(self, tokens: int, seed: int) -> list[Tensor]:
        """Output and the input's gradient in one process, in float64."""
        x, d_out, cu_seqlens = self.parallel.inputs(tokens, seed)
        full = x.detach().double().requires_grad_()
        out = self.parallel.plain_forward(self.parallel.exact, full, cu_seqlens)
        (grad,) = torch.autograd.grad(out, full, d_out.double())
        return [self.parallel.own(out.detach()), self.parallel.own(grad)]

    def check(self, results: list[Tensor], tokens: int, seed: int) -> None:
        rows = tokens // self.group.world_size
        host, exact = self.expected(tokens, seed), self.exact(tokens, seed)
        for name, result, near, right in zip(("output", "dx"), results, host, exact, strict=False):
            assert_module_close(f"{name} at {tokens} tokens", result[:rows], near, right, result.dtype)
            assert result[rows:].isnan().all(), f"{name} was written past {rows} rows"
        for parameter, result, near in zip(self.parameters, results[2:], host[2:], strict=True):
            assert bool(result.isfinite().all()), f"gradient of {list(parameter.shape)} at {tokens} tokens"
            scale = near.double().norm()
            error = (result.double() - near.double()).norm() / scale
            assert float(error) < 16 * torch.finfo(result.dtype).eps, f"gradient of {list(parameter.shape)}: {error}"


def values(group: to.Group, case: Case, dtype: torch.dtype, part: str) -> None:
    """At each count, up and down; nothing is compiled or registered after the first."""
    counted = Counted(group, case, dtype, part)
    steady: dict[str, int] = {}
    for seed, tokens in enumerate(case.counts(group)):
        counted.set(tokens, seed)
        counted.check(counted.step(), tokens, seed)
        steady = steady or counters()
    assert_steady("after the first count", steady)


def graph(group: to.Group, case: Case, dtype: torch.dtype, part: str, replays: int) -> None:
    """Forward and backward of a whole layer, captured once, at every count and in any order."""
    counted = Counted(group, case, dtype, part)
    counts = case.counts(group)
    counted.set(counts[0], 0)
    counted.step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = counted.step()
    generator = torch.Generator().manual_seed(replays)
    rows = torch.randint(1, counted.x.shape[0] + 1, (replays,), generator=generator).tolist()
    for seed, tokens in enumerate([*counts, *(count * group.world_size for count in rows)]):
        counted.set(tokens, seed)
        for result in results:
            result.fill_(float("nan"))
        captured.replay()
        group.check()
        if part == "mlp":  # PyTorch's attention adds gradients in any order
            for number, (result, eager) in enumerate(zip(results, counted.step(), strict=True)):
                active = tokens // group.world_size if number < 2 else result.shape[0]
                assert torch.equal(result[:active], eager[:active]), f"result {number} at {tokens} tokens"
        counted.check(results, tokens, seed)


def whole_layer(group: to.Group, normalized: bool) -> None:
    """A layer that nobody shares, on this rank's tokens or on all: values and gradients of the active rows alone."""
    count = torch.full((), 3 * group.world_size, dtype=torch.int32, device=group.device)
    for sequence_parallel, rows in ((True, 3), (False, 3 * group.world_size)):
        kind = to.nn.LayerNormLinear if normalized else to.nn.Linear
        layer = kind(8, 12, group=group, sequence_parallel=sequence_parallel, params_dtype=torch.float32)
        x = torch.randn(rows + 2, 8, device=group.device)
        x[rows:] = float("nan")
        d_out = torch.randn(rows + 2, 12, device=group.device)
        d_out[rows:] = float("nan")
        for active, end in ((count, rows + 2), (None, rows)):
            own = x[:end].clone().requires_grad_()
            out = layer(own, active_tokens=active)
            wanted = [own, *layer.parameters()]
            results = [out.detach(), *torch.autograd.grad(out, wanted, d_out[:end])]
            if active is not None:
                counted = results
        for result, right in zip(counted, results, strict=True):
            cut = result[: right.shape[0]]
            torch.testing.assert_close(cut, right)
            assert result[right.shape[0] :].isnan().all()


def autocast(group: to.Group) -> None:
    """Under autocast a counted layer gives what it gives without a count, in the same dtype."""
    world_size, rows = group.world_size, 3
    count = torch.full((), rows * world_size, dtype=torch.int32, device=group.device)
    with torch.autocast(group.device.type, dtype=torch.bfloat16):
        layer = to.nn.TransformerLayer(
            32, 64, 4, group=group, max_tokens=8 * world_size, sequence_parallel=True, params_dtype=torch.float32
        )
        x = torch.randn(rows + 2, 32, device=group.device)
        counted, plain = layer(x, active_tokens=count), layer(x[:rows])
        alone = to.nn.Linear(8, 12, group=group, params_dtype=torch.float32)
        heads = [alone(x[:, :8], active_tokens=count), alone(x[:, :8])]
    assert counted.dtype == plain.dtype == torch.float32
    assert float((counted[:rows] - plain).norm() / plain.norm()) < 2e-2
    assert heads[0].dtype == heads[1].dtype == torch.bfloat16


def registered_when_built(group: to.Group) -> None:
    """A layer built for counts on the device registers nothing later, so its first call may be a compiled one."""
    from torch._dynamo.testing import CompileCounterWithBackend

    capacity = 4 * group.world_size
    layer = to.nn.TransformerLayer(
        32,
        48,
        4,
        group=group,
        max_tokens=capacity,
        sequence_parallel=True,
        device_count=True,
        params_dtype=torch.float32,
    )
    allocations = to.symmetric_allocations()
    compiler = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    x = torch.randn(4, 32, device=group.device)
    tokens = torch.zeros((), dtype=torch.int32, device=group.device)
    for rows in (3, 1, 4):
        tokens.fill_(rows * group.world_size)
        found, expected = (function(x, active_tokens=tokens)[:rows] for function in (compiled, layer))
        torch.testing.assert_close(found, expected)
    assert compiler.frame_count == 1
    assert to.symmetric_allocations() == allocations


def refusals(group: to.Group) -> None:
    """What cannot go with a count on the device says so before the call."""
    count = torch.full((), group.world_size, dtype=torch.int32, device=group.device)
    shared: dict[str, Any] = {"group": group, "max_tokens": 4 * group.world_size, "params_dtype": torch.float32}
    whole = to.nn.Linear(8, 8, parallel_mode="column", **shared)
    with pytest.raises(NotImplementedError, match="needs sequence_parallel=True"):
        whole(torch.zeros(4, 8, device=group.device), active_tokens=count)
    for layer in (to.nn.Linear, to.nn.LayerNormLinear):
        with pytest.raises(NotImplementedError, match="needs sequence_parallel=True"):
            layer(8, 8, parallel_mode="column", device_count=True, **shared)
    split = to.nn.Linear(8, 8, parallel_mode="column", sequence_parallel=True, **shared)
    with pytest.raises(to.errors.ActiveShapeError, match="the tokens are packed"):
        split(torch.zeros(2, 2, 8, device=group.device), active_tokens=count)
