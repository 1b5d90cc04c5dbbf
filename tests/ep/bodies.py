"""Host code of a rank that uses an expert buffer and compares with the reference. Runs on any backend."""

from __future__ import annotations

from typing import Any

import torch

from tests.ep.worlds import Case, expected_combine, expected_dispatch, make_inputs
from triton_overlap.comm.group import Group
from triton_overlap.expert_buffer import ExpertBuffer


def make_buffer(group: Group, case: Case, **settings: Any) -> ExpertBuffer:
    return ExpertBuffer(
        group,
        num_max_tokens_per_rank=case.max_tokens,
        hidden=case.hidden,
        num_topk=case.topk,
        num_experts=case.experts,
        num_scale_up=case.scale_up,
        **{**case.settings, **settings},
    )


def round_trips(group: Group, case: Case, network: str, seeds: tuple[int, ...]) -> None:
    """Back-to-back dispatches and combines without any host barrier, each bitwise equal to the reference."""
    buffer = make_buffer(group, case, network=network)
    for seed in seeds:
        inputs = make_inputs(case, seed)
        mine, expected = inputs[group.rank], expected_dispatch(case, inputs, group.rank)
        x, idx, weights, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        assert isinstance(x, torch.Tensor)
        torch.testing.assert_close(x, expected.x, rtol=0, atol=0)
        assert torch.equal(idx, expected.topk_idx)
        assert weights is not None
        assert torch.equal(weights, expected.topk_weights)
        out, _, _ = buffer.combine(made(group.rank, expected.x), handle)
        right = expected_combine(
            case, inputs, lambda rank: made(rank, expected_dispatch(case, inputs, rank).x), group.rank
        )
        torch.testing.assert_close(out, right, rtol=0, atol=0)


def made(rank: int, x: torch.Tensor) -> torch.Tensor:
    """What the experts of ``rank`` make of its rows."""
    return (x.float() * (1 + rank / 8) + rank).to(x.dtype)
