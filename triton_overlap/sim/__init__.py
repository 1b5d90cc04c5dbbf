"""Deterministic simulation of N ranks that run Triton kernels in one process; see ``docs/simulator.md``."""

from triton_overlap.sim.costs import NetworkCost, NetworkUse
from triton_overlap.sim.faults import (
    KILLED,
    DelayRank,
    DoubleSignal,
    Fault,
    KillRank,
    LateBody,
    LoseSignal,
    SignalFault,
    StallSource,
    TearHeader,
)
from triton_overlap.sim.settings import Settings
from triton_overlap.sim.tasks import LogEntry
from triton_overlap.sim.world import World

__all__ = [
    "KILLED",
    "DelayRank",
    "DoubleSignal",
    "Fault",
    "KillRank",
    "LateBody",
    "LogEntry",
    "LoseSignal",
    "NetworkCost",
    "NetworkUse",
    "Settings",
    "SignalFault",
    "StallSource",
    "TearHeader",
    "World",
]
