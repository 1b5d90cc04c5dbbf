"""One rank of the benchmark of a transformer layer, forward and backward, on packed tokens.

The rivals are copies of one layer, which differ in how its four linear layers do their products: by a method of this
library for each; by ``nccl``, the same modules with NCCL's collectives and cuBLAS one after the other, which is what
speed is judged by; and by PyTorch's async-TP. Everything between the products is the same code.

Outputs and all gradients are compared with those of a copy in float32, by torch's own products and collectives, before
anything is timed.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import triton_overlap as to
from triton_overlap.bench.problems import MODELS, TINY, Model
from triton_overlap.bench.ranks import timer_of
from triton_overlap.bench.reports.layer import BASELINE, Row
from triton_overlap.bench.results import Measurement, Results
from triton_overlap.bench.rivals import Unavailable
from triton_overlap.bench.session import Session
from triton_overlap.problems import TOLERANCE
from triton_overlap.reference import relative_error
from triton_overlap.timing import Call

#: Cycles of the sleep before a sample: about 15 ms, in which the host enqueues a layer's forward and backward.
LAYER_SLEEP_CYCLES = 30_000_000
#: A layer rounds a dozen times on the way to a gradient.
TOLERANCE_FACTOR = 5
#: Input sets to take in turns. A layer's weights alone are more than a cache holds.
NUM_SETS = 2
_MODELS = {**MODELS, "tiny": TINY}


@dataclass(frozen=True)
class Problem:
    """A layer of ``model`` on a packed batch.

    Attributes:
        model: its name.
        tokens: T, of all ranks.
        document: length of every document but perhaps the last.
        max_tokens: the capacity that is registered.
    """

    model: str
    tokens: int
    document: int
    max_tokens: int

    @property
    def sizes(self) -> Model:
        return _MODELS[self.model]

    def arguments(self, device: torch.device, angles: Tensor) -> dict[str, Any]:
        """Keyword arguments of the layer; ``angles`` as ``rotary_angles`` makes them."""
        return {
            "rotary_pos_emb": angles,
            "cu_seqlens_q": document_bounds(self.tokens, self.document, device),
            "max_seqlen_q": min(self.document, self.tokens),
        }


@dataclass(frozen=True)
class Inputs:
    """What one call of a layer and its backward take.

    Attributes:
        x: [T/W, hidden], requires a gradient.
        grad: of the output.
        arguments: keyword arguments of the layer.
    """

    x: Tensor
    grad: Tensor
    arguments: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""
        return Inputs(self.x.detach().to(dtype).requires_grad_(), self.grad.to(dtype), self.arguments)


def build_layer(problem: Problem, session: Session) -> to.nn.TransformerLayer:
    """A layer as Llama's, with fresh weights. Collective."""
    sizes = problem.sizes
    torch.manual_seed(session.settings.seed)
    return to.nn.TransformerLayer(
        sizes.hidden,
        sizes.ffn,
        sizes.queries // sizes.head,
        sizes.keys // sizes.head,
        kv_channels=sizes.head,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        group=session.group,
        max_tokens=problem.max_tokens,
        sequence_parallel=True,
        params_dtype=session.settings.dtype,
    )


def rotary_angles(problem: Problem, device: torch.device) -> Tensor:
    """For the longest document."""
    return to.nn.RotaryPositionEmbedding(problem.sizes.head, device=device)(problem.document)


def document_bounds(tokens: int, document: int, device: torch.device) -> Tensor:
    """``cu_seqlens`` of T tokens in documents of one length, the last one perhaps shorter."""
    starts = torch.arange(0, tokens, document, dtype=torch.int32)
    return torch.cat([starts, torch.tensor([tokens], dtype=torch.int32)]).to(device)


def make_inputs(problem: Problem, session: Session, index: int) -> Inputs:
    """Fresh random inputs of this rank for input set ``index``."""
    rows = problem.tokens // session.group.world_size
    seed = (session.settings.seed + index) * session.group.world_size + session.group.rank
    generator = torch.Generator(session.device).manual_seed(seed)
    x, grad = (
        torch.randn(rows, problem.sizes.hidden, generator=generator, device=session.device).to(session.settings.dtype)
        for _ in range(2)
    )
    return Inputs(x.requires_grad_(), grad, problem.arguments(session.device, rotary_angles(problem, session.device)))


def forward_backward(layer: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    out = layer(inputs.x, **inputs.arguments)
    return [out, *torch.autograd.grad(out, [inputs.x, *layer.parameters()], inputs.grad)]


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of all tensors; NaN where one is."""
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    return next((error for error in errors if error != error), max(errors))


def reference(layer: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What ``forward_backward`` should give, in float32. Collective."""
    twin = by_methods(layer, "nccl", "nccl").float()
    return forward_backward(twin, inputs.to(torch.float32))


# Rivals --------------------------------------------------------------------------------------------------------------


def linears(layer: nn.Module) -> list[to.nn.Linear]:
    return [module for module in layer.modules() if isinstance(module, to.nn.Linear)]


def by_methods(layer: nn.Module, column: str, row: str, *, save_gathered: bool = True) -> nn.Module:
    """A copy whose column and row layers use these methods, as ``str`` of ``GemmMethods`` has them."""
    layer = copy.deepcopy(layer)
    for linear in linears(layer):
        linear.method = column if linear.parallel_mode == "column" else row
        linear.save_gathered_input = save_gathered
    return layer


class _AsyncColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group_name: str) -> Tensor:
        gathered, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, group_name)
        ctx.save_for_backward(gathered, weight)
        ctx.group_name = group_name
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gathered, weight = ctx.saved_tensors
        x_grad = torch.ops.symm_mem.fused_matmul_reduce_scatter(grad, weight, "sum", 0, ctx.group_name)
        return x_grad, grad.t() @ gathered, None


class _AsyncRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group_name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group_name = group_name
        out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group_name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gathered, (x_grad,) = torch.ops.symm_mem.fused_all_gather_matmul(grad.contiguous(), [weight], 0, ctx.group_name)
        return x_grad, gathered.t() @ x, None


class _AsyncLinear(nn.Module):
    """A linear layer of ``build_layer``, with its products by PyTorch's async-TP."""

    def __init__(self, linear: to.nn.Linear, group_name: str) -> None:
        super().__init__()
        self.linear = linear
        self._function = _AsyncColumn if linear.parallel_mode == "column" else _AsyncRow
        self._group_name = group_name

    def forward(self, x: Tensor, *, active_tokens: Tensor | None = None) -> Tensor:
        linear = self.linear
        if isinstance(linear, to.nn.LayerNormLinear):
            x = F.rms_norm(x, (x.shape[-1],), linear.layer_norm_weight, linear.eps)
        out: Tensor = self._function.apply(x, linear.weight, self._group_name)
        return out


def by_async_tp(layer: nn.Module) -> nn.Module:
    """A copy whose linear layers are PyTorch's async-TP.

    Raises:
        Unavailable: it cannot run here.
    """
    process_group = dist.group.WORLD
    if not torch.cuda.is_available() or process_group is None or dist.get_backend() != "nccl":
        raise Unavailable("PyTorch's async-TP needs a GPU for each rank")
    if dist.get_world_size() == 1:
        raise Unavailable("PyTorch's async-TP needs more than one rank")
    importlib.import_module("torch.distributed._symmetric_memory")  # registers torch.ops.symm_mem
    layer = copy.deepcopy(layer)
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, to.nn.Linear):
                setattr(parent, name, _AsyncLinear(child, process_group.group_name))
    return layer


#: Copies of a layer, by rival. "nccl" is what the others are compared with. "bulk" does the collectives of its column
#: layers' backward beside the products, and "te" is TransformerEngine's default for each GEMM.
RIVALS: dict[str, Callable[[nn.Module], nn.Module]] = {
    BASELINE: lambda layer: by_methods(layer, "nccl", "nccl"),
    "fused": lambda layer: by_methods(layer, "fused", "fused"),
    "ring_exchange": lambda layer: by_methods(layer, "ring_exchange", "ring_exchange"),
    "bulk": lambda layer: by_methods(layer, "fused; dgrad=bulk; wgrad=bulk", "fused", save_gathered=False),
    "te": lambda layer: by_methods(
        layer, "ring_exchange; dgrad=bulk; wgrad=bulk", "pipeline; dgrad=ring_exchange", save_gathered=False
    ),
    "auto": lambda layer: by_methods(layer, "auto", "auto"),
    "async_tp": by_async_tp,
}


# Communication -------------------------------------------------------------------------------------------------------


class _TimedCollectives:
    """A backend's collectives, with the time that each takes on the calling stream."""

    def __init__(self, collectives: Any, device: torch.device) -> None:
        self._collectives = collectives
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def _span(self) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        with self._span():
            self._collectives.all_gather(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        with self._span():
            self._collectives.reduce_scatter(out, x)

    def take_ms(self) -> float:
        """The sum since the last time; the device has ended."""
        spans, self._spans = self._spans, []
        if self._cuda:
            return sum(start.elapsed_time(end) for start, end in spans)
        return 1e3 * sum(end - start for start, end in spans)


def communication_ms(layer: nn.Module, sets: Sequence[Inputs], session: Session) -> float | None:
    """Of a layer by ``nccl``: the time in collectives, none of which is hidden; None without peers.

    The median over rounds of their sum, on the rank that waited least for its peers.
    """
    backend, settings = session.group.backend, session.settings
    if session.group.world_size == 1 or backend.collectives is None:
        return None
    timed = _TimedCollectives(backend.collectives, session.device)
    measure = timer_of(session.group, LAYER_SLEEP_CYCLES)
    found = []
    backend.collectives = timed
    try:
        for turn in range(settings.warmup + settings.rounds):
            measure(lambda index: forward_backward(layer, sets[index]), turn % len(sets))
            found.append(timed.take_ms())
    finally:
        backend.collectives = timed._collectives
    return min(session.group.all_gather_object(statistics.median(found[settings.warmup :])))


# The benchmark -------------------------------------------------------------------------------------------------------


def prepare(layer: nn.Module, names: Sequence[str]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The rivals that can run, and why others cannot."""
    copies: dict[str, nn.Module] = {}
    unavailable: dict[str, str] = {}
    for name in names:
        try:
            copies[name] = RIVALS[name](layer)
        except Unavailable as reason:
            unavailable[name] = str(reason)
    return copies, unavailable


def check(
    session: Session, problem: Problem, steps: Mapping[str, Callable[[], list[Tensor]]], expected: Sequence[Tensor]
) -> dict[str, float]:
    """Each rival's largest error over the ranks; raises on every rank where one is too large."""
    errors = {name: largest_error(step(), expected) for name, step in steps.items()}
    return session.check(problem, errors, TOLERANCE_FACTOR * TOLERANCE[session.settings.dtype])


def measure(problem: Problem, session: Session, names: Sequence[str]) -> Row:
    """Collective."""
    layer = build_layer(problem, session)
    copies, unavailable = prepare(layer, names)
    sets = [make_inputs(problem, session, index) for index in range(NUM_SETS)]
    steps = {name: lambda rival=rival: forward_backward(rival, sets[0]) for name, rival in copies.items()}
    errors = check(session, problem, steps, reference(layer, sets[0]))

    def call(rival: nn.Module) -> Call:
        return lambda index: forward_backward(rival, sets[index])

    timings = session.time({name: call(rival) for name, rival in copies.items()}, NUM_SETS, LAYER_SLEEP_CYCLES)
    baseline = copies.get(BASELINE)
    return Row(
        model=problem.model,
        tokens=problem.tokens,
        document=problem.document,
        world_size=session.group.world_size,
        dtype=str(session.settings.dtype).removeprefix("torch."),
        communication_ms=None if baseline is None else communication_ms(baseline, sets, session),
        measurements={name: Measurement(name, timings[name], errors[name]) for name in copies},
        unavailable=unavailable,
    )


def run(session: Session, problems: Sequence[Problem], names: Sequence[str]) -> Results:
    """Measure; collective.

    Args:
        session: of this rank.
        problems: a row each.
        names: of rivals.

    Raises:
        WrongResult: a result or a gradient is not the reference.
        ValueError: a rival that is not known.
    """
    unknown = sorted(set(names) - set(RIVALS))
    if unknown:
        raise ValueError(f"unknown rivals {', '.join(unknown)}; known: {', '.join(RIVALS)}")
    rows = [measure(p, session, names) for p in session.progress(problems, lambda p: f"{p.model} T {p.tokens}")]
    return session.results(
        "layer",
        rows,
        {
            "inputs": f"normal, {NUM_SETS} sets in turns; packed documents, causal attention, rotary embedding",
            "time": "forward and backward, median over rounds on the slowest rank; see triton_overlap/timing.py",
            "reference": "float32, torch's products and collectives",
        },
    )
