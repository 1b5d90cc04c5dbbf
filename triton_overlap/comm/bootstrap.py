"""Collectives between hosts: how the ranks of a group meet, exchange addresses and agree on sizes.

Everything goes through the store of a ``torch.distributed`` process group, so it works for gloo and nccl groups and for
any subgroup of the world, contiguous or not, and a missing rank can be named, which no collective of torch does for all
its backends. A round trip takes about a millisecond: this is for construction, allocation and recovery, not for steps.

Protocol. Collective ``n`` of a bootstrap writes one key a rank, ``<instance>/<n>/<rank>``, and is complete on a rank
that has seen every rank's key. A rank writes its key of ``n`` only after it has left ``n - 1``, be it complete or
expired. So a rank that completes ``n`` knows that nobody will read a key of an earlier collective again, and deletes
its own: the store holds at most two keys a rank, plus those of collectives that expired and were not followed by a
complete one.

To begin (before the first collective) the ranks agree on an instance, and to begin anew after a failure (``rejoin``) on
a generation, whose keys nobody has written yet. Each counts its own attempts, writes its count with what it has last
seen of the others', and has met them once every rank has seen the counts as they are. What a rank left behind at an
attempt that came to nothing has seen an older count of somebody, so nobody takes it for a rank that is there. Counts
only grow, so their sum names the generation. So a bootstrap that some rank never made, or gave up, costs the ranks that
waited for it their time, and nothing that comes later.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch.distributed as dist

from triton_overlap.errors import BackendError, CommError, CommMismatchError, CommTimeoutError

#: The longest sleep between two looks at the store, in seconds. Waits begin with far shorter ones.
_LONGEST_SLEEP_S = 0.01
#: Bytes of a value in the store at most: the server of torch's TCPStore drops whoever sends it more than 8 MiB at once.
PIECE_BYTES = 4 * 1024 * 1024
#: Bytes that say, before the first piece, how many there are.
_COUNT_BYTES = 8


class Bootstrap(Protocol):
    """What a backend needs to meet its peers.

    Attributes:
        rank: this rank within the group, ``0 <= rank < world_size``.
        world_size: the number of ranks.
    """

    rank: int
    world_size: int

    def barrier(self, timeout_s: float) -> None:
        """Return once every rank has called it.

        Raises:
            CommTimeoutError: after ``timeout_s`` seconds; names exactly the ranks that did not come.
            CommMismatchError: ranks called different collectives.
        """

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        """Every rank's ``value`` (picklable), in rank order. Raises as :meth:`barrier` does."""

    def rejoin(self, timeout_s: float) -> int:
        """Begin anew; see :meth:`triton_overlap.comm.backend.Backend.rejoin`. Returns a number that all ranks agree on
        and no earlier call returned. Raises ``CommTimeoutError`` as :meth:`barrier` does."""


def ranks_in_words(ranks: list[int]) -> str:
    """Such as ``rank 1`` and ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class LocalBootstrap:
    """A group of one rank, without ``torch.distributed``."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._attempts = 0

    def barrier(self, timeout_s: float) -> None:
        """Return at once."""

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        """A list of one: a copy of ``value`` by way of pickle, as with more ranks."""
        return [pickle.loads(pickle.dumps(value))]

    def rejoin(self, timeout_s: float) -> int:
        """Nobody to meet."""
        self._attempts += 1
        return self._attempts


class StoreBootstrap:
    """A group over the store of a ``torch.distributed`` process group.

    Every rank of the process group constructs it, which is local, and then calls the same collectives in the same
    order. The first begins with a meeting of its own. A rank that is late for a later one, which has expired elsewhere,
    may still complete it: its peers' keys are still there.

    Args:
        process_group: the group; ranks here are ranks within it.

    Raises:
        BackendError: this process is no member of the group.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise BackendError(
                f"expected a torch.distributed ProcessGroup of which this process is a member, got {process_group!r}"
            )
        self.rank: int = process_group.rank()
        self.world_size: int = process_group.size()
        self._store = process_group.get_group_store()
        self._instance: str | None = None  # until the ranks have met

    def barrier(self, timeout_s: float) -> None:
        self._exchange("barrier", None, timeout_s)

    def all_gather_object(self, value: Any, timeout_s: float) -> list[Any]:
        return self._exchange("all_gather_object", value, timeout_s)

    def rejoin(self, timeout_s: float) -> int:
        generation = self._meet(f"{self._opened(timeout_s)}/rejoin", "rejoin", timeout_s)
        self._begin(generation)
        return generation

    def _opened(self, timeout_s: float) -> str:
        """What all keys of this bootstrap begin with. Collective the first time."""
        if self._instance is None:
            # Several bootstraps may live on one store, one after the other or side by side, and share these keys: their
            # numbers live exactly as long as the keys that they tell apart.
            self._instance = f"triton_overlap/{self._meet('triton_overlap/open', 'first meeting', timeout_s)}"
            self._begin(generation=0)
        return self._instance

    def _meet(self, place: str, what: str, timeout_s: float) -> int:
        """A number that all ranks agree on and no earlier meeting at the keys ``place`` returned. See the module's
        page."""
        keys = [f"{place}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + timeout_s
        sleep_s = 0.0001
        seen: tuple[int, ...] | None = None
        with self._naming_store_failures(what):
            attempt = self._store.add(f"{place}/attempts/{self.rank}", 1)
            while True:
                self._store.set(keys[self.rank], cast(str, pickle.dumps((attempt, seen))))
                entries = [self._entry(key) for key in keys]
                attempts = tuple(count for count, _ in entries)
                missing = [rank for rank, (_, theirs) in enumerate(entries) if theirs != attempts and rank != self.rank]
                if not missing and seen == attempts:
                    return sum(attempts)
                if missing and time.monotonic() >= deadline:
                    raise self._expired(what, timeout_s, missing)
                seen = attempts
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _entry(self, key: str) -> tuple[int, tuple[int, ...] | None]:
        """A rank's count of attempts, and the counts it has seen."""
        if not self._store.check([key]):
            return 0, None
        count, seen = pickle.loads(self._store.get(key))
        return count, seen

    def _begin(self, generation: int) -> None:
        # Keys of earlier generations stay: a late rank may still read them, and there are few.
        self._prefix = f"{self._instance}/{generation}"
        self._sequence = 0
        self._own_keys: list[list[str]] = []

    @contextlib.contextmanager
    def _naming_store_failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise CommError(
                f"{what} failed on rank {self.rank}: the store of the process group does not answer ({error}); the "
                "process that serves it has probably ended"
            ) from error

    def _expired(self, what: str, timeout_s: float, missing: list[int]) -> CommTimeoutError:
        return CommTimeoutError(
            f"{what}: rank {self.rank} of {self.world_size} waited {timeout_s:g} s for {ranks_in_words(missing)}"
        )

    def _exchange(self, kind: str, value: Any, timeout_s: float) -> list[Any]:
        payload = pickle.dumps((kind, value))
        self._opened(timeout_s)
        sequence = self._sequence
        keys = [f"{self._prefix}/{sequence}/{rank}" for rank in range(self.world_size)]
        # The number is used up even if the collective expires, or the next call here would meet this one elsewhere.
        self._sequence += 1
        with self._naming_store_failures(f"{kind} number {sequence}"):
            self._own_keys.append(self._set(keys[self.rank], payload))
            self._wait(kind, sequence, keys, timeout_s)
            payloads = [self._get(key, first) for key, first in zip(keys, self._store.multi_get(keys), strict=True)]
            # See the module's page: completing this collective proves that nobody reads the earlier ones again.
            for earlier in self._own_keys[:-1]:
                for key in earlier:
                    self._store.delete_key(key)
        del self._own_keys[:-1]
        entries = [pickle.loads(entry) for entry in payloads]
        kinds = [entry[0] for entry in entries]
        if len(set(kinds)) != 1:
            raise CommMismatchError(
                f"collective number {sequence}: ranks called different ones, in rank order: {', '.join(kinds)}"
            )
        return [entry[1] for entry in entries]

    def _set(self, key: str, payload: bytes) -> list[str]:
        """Store ``payload`` in pieces that the store takes, the one that others wait for last; returns the keys."""
        pieces = [payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES)]
        keys = [key, *(f"{key}/{number}" for number in range(1, len(pieces)))]
        pieces[0] = len(pieces).to_bytes(_COUNT_BYTES, "little") + pieces[0]
        for piece_key, piece in reversed(list(zip(keys, pieces, strict=True))):
            self._store.set(piece_key, cast(str, piece))  # declared for str, takes bytes
        return keys

    def _get(self, key: str, first: bytes) -> bytes:
        """What ``_set`` stored, from its first piece."""
        count = int.from_bytes(first[:_COUNT_BYTES], "little")
        return b"".join([first[_COUNT_BYTES:], *(self._store.get(f"{key}/{number}") for number in range(1, count))])

    def _wait(self, kind: str, sequence: int, keys: list[str], timeout_s: float) -> None:
        # Short looks rather than one long store.wait: a blocked wait holds the store's connection, which the process
        # group's own threads may need.
        deadline = time.monotonic() + timeout_s
        sleep_s = 0.0001
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if not missing:  # the last one came between the two looks
                    return
                raise self._expired(f"{kind} number {sequence}", timeout_s, missing)
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
