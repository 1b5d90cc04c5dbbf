"""The mover of the ``simulated`` network, as one process runs it under the interpreter: puts first, then the mover."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.ep.kernels import put_kernel
from triton_overlap.comm.group import Group, init_group
from triton_overlap.comm.layout import TableWord
from triton_overlap.comm.networks.mover import count_call, launch_mover
from triton_overlap.comm.networks.ring import RingWord, prepare_ring, put, ring_bytes

if not isinstance(tl.cdiv, InterpretedFunction):
    pytest.skip("the mover would run beside the puts, and not after them", allow_module_level=True)

#: Words of each rank's memory: sources, then targets, then signals.
SOURCES, TARGETS, SIGNALS, SIZE = 0, 256, 512, 520


class Sandbox:
    """Rank 0 of three ranks whose memory is all in this process, and its ring."""

    def __init__(
        self, group: Group, depth: int, *, seed: int = 0, in_order: bool = False, timeout_s: float = 60
    ) -> None:
        self._in_order = in_order
        self.copies = torch.zeros(3, SIZE, dtype=torch.int64)
        self.copies[0, :TARGETS] = torch.arange(1, TARGETS + 1)
        ring = torch.zeros(ring_bytes(depth), dtype=torch.uint8)
        prepare_ring(ring, depth, strong=in_order, seed=seed)
        self.ring = ring.view(torch.int64)
        words = [0] * int(TableWord.PEERS)
        words[TableWord.CLOCK] = group.backend.clock_address
        words[TableWord.TIMEOUT_NS] = int(timeout_s * 1e9)
        words[TableWord.NETWORK] = ring.data_ptr()
        self.table = torch.tensor([*words, *(copy.data_ptr() for copy in self.copies)])

    def put(self, orders: list[tuple[int, int, int, int, int]]) -> None:
        """Peer, source, target, words and signal of each, in words."""
        given = torch.tensor(orders, dtype=torch.int64).reshape(-1, 5) * torch.tensor([1, 8, 8, 8, 8])
        kernel: Any = put_kernel
        kernel[(1,)](self.table, given, len(orders), PUT=put)

    def move(self) -> None:
        launch_mover(self.table, in_order=self._in_order)

    def call(self, orders: list[tuple[int, int, int, int, int]]) -> None:
        count_call(self.table, RingWord.OPENED)
        self.put(orders)
        count_call(self.table, RingWord.CLOSED)
        self.move()


@pytest.fixture
def group() -> Iterator[Group]:
    group = init_group(backend="shm")
    yield group
    group.close()


@pytest.mark.parametrize("in_order", [False, True])
def test_puts_arrive_whole_and_are_counted(group: Group, in_order: bool) -> None:
    """Of one word and of several chunks, more than a window and, over the calls, more than the ring has entries."""
    sandbox = Sandbox(group, depth=7, in_order=in_order)
    expected = torch.zeros(3, SIZE, dtype=torch.int64)
    first = 0
    for call in range(4):
        orders = []
        for index in range(6):
            words = (1, 16, 37, 2, 17, 5)[index] if call < 3 else 1
            peer, target, signal = 1 + index % 2, TARGETS + first % 180, SIGNALS + index % 3
            orders.append((peer, SOURCES + index, target, words, signal))
            expected[peer, target : target + words] = torch.arange(index + 1, index + 1 + words)
            expected[peer, signal] += 1
            first += words
        sandbox.call(orders)
        assert torch.equal(sandbox.copies[1:], expected[1:]), f"call {call}"
    assert sandbox.ring[RingWord.TAKEN] == sandbox.ring[RingWord.TICKETS] == 24
    assert sandbox.ring[RingWord.SIGNALLED] == (24 if in_order else 0)


def chained(group: Group, seed: int) -> torch.Tensor:
    """A put whose source is the target of the put before it, on this rank: what it brought shows their order."""
    sandbox = Sandbox(group, depth=4, seed=seed)
    sandbox.call([(0, SOURCES, TARGETS, 64, SIGNALS), (0, TARGETS, TARGETS + 100, 64, SIGNALS + 1)])
    assert sandbox.copies[0, SIGNALS : SIGNALS + 2].tolist() == [1, 1]
    return sandbox.copies[0, TARGETS + 100 : TARGETS + 164] != 0


def test_nothing_orders_the_chunks_of_two_puts(group: Group) -> None:
    later = [chained(group, seed) for seed in range(5)]
    assert torch.equal(later[0], chained(group, 0)), "the same seed and moments give the same order"
    assert len({tuple(found.tolist()) for found in later}) > 2
    assert any(0 < int(found.sum()) < 64 for found in later)


def moved_by_one(group: Group, seed: int) -> list[int]:
    """A put of a chunk to the place one word further: a word that another one of it has replaced was read later."""
    sandbox = Sandbox(group, depth=4, seed=seed)
    sandbox.call([(0, SOURCES, SOURCES + 1, 16, SIGNALS)])
    return [int(word) for word in sandbox.copies[0, 1:17]]


def test_nothing_orders_the_words_of_a_put(group: Group) -> None:
    found = [moved_by_one(group, seed) for seed in range(8)]
    assert all(words != list(range(1, 17)) for words in found)
    assert len({tuple(words) for words in found}) > 4
    # The first word lands before the others of its chunk, and after those of the first half.
    assert {words[1] == 1 for words in found} == {True, False}


def test_it_ends_with_the_call_and_without_puts(group: Group) -> None:
    sandbox = Sandbox(group, depth=4)
    sandbox.call([])
    sandbox.move()  # late: its call is closed
    assert sandbox.ring[RingWord.TAKEN] == 0


def test_it_gives_up_on_a_call_that_does_nothing(group: Group) -> None:
    sandbox = Sandbox(group, depth=4, timeout_s=0.2)
    count_call(sandbox.table, RingWord.OPENED)
    started = time.monotonic()
    sandbox.move()
    assert time.monotonic() - started > 0.2
    sandbox.put([(1, SOURCES, TARGETS, 4, SIGNALS)])
    count_call(sandbox.table, RingWord.CLOSED)
    sandbox.move()
    assert sandbox.copies[1, TARGETS : TARGETS + 4].tolist() == [1, 2, 3, 4]
