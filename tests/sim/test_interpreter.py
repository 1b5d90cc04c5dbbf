"""The changes to Triton's interpreter, and hooks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as stock

from tests.sim import kernels as k
from triton_overlap.comm import interpreter
from triton_overlap.comm.interpreter import SpinYield
from triton_overlap.comm.interpreter_hooks import AtomicAccess, KernelLaunch
from triton_overlap.errors import BackendError


class Recorder(SpinYield):
    """Hooks that run everything in order and note what they were asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        self.calls.append(("load", np.size(addresses), dtype))
        return super().load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, asynchronous: bool) -> None:
        self.calls.append(("store", np.size(addresses), asynchronous))
        super().store(addresses, values, mask, asynchronous)

    def atomic(self, access: AtomicAccess, perform: Any) -> Any:
        self.calls.append(access)
        return super().atomic(access, perform)

    def launch(self, launch: KernelLaunch) -> None:
        self.calls.append(launch)
        super().launch(launch)


@pytest.fixture
def recorder() -> Any:
    hooks = Recorder()
    interpreter.install(hooks)
    yield hooks
    interpreter.uninstall(hooks)


def test_hooks_see_launches_loads_and_stores(recorder: Recorder) -> None:
    x, out = torch.arange(8.0), torch.empty(8)
    k.scale_kernel[(2,)](x, out, 2.0, 8, BLOCK=4, num_warps=2)
    assert torch.equal(out, 2 * x)
    launch = recorder.calls[0]
    assert (launch.name, launch.grid) == ("scale_kernel", (2, 1, 1))
    assert [name for name, _ in launch.tensors] == ["x_ptr", "out_ptr"]
    assert recorder.calls[1:] == [("load", 4, np.dtype(np.float32)), ("store", 4, False)] * 2


def test_hooks_see_the_meaning_of_an_atomic(recorder: Recorder) -> None:
    state, out = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    k.two_programs_kernel[(2,)](state, out, SEM="acq_rel", SCOPE="gpu", BARRIER=True)
    first, second = [call for call in recorder.calls if isinstance(call, AtomicAccess)]
    for access in (first, second):
        assert (access.op, access.acquire, access.release, access.scope) == ("add", True, True, "gpu")
        assert access.addresses.tolist() == [state.data_ptr()]
        assert access.values.tolist() == [1]
        assert not access.only_reads
        assert not access.block
    assert int(out) == 21


def test_adding_zero_only_reads(recorder: Recorder) -> None:
    k.peek_kernel[(2,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), ATOMIC=True)
    accesses = [call for call in recorder.calls if isinstance(call, AtomicAccess)]
    assert [access.only_reads for access in accesses] == [False, True]


def test_only_one_set_of_hooks_at_a_time(recorder: Recorder) -> None:
    with pytest.raises(BackendError, match="Recorder"):
        interpreter.install(SpinYield())
    interpreter.uninstall(SpinYield())  # not the installed one: no effect
    x = torch.zeros(4)
    k.fill_kernel[(1,)](x, 1.0, 4, BLOCK=4)
    assert recorder.calls


def test_hooks_go_before_those_of_spinning_processes() -> None:
    resting = interpreter.yield_on_spin()
    try:
        assert interpreter.yield_on_spin() is resting
        hooks = Recorder()
        interpreter.install(hooks)
        k.fill_kernel[(1,)](torch.zeros(4), 1.0, 4, BLOCK=4)
        interpreter.uninstall(hooks)
        count = len(hooks.calls)
        k.fill_kernel[(1,)](torch.zeros(4), 1.0, 4, BLOCK=4)
        assert len(hooks.calls) == count > 0
    finally:
        interpreter.uninstall(resting)


def test_a_vain_poll_gives_the_processor_away(monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[int] = []
    sleeps: list[float] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    monkeypatch.setattr(time, "sleep", sleeps.append)
    hooks = SpinYield()

    def access(value: int) -> AtomicAccess:
        word = np.array([value], dtype=np.int32)
        return AtomicAccess("add", np.zeros(1, np.uint64), word, word.dtype, True, False, "sys", False)

    assert [hooks.atomic(access(0), lambda: 7) for _ in range(100)] == [7] * 100
    assert len(yields) == 63
    assert len(sleeps) == 36
    hooks.atomic(access(1), lambda: None)
    hooks.atomic(access(0), lambda: None)  # the first poll after some progress costs nothing
    assert (len(yields), len(sleeps)) == (63, 36)


def test_the_language_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.prepare()
    k.fill_kernel[(1,)](torch.zeros(4), 1.0, 4, BLOCK=4)
    replaced = tl.load
    calls: list[Any] = []
    monkeypatch.setattr(interpreter, "_stock_patch_lang", calls.append)
    k.fill_kernel[(1,)](torch.zeros(4), 1.0, 4, BLOCK=4)
    assert tl.load is replaced
    assert not calls


def test_dtypes_are_those_of_the_stock_interpreter() -> None:
    interpreter.prepare()
    for dtype in (tl.int1, tl.int8, tl.uint16, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64):
        for wrapped in (dtype, tl.block_type(dtype, [4])):
            assert stock._get_np_dtype(wrapped) == interpreter._stock_np_dtype(wrapped)
    for pointer in (tl.pointer_type(tl.float32), tl.block_type(tl.pointer_type(tl.int8), [2])):
        assert stock._get_np_dtype(pointer) == np.dtype(np.uint64)


def test_an_error_in_a_program_is_an_interpreter_error_with_its_cause() -> None:
    interpreter.prepare()
    with pytest.raises(interpreter.InterpreterError, match="deliberate") as caught:
        k.failing_kernel[(1,)](torch.zeros(1))
    assert isinstance(caught.value.__cause__, AssertionError)


def test_a_grid_may_be_a_function_and_has_at_most_three_extents() -> None:
    interpreter.prepare()
    out = torch.zeros(8)
    k.fill_kernel[lambda arguments: (2,)](out, 1.0, 8, BLOCK=4)
    assert (out == 1).all()
    with pytest.raises(ValueError, match="one to three extents"):
        k.fill_kernel[(1, 1, 1, 1)](out, 1.0, 8, BLOCK=4)


def test_without_the_interpreter_the_remedy_is_named() -> None:
    code = """
from triton_overlap.comm import interpreter
from triton_overlap.errors import BackendError
try:
    interpreter.prepare()
except BackendError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert "set TRITON_INTERPRET=1 in the environment before triton is first imported" in done.stdout
