"""Symmetric memory of an expert buffer, its signals, and the tables through which kernels reach them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..comm.group import Group
from ..comm.layout import STATE_WORDS, StateWord, TableWord
from ..comm.network import Network
from ..kernels.ep_geometry import Knobs
from ..kernels.ep_layout import EpLayout
from ..kernels.ep_parts import cut_words


class EpMemory:
    """What is registered for one generation of a buffer; recovery makes a new one. Collective.

    Args:
        group: the ranks.
        layout: of the symmetric allocation.
        network: how scale-out peers are reached.
        knobs: of the cut into parts.
        epoch: of the last call before the first.
        timeout_s: bound of the waits of a call.

    Attributes:
        symmetric: the allocation.
        table: int64, ``comm.layout.TableWord``, for kernels.
        ep_tables: int64, ``ep_layout.EpWord``, for kernels; one for each format of rows.
        num_programs: of a persistent grid beside what the network runs.
    """

    def __init__(
        self, group: Group, layout: EpLayout, network: Network, knobs: Knobs, epoch: int, timeout_s: float
    ) -> None:
        self._group, self._layout, self._timeout_s = group, layout, timeout_s
        self.symmetric = group.symmetric_empty(layout.num_bytes)
        cut = cut_words(layout.geometry, knobs)
        signals = [layout.data_signal(channel) for channel in range(layout.geometry.num_channels)]
        constants = torch.tensor(cut + signals, dtype=torch.int32)
        # Bases of the signals, state of a call, constants: kernels reach them by address.
        self._local = group.backend.local_zeros(8 * layout.num_signals + 4 * STATE_WORDS + 4 * constants.numel())
        bases = self._local.data_ptr()
        state = bases + 8 * layout.num_signals
        cut_address = state + 4 * STATE_WORDS
        tail = self._local[8 * layout.num_signals :].view(torch.int32)
        tail[StateWord.EPOCH] = epoch + 1
        tail[STATE_WORDS:].copy_(constants)
        self._state = tail[:STATE_WORDS]
        self._network = network if layout.num_scale_out > 1 else None
        network_state = self._network.attach(group, self.symmetric, layout.max_puts) if self._network else 0
        self.num_programs = _num_programs(group, self._network)
        self.table = self._make_table(state, network_state)
        places = (bases, cut_address, cut_address + 4 * len(cut))
        self.ep_tables = {
            form: torch.tensor(layout.words(form, *places), dtype=torch.int64, device=group.device)
            for form in layout.formats
        }

    def _make_table(self, state: int, network_state: int) -> torch.Tensor:
        group = self._group
        words = [0] * int(TableWord.PEERS)
        words[TableWord.RANK] = group.rank
        words[TableWord.WORLD_SIZE] = group.world_size
        words[TableWord.HEADERS] = self._layout.offset("headers")
        words[TableWord.STATE] = state
        words[TableWord.RECORD] = group.record_words.data_ptr()
        words[TableWord.CLOCK] = group.backend.clock_address
        words[TableWord.TIMEOUT_NS] = int(self._timeout_s * 1e9)
        words[TableWord.NETWORK] = network_state
        head = torch.tensor(words, dtype=torch.int64, device=group.device)
        return torch.cat([head, self.symmetric.table, group.control_table])

    def network_running(self) -> AbstractContextManager[None]:
        """Around the launches of a call."""
        return self._network.beside(self.table) if self._network else nullcontext()

    @property
    def bases(self) -> torch.Tensor:
        """int64 [num_signals], what this rank's signals held when the last call ended."""
        return self._local[: 8 * self._layout.num_signals].view(torch.int64)

    @property
    def epoch(self) -> int:
        """Of the last call, 0 before the first. Waits for the device, where a replayed graph advances it too."""
        return int(self._state[StateWord.EPOCH]) - 1

    def free(self) -> None:
        """Local; once no rank uses it any more."""
        self._group.backend.free(self.symmetric)


def _num_programs(group: Group, network: Network | None) -> int:
    """Programs of a call's kernels: what the network leaves, or, without one, two for each multiprocessor of a GPU,
    which have twice the loads in flight. They need not be resident together: a task waits for earlier ones alone."""
    if network is not None:
        return max(group.backend.num_programs - network.num_programs, 1)
    return group.backend.num_programs * (1 if group.backend.interpreted else 2)
