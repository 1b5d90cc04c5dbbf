"""Host code of a rank that uses an expert buffer and compares with the reference. Runs on any backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ep.worlds import Case, Inputs, expand, expected_combine, expected_dispatch, make_inputs
from triton_overlap.comm.group import Group
from triton_overlap.expert_buffer import EpHandle, ExpertBuffer


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


def exactly(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def made(rank: int, x: torch.Tensor) -> torch.Tensor:
    """What the experts of ``rank`` make of its rows."""
    return (x.float() * (1 + rank / 8) + rank).to(x.dtype)


def round_trip(
    buffer: ExpertBuffer,
    case: Case,
    seed: int,
    spoil: Callable[[EpHandle], None] = lambda handle: None,
    combines: bool = True,
) -> None:
    """A dispatch and a combine, each bitwise equal to the reference."""
    rank = buffer.group.rank
    inputs = make_inputs(case, seed)
    mine, expected = inputs[rank], expected_dispatch(case, inputs, rank)
    x, idx, weights, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    exactly(x, expected.x)
    exactly(idx, expected.topk_idx)
    exactly(weights, expected.topk_weights)
    spoil(handle)
    if not combines:
        return
    out, _, _ = buffer.combine(made(rank, expected.x), handle)
    outputs = [made(peer, expected_dispatch(case, inputs, peer).x) for peer in range(case.world_size)]
    exactly(out, expected_combine(case, inputs, outputs.__getitem__, rank))


def round_trips_on(buffer: ExpertBuffer, case: Case, seeds: tuple[int, ...]) -> None:
    """Back-to-back round trips without any host barrier."""
    for seed in seeds:
        round_trip(buffer, case, seed)


def round_trips(group: Group, case: Case, network: str, seeds: tuple[int, ...]) -> None:
    """As ``round_trips_on``, with a buffer of their own."""
    round_trips_on(make_buffer(group, case, network=network), case, seeds)


def fp8_rows(case: Case, inputs: list[Inputs]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's rows in fp8, with a scale for every 128 columns."""
    columns = -(-case.hidden // 128)
    found = []
    for given in inputs:
        scales = torch.arange(given.x.shape[0] * columns, dtype=torch.float32).view(-1, columns) + 0.5
        found.append((given.x.to(torch.float8_e4m3fn), scales))
    return found


def matrix(group: Group, case: Case, network: str, alignment: int, fp8: bool, num_biases: int) -> None:
    """Dispatch, expanded, cached, cached expanded with zeros, combine and reduced combine, for one setting."""
    buffer = make_buffer(group, case, network=network, use_fp8_dispatch=fp8)
    rank = group.rank
    inputs = make_inputs(case, alignment)
    mine, expected = inputs[rank], expected_dispatch(case, inputs, rank)
    rows = fp8_rows(case, inputs)
    x = rows[rank] if fp8 else mine.x
    sent = [content if fp8 else given.x for given, (content, _) in zip(inputs, rows, strict=True)]
    right_x = torch.cat([sent[source][token : token + 1] for source, token in expected.sources] or [sent[rank][:0]])
    scales = torch.cat(
        [rows[source][1][token : token + 1] for source, token in expected.sources] or [rows[rank][1][:0]]
    )

    plain = buffer.dispatch(x, mine.topk_idx, mine.topk_weights)
    handle = plain[3]
    assert handle.num_recv_tokens == len(expected.sources)
    check_rows(plain[0], right_x, scales if fp8 else None)
    exactly(plain[1], expected.topk_idx)
    cached = buffer.dispatch(x, handle=handle)
    check_rows(cached[0], right_x, scales if fp8 else None)
    assert cached[2] is None

    grouped, place = expand(expected, case, alignment)
    for zero_fill, again in ((False, None), (True, handle)):
        topk_idx = mine.topk_idx if again is None else None
        expanded = buffer.dispatch(
            x, topk_idx, mine.topk_weights, handle=again, expand=True, expert_alignment=alignment, zero_fill=zero_fill
        )
        wide = expanded[3]
        assert wide.expert_starts is not None
        assert wide.expert_starts[-1] == len(grouped)
        exactly(wide.view("expanded")[: len(expected.sources)].long(), place)
        check_grouped(expanded[0], right_x, scales if fp8 else None, place, zero_fill)

    biases = tuple(torch.full_like(mine.x, index + 0.5) for index in range(num_biases))
    outputs = [made(peer, expected_dispatch(case, inputs, peer).x) for peer in range(case.world_size)]
    out, _, event = buffer.combine(outputs[rank], handle, bias=biases, async_op=True)
    group.backend.wait_event(event)
    exactly(out, expected_combine(case, inputs, outputs.__getitem__, rank, biases))

    # Reduced: what each expert made of a token, weighted and summed before it is sent.
    made_rows = torch.zeros(len(grouped), case.hidden, dtype=buffer.dtype)
    for row, k in (place >= 0).nonzero().tolist():
        made_rows[place[row, k]] = made(rank, expected.x[row]) + int(expected.topk_idx[row, k])
    totals = []
    for peer in range(case.world_size):
        theirs = expected_dispatch(case, inputs, peer)
        weighted = torch.zeros(len(theirs.sources), case.hidden)
        for row, k in (theirs.topk_idx >= 0).nonzero().tolist():
            expert = made(peer, theirs.x[row]) + int(theirs.topk_idx[row, k])
            weighted[row] += expert.float() * theirs.topk_weights[row, k]
        totals.append(weighted.to(buffer.dtype))
    assert expanded[2] is not None
    out, _, _ = buffer.combine(made_rows, wide, expanded[2])
    exactly(out, expected_combine(case, inputs, totals.__getitem__, rank))

    # Weights come back summed over ranks: those of experts that are.
    _, out_weights, _ = buffer.combine(outputs[rank], handle, expected.topk_weights)
    assert out_weights is not None
    exactly(out_weights, torch.where(mine.topk_idx >= 0, mine.topk_weights, 0.0))


def check_rows(
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, scales: torch.Tensor | None
) -> None:
    rows, found_scales = found if isinstance(found, tuple) else (found, None)
    assert rows.dtype == x.dtype
    exactly(rows.view(torch.uint8), x.view(torch.uint8))
    assert (found_scales is None) == (scales is None)
    if found_scales is not None and scales is not None:
        exactly(found_scales, scales)


def check_grouped(
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    scales: torch.Tensor | None,
    place: torch.Tensor,
    zero_fill: bool,
) -> None:
    """Row (r, k) stands at its place; the padding is zero where asked."""
    rows, found_scales = found if isinstance(found, tuple) else (found, None)
    chosen = (place >= 0).nonzero()
    exactly(rows[place[place >= 0]].view(torch.uint8), x[chosen[:, 0]].view(torch.uint8))
    if scales is not None:
        assert found_scales is not None
        exactly(found_scales[place[place >= 0]], scales[chosen[:, 0]])
    if zero_fill:
        padding = torch.ones(rows.shape[0], dtype=torch.bool)
        padding[place[place >= 0]] = False
        assert not rows[padding].view(torch.uint8).any()


def without_cpu_sync(group: Group, case: Case, network: str) -> None:
    """Largest shapes, and the counts on the device."""
    buffer = make_buffer(group, case, network=network)
    inputs = make_inputs(case, 0)
    mine, expected = inputs[group.rank], expected_dispatch(case, inputs, group.rank)
    x, idx, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, cpu_sync=False)
    assert isinstance(x, torch.Tensor)
    rows = int(handle.view("prefix")[-1])
    assert x.shape[0] == case.world_size * case.max_tokens
    assert rows == len(expected.sources)
    exactly(x[:rows], expected.x)
    exactly(idx[:rows], expected.topk_idx)
    y = torch.full_like(x, float("nan"))
    y[:rows] = made(group.rank, expected.x)
    out, _, _ = buffer.combine(y, handle)
    outputs = [made(peer, expected_dispatch(case, inputs, peer).x) for peer in range(case.world_size)]
    exactly(out, expected_combine(case, inputs, outputs.__getitem__, group.rank))


def errors(group: Group, case: Case) -> None:
    """Every broken rule is named, before anything is sent; the buffer works afterwards."""
    buffer = make_buffer(group, case)
    other = make_buffer(group, case)
    x = torch.zeros(2, case.hidden, dtype=torch.bfloat16)
    idx = torch.zeros(2, case.topk, dtype=torch.int64)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("num_experts must be divisible", lambda: make_buffer(group, replace(case, scale_out=1, experts_per_rank=0))),
        ("num_topk must be 1 to 32", lambda: make_buffer(group, replace(case, topk=33, experts_per_rank=40))),
        ("multiple of 32 bytes", lambda: make_buffer(group, replace(case, hidden=24))),
        ("num_scale_up must divide", lambda: make_buffer(group, replace(case, scale_up=3))),
        ("ordered kernels need strong_signals", lambda: make_buffer(group, case, kernel="ordered")),
        ("network is", lambda: make_buffer(group, case, network="pigeon")),
        ("expert ids must be -1 to", lambda: buffer.dispatch(x, idx + case.experts)),
        ("at most num_max_tokens_per_rank", lambda: buffer.dispatch(x.new_zeros(99, case.hidden), idx)),
        ("x must be torch.bfloat16", lambda: buffer.dispatch(x.float(), idx)),
        ("topk_idx must be int64", lambda: buffer.dispatch(x, idx.int())),
        ("topk_weights must be float32", lambda: buffer.dispatch(x, idx, idx)),
        ("needs topk_idx or a handle", lambda: buffer.dispatch(x)),
        ("expert_alignment must be at least 1", lambda: buffer.dispatch(x, idx, expert_alignment=0)),
        ("use_fp8_dispatch=True", lambda: buffer.dispatch((x.to(torch.float8_e4m3fn), torch.zeros(2, 1)), idx)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    received, _, _, handle, _ = buffer.dispatch(x, idx)
    assert isinstance(received, torch.Tensor)
    for message, call in (
        ("the handle is of", lambda: other.combine(received, handle)),
        ("as it was received", lambda: buffer.combine(received[:0].new_zeros(77, case.hidden), handle)),
        ("at most 2 biases", lambda: buffer.combine(received, handle, bias=(x, x, x))),
        ("topk_idx must be None with a handle", lambda: buffer.dispatch(x, idx, handle=handle)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    round_trip(buffer, case, 0)
    group.barrier()
    other.close()
    with pytest.raises(ValueError, match="is closed"):
        other.dispatch(x, idx)
