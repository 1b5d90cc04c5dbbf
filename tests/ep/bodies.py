"""Host code of a rank that uses an expert buffer and compares with the reference. Runs on any backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ep.kernels import copy_kernel
from tests.ep.worlds import Case, Inputs, expand, expected_combine, expected_dispatch, make_inputs
from triton_overlap.comm.group import Group
from triton_overlap.expert_buffer import EpHandle, ExpertBuffer
from triton_overlap.ops import ep_dispatch


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


def cached_round_trip(buffer: ExpertBuffer, case: Case, seed: int) -> None:
    """A dispatch, and then other rows along the same routing, there and back."""
    rank = buffer.group.rank
    inputs = make_inputs(case, seed)
    others = [replace(given, x=-given.x) for given in inputs]
    handle = buffer.dispatch(inputs[rank].x, inputs[rank].topk_idx)[3]
    x, idx, weights, again, _ = buffer.dispatch(others[rank].x, handle=handle)
    assert isinstance(x, torch.Tensor)
    assert weights is None
    expected = expected_dispatch(case, others, rank)
    exactly(x, expected.x)
    exactly(idx, expected.topk_idx)
    out, _, _ = buffer.combine(made(rank, expected.x), again)
    outputs = [made(peer, expected_dispatch(case, others, peer).x) for peer in range(case.world_size)]
    exactly(out, expected_combine(case, others, outputs.__getitem__, rank))


def expanded_round_trip(buffer: ExpertBuffer, case: Case, seed: int) -> None:
    """A row for each local expert, grouped, and the weighted sum of what the experts made of them."""
    rank = buffer.group.rank
    inputs = make_inputs(case, seed)
    mine, expected = inputs[rank], expected_dispatch(case, inputs, rank)
    x, _, weights, handle, _ = buffer.dispatch(
        mine.x, mine.topk_idx, mine.topk_weights, expand=True, expert_alignment=2, zero_fill=True
    )
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    _, place = expand(expected, case, 2)
    check_grouped(x, expected.x, None, place, True)
    out, _, _ = buffer.combine(x, handle, weights)
    totals = []
    for peer in range(case.world_size):
        theirs = expected_dispatch(case, inputs, peer)
        weighted = torch.zeros(len(theirs.sources), case.hidden)
        for row, k in (theirs.topk_idx >= 0).nonzero().tolist():
            weighted[row] += theirs.x[row].float() * theirs.topk_weights[row, k]
        totals.append(weighted.to(buffer.dtype))
    exactly(out, expected_combine(case, inputs, totals.__getitem__, rank))


def check_bases(buffer: ExpertBuffer) -> None:
    """After a barrier of the hosts: every signal has counted exactly what its base says."""
    start = buffer.layout.offset("signals")
    signals = buffer.memory.local[start : start + 8 * buffer.layout.num_signals].view(torch.int64)
    assert torch.equal(signals, buffer.bases), f"{signals.tolist()} are not {buffer.bases.tolist()}"
    assert signals.sum() > 0


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


def separate(group: Group, case: Case, network: str) -> None:
    """Without ``allow_multiple_reduction``: nothing is summed before the source has it, in the order of k."""
    buffer = make_buffer(group, case, network=network, allow_multiple_reduction=False)
    inputs = make_inputs(case, 3)
    mine, expected = inputs[group.rank], expected_dispatch(case, inputs, group.rank)
    biases = (torch.full_like(mine.x, 0.5),)

    # One partial result for each expert, weighted at the source.
    wide = buffer.dispatch(mine.x, mine.topk_idx, expand=True)[3]
    _, place = expand(expected, case, 1)
    y = torch.zeros(int((place >= 0).sum()), case.hidden, dtype=buffer.dtype)
    for row, k in (place >= 0).nonzero().tolist():
        expert = group.rank * case.experts_per_rank + int(expected.topk_idx[row, k])
        y[place[row, k]] = of_expert(expert, expected.x[row])
    out, _, _ = buffer.combine(y, wide, mine.topk_weights, biases)
    total = torch.full(mine.x.shape, 0.5)
    for token, k in (mine.topk_idx >= 0).nonzero().tolist():
        made_row = of_expert(int(mine.topk_idx[token, k]), mine.x[token])
        total[token] += made_row.float() * mine.topk_weights[token, k]
    exactly(out, total.to(buffer.dtype))
    check_slots(buffer, wide, case, mine.topk_idx)
    with pytest.raises(ValueError, match="cannot be summed over the ranks"):
        buffer.combine_weights(expected.topk_weights, wide)
    with pytest.raises(NotImplementedError, match="gradients need a buffer with allow_multiple_reduction=True"):
        ep_dispatch(mine.x, mine.topk_idx, buffer=buffer)

    # One for each rank, at the place of the first of its experts.
    handle = buffer.dispatch(mine.x, handle=wide)[3]
    out, out_weights, _ = buffer.combine(made(group.rank, expected.x), handle, expected.topk_weights, biases)
    total = torch.full(mine.x.shape, 0.5)
    for token in range(len(mine.x)):
        hosts = [int(expert) // case.experts_per_rank for expert in mine.topk_idx[token] if expert >= 0]
        for host in dict.fromkeys(hosts):
            total[token] += made(host, mine.x[token]).float()
    exactly(out, total.to(buffer.dtype))
    assert out_weights is not None
    exactly(out_weights, torch.where(mine.topk_idx >= 0, mine.topk_weights, 0.0))


def of_expert(expert: int, row: torch.Tensor) -> torch.Tensor:
    """What an expert makes of a row, in the row's dtype."""
    return (row.float() * (1 + expert / 8) + expert).to(row.dtype)


def check_slots(buffer: ExpertBuffer, handle: EpHandle, case: Case, topk_idx: torch.Tensor) -> None:
    """Every (token, k) with an expert has a slot of its own, at its channel, from the rank that forwards it."""
    slots = handle.recv_slots
    assert slots.shape == (*topk_idx.shape, 3)
    assert torch.equal(slots[..., 0] >= 0, topk_idx >= 0)
    channels = buffer.layout.geometry.num_channels
    own_out = buffer.group.rank // case.scale_up
    seen = set()
    for token, k in (topk_idx >= 0).nonzero().tolist():
        rank, channel, slot = slots[token, k].tolist()
        scale_out = int(topk_idx[token, k]) // case.experts_per_rank // case.scale_up
        assert (rank // case.scale_up, rank % case.scale_up) == (scale_out, buffer.group.rank % case.scale_up)
        assert channel == token % channels
        place = (rank, channel, slot) if scale_out != own_out else (rank, token, slot)
        assert place not in seen
        seen.add(place)


def events(backend: Any, case: Case, network: str, previous: bool, beside: bool, forgotten: bool = False) -> None:
    """A dispatch and a combine between kernels on a stream, ordered by events alone."""
    group = Group(backend, check="async")
    buffer = make_buffer(group, case, network=network)
    inputs = make_inputs(case, 0)
    mine, expected = inputs[group.rank], expected_dispatch(case, inputs, group.rank)
    x, out = torch.empty_like(mine.x), torch.empty_like(mine.x)
    y = torch.empty(case.world_size * case.max_tokens, case.hidden, dtype=buffer.dtype)
    copy: Any = copy_kernel

    def given() -> Any:
        return backend.record_event() if previous else None

    with backend.stream():
        copy[(1,)](mine.x, x, x.numel(), BLOCK=1024)
        received, _, _, handle, event = buffer.dispatch(
            x, mine.topk_idx, cpu_sync=False, previous_event=given(), async_op=beside
        )
        assert (event is not None) == beside
        if beside and not forgotten:
            backend.wait_event(event)
        copy[(1,)](received, y, len(expected.x) * case.hidden, BLOCK=1024)
        found, _, event = buffer.combine(y, handle, previous_event=given(), async_op=beside)
        if beside:
            backend.wait_event(event)
        copy[(1,)](found, out, out.numel(), BLOCK=1024)
        backend.synchronize()
    group.check()
    exactly(y[: len(expected.x)], expected.x)
    outputs = [expected_dispatch(case, inputs, peer).x for peer in range(case.world_size)]
    exactly(out, expected_combine(case, inputs, outputs.__getitem__, group.rank))
    group.close()


def sizes(group: Group, case: Case) -> None:
    """``size_hint`` says what is registered, and what each choice costs."""
    arguments: dict[str, Any] = {
        "num_max_tokens_per_rank": case.max_tokens,
        "hidden": case.hidden,
        "num_topk": case.topk,
        "num_experts": case.experts,
        "num_scale_up": case.scale_up,
        "num_sms": 1,
        "channels_per_sm": 2,
    }
    hint = ExpertBuffer.size_hint(case.world_size, **arguments)
    assert make_buffer(group, case, num_sms=1, channels_per_sm=2).memory.local.numel() == hint
    if case.scale_out > 1:  # rows of their own length, and K slots for a token that comes back, are for puts
        assert ExpertBuffer.size_hint(case.world_size, use_fp8_dispatch=True, **arguments) > hint
        assert ExpertBuffer.size_hint(case.world_size, allow_multiple_reduction=False, **arguments) > hint
    with pytest.raises(ValueError, match="num_topk must be 1 to"):
        ExpertBuffer.size_hint(case.world_size, **{**arguments, "num_topk": 99})


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
        (
            "ordered kernels need strong_signals, which the simulated network",
            lambda: make_buffer(group, case, kernel="ordered", network="simulated"),
        ),
        (
            "ordered kernels have rings of 1024 slots",
            lambda: make_buffer(group, replace(case, max_tokens=3000), kernel="ordered"),
        ),
        ("kernel must be", lambda: make_buffer(group, case, kernel="fast")),
        ("dtype must be one of", lambda: make_buffer(group, case, dtype=torch.float64)),
        ("num_topk must be 1 to", lambda: make_buffer(group, replace(case, topk=case.experts + 1))),
        ("timeout_s must be positive seconds", lambda: make_buffer(group, case, timeout_s=0)),
        ("network is", lambda: make_buffer(group, case, network="pigeon")),
        ("expert ids must be -1 to", lambda: buffer.dispatch(x, idx + case.experts)),
        ("at most num_max_tokens_per_rank", lambda: buffer.dispatch(x.new_zeros(99, case.hidden), idx)),
        ("x must be torch.bfloat16", lambda: buffer.dispatch(x.float(), idx)),
        ("topk_idx must be int64", lambda: buffer.dispatch(x, idx.int())),
        ("topk_weights must be float32", lambda: buffer.dispatch(x, idx, idx)),
        ("needs topk_idx or a handle", lambda: buffer.dispatch(x)),
        ("expert_alignment must be at least 1", lambda: buffer.dispatch(x, idx, expert_alignment=0)),
        ("expert_alignment 1073741824 could make", lambda: buffer.dispatch(x, idx, expert_alignment=2**30)),
        ("x must be a dense tensor", lambda: buffer.dispatch(x.to_sparse(), idx)),
        ("topk_idx must be on cpu, got meta", lambda: buffer.dispatch(x, idx.to("meta"))),
        ("needs a routing of", lambda: make_buffer(group, replace(case, max_tokens=2**31), num_sms=60)),
        ("use_fp8_dispatch=True", lambda: buffer.dispatch((x.to(torch.float8_e4m3fn), torch.zeros(2, 1)), idx)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    unfit: list[tuple[str, Callable[[], Any]]] = [
        ("num_topk must be of type int, got 2.0", lambda: make_buffer(group, replace(case, topk=2.0))),  # type: ignore[arg-type]
        ("rank must be of type int, got True", lambda: make_buffer(group, replace(case, max_tokens=True))),
        ("dtype must be of type dtype, got 'bf16'", lambda: make_buffer(group, case, dtype="bf16")),
        ("use_fp8_dispatch must be of type bool, got 1", lambda: make_buffer(group, case, use_fp8_dispatch=1)),
        ("num_sub_parts must be of type int", lambda: make_buffer(group, case, num_sub_parts="2")),
        ("kernel must be of type str", lambda: make_buffer(group, case, kernel=["ordered"])),
        ("x must be a torch.Tensor, got ndarray", lambda: buffer.dispatch(x.float().numpy(), idx)),  # type: ignore[arg-type]
        ("x must be a tensor, or two", lambda: buffer.dispatch((x,), idx)),  # type: ignore[arg-type]
        ("topk_idx must be a torch.Tensor, got list", lambda: buffer.dispatch(x, idx.tolist())),  # type: ignore[arg-type]
        ("expand must be True or False, got 1", lambda: buffer.dispatch(x, idx, expand=1)),  # type: ignore[arg-type]
        ("expert_alignment must be an int, got 2.0", lambda: buffer.dispatch(x, idx, expert_alignment=2.0)),  # type: ignore[arg-type]
        ("handle must be the EpHandle", lambda: buffer.dispatch(x, handle="last")),  # type: ignore[arg-type]
        ("handle must be the EpHandle", lambda: buffer.combine(x, None)),  # type: ignore[arg-type]
    ]
    for message, call in unfit:
        with pytest.raises(TypeError, match=message):
            call()
    received, _, _, handle, _ = buffer.dispatch(x, idx)
    assert isinstance(received, torch.Tensor)
    for message, call in (
        ("the handle is of", lambda: other.combine(received, handle)),
        ("as it was received", lambda: buffer.combine(received[:0].new_zeros(77, case.hidden), handle)),
        ("bias must be one of", lambda: buffer.combine(received, handle, bias=idx)),
        ("bias must be bfloat16", lambda: buffer.combine(received, handle, bias=x[:1])),
        ("topk_weights must be float32", lambda: buffer.combine(received, handle, x)),
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
