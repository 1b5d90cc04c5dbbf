"""Networks that break their promises, and ranks that die: every surviving rank learns of it, in time, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.ep import bodies
from tests.ep.worlds import Case
from triton_overlap.comm.group import Group
from triton_overlap.errors import CommError, CommMismatchError, CommSignalError, CommTimeoutError, FailureRecord
from triton_overlap.expert_buffer.settings import Settings
from triton_overlap.kernels.ep_layout import EpLayout, EpWord
from triton_overlap.sim import KILLED, DoubleSignal, Fault, KillRank, LateBody, LoseSignal, TearHeader, World

if not isinstance(tl.cdiv, InterpretedFunction):
    pytest.skip("the simulator needs Triton's interpreter", allow_module_level=True)

#: Four puts of one token each that share a signal, and batches for both ranks.
CASE = Case(2, 1, max_tokens=4, tokens=(4, 3), masked=0.0, settings={"num_sub_parts": 4, "channels_per_sm": 1})
ORDERED = replace(CASE, settings={**CASE.settings, "kernel": "ordered"})
FOUR_RANKS = replace(CASE, scale_up=2, max_tokens=2, tokens=(2, 1))
TIMEOUT_S = 20.0
#: Calls until a fault must have shown, and after recovery.
CALLS = 4


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: calls that were right, the error, and whether the group worked again afterwards."""

    right: int
    error: CommError
    recovered: bool


def network_of(case: Case) -> str:
    return "simulated_strong" if case.settings.get("kernel") == "ordered" else "simulated"


def until_failure(group: Group, case: Case, combines: bool = True, seed: int = 0) -> Outcome:
    """Round trips, each right, until one fails; then the way back. A wrong result is an AssertionError."""
    buffer = bodies.make_buffer(group, case, network=network_of(case))
    right = 0
    try:
        while right < CALLS:
            bodies.round_trip(buffer, case, seed + right, combines=combines)
            right += 1
        raise AssertionError(f"{right} calls did not show it")
    except CommError as error:
        found = error
    try:
        group.recover()
        bodies.round_trip(buffer, case, seed + 50)
    except CommTimeoutError:
        return Outcome(right, found, recovered=False)
    return Outcome(right, found, recovered=True)


def layout_of(case: Case) -> EpLayout:
    settings: dict[str, Any] = dict(case.settings)
    return Settings.choose(
        world_size=case.world_size,
        num_max_tokens_per_rank=case.max_tokens,
        hidden=case.hidden,
        num_topk=case.topk,
        num_experts=case.experts,
        num_scale_up=case.scale_up,
        interpreted=True,
        **settings,
    ).layout()


#: Signals of a buffer, in the order of their places.
KINDS = ("hello", "push", "batch", "data", "tail", "arrival")


def signals_of(case: Case, kind: str) -> Callable[[int, int], bool]:
    """Whether a place in symmetric memory is a signal of this kind."""
    layout = layout_of(case)
    words = layout.words("rows", 0, 0, 0)
    starts = [words[EpWord[f"{name.upper()}_SIGNALS"]] for name in KINDS]
    ends = [*starts[1:], layout.offset("signals") + 8 * layout.num_signals]
    index = KINDS.index(kind)
    return lambda offset, num_bytes: num_bytes == 8 and starts[index] <= offset < ends[index]


def headers_of(case: Case) -> Callable[[int, int], bool]:
    """Whether a place in symmetric memory is where puts of a dispatch, or batches, begin."""
    layout = layout_of(case)
    start, end = layout.offset("incoming of rows"), layout.offset("staging of weights")
    return lambda offset, num_bytes: num_bytes == 8 and start <= offset < end


def outcomes(case: Case, seed: int, faults: list[Fault], combines: bool = True) -> list[Any]:
    world = World(case.world_size, seed, faults=faults, timeout_s=TIMEOUT_S)
    found = world.run(lambda group: until_failure(group, case, combines, seed), return_exceptions=True)
    # Waits of the failed call, of the next one on a rank that had not noticed, and of the recovery.
    assert world.time_ns < 10 * TIMEOUT_S * 1e9
    return found


def error_of_all(found: list[Any], *kinds: type[CommError]) -> list[FailureRecord]:
    """The records of the errors that every rank got, after which every rank went on."""
    records = []
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
        assert type(outcome.error) in kinds, outcome.error
        assert outcome.recovered
        assert outcome.error.record is not None
        records.append(outcome.error.record)
    return records


def over_seeds(*cases: tuple[Any, ...], seeds: int = 12) -> pytest.MarkDecorator:
    """Arguments ``seeds, case, kind``: one seed in every run of the tests, the others in long ones."""
    names = {id(CASE): "unordered", id(ORDERED): "ordered", id(FOUR_RANKS): "four ranks"}
    return pytest.mark.parametrize(
        "seeds, case, kind",
        [
            pytest.param(chosen, *case, id=f"{names[id(case[0])]}-{case[1]}-{len(chosen)}", marks=marks)
            for case in cases
            for chosen, marks in ((range(1), []), (range(1, seeds), [pytest.mark.long]))
        ],
    )


@over_seeds(
    (CASE, "hello"),
    (CASE, "data"),
    (CASE, "batch"),
    (CASE, "arrival"),
    (ORDERED, "tail"),
    (ORDERED, "push"),
    (ORDERED, "batch"),
    (FOUR_RANKS, "data"),
)
def test_a_lost_signal(seeds: range, case: Case, kind: str) -> None:
    for seed in seeds:
        lost = LoseSignal(source=0, where=signals_of(case, kind), skip=seed % 2)
        for record in error_of_all(outcomes(case, seed, [lost]), CommTimeoutError):
            assert record.kind == "timeout"
            assert record.timeout_s == TIMEOUT_S


def test_the_record_says_what_was_waited_for() -> None:
    def body(group: Group) -> FailureRecord | None:
        buffer = bodies.make_buffer(group, CASE, network="simulated", timeout_s=5.0)
        # Rank 1 waits its whole time; rank 0 has all it wants, and learns of it in its next call.
        for seed in range(2):
            try:
                bodies.round_trip(buffer, CASE, seed, combines=False)
            except CommTimeoutError as error:
                if group.rank == 1:
                    group.backend.barrier(1e6)
                return error.record
            group.backend.barrier(1e6)
        return None

    lost = LoseSignal(source=0, target=1, where=signals_of(CASE, "data"))
    first, second = World(2, 5, faults=[lost]).run(body)
    assert second.place == "parts of channel"
    assert (second.rank, second.peer, second.index) == (1, 0, 0)
    assert second.expected == "further sub-parts"
    assert second.timeout_s == 5.0
    assert second.seen == "the headers of 4 and the signals of 3"
    assert first == replace(second, reported_by=0)


@over_seeds((CASE, "with its signal"), (CASE, "without"), (ORDERED, "with its signal"), (ORDERED, "without"))
def test_a_header_whose_written_half_never_lands(seeds: range, case: Case, kind: str) -> None:
    """The rest of its put lands, and may signal: what a network must not do, and what the receiver must not believe."""
    for seed in seeds:
        faults: list[Fault] = [TearHeader(source=0, where=headers_of(case), lost=True, skip=seed % 4)]
        if kind == "without":
            signals = signals_of(case, "tail" if case is ORDERED else "data")
            faults.append(LoseSignal(source=0, where=signals, skip=seed % 4))
        error_of_all(outcomes(case, seed, faults, combines=False), CommTimeoutError)


@over_seeds((CASE, "lower"), (CASE, "upper"), (CASE, "body"), (ORDERED, "lower"), (ORDERED, "body"))
def test_a_header_far_from_the_rest_gives_the_right_result(seeds: range, case: Case, kind: str) -> None:
    """One half of it long after everything else, which no network may do that writes words whole; or the header long
    before everything else. A count that is complete does not depend on either."""
    for seed in seeds:
        late: Fault = LateBody(count=None, skip=seed % 2)
        if kind != "body":
            late = TearHeader(where=headers_of(case), first=kind, count=None, skip=seed % 3)
        world = World(case.world_size, seed, faults=[late], check_races=seed % 2 == 0)
        world.run(partial(bodies.round_trips, case=case, network=network_of(case), seeds=(seed, seed + 1)))


@over_seeds((CASE, "data"), (CASE, "batch"), (CASE, "hello"), (ORDERED, "tail"), (ORDERED, "batch"), seeds=24)
def test_a_signal_that_counts_twice_is_diagnosed(seeds: range, case: Case, kind: str) -> None:
    """With the checker it would be a race. Without, the call or the next one fails, and no result before is wrong."""
    for seed in seeds:
        double = DoubleSignal(source=0, where=signals_of(case, kind), skip=seed % 3)
        world = World(case.world_size, seed, faults=[double], timeout_s=TIMEOUT_S, check_races=False)
        found = world.run(partial(until_failure, case=case, seed=seed), return_exceptions=True)
        # A doubled hello of one call may be taken for the next one, which then finds the header of an earlier call.
        allowed = (CommSignalError, CommMismatchError) if kind == "hello" else (CommSignalError,)
        for record in error_of_all(found, *allowed):
            assert record.kind in ("surplus", "mismatch")


@over_seeds((CASE, "entry"), (CASE, "later"), (ORDERED, "later"), (FOUR_RANKS, "later"))
def test_a_dead_rank(seeds: range, case: Case, kind: str) -> None:
    for seed in seeds:
        turn = 60 + seed * 7 if kind == "entry" else 130 + 30 * seed
        found = outcomes(case, seed, [KillRank(1, turn=turn)])
        assert found.pop(1) is KILLED
        for outcome in found:
            assert type(outcome.error) is CommTimeoutError
            assert outcome.error.record is not None
            # Going on takes all ranks; that one is missing is said in time as well.
            assert not outcome.recovered
