"""Shared by the tests of the transformer modules: cases, data, and how near a result must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import triton_overlap as to
from tests.nn.plain import Shape
from triton_overlap.reference import relative_error

RTOL, ATOL = 0.025, 0.00125
#: Relative Frobenius error that rounding explains even where one process happens to have less.
FLOOR = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-4}
#: Overlap flags.
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


def assert_module_close(what: str, actual: Tensor | None, single: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Every element near the float64 result and near what one process computes in ``dtype``.

    Both differ by rounding: all elements together may by one and a half times one process's own error, each by the
    stated tolerance plus one and a half times the largest of one process's, which is the scale of the outliers where
    few tokens make errors of very different size. Triton's interpreter cuts bfloat16 off instead of rounding it, which
    is twice the error at each step, and always of one sign: there it may be three times, and one cut more.
    """
    assert actual is not None, f"{what} is None"
    assert actual.dtype == dtype, f"{what} is {actual.dtype}, not {dtype}"
    assert bool(torch.isfinite(actual).all()), f"{what} is not finite"
    cuts_off = dtype == torch.bfloat16 and actual.device.type == "cpu"
    factor, floor = (3.0, 2.0**-7) if cuts_off else (1.5, FLOOR[dtype])
    actual, single, exact = actual.detach().double(), single.detach().double(), exact.detach()
    rounding = float((single - exact).abs().max())
    # Two results that are each off by as much may differ from each other by twice that.
    for name, expected, share in (("float64", exact, 1), ("one process", single, 2)):
        difference = (actual - expected).abs()
        excess = difference - (RTOL * expected.abs() + ATOL + share * factor * rounding)
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
