"""TransformerEngine's user-buffer functions: a set of communicators, one for each GEMM of a transformer layer.

A set belongs to a group, and a process has as many sets as it has groups that want one. Functions without ``group``
mean the set whose group ``initialize_ub`` made itself, or the only one there is. All communicators of a set stand for
one buffer: calls of a group follow each other, so GEMMs need no memory of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from .gemm_configs import GemmConfig, default_config, gemm_configs
from .group import Group, init_group
from .rules import check_capacity
from .user_buffers import Communicator

__all__ = [
    "CommunicatorSet",
    "UserBufferQuantizationMode",
    "communicators_of",
    "destroy_ub",
    "get_ub",
    "initialize_ub",
    "set_ub_active_shape",
]


class UserBufferQuantizationMode(Enum):
    """TransformerEngine's modes; only NONE exists here."""

    NONE = "none"
    FP8 = "fp8"


@dataclass(frozen=True)
class CommunicatorSet:
    """What one ``initialize_ub`` made.

    Attributes:
        group: whose ranks share the buffer.
        owns_group: whether ``initialize_ub`` made the group, and ``destroy_ub`` closes it.
        communicators: by GEMM name.
    """

    group: Group
    owns_group: bool
    communicators: dict[str, Communicator]


_sets: list[CommunicatorSet] = []


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    quantization_modes: Sequence[UserBufferQuantizationMode] | UserBufferQuantizationMode | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Mapping[str, Any]]] | None = None,
    bootstrap_backend: str | None = None,
    *,
    group: Group | None = None,
) -> None:
    """Collective: register a group's user buffer at its capacity ``shape`` [max_tokens, hidden].

    Args:
        shape: the capacity; ``set_ub_active_shape`` chooses the active prefix afterwards.
        tp_size: ranks that share the buffer.
        quantization_modes: NONE only.
        dtype: of the buffer.
        ub_cfgs: for each GEMM name a mapping with ``method`` and its options, see ``comm/gemm_configs.py``; modules
            with a ``ub_name`` take their methods from it.
        bootstrap_backend: accepted and unused: the group's own store serves.
        group: an existing group of ``tp_size`` ranks; by default a new one over torch.distributed's world.

    Raises:
        NotImplementedError: a quantization mode other than NONE, method "external", or a key of ``ub_cfgs`` that would
            change results.
        RuntimeError: the group has user buffers already.
        TypeError: an argument is of another type than its annotation says; nothing was made.
        ValueError: an argument does not fit, or differs between ranks; the message says what would do.

    All of these on every rank, also where one rank alone is at fault; but for ``group``, in which ranks would meet.
    """
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"initialize_ub: group must be a Group from init_group, or None, got {group!r}")
    owns_group = group is None
    used = init_group() if group is None else group

    def judge() -> tuple[int, int, dict[str, GemmConfig]]:
        if any(known.group is group or (group is None and known.owns_group) for known in _open_sets()):
            raise RuntimeError("user buffers are initialised already; call destroy_ub() first")
        max_tokens, hidden = _capacity(shape, used.world_size, dtype)
        if isinstance(tp_size, bool) or not isinstance(tp_size, int):
            raise TypeError(f"initialize_ub: tp_size must be an int, got {tp_size!r}")
        _check_quantization(quantization_modes)
        configs = gemm_configs(ub_cfgs)
        if used.world_size != tp_size:
            raise ValueError(f"tp_size must be the group's size {used.world_size}, got {tp_size}; pass another group")
        return max_tokens, hidden, configs

    try:
        # Also before modules take their methods from it: ranks that differ would find out at a product, or in backward.
        max_tokens, hidden, configs = used.agree_on("ub_cfgs", judge, lambda judged: _unusual(judged[2]))
        buffer = used.user_buffer(max_tokens, hidden, dtype)
    except BaseException:
        if owns_group:
            used.close()
        raise
    communicators = {name: Communicator(name, buffer, config) for name, config in configs.items()}
    _sets.append(CommunicatorSet(used, owns_group, communicators))


def get_ub(name: str, *, group: Group | None = None) -> Communicator:
    """The communicator of the GEMM ``name``, as TransformerEngine's ``get_ub``.

    Args:
        name: ``"qkv_fprop"``, ``"proj_dgrad"`` and so on (``comm/gemm_configs.py``).
        group: whose; by default the one that ``initialize_ub`` made, else the only one that has communicators.

    Raises:
        RuntimeError: ``initialize_ub`` was not called, or not for ``group``.
        ValueError: an unknown name, or no ``group`` where several could be meant; the message lists what is known.
    """
    communicators = _set_of(group).communicators
    if not isinstance(name, str) or name not in communicators:
        raise ValueError(f"unknown user buffer {name!r}; known: {', '.join(communicators)}")
    return communicators[name]


def set_ub_active_shape(shape: Sequence[int], *, group: Group | None = None) -> None:
    """Set the active shape [active_tokens, hidden] of every communicator: no allocation, no registration. ``group``
    as for ``get_ub``.

    Raises:
        ActiveShapeError: a rule is broken; every communicator stays as it was.
        RuntimeError, ValueError: as ``get_ub``.
    """
    # The rules are the same for all: all or none pass.
    for communicator in _set_of(group).communicators.values():
        communicator.set_buffer_active_shape(shape)


def destroy_ub(*, group: Group | None = None) -> None:
    """Collective: forget the communicators of ``group``, or of all groups, and close a group that ``initialize_ub``
    made. A group that was passed in keeps its buffers. Without any, nothing happens.

    A backward pass whose forward used a group that is closed here is a ``ClosedError`` on every rank: run it before."""
    for known in _open_sets():
        if group is None or known.group is group:
            _sets.remove(known)
            if known.owns_group:
                known.group.close()


def communicators_of(group: Group) -> CommunicatorSet | None:
    """The set of ``group``, if it has one.

    Raises:
        ValueError: it has none, but ``initialize_ub`` made a set for a group of its own, which cannot serve ``group``.
    """
    sets = _open_sets()
    for known in sets:
        if known.group is group:
            return known
    if any(known.owns_group for known in sets):
        raise ValueError(
            f"initialize_ub made a group of its own, and its user buffers cannot serve {group}; call "
            'initialize_ub(.., group=..) with this group, or build modules with get_ub("qkv_fprop").group'
        )
    return None


def _open_sets() -> list[CommunicatorSet]:
    """All sets; those whose group was closed meanwhile are forgotten."""
    _sets[:] = [known for known in _sets if not known.group.closed]
    return list(_sets)


def _set_of(group: Group | None) -> CommunicatorSet:
    sets = _open_sets()
    if group is None:
        sets = [known for known in sets if known.owns_group] or sets
        if len(sets) > 1:
            raise ValueError(f"{len(sets)} groups have user buffers; say which one's with group=")
    else:
        sets = [known for known in sets if known.group is group]
    if not sets:
        raise RuntimeError(
            "user buffers are not initialised; call initialize_ub(shape, tp_size)"
            + ("" if group is None else f" with group={group}")
            + " first"
        )
    return sets[0]


def _unusual(configs: Mapping[str, GemmConfig]) -> list[str]:
    """Those that are not the default, for messages."""
    return [str(config) for config in configs.values() if config != default_config(config.name)]


def _capacity(shape: Sequence[int], world_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """``shape`` as max_tokens and hidden, where ``initialize_ub`` can take it."""
    allowed = "two integers, [max_tokens, hidden]"
    try:
        dims = [operator.index(dim) for dim in shape]
    except TypeError:
        raise TypeError(f"initialize_ub: shape must be {allowed}, got {shape!r}") from None
    if len(dims) != 2:
        raise ValueError(f"initialize_ub: shape must be {allowed}, got {dims}")
    max_tokens, hidden = dims
    check_capacity("initialize_ub", world_size, max_tokens, hidden, dtype)
    return max_tokens, hidden


def _check_quantization(given: Any) -> None:
    """TypeError unless ``given`` is one mode, several or None; NotImplementedError where one of them is not NONE."""
    for mode in given if isinstance(given, (list, tuple)) else [] if given is None else [given]:
        if not isinstance(mode, UserBufferQuantizationMode):
            allowed = "UserBufferQuantizationMode.NONE, or a list of it"
            raise TypeError(f"initialize_ub: quantization_modes must be {allowed}, got {mode!r}")
        if mode is not UserBufferQuantizationMode.NONE:
            raise NotImplementedError(
                f"quantization mode {mode.name} is not supported, since buffers hold 2- and 4-byte floating-point "
                "numbers only; pass UserBufferQuantizationMode.NONE, or None"
            )
