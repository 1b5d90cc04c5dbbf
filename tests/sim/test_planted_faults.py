"""Each classic fault of a signal protocol is found, and the protocol without faults passes."""

from __future__ import annotations

import pytest

from tests.sim.exchange import gather_repeatedly
from triton_overlap.errors import DeadlockError, RaceError, SimulationError
from triton_overlap.sim import World

FAULTS = {
    "flag_first": RaceError,  # the flag is written before the data
    "no_release": RaceError,  # the flag is written without release
    "no_acquire": RaceError,  # the flag is read without acquire
    "gpu_scope": RaceError,  # released and acquired on the device only
    "any_epoch": RaceError,  # a flag of an earlier epoch is accepted
    "no_parity": RaceError,  # one slot for all epochs
    "no_barrier": RaceError,  # no debug_barrier between the block's stores and the release
    "not_resident": DeadlockError,  # a wait for a program that need not have started
}
#: Faults that the late stores and loads show as wrong results, without the checker.
SHOWN = ["flag_first", "no_release", "no_acquire", "any_epoch", "no_parity", "no_barrier"]


def first_failure(world_size: int, fault: str, seeds: range, **options: bool) -> tuple[int, SimulationError | None]:
    """The first seed that shows the fault, and what the simulator reported, if it reported it."""
    for seed in seeds:
        try:
            results = World(world_size, seed, **options).run_backends(lambda backend: gather_repeatedly(backend, fault))
        except SimulationError as error:
            return seed, error
        if not all(all(right) for right in results):
            return seed, None
    return -1, None


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_reports_a_planted_fault(fault: str) -> None:
    seed, error = first_failure(2, fault, range(200))
    assert type(error) is FAULTS[fault]
    assert seed >= 0


@pytest.mark.parametrize("fault", SHOWN)
def test_a_planted_fault_gives_wrong_results_without_the_checker(fault: str) -> None:
    seed, _ = first_failure(3 if fault == "no_parity" else 2, fault, range(200), check_races=False)
    assert seed >= 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("check_races", [True, False])
def test_the_protocol_without_faults_passes(world_size: int, check_races: bool) -> None:
    assert first_failure(world_size, "", range(12 // world_size), check_races=check_races) == (-1, None)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("check_races", [True, False])
def test_the_protocol_without_faults_passes_many_seeds(world_size: int, check_races: bool) -> None:
    assert first_failure(world_size, "", range(100), check_races=check_races) == (-1, None)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_most_seeds_show_a_planted_fault(world_size: int, fault: str) -> None:
    shown = sum(first_failure(world_size, fault, range(seed, seed + 1))[0] >= 0 for seed in range(40))
    assert shown >= 20
