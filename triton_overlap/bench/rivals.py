"""What the benchmark compares. A rival prepares itself for a problem and returns the call that is checked and timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import triton_overlap as to
from triton_overlap.problems import Inputs, OverlappedOperation, Problem
from triton_overlap.tuning import applies, can_run, default_candidates, run_method

# Newer releases of torch rename the two collectives on single tensors; the oldest supported one has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: One call: a rank's operands to a rank's result.
Run = Callable[[Inputs], Tensor]


class Unavailable(Exception):
    """A rival cannot run here; the message is the reason."""


class NotThisOperation(Exception):
    """A rival is no way to do this operation."""


class Rival(Protocol):
    """One way to compute a problem.

    Attributes:
        name: its key in results.
        communicates: False where the result is the product of a rank's own operands: not the problem's, for a
            reduce-scatter.
    """

    name: str
    communicates: bool

    def prepare(self, problem: Problem) -> Run:
        """The call for ``problem``. Collective. Raises :class:`Unavailable` or :class:`NotThisOperation`."""


class OneMethod:
    """This library by one method, on one buffer that is registered once for the largest token count."""

    communicates = True

    def __init__(self, group: to.Group, max_tokens: int, name: str) -> None:
        self.name = name
        self._group = group
        self._max_tokens = max_tokens

    def prepare(self, problem: Problem) -> Run:
        buffer = self._group.user_buffer(self._max_tokens, problem.hidden, dtype=problem.dtype)
        if not applies(problem.operation, self.name):
            raise NotThisOperation
        if not can_run(self._group, self.name):
            raise Unavailable(f"the {self._group.backend.name} backend cannot run it")
        return lambda inputs: run_method(problem, inputs, buffer, self.name)


class Bulk:
    """The library's collective beside a GEMM of this size that does not depend on it: as much work, all independent."""

    name = "bulk"
    communicates = False

    def __init__(self, group: to.Group, max_tokens: int) -> None:
        self._group = group
        self._max_tokens = max_tokens

    def prepare(self, problem: Problem) -> Run:
        buffer = self._group.user_buffer(self._max_tokens, problem.hidden, dtype=problem.dtype)
        if problem.gathers:
            return lambda inputs: to.all_gather_beside_matmul(inputs.a, inputs.gathered, inputs.b, buffer=buffer)[1]
        whole = torch.zeros(problem.tokens, problem.hidden, dtype=problem.dtype, device=self._group.device)
        return lambda inputs: to.reduce_scatter_beside_matmul(whole, inputs.a, inputs.b, buffer=buffer)[1]


class GemmAlone:
    """``torch.matmul`` (cuBLAS on a GPU) on operands that need no communication: what perfect overlap would cost."""

    name = "gemm"
    communicates = False

    def prepare(self, problem: Problem) -> Run:
        return lambda inputs: inputs.gathered @ inputs.b


class CollectiveThenGemm:
    """A collective of torch.distributed (NCCL on a GPU) and ``torch.matmul``, one after the other."""

    name = "collective"
    communicates = True

    def prepare(self, problem: Problem) -> Run:
        world_size = problem.world_size

        def all_gather_matmul(inputs: Inputs) -> Tensor:
            gathered = inputs.a.new_empty(inputs.a.shape[0] * world_size, inputs.a.shape[1])
            _all_gather(gathered, inputs.a)
            return gathered @ inputs.b

        def matmul_reduce_scatter(inputs: Inputs) -> Tensor:
            out = inputs.a.new_empty(problem.out_shape)
            _reduce_scatter(out, inputs.a @ inputs.b)
            return out

        gathers = problem.operation == OverlappedOperation.ALL_GATHER_MATMUL
        return all_gather_matmul if gathers else matmul_reduce_scatter


class AsyncTensorParallel:
    """PyTorch's own overlap, the operators behind async-TP."""

    name = "async_tp"
    communicates = True

    def prepare(self, problem: Problem) -> Run:
        if not torch.cuda.is_available():
            raise Unavailable("PyTorch's async-TP needs CUDA devices")
        # Importing the module registers torch.ops.symm_mem; nothing of it is used by name.
        importlib.import_module("torch.distributed._symmetric_memory")
        process_group = dist.group.WORLD
        assert process_group is not None
        group_name = process_group.group_name
        if problem.operation == OverlappedOperation.ALL_GATHER_MATMUL:
            return lambda inputs: torch.ops.symm_mem.fused_all_gather_matmul(inputs.a, [inputs.b], 0, group_name)[1][0]
        return lambda inputs: torch.ops.symm_mem.fused_matmul_reduce_scatter(inputs.a, inputs.b, "sum", 0, group_name)


def every_method(dtype: torch.dtype) -> list[str]:
    """The library's methods with the options that ``tune`` tries, simpler ones first, then ``auto`` and ``bulk``."""
    candidates = [default_candidates(operation.value, dtype) for operation in OverlappedOperation]
    return [*dict.fromkeys(name for names in candidates for name in names), "auto", "bulk"]


def all_rivals(group: to.Group, max_tokens: int, methods: Sequence[str]) -> list[Rival]:
    """The library by each of ``methods``, and every rival.

    Raises:
        ValueError: a method that is not known.
    """
    own: list[Rival] = []
    for name in methods:
        to.Method.parse(name)
        own.append(Bulk(group, max_tokens) if name == "bulk" else OneMethod(group, max_tokens, name))
    return [*own, GemmAlone(), CollectiveThenGemm(), AsyncTensorParallel()]
