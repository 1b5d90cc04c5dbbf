"""An expert buffer and what surrounds it: tensors in strange memory, recovery, default devices, its end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.ep import bodies
from tests.ep.worlds import Case, make_inputs
from triton_overlap.comm.group import Group
from triton_overlap.errors import ClosedError
from triton_overlap.sim import World

if not isinstance(tl.cdiv, InterpretedFunction):
    pytest.skip("the simulator needs Triton's interpreter", allow_module_level=True)


def strange_tensors(group: Group, strange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What holds the same values in another way gives the same result."""
    case = Case(2, 1, tokens=(6, 3), masked=0.0)
    buffer = bodies.make_buffer(group, case, network="simulated")
    mine = make_inputs(case, 1)[group.rank]
    expected, idx, weights, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, expand=True)
    assert isinstance(expected, torch.Tensor)
    assert weights is not None
    again = (strange(mine.x), strange(mine.topk_idx), strange(mine.topk_weights))
    found = buffer.dispatch(*again, expand=True)
    for left, right in zip(found[:3], (expected, idx, weights), strict=True):
        assert isinstance(left, torch.Tensor)
        bodies.exactly(left, right)
    bias = torch.randn_like(mine.x)
    right, _, _ = buffer.combine(expected, handle, weights, bias)
    left, _, _ = buffer.combine(strange(expected), handle, strange(weights), strange(bias))
    bodies.exactly(left, right)
    _, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    bodies.exactly(buffer.combine_weights(strange(weights), handle), buffer.combine_weights(weights, handle))


def behind_one_element(tensor: torch.Tensor) -> torch.Tensor:
    """At an address that is not on 16 bytes, nor on 8 where elements are shorter."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]


def negated_twice(tensor: torch.Tensor) -> torch.Tensor:
    """torch puts the second negation off."""
    found = torch._neg_view(-tensor)
    assert found.is_neg()
    return found


@pytest.mark.parametrize("strange", [behind_one_element, with_gaps, negated_twice])
def test_tensors_in_strange_memory(strange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    World(2, 3).run(partial(strange_tensors, strange=strange))


def test_tables_stay_where_they_are_when_a_group_recovers() -> None:
    """A captured graph has their addresses."""

    def body(group: Group) -> None:
        case = Case(2, 1, tokens=(6, 3))
        buffer = bodies.make_buffer(group, case, network="simulated")
        bodies.round_trip(buffer, case, 1)
        before = {form: table.data_ptr() for form, table in buffer.ep_tables.items()} | {"": buffer.table.data_ptr()}
        memory, epoch = buffer.memory.local.data_ptr(), buffer.epoch
        group.recover()
        after = {form: table.data_ptr() for form, table in buffer.ep_tables.items()} | {"": buffer.table.data_ptr()}
        assert after == before
        assert buffer.memory.local.data_ptr() != memory
        bodies.round_trip(buffer, case, 2)
        assert buffer.epoch == epoch + 2

    World(2, 3).run(body)


def test_a_buffer_heeds_no_default_device_and_no_inference_mode() -> None:
    def body(group: Group) -> None:
        case = Case(2, 1, tokens=(6, 3))
        with torch.inference_mode(), torch.device("meta"):
            buffer = bodies.make_buffer(group, case, network="simulated")
        bodies.round_trip(buffer, case, 1)
        group.recover()
        bodies.round_trip(buffer, case, 2)

    World(2, 3).run(body)


def test_a_closed_buffer_keeps_no_memory() -> None:
    def body(group: Group) -> None:
        buffer = bodies.make_buffer(group, Case(2, 1))
        memory = weakref.ref(buffer.memory)
        group.barrier()
        buffer.close()
        gc.collect()
        assert memory() is None
        with pytest.raises(ClosedError, match="is closed; make a new ExpertBuffer"):
            _ = buffer.table

    World(2, 3).run(body)


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"num_sms": 1.5}, TypeError, r"num_sms must be of type int, got 1\.5"),
        ({"kernel": "fast"}, ValueError, "kernel must be"),
        ({"network": "pigeon"}, ValueError, "network is"),
        ({"num_sub_parts": 3}, ValueError, "settings of an expert buffer must be the same on every rank"),
        ({"timeout_s": -1.0}, ValueError, "timeout_s must be positive seconds"),
        ({"allow_hybrid_mode": False}, ValueError, "need allow_hybrid_mode"),
    ],
)
def test_a_mistake_of_one_rank_is_an_error_of_all(arguments: dict[str, Any], kind: type, message: str) -> None:
    def body(group: Group) -> None:
        case = Case(2, 1, tokens=(6, 3))
        given = {"network": "simulated"} | (arguments if group.rank == 1 else {})
        with pytest.raises(kind, match=message) as caught:
            bodies.make_buffer(group, case, **given)
        assert "rank" in str(caught.value)
        bodies.round_trip(bodies.make_buffer(group, case, network="simulated"), case, 1)

    World(2, 3, timeout_s=20.0).run(body)
