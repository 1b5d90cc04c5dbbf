"""Networks: what they promise, and that the simulator finds who counts on more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.ep.kernels import exchange_kernel
from triton_overlap.comm.group import Group
from triton_overlap.comm.network import NetworkProperties, check_requirements, create_network
from triton_overlap.errors import BackendError, CommTimeoutError, RaceError
from triton_overlap.sim import LoseSignal, World

if not isinstance(tl.cdiv, InterpretedFunction):
    pytest.skip("the simulator needs Triton's interpreter", allow_module_level=True)


def exchange(group: Group, name: str, fault: str = "", calls: int = 3) -> bool:
    """``calls`` exchanges of two ranks; True if each brought the peer's words."""
    memory = group.backend.symmetric_empty(8192, group.timeout_s)
    network = create_network(name)
    words = [0] * 16
    words[0], words[1] = group.rank, group.world_size
    words[13] = network.attach(group, memory, 4)
    table = torch.cat([torch.tensor(words), memory.table])
    right = True
    kernel: Any = exchange_kernel
    for call in range(1, calls + 1):
        size = 2 * call + 6
        x, expected = (torch.arange(size) + 1000 * (10 * call + rank) for rank in (group.rank, 1 - group.rank))
        out = torch.full((64,), -1)
        kernel[(1,)](table, x, out, call, size, PUT=network.put, FAULT=fault)
        right = right and torch.equal(out[:size], expected)
        # The next call stores where this one's was read.
        group.backend.synchronize()
        group.barrier()
    return right


@pytest.mark.parametrize("name", ["direct", "simulated"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("check_races", [True, False])
def test_puts_arrive(name: str, seed: int, check_races: bool) -> None:
    assert World(2, seed, check_races=check_races).run(lambda group: exchange(group, name)) == [True, True]


@pytest.mark.parametrize("fault", ["source rewritten", "first signal ignored", "second signal ignored"])
def test_the_checker_finds_who_counts_on_more(fault: str) -> None:
    with pytest.raises(RaceError):
        World(2, 0).run(lambda group: exchange(group, "simulated", fault))


@pytest.mark.parametrize("fault", ["source rewritten", "first signal ignored", "second signal ignored"])
def test_wrong_values_without_the_checker(fault: str) -> None:
    results = [
        World(2, seed, check_races=False).run(lambda group: exchange(group, "simulated", fault)) for seed in range(12)
    ]
    assert any(not all(right) for right in results)


def test_a_lost_signal_is_the_networks_too() -> None:
    lost = LoseSignal(source=0, target=1, where=lambda offset, num_bytes: offset == 4104)
    with pytest.raises(CommTimeoutError) as raised:  # of the host that waits for the stuck one
        World(2, 3, faults=[lost]).run(lambda group: exchange(group, "simulated"))
    assert "4104 saw 0" in "".join(raised.value.__notes__)  # type: ignore[attr-defined]


def test_what_a_network_does_not_declare_is_refused() -> None:
    network = create_network("simulated")
    check_requirements("unordered", NetworkProperties(), network)
    with pytest.raises(ValueError, match="ordered kernels need strong_signals, which the simulated network"):
        check_requirements("ordered", NetworkProperties(strong_signals=True), network)


def test_nvshmem_needs_memory_from_nvshmem() -> None:
    refusals = World(2).run(lambda group: _refusal(group, "nvshmem"))
    assert (
        refusals
        == [
            "the nvshmem network cannot run here: memory must come from NVSHMEM, and the backend is 'sim'; "
            'make the group with init_group(backend="nvshmem")'
        ]
        * 2
    )
    with pytest.raises(ValueError, match="ordered kernels need strong_signals, which the nvshmem network"):
        check_requirements("ordered", NetworkProperties(strong_signals=True), create_network("nvshmem"))


def _refusal(group: Group, name: str) -> str:
    with pytest.raises(BackendError) as error:
        create_network(name).attach(group, group.backend.symmetric_empty(8, group.timeout_s), 4)
    return str(error.value)


def test_unknown_network() -> None:
    with pytest.raises(ValueError, match="direct"):
        create_network("carrier pigeon")


def test_the_simulated_network_needs_the_simulator() -> None:
    class Elsewhere:
        name = "shm"

    class SomeGroup:
        backend = Elsewhere()
        device = torch.device("cpu")

    with pytest.raises(BackendError, match="needs the simulator or GPUs, and the backend is 'shm'"):
        create_network("simulated").attach(SomeGroup(), None, 4)  # type: ignore[arg-type]
