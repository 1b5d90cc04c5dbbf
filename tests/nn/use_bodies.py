"""Ways to use the transformer modules, as bodies for every backend (``tests.ops.cases``): microbatches, recomputation,
autocast, ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import triton_overlap as to
from tests.nn.cases import Case
from tests.nn.parallel import Parallel
from tests.ops.cases import assert_equal
from triton_overlap.reference import relative_error


def collective_calls(group: to.Group) -> int:
    return sum(buffer.epoch for buffer in group._buffers.values())


def microbatches(group: to.Group, case: Case, dtype: torch.dtype) -> None:
    """Forward and backward of three microbatches of different counts interleaved: the bits of one after another."""
    parallel = Parallel(group, case, dtype, "layer")
    batches = [
        parallel.inputs(tokens, seed) for seed, tokens in enumerate((*case.counts(group), *case.counts(group))[:3])
    ]

    def leaves() -> list[Tensor]:
        return [parallel.own(x).clone().requires_grad_() for x, _, _ in batches]

    def forward(xs: list[Tensor], i: int) -> Tensor:
        return parallel(xs[i], batches[i][2])

    def backward(out: Tensor, i: int) -> None:
        out.backward(parallel.own(batches[i][1]))

    plain = leaves()
    for i in range(3):
        backward(forward(plain, i), i)
    expected = parallel.gradients()

    mixed = leaves()
    first, second = forward(mixed, 0), forward(mixed, 1)
    backward(first, 0)
    third = forward(mixed, 2)
    backward(second, 1)
    backward(third, 2)
    for x, y in zip(mixed, plain, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert_equal("dx", x.grad, y.grad)
    for name, grad in parallel.gradients().items():
        assert_equal(f"gradient of {name}", grad, expected[name])


def recomputation(group: to.Group, case: Case, dtype: torch.dtype) -> None:
    """``no_grad`` and checkpointing give the same bits and communicate through the same overlapped calls."""
    parallel = Parallel(group, case, dtype, "layer")
    x, d_out, cu_seqlens = parallel.inputs(case.counts(group)[0], 11)

    def run(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor], int]:
        own_x = parallel.own(x).clone().requires_grad_()
        before = collective_calls(group)
        out = function(own_x)
        out.backward(parallel.own(d_out))
        calls = collective_calls(group) - before
        assert own_x.grad is not None
        return out.detach(), own_x.grad, parallel.gradients(), calls

    out, dx, grads, calls = run(lambda t: parallel(t, cu_seqlens))
    before = collective_calls(group)
    with torch.no_grad():
        assert_equal("output under no_grad", parallel(parallel.own(x), cu_seqlens), out)
    forward_calls = collective_calls(group) - before
    assert forward_calls >= (4 if case.sequence_parallel else 2), "forward does not overlap under no_grad"
    for reentrant in (False, True):
        again = run(partial(checkpoint, lambda t: parallel(t, cu_seqlens), use_reentrant=reentrant))
        assert_equal("checkpointed output", again[0], out)
        assert_equal("checkpointed dx", again[1], dx)
        for name, grad in again[2].items():
            assert_equal(f"checkpointed gradient of {name}", grad, grads[name])
        assert again[3] > calls, "the forward pass was not run again"
        assert again[3] <= calls + forward_calls


def autocast(group: to.Group, case: Case) -> None:
    """float32 parameters under bfloat16 autocast: float32 residuals and gradients, one buffer, near float32 results."""
    with torch.autocast(group.device.type, dtype=torch.bfloat16):
        parallel = Parallel(group, case, torch.float32, "layer")
    x, d_out, cu_seqlens = parallel.inputs(case.counts(group)[0], 2)
    allocations = to.symmetric_allocations()
    with torch.autocast(group.device.type, dtype=torch.bfloat16):
        out = parallel(parallel.own(x), cu_seqlens)
    assert to.symmetric_allocations() == allocations, "registered again"
    out.backward(parallel.own(d_out))
    grads = parallel.gradients()
    full_out = parallel.plain_forward(parallel.plain, x, cu_seqlens)
    full_out.backward(d_out)
    expected = parallel.expected_gradients(parallel.plain)
    for name, actual, wanted in (
        ("output", out, parallel.own(full_out)),
        *((name, grad, expected[name]) for name, grad in grads.items()),
    ):
        assert actual.dtype == torch.float32
        error = relative_error(actual, wanted)
        assert error < 3e-2, f"{name}: relative error {error:.2e}"


def compiled(group: to.Group, case: Case, dtype: torch.dtype, unbacked: bool = False) -> None:
    """``torch.compile(fullgraph=True)`` of a layer: one graph for all token and document counts, near eager results.

    With ``unbacked`` counts that the compiler never learns, one row a rank among them.
    """
    from torch._dynamo.decorators import mark_unbacked
    from torch._dynamo.testing import CompileCounterWithBackend

    parallel = Parallel(group, case, dtype, "layer")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(parallel.modules[0], fullgraph=True, dynamic=True, backend=counter)
    for seed, tokens in enumerate(case.counts(group)):
        if tokens <= group.world_size and not unbacked:
            continue  # torch.compile specialises a dimension of one
        x, d_out, cu_seqlens = parallel.inputs(tokens, seed)
        if unbacked:
            mark_unbacked(cu_seqlens, 0)
        results = []
        angles = parallel.rotary(case.capacity)
        for function in (parallel.modules[0], fast):
            own_x = parallel.own(x).clone().requires_grad_()
            if unbacked:
                mark_unbacked(own_x, 0)
            out = function(own_x, cu_seqlens_q=cu_seqlens, rotary_pos_emb=angles)
            out.backward(parallel.own(d_out))
            assert own_x.grad is not None
            results.append({"output": out.detach(), "dx": own_x.grad, **parallel.gradients()})
        for name, eager in results[0].items():
            # A compiler may add in another order, and round bfloat16 elsewhere.
            error = relative_error(results[1][name], eager)
            assert error < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype], f"{name}: relative error {error:.2e}"
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"
