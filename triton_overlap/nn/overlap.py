"""Overlap flags by TransformerEngine's names, what they are allowed with, and the method each one asks for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["PARALLEL_MODES", "Overlap", "choose_method"]

#: For each parallel mode, the dimension of the [out, in] weight that the ranks split.
PARALLEL_MODES: dict[str | None, int | None] = {"column": 0, "row": 1, None: None}
#: For each parallel mode, the flags that mean something.
_FLAGS: dict[str | None, tuple[str, ...]] = {
    "column": ("ub_overlap_ag", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
    "row": ("ub_overlap_ag", "ub_overlap_rs"),
    None: (),
}
#: For each parallel mode, TransformerEngine's names of the GEMMs that run in it.
_NAMES: dict[str | None, tuple[str, ...]] = {"column": ("qkv", "fc1"), "row": ("proj", "fc2"), None: ()}
#: For each parallel mode, the flag that governs the forward operation. Its backward uses the same method.
_FORWARD_FLAG = {"column": "ub_overlap_ag", "row": "ub_overlap_rs"}
#: The method that a flag asks for, and under None the method without one. New methods enter here.
_METHODS: dict[str | None, str] = {"ub_overlap_ag": "fused", "ub_overlap_rs": "fused", None: "fused"}


@dataclass(frozen=True)
class Overlap:
    """The overlap flags of a layer or a block; ``Linear`` says what each one means."""

    ub_overlap_ag: bool = False
    ub_overlap_rs: bool = False
    ub_overlap_rs_dgrad: bool = False
    ub_bulk_dgrad: bool = False
    ub_bulk_wgrad: bool = False

    def of(self, parallel_mode: str) -> dict[str, Any]:
        """The flags that mean something in ``parallel_mode``, as keyword arguments of ``Linear``."""
        return {name: value for name, value in asdict(self).items() if name in _FLAGS[parallel_mode]}

    def check(self, kind: str, parallel_mode: str | None, sequence_parallel: bool, ub_name: str | None) -> None:
        """ValueError unless mode, flags and name fit together.

        Args:
            kind: of the module, for the message.
            parallel_mode: of the layer.
            sequence_parallel: of the layer.
            ub_name: of the layer, or None.
        """
        if parallel_mode not in PARALLEL_MODES:
            raise ValueError(f'{kind}: parallel_mode must be "column", "row" or None, got {parallel_mode!r}')
        given = [name for name, value in asdict(self).items() if value]
        wrong = [name for name in given if name not in _FLAGS[parallel_mode]]
        if wrong:
            allowed = ", ".join(_FLAGS[parallel_mode]) or 'none; choose parallel_mode="column" or "row"'
            raise ValueError(
                f"{kind}: {', '.join(wrong)} cannot be with parallel_mode={parallel_mode!r}; allowed: {allowed}"
            )
        if given and not sequence_parallel:
            raise ValueError(
                f"{kind}: {', '.join(given)} overlap the collectives of sequence parallelism; "
                "set sequence_parallel=True, or leave the flags out"
            )
        if ub_name is not None and ub_name not in _NAMES[parallel_mode]:
            allowed = ", ".join(map(repr, _NAMES[parallel_mode])) or "None"
            raise ValueError(
                f"{kind}: ub_name with parallel_mode={parallel_mode!r} must be one of {allowed}, got {ub_name!r}"
            )


def choose_method(parallel_mode: str | None, overlap: Overlap) -> str:
    """The method of the layer's operations."""
    flag = _FORWARD_FLAG.get(parallel_mode or "")
    return _METHODS[flag if flag is not None and getattr(overlap, flag) else None]
