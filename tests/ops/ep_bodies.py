"""Differentiable dispatch and combine against their twins, as bodies for every backend (``cases``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import triton_overlap as to
from tests.ops.cases import Draw, assert_close, assert_equal, assert_steady, counters, leaf, leaves64
from triton_overlap import reference

_WITHOUT_VALUES = ("test_schema", "test_autograd_registration", "test_faketensor")
_ALL_CHECKS = (*_WITHOUT_VALUES, "test_aot_dispatch_dynamic")
#: Columns of a row: not a power of two, and a multiple of 32 bytes in every dtype.
HIDDEN, MAX_TOKENS, TOPK = 48, 5, 3


@dataclass(frozen=True)
class Routing:
    """Tokens of each rank, and where they go.

    Attributes:
        tokens: of each rank, repeated where there are more ranks.
        masked: every how many-eth expert is none; 0 for all of them there.
        one_expert: all tokens go to expert 0 alone.
    """

    tokens: tuple[int, ...]
    masked: int = 0
    one_expert: bool = False

    def topk_idx(self, group: to.Group, num_experts: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(11)
        found = []
        for rank in range(group.world_size):
            tokens = self.tokens[rank % len(self.tokens)]
            idx = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :TOPK].contiguous()
            if self.masked:
                idx.view(-1)[:: self.masked] = -1
            if self.one_expert:
                idx = torch.tensor([0, -1, -1]).repeat(tokens, 1)
            found.append(idx.to(group.device))
        return found


USUAL = Routing((3, 5))
ROUTINGS = {
    "usual": USUAL,
    "masked": Routing((4, 3), masked=2),
    "nobody on rank 0": Routing((0, 3)),
    "no tokens": Routing((0,)),
    "one expert": Routing((3, 2), one_expert=True),
}


def make_buffer(group: to.Group, dtype: torch.dtype, **settings: Any) -> to.ExpertBuffer:
    return to.ExpertBuffer(
        group,
        num_max_tokens_per_rank=MAX_TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        num_experts=2 * max(2, group.world_size),
        dtype=dtype,
        channels_per_sm=1,
        **settings,
    )


class Round:
    """A dispatch, rows made of what came in, and a combine; here and in the twin."""

    def __init__(self, buffer: to.ExpertBuffer, routing: Routing, expand: bool, biases: int, seed: int = 0) -> None:
        self.buffer, self.expand = buffer, expand
        group = buffer.group
        draw = Draw(group, buffer.dtype, seed)
        self.idx = routing.topk_idx(group, buffer.num_experts)
        counts = [len(idx) for idx in self.idx]
        self.x = [draw.one(count, HIDDEN) for count in counts]
        self.weights = [draw.one(count, TOPK).float() for count in counts]
        self.biases = [[draw.one(count, HIDDEN) for count in counts] for _ in range(biases)]
        self.grads = [draw.one(count, HIDDEN) for count in counts]
        self.grads_of_weights = [draw.one(count, TOPK).float() for count in counts]

    def here(self, **options: Any) -> list[Tensor]:
        """Output, summed weights, and the gradients of x, weights and biases, of this rank."""
        rank = self.buffer.group.rank
        x, weights = leaf(self.x[rank]), leaf(self.weights[rank])
        biases = [leaf(bias[rank]) for bias in self.biases]
        recv_x, _, recv_weights, handle = to.ep_dispatch(
            x, self.idx[rank], weights, buffer=self.buffer, expand=self.expand, **options
        )
        out, out_weights = to.ep_combine(recv_x * 2, handle, recv_weights, biases)
        outputs, grads = [out], [self.grads[rank]]
        if out_weights is not None:
            outputs.append(out_weights)
            grads.append(self.grads_of_weights[rank])
        gradients = torch.autograd.grad(outputs, [x, weights, *biases], grads)
        return [value.detach() for value in (*outputs, *gradients)]

    def twin(self) -> list[Tensor]:
        """The same in float64, in one process."""
        rank, experts = self.buffer.group.rank, self.buffer.num_experts
        x, weights = leaves64(self.x), leaves64(self.weights)
        biases = [leaves64(bias) for bias in self.biases]
        received = reference.ep_dispatch(x, self.idx, experts, weights, self.expand)
        recv_weights = [own for _, _, own in received if own is not None]
        outs = reference.ep_combine(
            [rows * 2 for rows, _, _ in received],
            self.idx,
            experts,
            recv_weights if self.expand else None,
            biases,
            self.expand,
        )
        outputs, grads = list(outs), [grad.double() for grad in self.grads]
        if not self.expand:
            sums = reference.ep_combine(recv_weights, self.idx, experts)
            outputs += sums
            grads += [grad.double() for grad in self.grads_of_weights]
        inputs = [x[rank], weights[rank], *(bias[rank] for bias in biases)]
        gradients = torch.autograd.grad(outputs, inputs, grads, allow_unused=True, materialize_grads=True)
        own = [outs[rank]] if self.expand else [outs[rank], sums[rank]]
        return [value.detach() for value in (*own, *gradients)]

    def check(self, **options: Any) -> None:
        found = self.here(**options)
        names = ["out", *([] if self.expand else ["out_weights"]), "dx", "d topk_weights", "d bias 0", "d bias 1"]
        for name, actual, expected in zip(names, found, self.twin(), strict=False):
            dtype = torch.float32 if "weights" in name else self.buffer.dtype
            if expected.numel():
                assert_close(name, actual, expected, dtype)
            else:
                assert actual.shape == expected.shape, name


def values(group: to.Group, dtype: torch.dtype, expand: bool, name: str) -> None:
    """Outputs and every gradient, with the counts on the host, and on the device only."""
    buffer = make_buffer(group, dtype)
    routing = ROUTINGS[name]
    problem = Round(buffer, routing, expand, biases=2)
    problem.check()
    problem.check(cpu_sync=False)
    if expand:
        problem.check(expert_alignment=4)


def cached(group: to.Group, dtype: torch.dtype) -> None:
    """A handle replays its routing, with its layout or another one, here and in the methods of the buffer."""
    buffer = make_buffer(group, dtype)
    problem = Round(buffer, USUAL, expand=False, biases=0)
    rank = group.rank
    x, idx, weights = problem.x[rank], problem.idx[rank], problem.weights[rank]
    first = to.ep_dispatch(x, idx, weights, buffer=buffer)
    expected = buffer.dispatch(x, idx, weights)
    for mine, theirs in zip(first[:3], expected[:3], strict=True):
        assert isinstance(mine, Tensor)
        assert isinstance(theirs, Tensor)
        assert_equal("dispatch", mine, theirs)
    handle = first[3]
    assert handle.num_recv_per_expert == expected[3].num_recv_per_expert
    for changes in ({}, {"expand": True}, {"expand": True, "expert_alignment": 4, "zero_fill": True}):
        again = to.ep_dispatch(leaf(x), None, leaf(weights), handle=handle, **changes)
        fresh = to.ep_dispatch(x, idx, weights, buffer=buffer, **changes)
        for mine, theirs in zip(again[:3], fresh[:3], strict=True):
            assert mine is not None
            assert theirs is not None
            assert_equal("cached dispatch", mine.detach(), theirs)
        assert again[3].num_rows == fresh[3].num_rows == len(again[0])
        again[0].sum().backward()  # every rank's, through the new handle
        assert_equal(
            "combine of the buffer",
            buffer.combine(again[0].detach(), again[3])[0],
            buffer.combine(fresh[0], fresh[3])[0],
        )
    x_leaf, w_leaf = leaf(x), leaf(weights)
    grad = torch.ones_like(first[0])
    for function in (
        lambda: to.ep_dispatch(x_leaf, idx, w_leaf, buffer=buffer),
        lambda: to.ep_dispatch(x_leaf, None, w_leaf, handle=handle),
    ):
        rows, _, own, _ = function()
        assert own is not None
        grads = torch.autograd.grad([rows, own], [x_leaf, w_leaf], [grad, torch.ones_like(own)])
        copies = reference.ep_dispatch(problem.x, problem.idx, buffer.num_experts)
        expected_x = reference.ep_combine(
            [torch.ones_like(given[0]) for given in copies], problem.idx, buffer.num_experts
        )
        assert_equal("dx", grads[0], expected_x[rank])
        assert_equal("d topk_weights", grads[1], torch.ones_like(weights))


def errors(group: to.Group) -> None:
    """Named before anything is sent; the buffer works afterwards."""
    buffer, other = make_buffer(group, torch.float32), make_buffer(group, torch.float32)
    problem = Round(buffer, USUAL, expand=False, biases=0)
    x, idx, weights = (values[group.rank] for values in (problem.x, problem.idx, problem.weights))
    recv_x, _, _, handle = to.ep_dispatch(x, idx, weights, buffer=buffer)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            TypeError,
            "buffer must be an ExpertBuffer, got an object of type str",
            lambda: to.ep_dispatch(x, idx, buffer="a"),  # type: ignore[arg-type]
        ),
        (TypeError, "x must be a torch.Tensor", lambda: to.ep_dispatch((x, x), idx, buffer=buffer)),  # type: ignore[arg-type]
        (TypeError, "cpu_sync must be True or False", lambda: to.ep_dispatch(x, idx, buffer=buffer, cpu_sync=1)),  # type: ignore[arg-type]
        (ValueError, "give topk_idx, or the handle", lambda: to.ep_dispatch(x, buffer=buffer)),
        (ValueError, "topk_idx must be None with a handle", lambda: to.ep_dispatch(x, idx, handle=handle)),
        (ValueError, "the handle is of", lambda: to.ep_dispatch(x, buffer=other, handle=handle)),
        (ValueError, "x must be torch.float32", lambda: to.ep_dispatch(x.bfloat16(), idx, buffer=buffer)),
        (TypeError, "handle must be what a dispatch returned", lambda: to.ep_combine(recv_x, idx)),  # type: ignore[arg-type]
        (ValueError, "rows that were received", lambda: to.ep_combine(recv_x.new_zeros(99, HIDDEN), handle)),
        (ValueError, "topk_weights must have the", lambda: to.ep_combine(recv_x, handle, weights.new_zeros(99, TOPK))),
        (ValueError, "at most two biases, got 3", lambda: to.ep_combine(recv_x, handle, None, (x, x, x))),
        (TypeError, r"bias\[0\] must be a torch.Tensor", lambda: to.ep_combine(recv_x, handle, None, [1])),  # type: ignore[list-item]
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
    leaf_x = leaf(x)
    out = to.ep_dispatch(leaf_x, idx, buffer=buffer)[0]
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        torch.autograd.grad(out.sum(), leaf_x, create_graph=True)
    problem.check()


def opcheck(group: to.Group) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch with dynamic shapes, of every operator."""
    buffer = make_buffer(group, torch.float32)
    problem = Round(buffer, Routing((1, 2)), expand=True, biases=2)
    rank = group.rank
    x, weights = leaf(problem.x[rank]), leaf(problem.weights[rank])
    bias_0, bias_1 = (leaf(bias[rank]) for bias in problem.biases)
    name, idx = buffer.handle, problem.idx[rank]
    ops = torch.ops.triton_overlap
    plain, wide = (ops.ep_dispatch(x, idx, weights, name, expand, 1, False, True) for expand in (False, True))
    rows, grouped = len(plain[0]), len(wide[0])
    sent, routing, wide_routing = plain[3], plain[4], wide[4]
    y, wide_y, recv_weights = leaf(plain[0]), leaf(wide[0]), leaf(plain[2])
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.ep_dispatch, (x, idx, weights, name, False, 1, False, True)),
        (ops.ep_dispatch, (x, idx, None, name, True, 4, True, True)),
        (ops.ep_cached_dispatch, (x, weights, sent, routing, rows, rows, name, False, 1, False, False)),
        (ops.ep_cached_dispatch, (x, None, sent, routing, rows, grouped, name, True, 1, False, True)),
        (ops.ep_combine, (y, None, bias_0, bias_1, sent, routing, name, False, 1)),
        (ops.ep_combine, (wide_y, recv_weights, bias_0, None, sent, wide_routing, name, True, 1)),
        (ops.ep_combine_weights, (recv_weights, sent, routing, name)),
        (ops.ep_weights_gradient_, (wide[0].detach().clone(), wide_y.detach(), plain[2].detach(), wide_routing, name)),
    ]
    # Rows past the counts are uninitialised memory, NaN in tests, which no value check takes.
    without_values = (ops.ep_dispatch, (x, idx, weights, name, True, 1, False, False))
    for op, args in (*cases, without_values):
        chosen = _WITHOUT_VALUES if args is without_values[1] else _ALL_CHECKS
        outcome = torch.library.opcheck(op.default, args, test_utils=chosen)
        assert set(outcome.values()) == {"SUCCESS"}, f"{op}: {outcome}"


def compiled(group: to.Group, cpu_sync: bool) -> None:
    """``fullgraph``: one graph for every count of tokens and of received rows, bitwise what eager mode gives."""
    from torch._dynamo.testing import CompileCounterWithBackend

    buffer = make_buffer(group, torch.float32)

    def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        rows, _, own, handle = to.ep_dispatch(x, idx, weights, buffer=buffer, expand=True, cpu_sync=cpu_sync)
        return to.ep_combine(rows * 2, handle, own, bias=x)[0]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        # The first counts are no other size here: a compiler takes equal sizes for one.
        for seed, routing in enumerate(
            (Routing((5, 4)), Routing((3, 2)), Routing((4, 5), masked=2), Routing((4, 2), one_expert=True))
        ):
            problem = Round(buffer, routing, expand=True, biases=0, seed=seed)
            results = []
            for function in (layer, fast):
                x, weights = leaf(problem.x[group.rank]), leaf(problem.weights[group.rank])
                out = function(x, problem.idx[group.rank], weights)
                out.backward(problem.grads[group.rank])
                assert x.grad is not None
                assert weights.grad is not None
                results.append((out.detach(), x.grad, weights.grad))
            for eager, got in zip(*results, strict=True):
                assert_equal("compiled", got, eager)
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"


def graph(group: to.Group) -> None:
    """One CUDA graph of a forward and a backward, replayed with other tokens and routings, also after a recovery."""
    buffer, rank = make_buffer(group, torch.bfloat16), group.rank
    x = torch.zeros(MAX_TOKENS, HIDDEN, dtype=buffer.dtype, device=group.device, requires_grad=True)
    grad = torch.zeros_like(x)
    idx = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int64, device=group.device)
    weights = torch.zeros(MAX_TOKENS, TOPK, device=group.device, requires_grad=True)

    def step() -> list[Tensor]:
        rows, _, own, handle = to.ep_dispatch(x, idx, weights, buffer=buffer, expand=True, cpu_sync=False)
        out = to.ep_combine(rows * 2, handle, own)[0]
        return [out, *torch.autograd.grad(out, [x, weights], grad)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        results = step()
    routings = (*ROUTINGS.values(), USUAL)
    for seed, routing in enumerate(routings):
        if seed == len(routings) - 1:
            group.recover()
        problem = Round(buffer, routing, expand=True, biases=0, seed=seed)
        tokens = len(problem.idx[rank])
        idx.fill_(-1)
        with torch.no_grad():
            for place, given in ((x, problem.x), (grad, problem.grads), (idx, problem.idx), (weights, problem.weights)):
                place[:tokens].copy_(given[rank])
        captured.replay()
        group.check()
        names = ("out", "dx", "d topk_weights")
        for name, actual, expected in zip(names, results, problem.twin(), strict=True):
            dtype = torch.float32 if "weights" in name else buffer.dtype
            if tokens and bool(expected.any()):
                assert_close(f"replay {seed}: {name}", actual.detach()[:tokens], expected, dtype)
            assert not bool(actual[tokens:].any()), f"replay {seed}: {name} of a masked token"


def specialisations(group: to.Group) -> None:
    """Other counts and routings compile nothing and register nothing."""
    buffer = make_buffer(group, torch.bfloat16)

    def call(routing: Routing) -> None:
        Round(buffer, routing, expand=True, biases=1).here()

    call(USUAL)
    before = counters()
    for routing in ROUTINGS.values():
        call(routing)
    call(Routing((1, 2)))
    assert_steady("later calls", before)
