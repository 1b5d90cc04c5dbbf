"""The cut into parts and sub-parts: reference values, properties, and the same numbers from the device functions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.ep.kernels import cut_kernel
from triton_overlap.kernels.ep_geometry import Geometry, Knobs, check_scale_out, plan, signals_of_context, spread
from triton_overlap.kernels.ep_parts import cut_words

CASES = json.loads((Path(__file__).parent.parent / "data" / "part_geometry.json").read_text())


def quiet_plan(**arguments: Any) -> Geometry:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(**arguments)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_reference_values(case: dict[str, Any]) -> None:
    arguments = {name: value for name, value in case.items() if name != "expect"}
    found = dataclasses.asdict(quiet_plan(**arguments))
    assert {name: found[name] for name in case["expect"]} == case["expect"]


def test_the_reference_file_is_whole() -> None:
    assert len(CASES) == 88


ARGUMENTS = st.fixed_dictionaries(
    {
        "max_tokens_per_rank": st.integers(1, 20000),
        "num_sms": st.integers(1, 64),
        "channels_per_sm": st.integers(1, 8),
        "num_contexts": st.integers(2, 17),
        "cached": st.booleans(),
        "min_tokens_per_part": st.integers(0, 40),
        "num_sub_parts": st.integers(1, 8),
        "min_sub_tokens": st.integers(0, 20),
        "arch_min_sub_tokens": st.sampled_from((1, 15)),
    }
)


def planned(arguments: dict[str, Any]) -> Geometry:
    try:
        return quiet_plan(**arguments)
    except ValueError:
        assume(False)
        raise


@given(arguments=ARGUMENTS)
def test_parts_cover_the_channel(arguments: dict[str, Any]) -> None:
    geometry = planned(arguments)
    assert len(geometry.part_sizes) == geometry.num_parts <= geometry.budget_parts <= 4
    assert geometry.num_channels * geometry.max_tokens_per_channel >= arguments["max_tokens_per_rank"]
    # Contiguous and disjoint by their starts; enough for M tokens; within the slots.
    starts = [geometry.part_start(part) for part in range(geometry.num_parts + 1)]
    assert [stop - start for start, stop in itertools.pairwise(starts)] == geometry.part_sizes
    assert min(geometry.part_sizes) >= 1
    assert geometry.max_tokens_per_channel <= starts[-1] <= geometry.slots_per_channel
    for size, sub_parts in zip(geometry.part_sizes, geometry.sub_part_sizes, strict=True):
        assert sum(sub_parts) == size
        assert 1 <= len(sub_parts) <= arguments["num_sub_parts"]
        assert max(sub_parts) - min(sub_parts) <= 1
        floor = max(arguments["min_sub_tokens"], arguments["arch_min_sub_tokens"])
        assert len(sub_parts) == 1 or min(sub_parts) >= floor


@given(arguments=ARGUMENTS)
def test_signals_are_disjoint_and_balanced(arguments: dict[str, Any]) -> None:
    geometry = planned(arguments)
    signals = [
        geometry.signal(channel, part) for channel in range(geometry.num_channels) for part in range(geometry.num_parts)
    ]
    assert len(set(signals)) == len(signals)
    assert all(0 <= context < geometry.data_contexts for context, _ in signals)
    assert all(0 <= signal < geometry.signals_per_context for _, signal in signals)
    loads = [0] * geometry.data_contexts
    for channel in range(geometry.num_channels):
        loads[geometry.context(channel)[0]] += 1
    assert max(loads) - min(loads) <= 1


@given(arguments=ARGUMENTS, data=st.data())
def test_puts(arguments: dict[str, Any], data: st.DataObject) -> None:
    geometry = planned(arguments)
    tokens = data.draw(st.integers(0, geometry.max_tokens_per_channel))
    puts = list(geometry.puts(tokens))
    assert sum(put.count for put in puts) == tokens
    assert [put.more for put in puts] == [True] * (len(puts) - 1) + [False]
    first = 0
    for put in puts:
        size = geometry.sub_part_sizes[put.part][put.sub_part]
        assert put.first == first
        assert put.count == size if put.more else put.count <= size
        first += size


@settings(max_examples=60)
@given(arguments=ARGUMENTS)
def test_device_functions_agree(arguments: dict[str, Any]) -> None:
    geometry = planned(arguments)
    knobs = Knobs(*(arguments[field.name] for field in dataclasses.fields(Knobs)))
    out = torch.full((geometry.num_parts, 32), -1, dtype=torch.int32)
    cut_kernel[(1,)](torch.tensor(cut_words(geometry, knobs), dtype=torch.int32), out)
    for part, (size, sub_parts) in enumerate(zip(geometry.part_sizes, geometry.sub_part_sizes, strict=True)):
        starts = list(itertools.accumulate(sub_parts, initial=0))
        expected = [geometry.part_start(part), size, len(sub_parts), *starts]
        assert out[part, : len(expected)].tolist() == expected


def test_fewer_channels_come_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="using 3"):
        assert plan(4096, 64, 4).channels_per_sm == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_contexts": 1}, "num_contexts must be 2 to 17"),
        ({"num_contexts": 18}, "num_contexts must be 2 to 17"),
        ({"num_sub_parts": 0}, "num_sub_parts must be 1 to 8"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank must be at least 1"),
        ({"num_sms": 256}, "256 multiprocessors need 26 signals"),
    ],
)
def test_errors(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_plan(**{"max_tokens_per_rank": 128, "num_sms": 12, "channels_per_sm": 4, **arguments})


def test_barrier_signals_bound_the_scale_out_ranks() -> None:
    assert signals_of_context(11) == 21
    check_scale_out(22, 11)
    with pytest.raises(ValueError, match="23 scale-out ranks need 22 barrier signals"):
        check_scale_out(23, 11)


def test_settings_come_from_arguments_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Knobs.choose() == Knobs(15, 2, 1, 1)
    assert Knobs.choose(capability=10) == Knobs(15, 2, 1, 15)
    monkeypatch.setenv("EP_MIN_TOKENS_PER_PART", "1")
    monkeypatch.setenv("EP_SM100_MIN_SUB_TOKENS", "7")
    assert Knobs.choose(num_sub_parts=4, capability=10) == Knobs(1, 4, 1, 7)
    monkeypatch.setenv("EP_NUM_SUB_PARTS", "two")
    with pytest.raises(ValueError, match="EP_NUM_SUB_PARTS must be an integer, got 'two'"):
        Knobs.choose()


def test_spread() -> None:
    assert spread(7, 3) == [3, 2, 2]
