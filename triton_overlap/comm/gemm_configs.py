"""``ub_cfgs``: what is configured for each GEMM of a transformer layer, by TransformerEngine's names. Plain Python.

GEMM                      what the ranks exchange                             default        also
qkv_fprop, fc1_fprop      x is gathered for the product                       ring_exchange  fused, nccl, auto
proj_fprop, fc2_fprop     the product is reduce-scattered                     pipeline       ring_exchange, fused, nccl,
                                                                                             auto
qkv_dgrad, fc1_dgrad      x is gathered once more, beside the product, or     bulk
                          the product dX itself is reduce-scattered                          pipeline, ring_exchange,
                                                                                             fused, nccl, auto
proj_dgrad, fc2_dgrad     dY is gathered for the product                      ring_exchange  fused, nccl, auto
qkv_wgrad, fc1_wgrad      dX is reduce-scattered beside the product           bulk
proj_wgrad, fc2_wgrad     nothing: the product uses what dgrad gathered       none

``fused``, ``nccl`` and ``auto`` are additions to TransformerEngine's methods. What each key does:

method                           one of the above
aggregate, use_ce, num_sm,       options of the method where it has them, see kernels/methods.py; without effect where
num_splits                       it has not, as in TransformerEngine
cga_size, set_sm_margin,         accepted, without effect: they tune TransformerEngine's kernels and change no result
comm_priority, gemm_priority,
pipeline_rs_overlap_first_gemm
atomic_gemm, fp8_buf             False; True asks for arithmetic that does not exist here, and is refused
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .method_names import BESIDE_METHODS, GATHER_METHODS, OPTIONS, REDUCE_METHODS

#: What each layer multiplies: y = x w^T, dx = dy w, dw = dy^T x.
STEPS = ("fprop", "dgrad", "wgrad")
# The defaults first.
_GATHER = tuple(dict.fromkeys(("ring_exchange", *GATHER_METHODS)))
_REDUCE = tuple(dict.fromkeys(("pipeline", *REDUCE_METHODS)))
#: For each GEMM the methods that apply to it, its default first.
APPLICABLE: dict[str, tuple[str, ...]] = {
    "qkv_fprop": _GATHER,
    "qkv_dgrad": (*BESIDE_METHODS, *_REDUCE),
    "qkv_wgrad": BESIDE_METHODS,
    "proj_fprop": _REDUCE,
    "proj_dgrad": _GATHER,
    "proj_wgrad": (),
    "fc1_fprop": _GATHER,
    "fc1_dgrad": (*BESIDE_METHODS, *_REDUCE),
    "fc1_wgrad": BESIDE_METHODS,
    "fc2_fprop": _REDUCE,
    "fc2_dgrad": _GATHER,
    "fc2_wgrad": (),
}
#: The GEMMs of a transformer layer that have a communicator, by TransformerEngine's names.
GEMM_NAMES = tuple(APPLICABLE)

_METHODS = (*OPTIONS, "external")
#: Keys with a whole number, and the least it may be.
_NUMBERS: dict[str, int | None] = {
    "num_sm": 1,
    "cga_size": 1,
    "num_splits": 1,
    "comm_priority": None,
    "gemm_priority": None,
}
#: Keys that are on or off, 1 or 0 for short.
_SWITCHES = ("aggregate", "atomic_gemm", "fp8_buf", "pipeline_rs_overlap_first_gemm", "set_sm_margin", "use_ce")
#: Switches that stay off, and why.
_REFUSED = {
    "atomic_gemm": "one GEMM that signals its parts exists in TransformerEngine for FP8 alone; leave the key out, and "
    'for one kernel that does all take "method": "fused"',
    "fp8_buf": "sums over quantized partial results would differ, and buffers here hold 2- and 4-byte floating-point "
    "numbers only; leave the key out",
}
KEYS = ("method", *_NUMBERS, *_SWITCHES)
#: Keys that are options of methods.
OPTION_KEYS = ("aggregate", "use_ce", "num_sm", "num_splits")


@dataclass(frozen=True)
class GemmConfig:
    """What is configured for one GEMM, checked.

    Attributes:
        name: of the GEMM.
        method: one that applies to it; None where nothing is exchanged.
        is_default: whether the configuration left the method open.
        aggregate: given or None, as the other options.
        use_ce: likewise.
        num_sm: likewise.
        num_splits: likewise.
    """

    name: str
    method: str | None
    is_default: bool = True
    aggregate: bool | None = None
    use_ce: bool | None = None
    num_sm: int | None = None
    num_splits: int | None = None

    @property
    def gathers(self) -> bool:
        """Whether the GEMM multiplies gathered rows."""
        return APPLICABLE[self.name] == _GATHER


def gemm_configs(
    ub_cfgs: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Mapping[str, Any]]] | None,
) -> dict[str, GemmConfig]:
    """The configuration of every GEMM: what ``ub_cfgs`` says of it, and the default where it says nothing.

    Args:
        ub_cfgs: a mapping of some GEMM names to mappings of some keys, or as in TransformerEngine a list with one such
            mapping for each quantization mode, of which there is one; None for defaults throughout.

    Raises:
        NotImplementedError: method "external", or a switch that would change results.
        TypeError: a value of another type than its key takes.
        ValueError: an unknown name, key or method, a method that does not apply, or a number that is too small; the
            message lists what is known.
    """
    if isinstance(ub_cfgs, Sequence) and not isinstance(ub_cfgs, str) and len(ub_cfgs) == 1:
        ub_cfgs = ub_cfgs[0]
    if ub_cfgs is None:
        ub_cfgs = {}
    if not isinstance(ub_cfgs, Mapping):
        raise TypeError(
            f"initialize_ub: ub_cfgs must be None or a mapping, got {ub_cfgs!r}; its keys are names of GEMMs: "
            f"{', '.join(GEMM_NAMES)}"
        )
    for name in ub_cfgs:
        if name not in APPLICABLE:
            raise ValueError(f"ub_cfgs: unknown GEMM {name!r}; known: {', '.join(GEMM_NAMES)}")
    configs = {name: _config(name, ub_cfgs.get(name, {})) for name in GEMM_NAMES}
    for name in ("qkv", "fc1"):
        dgrad, wgrad = configs[f"{name}_dgrad"], f"{name}_wgrad"
        if dgrad.method != "bulk" and wgrad in ub_cfgs:
            raise ValueError(
                f"ub_cfgs: {wgrad} cannot be configured beside {dgrad.name} with method {dgrad.method!r}, which leaves "
                f'no gradient to reduce-scatter; leave {wgrad} out, or give {dgrad.name} the method "bulk"'
            )
    return configs


def default_config(name: str) -> GemmConfig:
    """The configuration of a GEMM of which ``ub_cfgs`` says nothing."""
    return _config(name, {})


def _config(name: str, given: Any) -> GemmConfig:
    """The configuration of the GEMM ``name`` from its entry in ``ub_cfgs``."""
    if not isinstance(given, Mapping):
        raise TypeError(f"ub_cfgs[{name!r}] must be a mapping of keys to values, got {given!r}")
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in KEYS:
            raise ValueError(f"ub_cfgs[{name!r}]: unknown key {key!r}; known: {', '.join(KEYS)}")
        values[key] = _method(name, value) if key == "method" else _value(name, key, value)
    default = APPLICABLE[name][0] if APPLICABLE[name] else None
    options = {key: values.get(key) for key in OPTION_KEYS}
    return GemmConfig(name, values.get("method", default), "method" not in values, **options)


def _method(name: str, value: Any) -> str:
    where = f"ub_cfgs[{name!r}]['method']"
    applicable = APPLICABLE[name]
    which = (
        f"methods that apply to {name}: {', '.join(applicable)}"
        if applicable
        else (
            f"{name} exchanges nothing, since it uses what {name.replace('wgrad', 'dgrad')} gathered; leave the key out"
        )
    )
    if not isinstance(value, str):
        raise TypeError(f"{where} must be a str, got {value!r}; {which}")
    if value not in _METHODS:
        raise ValueError(f"{where} must be one of {', '.join(_METHODS)}, got {value!r}; {which}")
    if value == "external":
        raise NotImplementedError(
            f"{where}: 'external' leaves the exchange to another GEMM's communicator, and no such thing exists here; "
            f"{which}"
        )
    if value not in applicable:
        raise ValueError(f"{where}: {value!r} does not apply; {which}")
    return value


def _value(name: str, key: str, value: Any) -> bool | int:
    where = f"ub_cfgs[{name!r}][{key!r}]"
    if key in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{where} must be a whole number, got {value!r}")
        least = _NUMBERS[key]
        if least is not None and value < least:
            raise ValueError(f"{where} must be at least {least}, got {value}")
        return value
    if not isinstance(value, int):
        raise TypeError(f"{where} must be True or False, got {value!r}")
    if value not in (0, 1):
        raise ValueError(f"{where} must be True or False, got {value}")
    if value and key in _REFUSED:
        raise NotImplementedError(f"{where} must be False: {_REFUSED[key]}")
    return bool(value)
