"""``nn.MoE`` against the same layer in one process in float64, as bodies for every backend."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triton_overlap as to
from tests.nn.cases import Draw
from tests.ops.cases import assert_equal, assert_steady, counters
from triton_overlap.activations import ACTIVATIONS, GATED_ACTIVATIONS
from triton_overlap.reference import relative_error

#: Relative Frobenius error of outputs and gradients; the interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 4e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """Sizes of a layer and counts of tokens.

    Attributes:
        tokens: for each call, of each rank, repeated where there are more ranks.
        one_expert: the router sends every token to expert 0 first.
        options: of the layer.
    """

    hidden: int = 32
    ffn: int = 24
    experts_per_rank: int = 2
    top_k: int = 2
    activation: str = "swiglu"
    shared: int = 0
    router: to.nn.RouterSettings = to.nn.RouterSettings()  # noqa: RUF009 - frozen
    tokens: tuple[tuple[int, ...], ...] = ((5, 3),)
    max_tokens: int = 8
    one_expert: bool = False
    cpu_sync: bool = True

    def layer(self, group: to.Group, dtype: torch.dtype, **options: Any) -> to.nn.MoE:
        settings: dict[str, Any] = {
            "num_max_tokens_per_rank": self.max_tokens,
            "router": self.router,
            "activation": self.activation,
            "shared_ffn_hidden_size": self.shared,
            "cpu_sync": self.cpu_sync,
            "params_dtype": dtype,
            **options,
        }
        experts = self.experts_per_rank * group.world_size
        return to.nn.MoE(self.hidden, self.ffn, experts, self.top_k, group=group, **settings)


class Plain:
    """The layer in one process, in the dtype of ``weights``, by the names of the full state dict."""

    def __init__(self, case: Case, weights: dict[str, Tensor]) -> None:
        self.case, self.weights = case, weights

    def _feed(self, x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        h, name = x @ fc1.T, self.case.activation
        if name in GATED_ACTIVATIONS:
            gate, up = h.chunk(2, dim=1)
            return (GATED_ACTIVATIONS[name](gate) * up) @ fc2.T
        return ACTIVATIONS[name](h) @ fc2.T

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output and balance loss of all tokens."""
        settings, weights = self.case.router, self.weights
        logits = x @ weights["router.weight"].T
        softmax = settings.score_function == "softmax"
        scores = logits.softmax(1) if softmax else logits.sigmoid()
        chosen, idx = scores.topk(self.case.top_k, dim=1)
        if settings.normalize:
            chosen = chosen / chosen.sum(1, keepdim=True)
        chosen = chosen * settings.scale
        experts = logits.shape[1]
        out = torch.zeros_like(x)
        if self.case.shared:
            out = out + self._feed(x, weights["shared.fc1_weight"], weights["shared.fc2_weight"])
        for expert in range(experts):
            token, k = (idx == expert).nonzero(as_tuple=True)
            y = self._feed(x[token], weights["experts.fc1_weight"][expert], weights["experts.fc2_weight"][expert])
            out = out.index_add(0, token, y * chosen[token, k, None])
        shares = F.one_hot(idx, experts).to(x.dtype).sum((0, 1)) / max(1, idx.numel())
        means = (scores if softmax else scores / scores.sum(1, keepdim=True)).sum(0) / max(1, len(x))
        return out, settings.balance_coefficient * experts * (shares * means).sum()


class Problem:
    """A layer on the ranks, the plain one with its weights, and inputs."""

    def __init__(self, group: to.Group, case: Case, dtype: torch.dtype, **options: Any) -> None:
        torch.manual_seed(5)
        self.group, self.case, self.dtype = group, case, dtype
        self.layer = case.layer(group, dtype, **options)
        full = to.nn.gather_state_dict(self.layer, group)
        self.plain = Plain(case, {name: x.to(group.device, torch.float64).requires_grad_() for name, x in full.items()})

    def counts(self, call: int) -> list[int]:
        tokens = self.case.tokens[call]
        return [tokens[rank % len(tokens)] for rank in range(self.group.world_size)]

    def inputs(self, call: int) -> tuple[list[Tensor], list[Tensor]]:
        """``x`` and the output's gradient of every rank."""
        draw, counts = Draw(self.group, self.dtype, call), self.counts(call)
        xs = [draw(count, self.case.hidden) for count in counts]
        if self.case.one_expert:  # towards the weight of expert 0, yet not so far that its score rounds to 1
            direction = self.plain.weights["router.weight"][0].detach().to(self.dtype)
            xs = [x + direction / direction.norm() * 8 for x in xs]
        return xs, [draw(count, self.case.hidden) for count in counts]

    def here(self, call: int) -> dict[str, Tensor]:
        """Output, balance loss, and every gradient, of this rank."""
        xs, grads = self.inputs(call)
        x = xs[self.group.rank].clone().requires_grad_()
        out = self.layer(x)
        loss = self.layer.balance_loss
        # The gradient of the sum is that of every rank's share.
        total = (out * grads[self.group.rank]).sum() if loss is None else (out * grads[self.group.rank]).sum() + loss
        total.backward()
        to.nn.all_reduce_replicated_gradients(self.layer, self.group)
        assert x.grad is not None
        found = {"out": out.detach(), "dx": x.grad}
        if loss is not None:
            found["balance loss"] = torch.tensor(sum(self.group.all_gather_object(loss.item())))
        for name, parameter in self.layer.named_parameters():
            assert parameter.grad is not None, name
            found[name] = parameter.grad.clone()
        self.layer.zero_grad()
        return found

    def there(self, call: int) -> dict[str, Tensor]:
        """The same from the plain layer on all tokens."""
        xs, grads = self.inputs(call)
        x = torch.cat(xs).double().requires_grad_()
        out, loss = self.plain(x)
        torch.autograd.backward([out, loss], [torch.cat(grads).double(), torch.ones_like(loss)])
        assert x.grad is not None
        rank, counts = self.group.rank, self.counts(call)
        found = {"out": out.detach().split(counts)[rank], "dx": x.grad.split(counts)[rank]}
        if self.case.router.balance_coefficient:
            found["balance loss"] = loss.detach()
        gradients = {}
        for name, weight in self.plain.weights.items():
            gradients[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = None
        return {**found, **to.nn.shard_state_dict(gradients, self.layer, self.group)}

    def check(self, call: int) -> None:
        found, expected = self.here(call), self.there(call)
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            actual = found[name]
            assert actual.shape == wanted.shape, name
            assert bool(actual.isfinite().all()), f"{name} is not finite"
            if bool(wanted.any()):
                error = relative_error(actual.cpu(), wanted.cpu())
                assert error < TOLERANCE[self.dtype], f"call {call}, {name}: relative error {error:.2e}"
            else:
                assert not bool(actual.any()), f"{name} must be zero"


def values(group: to.Group, case: Case, dtype: torch.dtype) -> None:
    """Output, balance loss and every gradient, of calls with different counts."""
    problem = Problem(group, case, dtype)
    for call in range(len(case.tokens)):
        problem.check(call)


def steady(group: to.Group, case: Case, dtype: torch.dtype) -> None:
    """After the first call no count and no routing compiles or registers anything, and a second layer shares."""
    problem = Problem(group, case, dtype)
    problem.here(0)
    before = counters()
    case.layer(group, dtype)
    for call in range(1, len(case.tokens)):
        problem.here(call)
    assert_steady("later calls", before)


def state(group: to.Group, case: Case) -> None:
    """Initial values, marks, copies, round trips of state dicts, and a buffer that is given."""
    torch.manual_seed(1)
    layer = case.layer(group, torch.float32)
    after = torch.rand(1)
    torch.manual_seed(1)
    full = to.nn.gather_state_dict(layer, group)
    bound = 1 / case.hidden**0.5
    generator = torch.Generator().manual_seed(1)
    for name, shape in (
        ("router.weight", full["router.weight"].shape),
        ("experts.fc1_weight", full["experts.fc1_weight"][0].shape),
    ):
        drawn = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        assert_equal(name, full[name] if name == "router.weight" else full[name][0], drawn)
    assert all(torch.equal(after, other) for other in group.all_gather_object(after)), "generators stay in step"
    for parameter_name, parameter in layer.named_parameters():
        own = parameter_name.startswith("experts.")
        assert parameter.tensor_parallel_dim == (0 if own else None)  # type: ignore[attr-defined]
        assert parameter.sequence_parallel is not own  # type: ignore[attr-defined]
    layer(torch.randn(2, case.hidden))
    copied = copy.deepcopy(layer)
    assert copied.experts.fc1_weight.tensor_parallel_dim == 0  # type: ignore[attr-defined]
    assert copied.balance_loss is None
    x = torch.randn(3, case.hidden)
    assert_equal("copy", copied(x), layer(x))
    assert_equal("three dimensions", layer(x[:, None])[:, 0], layer(x))

    meta = case.layer(group, torch.float32, device="meta")
    with pytest.raises(ValueError, match="MoE: the parameters are on the meta device; call to_empty"):
        meta(x.to("meta"))
    meta.to_empty(device=group.device)
    meta.load_state_dict(to.nn.shard_state_dict(full, meta, group))
    assert meta.experts.fc2_weight.tensor_parallel_dim == 0  # type: ignore[attr-defined]
    assert_equal("loaded", meta(x), layer(x))
    buffer = to.ExpertBuffer(
        group,
        num_max_tokens_per_rank=case.max_tokens,
        hidden=case.hidden,
        num_topk=case.top_k,
        num_experts=2 * group.world_size,
        dtype=torch.float32,
    )
    given = case.layer(group, torch.float32, buffer=buffer)
    given.load_state_dict(layer.state_dict())
    assert_equal("given buffer", given(x), layer(x))
    with pytest.raises(ValueError, match="the buffer must have"):
        case.layer(group, torch.bfloat16, buffer=buffer)


def main_grad(group: to.Group, case: Case) -> None:
    """Expert weights with a ``main_grad`` get their gradient there, added up over microbatches."""
    problem = Problem(group, case, torch.bfloat16)
    usual = problem.here(0)
    weights = (problem.layer.experts.fc1_weight, problem.layer.experts.fc2_weight)
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    xs, grads = problem.inputs(0)
    for _ in range(2):
        problem.layer(xs[group.rank]).backward(grads[group.rank])
    for name, weight in zip(("experts.fc1_weight", "experts.fc2_weight"), weights, strict=True):
        assert weight.grad is None
        assert relative_error(weight.main_grad / 2, usual[name]) < 1e-2  # type: ignore[attr-defined]


def autocast(group: to.Group, case: Case) -> None:
    """Parameters in float32, rows in bfloat16; the router stays in float32."""
    device = group.device.type
    with torch.autocast(device, torch.bfloat16):
        problem = Problem(group, case, torch.float32)
    xs, _ = problem.inputs(0)
    allocations = to.symmetric_allocations()
    with torch.autocast(device, torch.bfloat16):
        out = problem.layer(xs[group.rank])
    assert to.symmetric_allocations() == allocations
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    expected = problem.plain(torch.cat(xs).to(torch.bfloat16).double())[0].split(problem.counts(0))[group.rank]
    assert relative_error(out, expected.detach()) < TOLERANCE[torch.bfloat16]
    for parameter in problem.layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def compiled(group: to.Group, case: Case) -> None:
    """One graph for every count of tokens and of received rows, near eager results."""
    from torch._dynamo.testing import CompileCounterWithBackend

    problem = Problem(group, case, torch.float32)
    eager_layer = problem.layer
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graphs: list[tuple[int, int]] = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(eager_layer, fullgraph=True, dynamic=True, backend=counter)
        for call in range(len(case.tokens)):
            xs, grads = problem.inputs(call)
            results = []
            for function in (eager_layer, fast):
                x = xs[group.rank].clone().requires_grad_()
                out = function(x)
                out.backward(grads[group.rank])
                assert x.grad is not None
                results.append([out.detach(), x.grad, *(p.grad for p in eager_layer.parameters())])
                eager_layer.zero_grad()
            for eager, got in zip(*results, strict=True):
                assert relative_error(got, eager) < 1e-5
            graphs.append((counter.frame_count, counter.op_count))
    assert len(set(graphs)) == 1, f"graphs and their operations after each call: {graphs}"


def beside_tensor_parallelism(group: to.Group, case: Case) -> None:
    """Sequence-parallel attention before, and a layer of experts on the rows that it returns."""
    tokens = 4 * group.world_size
    attention = to.nn.MultiheadAttention(
        case.hidden, 4, input_layernorm=True, group=group, max_tokens=tokens, sequence_parallel=True
    )
    problem = Problem(group, case, torch.float32)
    x = Draw(group, torch.float32, 3)(tokens, case.hidden).chunk(group.world_size)[group.rank].requires_grad_()
    cu_seqlens = torch.tensor([0, 3, tokens], dtype=torch.int32, device=group.device)
    rows = attention(x, cu_seqlens_q=cu_seqlens, max_seqlen_q=tokens)
    out = problem.layer(rows)
    everything = torch.cat(group.all_gather_object(rows.detach()))
    expected = problem.plain(everything.double())[0].detach().chunk(group.world_size)[group.rank]
    assert relative_error(out.detach(), expected) < TOLERANCE[torch.float32]
    out.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())
    to.nn.all_reduce_replicated_gradients(torch.nn.ModuleList([attention, problem.layer]), group)


def settings(group: to.Group, case: Case) -> None:
    """Each wrong setting is named."""
    for message, change in (
        ("activation must be one of", {"activation": "tanh"}),
        ("ffn_hidden_size must be at least 1", {"ffn": 0}),
        ("num_topk must be 1 to", {"top_k": 99}),
        ("multiple of 32 bytes", {"hidden": 20}),
    ):
        with pytest.raises(ValueError, match=message):
            replace(case, **change).layer(group, torch.bfloat16)
    router = to.nn.RouterSettings
    for kind, message, wrong in (
        (ValueError, "score_function must be", {"score_function": "tanh"}),
        (TypeError, "normalize must be True or False", {"normalize": "no"}),
        (ValueError, "scale must be finite and positive, got nan", {"scale": float("nan")}),
        (TypeError, "balance_coefficient must be a number", {"balance_coefficient": None}),
        (ValueError, "balance_coefficient must be finite and not negative, got -1", {"balance_coefficient": -1}),
    ):
        with pytest.raises(kind, match=message):
            router(**wrong)
    layer = case.layer(group, torch.float32)
    x = torch.randn(2, case.hidden, device=group.device)
    out = layer(x)
    for kind, message, given in (
        (TypeError, "the input must be a torch.Tensor", None),
        (ValueError, rf"the input must be \[.., {case.hidden}\]", x[:, 1:]),
        (ValueError, "at least 2 dimensions", x[0]),
        (ValueError, "the input is torch.float64, the parameters are torch.float32", x.double()),
    ):
        with pytest.raises(kind, match=message):
            layer(given)
    assert_equal("after refused inputs", layer(x), out)
