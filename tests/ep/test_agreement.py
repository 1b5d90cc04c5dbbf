"""Ranks that do not mean the same call or the same routing: every rank is told, and no result is made of the mix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.ep import bodies
from tests.ep.test_faults import layout_of, signals_of
from tests.ep.worlds import Case, make_inputs
from triton_overlap.comm.group import Group
from triton_overlap.errors import CommMismatchError, CommTimeoutError, RoutingError
from triton_overlap.expert_buffer import EpHandle, ExpertBuffer
from triton_overlap.kernels.ep_layout import EpWord
from triton_overlap.sim import LoseSignal, World

if not isinstance(tl.cdiv, InterpretedFunction):
    pytest.skip("the simulator needs Triton's interpreter", allow_module_level=True)

#: Every rank has tokens, and all of them go somewhere: rows and shapes are the same in each dispatch.
CASE = Case(2, 1, max_tokens=4, tokens=(4, 3), masked=0.0, settings={"channels_per_sm": 1})
FLOAT32 = replace(CASE, settings={**CASE.settings, "dtype": torch.float32})
SEPARATE = replace(CASE, settings={**CASE.settings, "allow_multiple_reduction": False})

Call = Callable[[ExpertBuffer, Case, list[EpHandle]], Any]


def rows_of(buffer: ExpertBuffer, handle: EpHandle) -> torch.Tensor:
    assert handle.num_rows is not None
    return torch.ones(handle.num_rows, buffer.hidden, dtype=buffer.dtype)


def own_rows(buffer: ExpertBuffer, case: Case) -> torch.Tensor:
    return make_inputs(case, 0, buffer.dtype)[buffer.group.rank].x


def weights_of(handle: EpHandle) -> torch.Tensor:
    assert handle.num_recv_tokens is not None
    return torch.ones(handle.num_recv_tokens, handle.topk_idx.shape[1])


def combine(index: int, weighted: bool = False) -> Call:
    def call(buffer: ExpertBuffer, case: Case, handles: list[EpHandle]) -> Any:
        handle = handles[index]
        return buffer.combine(rows_of(buffer, handle), handle, weights_of(handle) if weighted else None)

    return call


def dispatch_again(index: int, expand: bool = False) -> Call:
    def call(buffer: ExpertBuffer, case: Case, handles: list[EpHandle]) -> Any:
        return buffer.dispatch(own_rows(buffer, case), handle=handles[index], expand=expand, cpu_sync=False)

    return call


def dispatch(weighted: bool, expand: bool = False) -> Call:
    def call(buffer: ExpertBuffer, case: Case, handles: list[EpHandle]) -> Any:
        mine = make_inputs(case, 0, buffer.dtype)[buffer.group.rank]
        return buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights if weighted else None, expand=expand)

    return call


def combine_weights(buffer: ExpertBuffer, case: Case, handles: list[EpHandle]) -> Any:
    return buffer.combine_weights(weights_of(handles[0]), handles[0])


def disagree(group: Group, case: Case, calls: tuple[Call, Call], expand: bool, message: str) -> None:
    """Dispatches with equal routing, whose handles thus fit everywhere; then rank r makes ``calls[r]``."""
    buffer = bodies.make_buffer(group, case, network="simulated")
    mine = make_inputs(case, 0, buffer.dtype)[group.rank]
    handles = [buffer.dispatch(mine.x, mine.topk_idx, expand=expand)[3] for _ in range(3)]
    with pytest.raises(CommMismatchError, match=message):
        calls[group.rank](buffer, case, handles)
    group.recover()
    # A handle outlives the memory, unless a dispatch with it failed: it is tensors of this rank alone.
    out, _, _ = buffer.combine(rows_of(buffer, handles[2]), handles[2])
    hosts = mine.topk_idx // case.experts_per_rank
    expected = (mine.topk_idx >= 0).sum(1) if expand else torch.stack([(hosts == h).any(1) for h in (0, 1)]).sum(0)
    bodies.exactly(out, expected[:, None].expand_as(out).to(out.dtype))


@pytest.mark.parametrize(
    "case, calls, expand, message",
    [
        pytest.param(
            CASE, (combine(0), combine(1)), False,
            r"called with the routing of the dispatch in epoch [12].* must pass the handle of the same dispatch",
            id="handles of a combine",
        ),
        pytest.param(
            CASE, (dispatch_again(1), dispatch_again(0)), False, "the routing of the dispatch in epoch",
            id="handles of a dispatch",
        ),
        pytest.param(CASE, (dispatch(True), dispatch(False)), False, "with weights", id="weights of a dispatch"),
        pytest.param(CASE, (combine(0, True), combine(0)), True, "with weights", id="weights of a combine"),
        pytest.param(FLOAT32, (combine(0), combine_weights), False, "of weights", id="rows or weights"),
        pytest.param(SEPARATE, (dispatch(True), dispatch(True, True)), False, "by expert", id="partial results"),
    ],
)  # fmt: skip
def test_ranks_that_disagree(case: Case, calls: tuple[Call, Call], expand: bool, message: str) -> None:
    World(2, 3, timeout_s=20.0).run(lambda group: disagree(group, case, calls, expand, message))


def test_each_rank_may_group_its_rows_as_it_likes_where_they_are_summed_before_they_are_sent() -> None:
    def body(group: Group) -> None:
        buffer = bodies.make_buffer(group, CASE, network="simulated")
        mine = make_inputs(CASE, 0)[group.rank]
        _, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, expand=group.rank == 1)
        y = rows_of(buffer, handle)
        out, _, _ = buffer.combine(y, handle)
        hosts = mine.topk_idx // CASE.experts_per_rank
        # Rank 0 makes one for each token that it hosts an expert of, rank 1 for each expert.
        expected = (hosts == 0).any(1).int() + (hosts == 1).sum(1)
        bodies.exactly(out, expected[:, None].expand_as(out).to(out.dtype))

    World(2, 4).run(body)


def data_puts(case: Case) -> int:
    """Puts that rank 1 counts in a dispatch."""

    def body(group: Group) -> int:
        buffer = bodies.make_buffer(group, case, network="simulated")
        mine = make_inputs(case, 0)[group.rank]
        buffer.dispatch(mine.x, mine.topk_idx)
        first = (layout_of(case).words("rows", 0, 0, 0)[EpWord.DATA_SIGNALS] - buffer.layout.offset("signals")) // 8
        return int(buffer.bases[first : first + buffer.layout.num_data_signals].sum())

    return World(2, 6).run(body)[1]


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_failed_dispatch_without_cpu_sync_leaves_no_row_and_a_handle_that_is_refused(
    expand: bool, cached: bool
) -> None:
    """Nothing on the device follows a routing that is half written, and the host is told before it trusts it."""

    def body(group: Group) -> bool:
        group.check_mode = "async"
        buffer = bodies.make_buffer(group, CASE, network="simulated")
        mine = make_inputs(CASE, 0)[group.rank]
        handle = None
        if cached:
            _, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, expand=expand)
            group.barrier()
        x, idx, weights, handle, _ = buffer.dispatch(
            mine.x, None if cached else mine.topk_idx, mine.topk_weights, handle=handle, expand=expand, cpu_sync=False
        )
        assert isinstance(x, torch.Tensor)
        assert weights is not None
        group.backend.barrier(1e6)
        with pytest.raises(CommTimeoutError):
            group.check()
        failed = not handle.view("dispatch_epoch").item()
        if failed:
            assert x.isnan().all()
            assert (idx == -1).all()
            assert weights.isnan().all()
            assert not handle.view("prefix").any()
            assert not handle.view("expert_counts").any()
        group.recover()
        group.check_mode = "sync"
        with pytest.raises(RoutingError, match=r"rank \d used the handle of a dispatch that failed.*dispatch again"):
            buffer.combine(torch.zeros(x.shape, dtype=x.dtype), handle)
        group.recover()
        bodies.round_trip(buffer, CASE, 1)
        return failed

    # One that rank 1 counts in the first dispatch, or in the second.
    lost = LoseSignal(source=0, target=1, where=signals_of(CASE, "data"), skip=data_puts(CASE) if cached else 0)
    assert World(2, 6, faults=[lost], timeout_s=20.0).run(body)[1]
