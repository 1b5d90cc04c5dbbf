"""The task queue of the fused reduce-scatter, walked in plain Python by the device function itself, interpreted."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_overlap.kernels import matmul_reduce_scatter
from triton_overlap.kernels.timeline import OWN_TILE, PEER_TILE, PUSH

_queue_entry = matmul_reduce_scatter._queue_entry


@triton.jit
def _entries_kernel(out_ptr, total, peer_tiles, delay):  # type: ignore[no-untyped-def]
    for task in range(total):
        kind, index = _queue_entry(task + 0 * total, peer_tiles, delay)
        tl.store(out_ptr + 2 * task, kind)
        tl.store(out_ptr + 2 * task + 1, index)


def _queue(peer_tiles: int, tiles: int, delay: int) -> list[tuple[int, int]]:
    total = 2 * peer_tiles + tiles
    out = torch.full((total, 2), -1, dtype=torch.int32)
    _entries_kernel[(1,)](out, total, peer_tiles, delay)
    return [(int(kind), int(index)) for kind, index in out]


def test_the_example_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_reduce_scatter, "PUSHES_PER_OWN_TILE", tl.constexpr(2))
    text = " ".join("P>O"[kind] + str(index) for kind, index in _queue(peer_tiles=3, tiles=3, delay=2))
    assert text == "P0 P1 >0 P2 >1 >2 O0 O1 O2"


@settings(max_examples=40)
@given(world_size=st.integers(1, 5), tiles=st.integers(1, 40), delay=st.integers(1, 50))
def test_every_task_once_and_in_an_order_that_ends(world_size: int, tiles: int, delay: int) -> None:
    peer_tiles = (world_size - 1) * tiles
    queue = _queue(peer_tiles, tiles, min(delay, tiles, peer_tiles))
    places = {entry: place for place, entry in enumerate(queue)}
    assert sorted(places) == (
        [(PEER_TILE.value, i) for i in range(peer_tiles)]
        + [(PUSH.value, i) for i in range(peer_tiles)]
        + [(OWN_TILE.value, i) for i in range(tiles)]
    )
    for push in range(peer_tiles):
        assert places[PEER_TILE.value, push] < places[PUSH.value, push], "a push waits for a tile before it"
    for own in range(tiles):
        for chunk in range(world_size - 1):
            # Every rank has the same queue: what own tile j waits for stands before own tile j at its sender.
            assert places[PUSH.value, chunk * tiles + own] < places[OWN_TILE.value, own]
