"""What the transformer modules promise, as bodies for every backend (``tests.ops.cases``)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import triton_overlap as to
from tests.nn.plain import PlainBlock, Shape, lengths_of
from tests.ops.cases import assert_equal
from triton_overlap.reference import relative_error

Body = Callable[..., Any]
RTOL, ATOL = 0.025, 0.00125
#: Relative Frobenius error that rounding explains even where one process happens to have less.
FLOOR = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-4}
BULK = {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
RS_DGRAD = {"ub_overlap_ag": True, "ub_overlap_rs_dgrad": True}
ROW = {"ub_overlap_ag": True, "ub_overlap_rs": True}


@dataclass(frozen=True)
class Case:
    """A block and how it is run.

    Attributes:
        shape: of the block.
        tokens: counts of successive calls, rounded up to multiples of the group size.
        capacity: the largest count, likewise.
        flags: overlap flags; any of them needs ``sequence_parallel``.
        sequence_parallel: whether tokens are split.
        batch: sequences side by side in a plain batch, or 0 for packed documents.
    """

    shape: Shape
    tokens: tuple[int, ...]
    capacity: int
    flags: tuple[str, ...] = tuple({**BULK, **ROW})
    sequence_parallel: bool = True
    batch: int = 0

    def counts(self, group: to.Group) -> list[int]:
        return [-(-count // group.world_size) * group.world_size for count in self.tokens]

    def shared(self, group: to.Group, dtype: torch.dtype) -> dict[str, Any]:
        """Keyword arguments of every module."""
        capacity = -(-self.capacity // group.world_size) * group.world_size * max(1, self.batch)
        return {
            "group": group,
            "max_tokens": capacity,
            "sequence_parallel": self.sequence_parallel,
            "params_dtype": dtype,
            **(dict.fromkeys(self.flags, True) if self.sequence_parallel else {}),
        }


# Comparing ------------------------------------------------------------------------------------------------------------


def assert_module_close(what: str, actual: Tensor | None, single: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Every element near the float64 result and near what one process computes in ``dtype``.

    Both differ by rounding: all elements together may by one and a half times one process's own error, each by the
    stated tolerance plus six times that. Triton's interpreter cuts bfloat16 off instead of rounding it, which is twice
    the error at each step, and always of one sign: there it may be three times, and one cut more.
    """
    assert actual is not None, f"{what} is None"
    assert actual.dtype == dtype, f"{what} is {actual.dtype}, not {dtype}"
    assert bool(torch.isfinite(actual).all()), f"{what} is not finite"
    cuts_off = dtype == torch.bfloat16 and actual.device.type == "cpu"
    factor, floor = (3.0, 2.0**-7) if cuts_off else (1.5, FLOOR[dtype])
    actual, single, exact = actual.detach().double(), single.detach().double(), exact.detach()
    rounding = float((single - exact).square().mean().sqrt())
    for name, expected in (("float64", exact), ("one process", single)):
        difference = (actual - expected).abs()
        excess = difference - (RTOL * expected.abs() + ATOL + 6 * factor * rounding)
        assert float(excess.max()) <= 0, (
            f"{what} differs from {name} by {float(difference.max()):.2e}, by {float(excess.max()):.2e} more than "
            f"allowed at {int((excess > 0).sum())} of {excess.numel()} elements; rounding is {rounding:.2e}"
        )
    error, allowed = relative_error(actual, exact), factor * relative_error(single, exact) + floor
    assert error < allowed, f"{what}: relative error {error:.2e}, allowed {allowed:.2e}"


class Draw:
    """Tensors that are the same on every rank."""

    def __init__(self, group: to.Group, dtype: torch.dtype, seed: int) -> None:
        self.group, self.dtype = group, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(device=self.group.device, dtype=self.dtype)

    def cu_seqlens(self, tokens: int) -> Tensor:
        """Documents of random lengths, one of them without a token where there is room for three."""
        cuts = torch.randint(0, tokens + 1, (min(4, tokens // 3),), generator=self._generator).sort().values.tolist()
        bounds = [0, *cuts, *cuts[:1], tokens]
        return torch.tensor(sorted(bounds), dtype=torch.int32, device=self.group.device)


def mine(x: Tensor, group: to.Group, dim: int = 0) -> Tensor:
    return x.chunk(group.world_size, dim)[group.rank]


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grads[name] = parameter.grad.detach().clone()
    return grads


# Linear layers --------------------------------------------------------------------------------------------------------


def linear(
    group: to.Group,
    case: Case,
    dtype: torch.dtype,
    mode: str | None,
    flags: Mapping[str, bool],
    normalization: str | None = None,
) -> None:
    """``Linear``, or ``LayerNormLinear`` with a ``normalization``, against plain modules in one process."""
    shape = case.shape
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(shape.hidden, shape.ffn))
    if normalization:
        plain.insert(0, getattr(nn, normalization)(shape.hidden, eps=1e-5))
        for parameter in plain[0].parameters():
            nn.init.normal_(parameter, mean=1.0, std=0.2)
    plain = plain.to(device=group.device, dtype=dtype)
    exact = copy.deepcopy(plain).double()

    shared = case.shared(group, dtype)
    settings = {name: shared[name] for name in ("group", "max_tokens", "params_dtype", "sequence_parallel")}
    settings.update(flags)
    if normalization:
        settings["normalization"] = normalization
    kind = to.nn.LayerNormLinear if normalization else to.nn.Linear
    layer = kind(shape.hidden, shape.ffn, parallel_mode=mode, **settings)

    norm_names = {"0.weight": "layer_norm_weight", "0.bias": "layer_norm_bias", "1.weight": "weight", "1.bias": "bias"}
    names = norm_names if normalization else {"0.weight": "weight", "0.bias": "bias"}

    def shard(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of tensors of the plain modules, under the layer's names."""
        return to.nn.shard_state_dict({names[name]: x for name, x in tensors.items()}, layer, group)

    layer.load_state_dict(shard(plain.state_dict()))
    split_in, split_out = case.sequence_parallel and mode != "row", case.sequence_parallel and mode != "column"
    for seed, tokens in enumerate(case.counts(group)):
        draw = Draw(group, dtype, seed)
        x, d_out = draw(tokens, shape.hidden), draw(tokens, shape.ffn)

        def own(full: Tensor, split_tokens: bool, split_features: bool) -> Tensor:
            rows = mine(full, group) if split_tokens else full
            return mine(rows, group, 1) if split_features else rows

        own_x = own(x, split_in, mode == "row").clone().requires_grad_()
        out = layer(own_x)
        out.backward(own(d_out, split_out, mode == "column"))
        to.nn.all_reduce_replicated_gradients(layer, group)
        single_x, exact_x = x.clone().requires_grad_(), x.double().requires_grad_()
        single_out, exact_out = plain(single_x), exact(exact_x)
        single_out.backward(d_out)
        exact_out.backward(d_out.double())
        assert single_x.grad is not None
        assert exact_x.grad is not None
        for what, actual, single, exact64, is_split, has_features in (
            ("output", out, single_out, exact_out, split_out, mode == "column"),
            ("dx", own_x.grad, single_x.grad, exact_x.grad, split_in, mode == "row"),
        ):
            expected = [own(x, is_split, has_features) for x in (single, exact64)]
            assert_module_close(what, actual, expected[0], expected[1], dtype)
        single_grads, exact_grads = (shard(gradients_of(m)) for m in (plain, exact))
        for name, grad in gradients_of(layer).items():
            assert_module_close(f"gradient of {name}", grad, single_grads[name], exact_grads[name], dtype)
        for module in (layer, plain, exact):
            module.zero_grad()


# Blocks ---------------------------------------------------------------------------------------------------------------


class Parallel:
    """Modules of ``part``, "attention", "mlp", "layer" or "stack", with the weights of plain blocks."""

    def __init__(self, group: to.Group, case: Case, dtype: torch.dtype, part: str) -> None:
        torch.manual_seed(3)
        self.group, self.case, self.dtype, self.part = group, case, dtype, part
        count = 2 if part == "stack" else 1
        self.plain = [PlainBlock(case.shape).to(device=group.device, dtype=dtype) for _ in range(count)]
        self.exact = [copy.deepcopy(block).double() for block in self.plain]
        self.modules = nn.ModuleList(self._module() for _ in range(count))
        for module, block in zip(self.modules, self.plain, strict=True):
            module.load_state_dict(to.nn.shard_state_dict(self._full(block.state_dict()), module, group))
        self.rotary = to.nn.RotaryPositionEmbedding(case.shape.head_dim, device=group.device)

    def _module(self) -> nn.Module:
        shape, shared = self.case.shape, self.case.shared(self.group, self.dtype)
        shared.update(normalization="RMSNorm" if shape.rms else "LayerNorm", bias=shape.bias)
        mask = "causal" if shape.causal else "no_mask"
        if self.part == "mlp":
            return to.nn.LayerNormMLP(shape.hidden, shape.ffn, activation=shape.activation, **shared)
        heads: dict[str, Any] = {"num_gqa_groups": shape.kv_heads, "kv_channels": shape.head_dim}
        if self.part == "attention":
            return to.nn.MultiheadAttention(
                shape.hidden, shape.heads, input_layernorm=True, attn_mask_type=mask, **heads, **shared
            )
        return to.nn.TransformerLayer(
            shape.hidden,
            shape.ffn,
            shape.heads,
            self_attn_mask_type=mask,
            activation=shape.activation,
            ub_tp_comm_overlap=self.case.sequence_parallel,
            **heads,
            **shared,
        )

    def _full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a plain block under the names of the module."""
        shape = self.case.shape
        full = to.nn.from_llama_block(tensors, num_attention_heads=shape.heads, num_gqa_groups=shape.kv_heads)
        prefix = {"attention": "self_attention.", "mlp": "layernorm_mlp."}.get(self.part, "")
        return {name.removeprefix(prefix): x for name, x in full.items() if name.startswith(prefix)}

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """``x`` and the output's gradient, whole, and ``cu_seqlens`` or None."""
        draw, hidden, batch = Draw(self.group, self.dtype, seed), self.case.shape.hidden, self.case.batch
        if batch:
            return draw(tokens, batch, hidden), draw(tokens, batch, hidden), None
        return draw(tokens, hidden), draw(tokens, hidden), draw.cu_seqlens(tokens)

    def own(self, x: Tensor) -> Tensor:
        return mine(x, self.group) if self.case.sequence_parallel else x

    def __call__(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        settings: dict[str, Any] = {}
        longest = x.shape[0] * (self.group.world_size if self.case.sequence_parallel else 1)
        if cu_seqlens is not None:
            longest = max(lengths_of(cu_seqlens))
            settings.update(cu_seqlens_q=cu_seqlens, max_seqlen_q=longest)
        if self.case.shape.rotary:
            settings["rotary_pos_emb"] = self.rotary(longest)  # no angles for a position past the longest document
        for module in self.modules:
            x = module(x) if self.part == "mlp" else module(x, **settings)
        return x

    def plain_forward(self, blocks: list[PlainBlock], x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """In one process; sequences of a plain batch are documents of one length."""
        if cu_seqlens is None:
            packed = x.transpose(0, 1).flatten(0, 1)
            lengths = [x.shape[0]] * x.shape[1]
        else:
            packed, lengths = x, lengths_of(cu_seqlens)
        for block in blocks:
            if self.part == "mlp":
                packed = block.feed(packed)
            elif self.part == "attention":
                packed = block.attend(packed, lengths)
            else:
                packed = block(packed, lengths)
        return packed if cu_seqlens is not None else packed.unflatten(0, (x.shape[1], -1)).transpose(0, 1)

    def gradients(self) -> dict[str, Tensor]:
        """Of the modules' parameters, complete; taken and cleared."""
        if self.case.sequence_parallel:
            to.nn.all_reduce_replicated_gradients(self.modules, self.group)
        grads = gradients_of(self.modules)
        self.modules.zero_grad()
        return grads

    def expected_gradients(self, blocks: list[PlainBlock]) -> dict[str, Tensor]:
        """This rank's part of the plain blocks' gradients; taken and cleared."""
        expected = {}
        for index, (module, block) in enumerate(zip(self.modules, blocks, strict=True)):
            grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
            shard = to.nn.shard_state_dict(self._full(grads), module, self.group)
            expected.update({f"{index}.{name}": grad for name, grad in shard.items()})
            block.zero_grad()
        return expected


def blocks(group: to.Group, case: Case, dtype: torch.dtype, part: str) -> None:
    """Output, input gradient and every parameter gradient at every count, against plain blocks in one process.

    After the first count no kernel is specialised anew and no symmetric memory allocated.
    """
    parallel = Parallel(group, case, dtype, part)
    counters = []
    for seed, tokens in enumerate(case.counts(group)):
        x, d_out, cu_seqlens = parallel.inputs(tokens, seed)
        own_x = parallel.own(x).clone().requires_grad_()
        out = parallel(own_x, cu_seqlens)
        out.backward(parallel.own(d_out))
        grads = parallel.gradients()
        counters.append((to.specializations(), to.symmetric_allocations()))

        results = []
        for modules, wide in ((parallel.plain, dtype), (parallel.exact, torch.float64)):
            full_x = x.detach().to(wide, copy=True).requires_grad_()
            full_out = parallel.plain_forward(modules, full_x, cu_seqlens)
            full_out.backward(d_out.to(wide))
            assert full_x.grad is not None
            results.append((parallel.own(full_out), parallel.own(full_x.grad), parallel.expected_gradients(modules)))
        (single_out, single_dx, single_grads), (exact_out, exact_dx, exact_grads) = results
        what = f"{part}, {tokens} tokens"
        assert_module_close(f"{what}: output", out, single_out, exact_out, dtype)
        assert_module_close(f"{what}: dx", own_x.grad, single_dx, exact_dx, dtype)
        assert set(grads) == set(exact_grads)
        for name, grad in grads.items():
            assert_module_close(f"{what}: gradient of {name}", grad, single_grads[name], exact_grads[name], dtype)
        if not case.sequence_parallel:
            for other in group.all_gather_object(out.detach().cpu()):
                assert_equal("output on another rank", out.detach().cpu(), other)
    assert len(set(counters)) == 1, f"specialisations and allocations after each count: {counters}"


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


def compiled(group: to.Group, case: Case, dtype: torch.dtype) -> None:
    """``torch.compile(fullgraph=True)`` of a layer: one graph for all token and document counts, near eager results."""
    from torch._dynamo.testing import CompileCounterWithBackend

    parallel = Parallel(group, case, dtype, "layer")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(parallel.modules[0], fullgraph=True, dynamic=True, backend=counter)
    for seed, tokens in enumerate(case.counts(group)):
        if tokens <= group.world_size:
            continue  # torch.compile specialises a dimension of one
        x, d_out, cu_seqlens = parallel.inputs(tokens, seed)
        results = []
        angles = parallel.rotary(case.capacity)
        for function in (parallel.modules[0], fast):
            own_x = parallel.own(x).clone().requires_grad_()
            out = function(own_x, cu_seqlens_q=cu_seqlens, rotary_pos_emb=angles)
            out.backward(parallel.own(d_out))
            assert own_x.grad is not None
            results.append({"output": out.detach(), "dx": own_x.grad, **parallel.gradients()})
        for name, eager in results[0].items():
            # A compiler may add in another order, and round bfloat16 elsewhere.
            error = relative_error(results[1][name], eager)
            assert error < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype], f"{name}: relative error {error:.2e}"
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"


# State ----------------------------------------------------------------------------------------------------------------


def conversion(group: to.Group, case: Case) -> None:
    """A Llama-style block to the ranks and back, bit by bit; a torch encoder layer, which computes the same."""
    shape = replace(case.shape, rms=True, activation="swiglu", bias=False, rotary=True)
    parallel = Parallel(group, replace(case, shape=shape), torch.float32, "layer")
    heads: dict[str, Any] = {"num_attention_heads": shape.heads, "num_gqa_groups": shape.kv_heads}
    layer, block = parallel.modules[0], parallel.plain[0].state_dict()
    back = to.nn.to_llama_block(to.nn.gather_state_dict(layer, group), **heads)
    assert set(back) == set(block)
    for name, tensor in block.items():
        assert_equal(name, back[name], tensor.cpu())
        assert back[name].dtype == tensor.dtype

    torch.manual_seed(8)
    encoder = nn.TransformerEncoderLayer(
        shape.heads * shape.head_dim, shape.heads, shape.ffn, 0.0, "gelu", norm_first=True, device=group.device
    )
    for parameter in (encoder.norm1.weight, encoder.norm2.bias):
        nn.init.normal_(parameter)
    shared = case.shared(group, torch.float32)
    mine_too = to.nn.TransformerLayer(
        shape.heads * shape.head_dim,
        shape.ffn,
        shape.heads,
        activation="gelu_exact",
        self_attn_mask_type="no_mask",
        **{name: shared[name] for name in ("group", "max_tokens", "sequence_parallel")},
    )
    full = to.nn.from_encoder_layer(encoder.state_dict(), num_attention_heads=shape.heads)
    mine_too.load_state_dict(to.nn.shard_state_dict(full, mine_too, group))
    x = Draw(group, torch.float32, 4)(case.counts(group)[0], 1, shape.heads * shape.head_dim)
    error = relative_error(mine_too(parallel.own(x)), parallel.own(encoder(x)))
    assert error < 1e-4, f"encoder layer: relative error {error:.2e}"
    encoder_back = to.nn.to_encoder_layer(to.nn.gather_state_dict(mine_too, group), num_attention_heads=shape.heads)
    assert set(encoder_back) == set(encoder.state_dict())
    for name, tensor in encoder.state_dict().items():
        assert_equal(name, encoder_back[name], tensor.cpu())

    state = dict(full)
    state["more"] = state.pop("self_attention.proj.bias")
    with pytest.raises(ValueError, match=r"missing \['self_attention.proj.bias'\], unexpected \['more'\]"):
        to.nn.shard_state_dict(state, mine_too, group)
    with pytest.raises(ValueError, match="the full tensor must be"):
        to.nn.shard_state_dict({**full, "self_attention.proj.bias": torch.zeros(3)}, mine_too, group)


def marks(group: to.Group, case: Case) -> None:
    """Marks on parameters outlive copies, casts, meta devices and assigned state dicts."""
    shared = case.shared(group, torch.float32)
    shape = case.shape

    def build(**kwargs: Any) -> nn.Module:
        return to.nn.LayerNormMLP(shape.hidden, shape.ffn, activation="swiglu", **{**shared, **kwargs})

    def marked(module: nn.Module) -> dict[str, tuple[Any, ...]]:
        names = ("tensor_parallel_dim", "tensor_parallel_parts", "sequence_parallel")
        return {n: tuple(getattr(p, name) for name in names) for n, p in module.named_parameters()}

    layer = build()
    expected = {
        "fc1.layer_norm_weight": (None, 1, case.sequence_parallel),
        "fc1.layer_norm_bias": (None, 1, case.sequence_parallel),
        "fc1.weight": (0, 2, False),
        "fc1.bias": (0, 2, False),
        "fc2.weight": (1, 1, False),
        "fc2.bias": (None, 1, False),
    }
    assert marked(layer) == expected
    allocations = to.symmetric_allocations()
    clone = copy.deepcopy(layer)
    assert to.symmetric_allocations() == allocations
    empty = build(device="meta").to_empty(device=group.device)
    empty.load_state_dict(layer.state_dict())
    assigned = build(device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    x = parallel_x = Draw(group, torch.float32, 1)(case.counts(group)[0], shape.hidden)
    x = mine(parallel_x, group) if case.sequence_parallel else x
    for other in (clone, empty, assigned, copy.deepcopy(layer).to(torch.float64)):
        assert marked(other) == expected
    for other in (clone, empty, assigned):
        assert_equal("copy", other(x), layer(x))


def replicated_gradients(group: to.Group, case: Case) -> None:
    """Marked gradients are summed in float32 and rank order, others and absent ones are left alone."""
    world_size, rank = group.world_size, group.rank
    for dtype in (torch.float32, torch.bfloat16):
        module = nn.ModuleList([nn.LayerNorm(case.shape.hidden), nn.RMSNorm(7), nn.Linear(3, 3), nn.RMSNorm(5)]).to(
            device=group.device, dtype=dtype
        )
        for index in (0, 1, 3):
            to.nn.mark_sequence_parallel(module[index])
        draws = [Draw(group, dtype, r) for r in range(world_size)]
        all_grads = [[draw(*p.shape) for p in module[:3].parameters()] for draw in draws]
        for parameter, grad in zip(module[:3].parameters(), all_grads[rank], strict=True):
            parameter.grad = grad.clone()
        to.nn.all_reduce_replicated_gradients(module, group)
        allocations = to.symmetric_allocations()
        for index, parameter in enumerate(module[:3].parameters()):
            if index < 3:
                expected = torch.stack([grads[index] for grads in all_grads]).double().sum(0)
                assert parameter.grad is not None
                error = relative_error(parameter.grad, expected)
                assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype], f"relative error {error:.2e}"
                for other in group.all_gather_object(parameter.grad.cpu()):
                    assert_equal("gradient on another rank", parameter.grad.cpu(), other)
            else:
                assert parameter.grad is not None
                assert_equal("unmarked gradient", parameter.grad, all_grads[rank][index])
        assert module[3].weight.grad is None
        to.nn.all_reduce_replicated_gradients(module, group)
        assert to.symmetric_allocations() == allocations
        module.zero_grad()
        to.nn.all_reduce_replicated_gradients(module, group)  # nothing to do


def settings(group: to.Group, case: Case) -> None:
    """Settings that do not fit are errors before anything is communicated, and say what would fit."""
    shape, nn_ = case.shape, to.nn
    base: dict[str, Any] = {"group": group, "max_tokens": 4 * group.world_size}
    split: dict[str, Any] = {**base, "sequence_parallel": True}
    world_size, hidden, ffn = group.world_size, shape.hidden, shape.ffn
    attention = nn_.MultiheadAttention(hidden, shape.heads, **base)
    padded = nn_.MultiheadAttention(hidden, shape.heads, attn_mask_type="padding_causal", **base)
    x = torch.zeros(2 * world_size, hidden, device=group.device)
    cu = torch.tensor([0, len(x)], dtype=torch.int32, device=group.device)

    def wrong() -> Iterator[tuple[Callable[[], Any], str]]:
        for flag in ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"):
            flagged = {**split, flag: True}
            yield partial(nn_.Linear, hidden, ffn, **flagged), f'{flag} cannot .*choose parallel_mode="'
        yield lambda: nn_.Linear(hidden, ffn, parallel_mode="col", **split), '"column", "row" or None, got \'col\''
        yield (
            lambda: nn_.Linear(hidden, ffn, parallel_mode="column", ub_overlap_rs=True, **split),
            "ub_overlap_rs cannot .*allowed: ub_overlap_ag, ub_overlap_rs_dgrad",
        )
        yield (
            lambda: nn_.Linear(hidden, ffn, parallel_mode="row", ub_bulk_wgrad=True, **split),
            "ub_bulk_wgrad cannot .*allowed: ub_overlap_ag, ub_overlap_rs",
        )
        yield (
            lambda: nn_.Linear(hidden, ffn, parallel_mode="row", ub_overlap_rs=True, **base),
            "set sequence_parallel=True",
        )
        yield lambda: nn_.Linear(hidden, ffn, parallel_mode="row", ub_name="qkv", **split), "one of 'proj', 'fc2'"
        yield lambda: nn_.Linear(hidden, ffn, parallel_mode="column", group=group), "needs max_tokens"
        yield lambda: nn_.Linear(hidden, ffn, parallel_mode="row", row_parts=2, **base), "row_parts must be 1"
        yield (
            lambda: nn_.Linear(hidden, 2 * world_size + 1, parallel_mode="column", row_parts=2, **base),
            f"{4 * world_size} would do",
        )
        yield lambda: nn_.LayerNormLinear(hidden, ffn, parallel_mode="row", **split), "needs all of them"
        yield lambda: nn_.LayerNormLinear(hidden, ffn, normalization="BatchNorm", **base), "LayerNorm, RMSNorm, got"
        yield lambda: nn_.LayerNormMLP(hidden, ffn, activation="tanh", **base), "one of geglu, gelu, .*got 'tanh'"
        yield lambda: nn_.MultiheadAttention(hidden, 3, 4, num_gqa_groups=2, **base), "divisible by num_gqa_groups"
        yield lambda: nn_.MultiheadAttention(hidden, hidden - 1, **base), "or give kv_channels"
        yield (
            lambda: nn_.MultiheadAttention(hidden, shape.heads, attn_mask_type="arbitrary", **base),
            "no_mask, padding",
        )
        if world_size > 1:
            yield (
                lambda: nn_.MultiheadAttention(hidden, world_size, 4, num_gqa_groups=1, **base),
                f"use a group of 1 ranks, or repeat the heads in the checkpoint until there are {world_size}",
            )
        yield lambda: nn_.RotaryPositionEmbedding(5), "even number"
        yield lambda: attention(x[None, None]), r"\[S, batch, hidden\]"
        yield lambda: attention(x[:, None], cu_seqlens_q=cu), "flatten them"
        yield lambda: attention(x, cu_seqlens_q=cu, cu_seqlens_kv=cu.clone()), "the tensor given as cu_seqlens_q"
        yield lambda: attention(x, cu_seqlens_q=cu, max_seqlen_q=3, max_seqlen_kv=4), "must be max_seqlen_q 3"
        yield lambda: attention(x, cu_seqlens_q=cu.float()), "int32 or int64"
        yield lambda: padded(x), "needs cu_seqlens_q"
        if group.device.type == "cpu":
            yield lambda: attention(x, cu_seqlens_q=cu - 1), "rise from 0 to the token count"

    for call, words in wrong():
        with pytest.raises(ValueError, match=words):
            call()
    layer = nn_.Linear(hidden, ffn * world_size, parallel_mode="column", **split)
    layer.method = "telepathy"
    with pytest.raises(ValueError, match="unknown method 'telepathy'"):
        layer(x)
    for call in (
        lambda: nn_.MultiheadAttention(hidden, shape.heads, attention_dropout=0.1, **base),
        lambda: nn_.TransformerLayer(hidden, ffn, shape.heads, hidden_dropout=0.1, **base),
    ):
        with pytest.raises(NotImplementedError, match=r"set 0\.0"):
            call()
    # The group still works.
    assert attention(x, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=len(x), max_seqlen_kv=len(x)).shape == x.shape
