"""What the caller has set for tensors of its own does not reach those that ranks share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import triton_overlap as to
from tests.distributed import run_ranks
from triton_overlap.comm.group import Group
from triton_overlap.sim import World

W = torch.eye(32)


def _train(group: Group, buffer: to.UserBuffer) -> None:
    """A step with values and gradients that are known."""
    a = torch.full((4, 32), float(group.rank + 1), requires_grad=True)
    b = W.clone().requires_grad_()
    out = to.all_gather_matmul(a, b, buffer=buffer)
    rows = torch.arange(1, group.world_size + 1).float().repeat_interleave(4)
    torch.testing.assert_close(out, rows[:, None].expand(-1, 32))
    out.sum().backward()
    torch.testing.assert_close(a.grad, torch.full((4, 32), float(group.world_size)))
    torch.testing.assert_close(b.grad, torch.full((32, 32), float(rows.sum())))


def _on_another_default_device(group: Group) -> None:
    with torch.device("meta"):
        buffer = group.user_buffer(8 * group.world_size, 32, torch.float32)
        counted = group.user_buffer(8 * group.world_size, 32, torch.float32, device_count=True)
        assert torch.empty(1).is_meta
        out = to.all_gather(torch.ones(2, 32, device="cpu"), buffer=buffer)
        group.interrupted("a test")
        group.recover()
    assert out.shape == (2 * group.world_size, 32)
    assert out.device.type == "cpu"
    assert counted.epoch == 0
    _train(group, buffer)
    group.close()


def _in_inference_mode(group: Group) -> None:
    with torch.inference_mode():
        buffers = [group.user_buffer(8 * group.world_size, 32, torch.float32, device_count=on) for on in (False, True)]
        group.interrupted("a test")
        group.recover()
        assert torch.empty(1).is_inference()
    for buffer in buffers:
        for tensor in (buffer.memory.local, buffer.memory.table, buffer.local, buffer.table, group.record_words):
            assert not tensor.is_inference()
    _train(group, buffers[0])
    group.interrupted("a test")
    group.recover()
    _train(group, buffers[0])
    group.close()


def _meta_from_the_start() -> None:
    with torch.device("meta"):
        group = to.init_group(timeout_s=20)
    _on_another_default_device(group)


def _inference_from_the_start() -> None:
    with torch.inference_mode():
        group = to.init_group(timeout_s=20)
    _in_inference_mode(group)


@pytest.mark.parametrize("body", [_meta_from_the_start, _inference_from_the_start])
def test_on_rank_processes(body: Callable[[], None]) -> None:
    run_ranks(2, body)


@pytest.mark.parametrize("body", [_on_another_default_device, _in_inference_mode])
def test_in_the_simulator(body: Callable[[Group], None]) -> None:
    World(2, 0).run(body)
