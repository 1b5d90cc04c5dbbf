"""Expert buffers under random schedules and an unordered network: results equal to an all-to-all, faults found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from tests.ep import bodies
from tests.ep.worlds import Case
from triton_overlap.errors import CommError, CommSignalError, RaceError, SimulationError
from triton_overlap.sim import LateBody, World

if not isinstance(tl.cdiv, InterpretedFunction):
    pytest.skip("the simulator needs Triton's interpreter", allow_module_level=True)

from tests.ep import campaign, faulty

#: Parts of two tokens in one sub-part or two, so that channels have several puts.
SMALL_PARTS = {"min_tokens_per_part": 1, "channels_per_sm": 1}


def run(case: Case, seed: int, network: str, calls: int = 2, **options: Any) -> None:
    seeds = tuple(range(seed, seed + calls))
    results = World(case.world_size, seed, **options).run(
        lambda group: bodies.round_trips(group, case, network, seeds), return_exceptions=True
    )
    for result in results:
        if result is not None:
            raise result


@pytest.mark.parametrize(
    "scale_out, scale_up, network",
    [(1, 1, "direct"), (1, 2, "direct"), (2, 1, "direct"), (2, 1, "simulated"), (2, 2, "simulated")],
)
@pytest.mark.parametrize("check_races", [True, pytest.param(False, marks=pytest.mark.long)])
def test_round_trips(scale_out: int, scale_up: int, network: str, check_races: bool) -> None:
    run(Case(scale_out, scale_up), 1, network, check_races=check_races)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, settings=SMALL_PARTS),
        Case(2, 1, masked=0.0, one_expert=True),
        Case(1, 2, tokens=(0, 1), topk=1),
        Case(2, 1, masked=1.0),
        Case(2, 1, hidden=48, topk=3, tokens=(1, 6), settings=SMALL_PARTS),
    ],
    ids=["small parts", "one expert", "no tokens", "all masked", "odd sizes"],
)
def test_routings(case: Case) -> None:
    run(case, 0, "simulated" if case.scale_out > 1 else "direct")


@pytest.mark.parametrize(
    "scale_out, scale_up, network",
    [(1, 2, "direct"), (2, 1, "simulated"), pytest.param(2, 2, "simulated", marks=pytest.mark.long)],
)
def test_partial_results_that_come_back_separate(scale_out: int, scale_up: int, network: str) -> None:
    case = Case(scale_out, scale_up, topk=3, max_tokens=5, tokens=(5, 3, 0), settings=SMALL_PARTS)
    World(case.world_size, 2).run(lambda group: bodies.separate(group, case, network))


@pytest.mark.parametrize("network", ["direct", "simulated_strong"])
def test_ordered_kernels(network: str) -> None:
    case = Case(2, 1, settings={**SMALL_PARTS, "kernel": "ordered"})
    run(case, 0, network)


def test_ordered_kernels_go_wrong_on_a_weaker_network_than_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_overlap.expert_buffer.buffer.check_requirements", lambda *arguments: None)
    case = replace(MANY_PUTS, settings={**MANY_PUTS.settings, "kernel": "ordered"})
    with pytest.raises((RaceError, CommSignalError)):
        run(case, 0, "simulated", faults=LATE)


def test_the_environment_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 1)
    monkeypatch.setenv("EP_HYBRID_KERNEL", "ordered")
    assert World(2).run(lambda group: bodies.make_buffer(group, case).kernel) == ["ordered"] * 2
    monkeypatch.setenv("EP_HYBRID_KERNEL", "eager")
    with pytest.raises(ValueError, match="EP_HYBRID_KERNEL must be"):
        World(2).run(lambda group: bodies.make_buffer(group, case))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("previous", [False, True])
def test_events_alone_order_a_call(previous: bool, beside: bool) -> None:
    case = Case(2, 1, max_tokens=3)
    World(2, 1).run_backends(lambda backend: bodies.events(backend, case, "simulated", previous, beside))


def test_a_forgotten_event_is_found() -> None:
    case = Case(1, 2, max_tokens=3)
    with pytest.raises(RaceError):
        World(2, 1).run_backends(lambda backend: bodies.events(backend, case, "direct", False, True, forgotten=True))


def test_fp8_rows_by_puts() -> None:
    """They have slots of their own length, between calls of other formats."""
    case = Case(2, 1, hidden=128, max_tokens=3, settings=SMALL_PARTS)
    World(2, 1).run(lambda group: bodies.matrix(group, case, "simulated", 2, True, 0))


def _cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        scale_out=st.sampled_from((1, 2)),
        scale_up=st.just(1),
        hidden=st.sampled_from((16, 32, 80)),
        topk=st.integers(1, 2),
        tokens=st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
        masked=st.sampled_from((0.0, 0.3, 1.0)),
        one_expert=st.booleans(),
        settings=st.fixed_dictionaries(
            {
                "min_tokens_per_part": st.sampled_from((1, 2, 15)),
                "num_sub_parts": st.integers(1, 3),
                "channels_per_sm": st.integers(1, 2),
            }
        ),
    )


@settings(max_examples=3)
@given(case=_cases(), seed=st.integers(0, 2**31 - 10))
def test_any_routing_and_schedule(case: Case, seed: int) -> None:
    run(case, seed, "simulated")


@pytest.mark.long
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("topology", campaign.SCHEDULES, ids=lambda topology: "{}x{}".format(*topology))
def test_campaign(topology: tuple[int, int]) -> None:
    """All schedules; ``python -m tests.ep.campaign`` runs them too, and keeps a summary."""
    for seed in range(campaign.SCHEDULES[topology]):
        campaign.run_schedule(topology, seed)


@pytest.mark.parametrize("kind", campaign.KINDS)
def test_a_sample_of_the_campaign(kind: str) -> None:
    seed = campaign.KINDS.index(kind)
    assert campaign.run_schedule((2, 1), seed) == kind


@pytest.mark.parametrize("topology", [(1, 2), (2, 2), (4, 1), (2, 4), (4, 2)], ids=lambda each: "{}x{}".format(*each))
def test_a_schedule_of_each_topology(topology: tuple[int, int]) -> None:
    campaign.run_schedule(topology, 0)


def test_a_hello_that_lands_after_the_next_one() -> None:
    """A peer that has heard of all ranks goes on to the next call, while its first hello is still under way."""
    assert campaign.run_schedule((2, 1), 394) == "one source stalled"


DATA = Path(__file__).parents[1] / "data"


def test_the_kept_summary_counts_every_schedule() -> None:
    kept = json.loads((DATA / "ep_campaign.json").read_text())
    assert kept["by_topology"] == {"{}x{}".format(*topology): count for topology, count in campaign.SCHEDULES.items()}
    assert kept["schedules"] == sum(campaign.SCHEDULES.values()) >= 2000
    assert set(kept["by_kind"]) == set(campaign.KINDS)
    assert kept["failures"] == 0


def test_the_kept_summary_found_every_planted_fault() -> None:
    kept = json.loads((DATA / "ep_campaign_planted.json").read_text())
    assert set(kept["planted"]) == set(faulty.FAULTS)
    assert all(1 <= schedules <= 200 for schedules in kept["planted"].values())


#: Few tokens, all to rank 0, and many puts that share a signal.
FAULT_CASE = Case(
    2, 1, max_tokens=4, topk=1, tokens=(4, 2), one_expert=True, settings={"num_sub_parts": 4, "channels_per_sm": 1}
)
#: Twice as many puts of one signal, for faults that need two of them to meet.
MANY_PUTS = replace(FAULT_CASE, max_tokens=8, tokens=(8,), settings={"num_sub_parts": 8, "channels_per_sm": 1})
#: What a network may do, and whoever trusts a header alone meets: one put of each rank announces itself long before its
#: bytes are there.
LATE = (LateBody(source=0, skip=1), LateBody(source=1, skip=2))


@pytest.mark.parametrize("check_races", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", faulty.FAULTS)
def test_a_planted_fault_is_found(fault: str, check_races: bool) -> None:
    case = MANY_PUTS if "headers" in fault else FAULT_CASE
    with faulty.planted(fault):
        for seed in range(12):
            try:
                run(case, seed, "simulated", calls=2, check_races=check_races, max_steps=50_000, faults=LATE)
            except (AssertionError, SimulationError, CommError):
                return
    pytest.fail(f"12 schedules did not show: {fault}")


def test_without_a_planted_fault_nothing_is_found() -> None:
    run(MANY_PUTS, 0, "simulated", faults=LATE)
