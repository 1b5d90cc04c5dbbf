"""Capacity and active prefix: every rule, what it says, and that a refused call changes nothing."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import triton_overlap as to
from tests.distributed import run_ranks
from triton_overlap.comm.gemm_configs import GEMM_NAMES
from triton_overlap.comm.rules import check_active_shape
from triton_overlap.errors import ActiveShapeError, ClosedError

CAPACITY = (64, 32)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((16,), "two-dimensional, got (16,)"),
        ((4, 4, 32), "two-dimensional, got (4, 4, 32)"),
        ("many", "two integers, got 'many'"),
        ((0, 32), "nonzero, got (0, 32)"),
        ((-4, 32), "nonzero, got (-4, 32)"),
        ((16, 0), "nonzero, got (16, 0)"),
        ((16, 31), "hidden size must stay 32, got (16, 31)"),
        ((68, 32), "within the capacity (64, 32), got (68, 32)"),
        ((18, 32), "divisible by the group size 4, got (18, 32)"),
    ],
)
def test_each_rule_names_given_and_allowed(shape: Any, says: str) -> None:
    with pytest.raises(ActiveShapeError) as caught:
        check_active_shape(shape, CAPACITY, world_size=4)
    assert says in str(caught.value)
    assert "[tokens, 32] with 0 < tokens <= 64 and tokens divisible by 4" in str(caught.value)


@pytest.mark.parametrize("tokens", [4, 20, 64])
def test_shapes_within_the_rules_pass(tokens: int) -> None:
    assert check_active_shape([tokens, 32], CAPACITY, world_size=4) == (tokens, 32)


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _capacity_and_prefix() -> None:
    group = to.init_group(timeout_s=20)
    buffer = group.user_buffer(*CAPACITY, torch.float32)
    assert buffer.active_shape == buffer.capacity_shape == CAPACITY
    assert group.user_buffer(*CAPACITY, torch.float32) is buffer
    assert to.user_buffer_by_handle(buffer.handle) is buffer

    pointer, allocations = buffer.memory.local.data_ptr(), to.symmetric_allocations()
    buffer.set_active_shape((16, 32))
    assert "divisible" in _raised(lambda: buffer.set_active_shape((17, 32)))
    assert buffer.active_shape == (16, 32), "a refused shape must leave the state as it was"
    buffer.validate((16, 32), torch.float32, group.device)
    assert "was set to (16, 32), got a tensor for (32, 32)" in _raised(
        lambda: buffer.validate((32, 32), torch.float32, group.device)
    )
    buffer.validate((32, 32), torch.float32, group.device, forward=False)  # backward keeps its own count
    buffer.set_active_shape(None)
    assert buffer.active_shape == CAPACITY
    assert "dtype must be the buffer's torch.float32, got torch.float16" in _raised(
        lambda: buffer.validate((16, 32), torch.float16, group.device)
    )
    assert (buffer.memory.local.data_ptr(), to.symmetric_allocations()) == (pointer, allocations)

    buffer.close()
    assert _raised(lambda: buffer.set_active_shape((16, 32))).startswith("ClosedError")
    assert _raised(lambda: to.user_buffer_by_handle("user_buffer_unknown")).startswith("ClosedError")
    again = group.user_buffer(*CAPACITY, torch.float32)
    assert again is not buffer
    group.close()
    group.close()
    with pytest.raises(ClosedError):
        group.user_buffer(*CAPACITY, torch.float16)


def _different_registrations(rank_arguments: list[tuple[int, int, str]]) -> str:
    group = to.init_group(timeout_s=20)
    max_tokens, hidden, dtype = rank_arguments[group.rank]
    before = _raised(lambda: group.user_buffer(max_tokens, hidden, getattr(torch, dtype)))
    good = group.user_buffer(8, 16, torch.bfloat16)  # the group is sound: a correct registration works
    assert good.registered_bytes == good.layout.num_bytes == good.memory.local.numel()
    group.close()
    return before


def test_capacity_and_prefix_on_two_ranks() -> None:
    run_ranks(2, _capacity_and_prefix)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            [(8, 16, "float32"), (16, 16, "float32")],
            "rank 0: (8, 16, torch.float32, False); rank 1: (16, 16, torch.float32, False)",
        ),
        ([(8, 16, "float32"), (8, 16, "float16")], "rank 1: (8, 16, torch.float16, False)"),
        ([(7, 16, "float32")] * 2, "max_tokens must be divisible by the group size 2, got 7; the next larger one is 8"),
        ([(8, 0, "float32")] * 2, "capacity must be positive, got [8, 0]"),
        (
            [(8, 16, "float64")] * 2,
            "dtype must be one of torch.bfloat16, torch.float16, torch.float32, got torch.float64",
        ),
    ],
)
def test_registrations_that_cannot_be(arguments: list[tuple[int, int, str]], says: str) -> None:
    for message in run_ranks(2, _different_registrations, arguments):
        assert message.startswith("ValueError")
        assert says in message


def _transformer_engine_names() -> None:
    with pytest.raises(RuntimeError, match="not initialised"):
        to.get_ub("qkv_fprop")
    to.initialize_ub([64, 32], 2, dtype=torch.float32)
    try:
        with pytest.raises(RuntimeError, match="initialised already"):
            to.initialize_ub([64, 32], 2)
        assert [to.get_ub(name).name for name in GEMM_NAMES] == list(GEMM_NAMES)
        with pytest.raises(ValueError, match="unknown user buffer 'qkv'; known: qkv_fprop"):
            to.get_ub("qkv")
        allocations = to.symmetric_allocations()
        to.set_ub_active_shape([48, 32])
        assert {to.get_ub(name).active_shape for name in GEMM_NAMES} == {(48, 32)}
        with pytest.raises(ActiveShapeError, match="within the capacity"):
            to.set_ub_active_shape([66, 32])
        assert {to.get_ub(name).active_shape for name in GEMM_NAMES} == {(48, 32)}
        to.get_ub("fc1_fprop").set_buffer_active_shape([2, 32])
        assert to.get_ub("fc1_fprop").active_shape == (2, 32)
        assert to.get_ub("fc2_fprop").active_shape == (48, 32)
        assert to.get_ub("fc1_fprop").capacity_shape == (64, 32)
        assert to.symmetric_allocations() == allocations

        # Operations take a communicator, and hold it to its shape.
        rank, weight = to.get_ub("fc2_fprop").group.rank, torch.eye(32)
        for name, tokens in (("fc1_fprop", 2), ("fc2_fprop", 48)):
            x = torch.arange(tokens * 32, dtype=torch.float32).view(tokens, 32)
            rows = tokens // 2
            out = to.all_gather_matmul(x[rank * rows :][:rows], weight, buffer=to.get_ub(name))
            torch.testing.assert_close(out, x)
        with pytest.raises(ActiveShapeError, match=r"set to \(48, 32\), got a tensor for \(2, 32\)"):
            to.all_gather_matmul(torch.ones(1, 32), weight, buffer=to.get_ub("fc2_fprop"))
        to.get_ub("fc2_fprop").set_buffer_active_shape(None)
        out = to.all_gather_matmul(torch.ones(1, 32), weight, buffer=to.get_ub("fc2_fprop"))
        torch.testing.assert_close(out, torch.ones(2, 32))
    finally:
        to.destroy_ub()
    to.destroy_ub()
    modes = to.UserBufferQuantizationMode
    rs_dgrad = {"qkv_dgrad": {"method": "ring_exchange"}}
    for arguments, error, words in (
        ({"quantization_modes": modes.FP8}, NotImplementedError, "quantization mode FP8 .*pass .*NONE"),
        ({"ub_cfgs": {"qkv_fprop": {"method": "bulk"}}}, ValueError, "'bulk' does not apply; methods that apply"),
        ({"ub_cfgs": {"qkv_fprop": {"method": "external"}}}, NotImplementedError, "another GEMM's communicator"),
        ({"tp_size": 3}, ValueError, "tp_size must be the group's size 2, got 3"),
        # TransformerEngine has an unrelated ValueError where two modes meet a dgrad that is not bulk.
        ({"quantization_modes": [modes.NONE, modes.FP8], "ub_cfgs": [rs_dgrad] * 2}, NotImplementedError, "mode FP8"),
    ):
        with pytest.raises(error, match=words):
            to.initialize_ub(**{"shape": [64, 32], "tp_size": 2, **arguments})  # type: ignore[arg-type]
        to.destroy_ub()
    # One mode, given in any way, is the only one there is.
    for quantization in (modes.NONE, [modes.NONE]):
        to.initialize_ub([64, 32], 2, quantization, ub_cfgs=[rs_dgrad])
        assert to.get_ub("qkv_dgrad").config.method == "ring_exchange"
        assert "qkv_dgrad, method ring_exchange" in repr(to.get_ub("qkv_dgrad"))
        to.destroy_ub()


def _several_sets() -> None:
    """A set of communicators for each group: they share nothing, and what is not said clearly is an error."""
    groups = [to.init_group(timeout_s=20) for _ in range(2)]
    to.initialize_ub([64, 32], 2, group=groups[0])
    assert to.get_ub("fc1_fprop").group is groups[0]
    to.initialize_ub([32, 16], 2, ub_cfgs={"fc1_fprop": {"method": "fused"}}, group=groups[1])
    with pytest.raises(RuntimeError, match="initialised already"):
        to.initialize_ub([32, 16], 2, group=groups[1])
    for call in (lambda: to.get_ub("fc1_fprop"), lambda: to.set_ub_active_shape([4, 32])):
        with pytest.raises(ValueError, match="2 groups have user buffers; say which"):
            call()
    assert [to.get_ub("fc1_fprop", group=group).config.method for group in groups] == ["ring_exchange", "fused"]
    to.set_ub_active_shape([8, 16], group=groups[1])
    assert [to.get_ub("fc1_fprop", group=group).active_shape for group in groups] == [(64, 32), (8, 16)]

    to.initialize_ub([16, 8], 2)  # with a group of its own, which functions without group= mean from now on
    own = to.get_ub("fc1_fprop").group
    assert own not in groups
    communicator = to.get_ub("fc1_fprop")
    assert copy.deepcopy(communicator) is communicator
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(communicator)
    to.destroy_ub(group=own)
    assert own.closed
    groups[1].close()
    assert to.get_ub("fc1_fprop").group is groups[0], "a closed group has no user buffers"
    with pytest.raises(RuntimeError, match=r"not initialised; .*with group="):
        to.get_ub("fc1_fprop", group=groups[1])
    to.destroy_ub()
    assert not groups[0].closed
    with pytest.raises(RuntimeError, match="not initialised"):
        to.get_ub("fc1_fprop")

    cfgs = {"fc1_fprop": {"num_sm": 1 + groups[0].rank}}
    with pytest.raises(ValueError, match=r"ub_cfgs must be the same on every rank, .*num_sm=1.*rank 1: .*num_sm=2"):
        to.initialize_ub([64, 32], 2, ub_cfgs=cfgs, group=groups[0])
    groups[0].close()


def test_a_set_of_communicators_for_each_group() -> None:
    run_ranks(2, _several_sets)


def test_transformer_engine_names_on_two_ranks() -> None:
    run_ranks(2, _transformer_engine_names)


def _wrong_arguments() -> None:
    """Each on rank 1 alone, in turn with what would be right: an error of both ranks, at once, which names rank 1."""
    group: Any = to.init_group(timeout_s=20)
    library: Any = to  # no type checker lets these through
    init = functools.partial(library.initialize_ub, group=group)
    shape = (64, 32)
    wrong: list[tuple[type[Exception], Callable[[Any], object], Any, Any, str]] = [
        (TypeError, lambda n: group.user_buffer(n, 24), 64, "64", "user_buffer: max_tokens must be an int, got '64'"),
        (TypeError, lambda n: group.user_buffer(64, n), 24, 24.0, "user_buffer: hidden must be an int, got 24.0"),
        (TypeError, lambda n: group.user_buffer(n, 24), 64, [64], "user_buffer: max_tokens must be an int, got [64]"),
        (TypeError, lambda n: group.user_buffer(64, n), 24, True, "user_buffer: hidden must be an int, got True"),
        (
            TypeError,
            lambda dtype: group.user_buffer(64, 24, dtype),
            torch.float32,
            "float32",
            "dtype must be a torch.dtype, got 'float32'; allowed: torch.b",
        ),
        (
            TypeError,
            lambda on: group.user_buffer(64, 24, device_count=on),
            True,
            1,
            "device_count must be True or False, got 1",
        ),
        (ValueError, lambda n: group.user_buffer(n, 24), 64, 63, "divisible by the group size 2, got 63; the next la"),
        (ValueError, lambda n: group.user_buffer(n, 24), 64, 2**62, f"at most 2147483647, since .*got {2**62}; give"),
        (ValueError, lambda n: group.user_buffer(64, n), 24, 2**62, f"hidden must be at most .*got {2**62}; give"),
        (
            ValueError,
            lambda n: group.user_buffer(n, n),
            64,
            2**30,
            rf"at most {2**47} bytes, got \d+ for .{2**30}, {2**30}. in torch.bfloat16; give",
        ),
        (
            TypeError,
            lambda given: init(given, 2),
            shape,
            64,
            r"shape must be two integers, .max_tokens, hidden., got 64",
        ),
        (TypeError, lambda given: init(given, 2), shape, ("a", 32), "initialize_ub: shape must be two integers"),
        (TypeError, lambda given: init(given, 2), shape, (64.0, 32), "initialize_ub: shape must be two integers"),
        (ValueError, lambda given: init(given, 2), shape, (64, 32, 1), r"two integers.*got \[64, 32, 1\]"),
        (ValueError, lambda given: init(given, 2), shape, (2**62, 32), "max_tokens must be at most"),
        (TypeError, lambda size: init(shape, size), 2, "2", "initialize_ub: tp_size must be an int, got '2'"),
        (ValueError, lambda size: init(shape, size), 2, 3, "tp_size must be the group's size 2, got 3"),
        (TypeError, lambda given: init(shape, 2, given), None, 8, "must be UserBufferQuantizationMode.NONE, or a list"),
        (
            NotImplementedError,
            lambda given: init(shape, 2, given),
            None,
            to.UserBufferQuantizationMode.FP8,
            "quantization mode FP8 is not supported",
        ),
        (
            TypeError,
            lambda dtype: init(shape, 2, dtype=dtype),
            torch.float32,
            "bf16",
            "dtype must be a torch.dtype, got",
        ),
        (TypeError, lambda cfgs: init(shape, 2, ub_cfgs=cfgs), None, 3, "ub_cfgs must be None or a mapping, got 3"),
        (ValueError, lambda cfgs: init(shape, 2, ub_cfgs=cfgs), None, {"x": {}}, "unknown GEMM 'x'; known"),
    ]
    for kind, call, right, given, says in wrong:
        began = time.monotonic()
        with pytest.raises(kind, match=says.replace("[64]", r"\[64\]")) as caught:
            call(given if group.rank == 1 else right)
        assert type(caught.value) is kind
        assert str(caught.value).startswith("on rank 1: ")
        assert time.monotonic() - began < 10
        with pytest.raises(RuntimeError, match="not initialised"):
            to.get_ub("qkv_fprop")
    # With a group of its own, which is closed again.
    for given in (3, 4):
        with pytest.raises(ValueError, match=rf"tp_size must be .*got {given}"):
            library.initialize_ub(shape, given if group.rank == 1 else 2)
    assert group.broken is None
    buffer = group.user_buffer(*CAPACITY, torch.float32)
    for alone, says in (
        (lambda: library.user_buffer_by_handle(None), "handle must be a str, such as buffer.handle, got None"),
        (lambda: library.user_buffer_by_handle([]), "handle must be a str, such as buffer.handle, got []"),
        (lambda: init(CAPACITY, 2, group="tp"), "group must be a Group from init_group, or None, got 'tp'"),
        # Equal to one that is there, which is no meeting of ranks.
        (lambda: group.user_buffer(64.0, 32, torch.float32), "user_buffer: max_tokens must be an int, got 64.0"),
    ):
        with pytest.raises(TypeError) as local:
            alone()
        assert says in str(local.value)
    for active in (3, "ab"):
        assert "active shape must be two integers" in _raised(functools.partial(buffer.set_active_shape, active))
    assert buffer.active_shape == CAPACITY
    assert group.user_buffer(*CAPACITY, torch.float32) is buffer
    library.initialize_ub(CAPACITY, 2, group=group)
    assert "unknown user buffer []" in _raised(lambda: library.get_ub([]))
    to.destroy_ub()
    group.close()


def test_a_wrong_argument_of_one_rank_is_an_error_of_all() -> None:
    run_ranks(2, _wrong_arguments)


def _nobody_to_tell() -> str:
    """The others do not come: what was wrong here is in the error all the same."""
    group: Any = to.init_group(timeout_s=2)
    message = ""
    if group.rank == 1:
        with pytest.raises(to.CommTimeoutError) as caught:
            group.user_buffer("64", 32)
        message = str(caught.value)
    dist.barrier()
    group.recover()
    group.close()
    return message


def test_a_wrong_argument_that_nobody_hears_of() -> None:
    assert "for rank 0, to tell them: user_buffer: max_tokens must be an int" in run_ranks(2, _nobody_to_tell)[1]


def _backward_after_destroy() -> list[str]:
    """Whoever still holds the communicator, and who does not: the ranks end alike, and at once."""
    messages = []
    for name in ("fc1_fprop", "fc2_fprop"):
        to.initialize_ub(CAPACITY, 2, dtype=torch.float32)
        communicator: Any = to.get_ub(name)
        x = torch.ones(4, 32, requires_grad=True)
        function: Any = to.all_gather_matmul if name == "fc1_fprop" else to.matmul_reduce_scatter
        out = function(x, torch.eye(32, requires_grad=True), buffer=communicator)
        rank = communicator.group.rank
        if rank == 1:
            del communicator
        to.destroy_ub()
        gc.collect()
        began = time.monotonic()
        with pytest.raises(ClosedError) as caught:
            out.sum().backward()
        assert time.monotonic() - began < 5
        messages.append(str(caught.value))
        if rank == 0:
            with pytest.raises(ClosedError, match=r"register it with group\.user_buffer or initialize_ub"):
                function(x, torch.eye(32), buffer=communicator)
    return messages


def test_backward_after_the_buffers_were_destroyed() -> None:
    for messages in run_ranks(2, _backward_after_destroy):
        for message in messages:
            assert message.startswith("user_buffer_")
            assert "this backward pass runs after destroy_ub()" in message


def _backward_on_a_group_that_stays() -> None:
    """The group keeps its buffers, and so the backward pass works, on ranks that hold the communicator or not."""
    group = to.init_group(timeout_s=20)
    to.initialize_ub(CAPACITY, 2, dtype=torch.float32, group=group)
    communicator = to.get_ub("fc1_fprop")
    communicator.set_buffer_active_shape((8, 32))
    a = torch.ones(4, 32, requires_grad=True)
    out = to.all_gather_matmul(a, torch.eye(32), buffer=communicator)
    if group.rank == 1:
        del communicator
    to.destroy_ub(group=group)
    gc.collect()
    out.sum().backward()
    torch.testing.assert_close(a.grad, torch.full((4, 32), 2.0))
    group.close()


def test_backward_after_communicators_are_gone() -> None:
    run_ranks(2, _backward_on_a_group_that_stays)
