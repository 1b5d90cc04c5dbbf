"""Symmetric memory of an expert buffer, its signals, and the tables through which kernels reach them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..comm.backend import SymmetricMemory
from ..comm.group import Group
from ..comm.layout import STATE_WORDS, StateWord, TableWord
from ..comm.network import Network
from ..kernels.ep_geometry import Knobs
from ..kernels.ep_layout import EpLayout
from ..kernels.ep_parts import cut_words


class EpMemory:
    """What a buffer has registered. Construction is collective.

    Args:
        group: the ranks.
        layout: of the symmetric allocation.
        network: how scale-out peers are reached.
        knobs: of the cut into parts.
        timeout_s: bound of the waits of a call.

    Attributes:
        symmetric: the allocation.
        table: int64, ``comm.layout.TableWord``, for kernels.
        ep_tables: int64, ``ep_layout.EpWord``, for kernels; one for each format of rows.
        num_programs: of a persistent grid beside what the network runs.
    """

    # Whoever builds a model may be in inference mode, and recover while training: tensors made in it could not change.
    @torch.inference_mode(False)
    def __init__(self, group: Group, layout: EpLayout, network: Network, knobs: Knobs, timeout_s: float) -> None:
        self._group, self._layout, self._timeout_s = group, layout, timeout_s
        self._network = network if layout.num_scale_out > 1 else None
        cut = cut_words(layout.geometry, knobs)
        signals = [layout.data_signal(channel) for channel in range(layout.geometry.num_channels)]
        constants = torch.tensor(cut + signals, dtype=torch.int32, device="cpu")
        # Bases of the signals, state of a call, constants: kernels reach them by address.
        self._local = group.backend.local_zeros(8 * layout.num_signals + 4 * STATE_WORDS + 4 * constants.numel())
        tail = self._local[8 * layout.num_signals :].view(torch.int32)
        self._state, self._constants = tail[:STATE_WORDS], tail[STATE_WORDS:]
        self._constants.copy_(constants)
        places = (self.bases.data_ptr(), self._constants.data_ptr(), self._constants.data_ptr() + 4 * len(cut))
        self.ep_tables = {
            form: torch.tensor(layout.words(form, *places), dtype=torch.int64, device=group.device)
            for form in layout.formats
        }
        self.symmetric, self.table = self._register(epoch=0)
        self.num_programs = _num_programs(group, self._network)

    def _register(self, epoch: int) -> tuple[SymmetricMemory, torch.Tensor]:
        """Fresh symmetric memory, and the table through which kernels reach it; signals and calls begin anew, the
        latter after ``epoch``."""
        symmetric = self._group.symmetric_empty(self._layout.num_bytes)
        network_state = self._network.attach(self._group, symmetric, self._layout.max_puts) if self._network else 0
        self.bases.zero_()
        self._state.zero_()
        self._state[StateWord.EPOCH] = epoch + 1
        return symmetric, self._make_table(symmetric, network_state)

    @torch.inference_mode(False)
    def renew(self, epoch: int) -> None:
        """Collective: go on from ``epoch`` with fresh memory, in which nothing of a failed call can land. Tables stay
        where they are: a graph that has captured their addresses follows them to the new memory."""
        old = self.symmetric
        self.symmetric, table = self._register(epoch)
        self.table.copy_(table)
        self._group.backend.synchronize()  # whatever stream the next call is on
        self._group.backend.free(old)

    def _make_table(self, symmetric: SymmetricMemory, network_state: int) -> torch.Tensor:
        group = self._group
        words = [0] * int(TableWord.PEERS)
        words[TableWord.RANK] = group.rank
        words[TableWord.WORLD_SIZE] = group.world_size
        words[TableWord.HEADERS] = self._layout.offset("headers")
        words[TableWord.STATE] = self._state.data_ptr()
        words[TableWord.RECORD] = group.record_words.data_ptr()
        words[TableWord.CLOCK] = group.backend.clock_address
        words[TableWord.TIMEOUT_NS] = int(self._timeout_s * 1e9)
        words[TableWord.NETWORK] = network_state
        head = torch.tensor(words, dtype=torch.int64, device=group.device)
        return torch.cat([head, symmetric.table, group.control_table])

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
