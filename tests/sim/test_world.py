"""What a world is made from, and whose error its run raises."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import triton_overlap as to
from triton_overlap.errors import CommTimeoutError
from triton_overlap.sim import DelayRank, Settings, World


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def test_a_world_keeps_its_settings() -> None:
    faults = [DelayRank(1, turns=3)]
    world = World(2, 5, faults=faults, num_programs=3, timeout_s=7.0, log=True)
    assert world.settings == Settings(world_size=2, seed=5, faults=faults, num_programs=3, timeout_s=7.0, log=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.settings.seed = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"world_size": 0}, ValueError, "world_size of a world must be positive, got 0"),
        ({"world_size": "2"}, TypeError, "world_size of a world must be a whole number, got '2'"),
        ({"seed": None}, TypeError, "seed of a world must be a whole number, got None"),
        ({"num_programs": 0}, ValueError, "num_programs of a world must be positive"),
        ({"max_steps": True}, TypeError, "max_steps of a world must be a whole number, got True"),
        ({"fibers": "rope"}, ValueError, "not 'rope'"),
        ({"faults": [DelayRank(2)]}, ValueError, "names rank 2; ranks are 0 to 1"),
        ({"faults": ["kill"]}, TypeError, "faults are Fault objects"),
        ({"speed": 2}, TypeError, "unexpected keyword argument 'speed'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        World(**{"world_size": 2, **settings})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("waits_for", ["close", "all_gather"])
def test_a_rank_that_raises_is_not_hidden_by_what_follows(seed: int, waits_for: str) -> None:
    """Rank 1 raises; where rank 0 waits for it in a call, closing rank 1's group expires too."""

    def body(group: to.Group) -> None:
        buffer = group.user_buffer(4, 16, torch.float32)
        if group.rank == 1:
            raise KeyError("rank 1's own")
        if waits_for == "all_gather":
            to.all_gather(torch.ones(2, 16), buffer=buffer)

    with pytest.raises(KeyError, match="rank 1's own") as caught:
        World(2, seed, timeout_s=5.0).run(body)
    assert "raised by rank 1" in _notes(caught.value)[-1 if waits_for == "close" else -2]


def test_closing_that_fails_is_a_note_of_the_error_before_it() -> None:
    """Rank 0 never comes to the barrier of rank 1's ``close``."""

    def body(group: to.Group) -> str:
        if group.rank == 1:
            raise KeyError("rank 1's own")
        group.close = lambda: None  # type: ignore[method-assign]
        return "left"

    with pytest.raises(KeyError, match="rank 1's own") as caught:
        World(2, 0, timeout_s=5.0).run(body)
    assert _notes(caught.value)[0].startswith("closing its group afterwards raised CommTimeoutError: rank 1 waited")
    results = World(2, 0, timeout_s=5.0).run(body, return_exceptions=True)
    assert results[0] == "left"
    assert isinstance(results[1], KeyError)


def test_closing_that_fails_alone_is_an_error() -> None:
    def body(group: to.Group) -> None:
        if group.rank == 0:
            group.close = lambda: None  # type: ignore[method-assign]

    with pytest.raises(CommTimeoutError, match="rank 1 waited 5 s for rank 0"):
        World(2, 0, timeout_s=5.0).run(body)
