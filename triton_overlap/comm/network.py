"""The protocol of a network: puts with signals, for ranks that cannot store into each other's memory.

A *put* copies one contiguous block of this rank's symmetric memory to a peer's copy and then adds 1 to a signal there.
A new network is one class with the members of :class:`Network`, and one device function::

    put(buffer_ptr, peer, source, target, num_bytes, signal)

    buffer_ptr   the int64 table of comm/layout.py; its word NETWORK is what ``attach`` returned
    source       byte offset in this rank's copy
    target       byte offset in the copy of ``peer``
    num_bytes    a positive multiple of 8
    signal       byte offset in the copy of ``peer`` of an int64 word

All threads of a program call it together. What the program stored before is in the block that is sent.

What every network promises
    * Aligned 8-byte words are written whole.
    * Who acquires a signal sees all bytes of every put whose addition it sees.
    * Signal additions commute, and each happens once.
    * The first word of a put may be polled, by an atomic, while the put is under way.

What none promises, unless it declares so
    * That the bytes of a put arrive in order, or two puts in any order, even between the same two ranks.
    * That a source has been read when ``put`` returns. It may be written again once the peer is known to have acquired
      the signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..errors import BackendError

if TYPE_CHECKING:
    import torch

    from .backend import SymmetricMemory
    from .group import Group

__all__ = ["Network", "NetworkProperties", "check_requirements", "create_network"]


@dataclass(frozen=True)
class NetworkProperties:
    """What a network promises beyond the module's page, or what a kernel needs.

    Attributes:
        strong_signals: who acquires a signal also sees every put to this rank that the same program had put earlier.
        signals_anywhere: a signal may be any word of symmetric memory, and not only one of a pool.
    """

    strong_signals: bool = False
    signals_anywhere: bool = False


@runtime_checkable
class Network(Protocol):
    """See the module's page.

    Attributes:
        name: such as ``"direct"``.
        properties: what it declares.
        put: the device function. It reaches kernels as a constexpr, so that every kernel has one body.
        num_programs: multiprocessors that calls leave to what the network itself runs, once it is attached.
        compile_options: Triton's options for kernels with ``put``, once it is attached.
    """

    name: str
    properties: NetworkProperties
    put: Any
    num_programs: int
    compile_options: Mapping[str, Any]

    def attach(self, group: Group, memory: SymmetricMemory, max_puts: int) -> int:
        """Serve ``memory``, in which a rank has at most ``max_puts`` puts under way. Returns the address of the
        network's own state on this device, or 0.

        Raises:
            BackendError: the network cannot run here; says why and what would.
        """

    def beside(self, table: torch.Tensor) -> AbstractContextManager[None]:
        """Around the launches of one call on the current stream: what the network runs meanwhile. ``table`` is what
        kernels get as ``buffer_ptr``; its word NETWORK is what ``attach`` returned."""


def check_requirements(kernel: str, needs: NetworkProperties, network: Network) -> None:
    """Refuse, at construction, a kernel that needs more than the network declares.

    Raises:
        ValueError: names the kernel, the network and what is missing.
    """
    missing = [
        name
        for name in ("strong_signals", "signals_anywhere")
        if getattr(needs, name) and not getattr(network.properties, name)
    ]
    if missing:
        raise ValueError(
            f"{kernel} kernels need {' and '.join(missing)}, which the {network.name} network does not declare; "
            "use the unordered kernels"
        )


def create_network(name: str) -> Network:
    """The network called ``name``: ``"direct"``, ``"nvshmem"``, ``"simulated"``, or ``"simulated_strong"``, whose
    signals are strong.

    Raises:
        ValueError: there is none of that name.
    """
    # Networks load when asked for, and none knows another.
    if name == "direct":
        from .networks.direct import DirectNetwork

        return DirectNetwork()
    if name in ("simulated", "simulated_strong"):
        from .networks.simulated import SimulatedNetwork

        return SimulatedNetwork(strong_signals=name == "simulated_strong")
    if name == "nvshmem":
        from .networks.nvshmem import NvshmemNetwork

        return NvshmemNetwork()
    raise ValueError(f'a network is "direct", "nvshmem", "simulated" or "simulated_strong", got {name!r}')


def refuse(name: str, reason: str) -> BackendError:
    """The error of a network that cannot run here."""
    return BackendError(f"the {name} network cannot run here: {reason}")
