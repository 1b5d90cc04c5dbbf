"""What an expert buffer is made from, the rules of these settings, and the layout that follows from them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..comm.network import NetworkProperties
from ..comm.rules import DTYPES
from ..kernels.ep_geometry import Knobs, check_scale_out, plan
from ..kernels.ep_layout import EpLayout

#: Columns of a row that share a scale factor.
SCALE_COLUMNS = 128
#: Rows, and words of a routing, are numbered in int32.
MOST_INT32 = 2**31 - 1
_MAX_TOPK = 32
#: Slots of a channel that ordered kernels have for each scale-out rank.
_RING_DEPTH = 1024

#: What each variant of the kernels needs of a network.
KERNEL_NEEDS = {
    "unordered": NetworkProperties(),
    "ordered": NetworkProperties(strong_signals=True, signals_anywhere=True),
}


def _check_types(kind: type, **arguments: object) -> None:
    """``TypeError`` for an argument that is not of ``kind``; a bool is no int."""
    for name, value in arguments.items():
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r}")


def choose_kernel(given: str | None) -> str:
    """The variant of the kernels: as given, else ``EP_HYBRID_KERNEL``, else unordered.

    Raises:
        ValueError: there is no such variant.
    """
    if given is not None:
        _check_types(str, kernel=given)
    kernel = given or os.environ.get("EP_HYBRID_KERNEL", "unordered")
    if kernel not in KERNEL_NEEDS:
        source = "kernel" if given else "EP_HYBRID_KERNEL"
        raise ValueError(f'{source} must be "unordered" or "ordered", got {kernel!r}')
    return kernel


#: num_sms and channels_per_sm that nobody chose: under the interpreter; where puts carry the channels, each of them a
#: queue of its own; and where stores do, one for nearly every program (4096 tokens of 7168 on an H200: 142 us with 198
#: channels, 226 us with 96).
_INTERPRETED, _PUTS, _STORES = (1, 2), (24, 4), (66, 3)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an expert buffer is made from: the arguments of ``ExpertBuffer`` of the same names, all of them chosen."""

    world_size: int
    num_scale_up: int
    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: torch.dtype
    use_fp8_dispatch: bool
    allow_multiple_reduction: bool
    num_allocated_qps: int
    num_sms: int
    channels_per_sm: int
    knobs: Knobs
    kernel: str

    @staticmethod
    def choose(
        *,
        world_size: int,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        use_fp8_dispatch: bool = False,
        allow_multiple_reduction: bool = True,
        num_scale_up: int | None = None,
        kernel: str | None = None,
        num_allocated_qps: int = 11,
        num_sms: int = 0,
        channels_per_sm: int = 0,
        capability: int = 0,
        interpreted: bool = False,
        **knobs: int | None,
    ) -> Settings:
        """Settings with a choice for whatever is left open; ``knobs`` are arguments of ``ep_geometry.Knobs.choose``.

        Args:
            capability: major compute capability of the device.
            interpreted: kernels run under Triton's interpreter.
        """
        num_scale_up = world_size if num_scale_up is None else num_scale_up
        _check_types(
            int,
            num_scale_up=num_scale_up,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            num_allocated_qps=num_allocated_qps,
            num_sms=num_sms,
            channels_per_sm=channels_per_sm,
            **{name: value for name, value in knobs.items() if value is not None},
        )
        _check_types(bool, use_fp8_dispatch=use_fp8_dispatch, allow_multiple_reduction=allow_multiple_reduction)
        _check_types(torch.dtype, dtype=dtype)
        default_sms, default_channels = _INTERPRETED if interpreted else _PUTS if num_scale_up < world_size else _STORES
        return Settings(
            world_size=world_size,
            num_scale_up=num_scale_up,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            dtype=dtype,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_multiple_reduction=allow_multiple_reduction,
            num_allocated_qps=num_allocated_qps,
            num_sms=num_sms or default_sms,
            channels_per_sm=channels_per_sm or default_channels,
            knobs=Knobs.choose(**knobs, capability=capability),
            kernel=choose_kernel(kernel),
        )

    def check(self) -> None:
        """``ValueError`` where a rule is broken; it names the rule, what was given and what is allowed."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {self.dtype}")
        if self.num_scale_up < 1 or self.world_size % self.num_scale_up:
            raise ValueError(f"num_scale_up must divide the {self.world_size} ranks, got {self.num_scale_up}")
        if self.num_experts < 1 or self.num_experts % self.world_size:
            raise ValueError(f"num_experts must be divisible by the {self.world_size} ranks, got {self.num_experts}")
        most = min(_MAX_TOPK, self.num_experts)
        if not 1 <= self.num_topk <= most:
            raise ValueError(f"num_topk must be 1 to {most}, got {self.num_topk}")
        narrowest = 1 if self.use_fp8_dispatch else self.dtype.itemsize
        if self.hidden < 1 or self.hidden * narrowest % 32:
            raise ValueError(f"a row must be a multiple of 32 bytes, got {self.hidden} columns of {narrowest} bytes")
        check_scale_out(self.world_size // self.num_scale_up, self.num_allocated_qps)

    def most_rows(self, *, expand: bool, expert_alignment: int = 1) -> int:
        """Rows that a dispatch can receive at most."""
        tokens = self.world_size * self.num_max_tokens_per_rank
        if not expand:
            return tokens
        return tokens * self.num_topk + self.num_experts // self.world_size * (expert_alignment - 1)

    def layout(self) -> EpLayout:
        """The layout of a buffer with these settings; ``ValueError`` as :meth:`check`."""
        self.check()
        geometry = plan(
            self.num_max_tokens_per_rank,
            self.num_sms,
            self.channels_per_sm,
            self.num_allocated_qps,
            min_tokens_per_part=self.knobs.min_tokens_per_part,
            num_sub_parts=self.knobs.num_sub_parts,
            min_sub_tokens=self.knobs.min_sub_tokens,
            arch_min_sub_tokens=self.knobs.arch_min_sub_tokens,
        )
        ordered = self.kernel == "ordered"
        if ordered and geometry.slots_per_channel > _RING_DEPTH:
            raise ValueError(
                f"ordered kernels have rings of {_RING_DEPTH} slots, and a channel here needs "
                f"{geometry.slots_per_channel}; use more num_sms or channels_per_sm, or the unordered kernels"
            )
        layout = EpLayout(
            num_scale_out=self.world_size // self.num_scale_up,
            num_scale_up=self.num_scale_up,
            max_tokens=self.num_max_tokens_per_rank,
            topk=self.num_topk,
            experts_per_rank=self.num_experts // self.world_size,
            row_bytes=self.hidden * self.dtype.itemsize,
            fp8_row_bytes=self.hidden if self.use_fp8_dispatch else 0,
            scale_bytes=4 * -(-self.hidden // SCALE_COLUMNS) if self.use_fp8_dispatch else 0,
            geometry=geometry,
            separate=not self.allow_multiple_reduction,
            ordered=ordered,
        )
        if layout.routing_words > MOST_INT32:
            raise ValueError(
                f"num_max_tokens_per_rank {self.num_max_tokens_per_rank} on {self.world_size} ranks with "
                f"{self.num_topk} experts a token needs a routing of {layout.routing_words} words, at most "
                f"{MOST_INT32}; dispatch fewer tokens at a time"
            )
        return layout
