"""Overlap flags by TransformerEngine's names, what they are allowed with, and the methods they ask for.

Flags and the GEMMs that they are about; ``ub_cfgs`` of ``initialize_ub`` says by which method each GEMM overlaps:

    column layer (ub_name qkv, fc1)                     row layer (ub_name proj, fc2)
    ub_overlap_ag         _fprop                        ub_overlap_rs   _fprop
    ub_overlap_rs_dgrad   _dgrad, reduce-scattered      ub_overlap_ag   _dgrad
    ub_bulk_dgrad         _dgrad, beside a gather of x
    ub_bulk_wgrad         _wgrad
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..comm.gemm_configs import GemmConfig
from ..ops.gemm_methods import GemmMethods, configured_method

__all__ = ["LIBRARY_CHOICE", "PARALLEL_MODES", "Overlap", "gemm_methods"]

#: The method of an operation that no flag and no configuration gives another.
LIBRARY_CHOICE = "fused"
#: For each parallel mode, the dimension of the [out, in] weight that the ranks split.
PARALLEL_MODES: dict[str | None, int | None] = {"column": 0, "row": 1, None: None}
#: For each parallel mode, the flags that mean something.
FLAGS: dict[str | None, tuple[str, ...]] = {
    "column": ("ub_overlap_ag", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
    "row": ("ub_overlap_ag", "ub_overlap_rs"),
    None: (),
}
#: For each parallel mode, TransformerEngine's names of the layers that run in it.
_NAMES: dict[str | None, tuple[str, ...]] = {"column": ("qkv", "fc1"), "row": ("proj", "fc2"), None: ()}


@dataclass(frozen=True)
class Overlap:
    """The overlap flags of a layer; ``Linear`` says what each one means."""

    ub_overlap_ag: bool = False
    ub_overlap_rs: bool = False
    ub_overlap_rs_dgrad: bool = False
    ub_bulk_dgrad: bool = False
    ub_bulk_wgrad: bool = False

    @property
    def given(self) -> list[str]:
        """Names of the flags that are set."""
        return [name for name, value in asdict(self).items() if value]

    def check(self, kind: str, parallel_mode: str | None, sequence_parallel: bool, ub_name: str | None) -> None:
        """ValueError unless mode, flags and name fit together.

        Args:
            kind: of the module, for the message.
            parallel_mode: of the layer.
            sequence_parallel: of the layer.
            ub_name: of the layer, or None.
        """
        for name, text in (("parallel_mode", parallel_mode), ("ub_name", ub_name)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{kind}: {name} must be a string or None, got {text!r}")
        if parallel_mode not in PARALLEL_MODES:
            raise ValueError(f'{kind}: parallel_mode must be "column", "row" or None, got {parallel_mode!r}')
        wrong = [name for name in self.given if name not in FLAGS[parallel_mode]]
        if wrong:
            allowed = ", ".join(FLAGS[parallel_mode]) or 'none; choose parallel_mode="column" or "row"'
            raise ValueError(
                f"{kind}: {', '.join(wrong)} cannot be with parallel_mode={parallel_mode!r}; allowed: {allowed}"
            )
        if self.given and not sequence_parallel:
            raise ValueError(
                f"{kind}: {', '.join(self.given)} overlap the collectives of sequence parallelism; "
                "set sequence_parallel=True, or leave the flags out"
            )
        if ub_name is not None and ub_name not in _NAMES[parallel_mode]:
            allowed = ", ".join(map(repr, _NAMES[parallel_mode])) or "None"
            raise ValueError(
                f"{kind}: ub_name with parallel_mode={parallel_mode!r} must be one of {allowed}, got {ub_name!r}"
            )

    @property
    def gathers_beside_dgrad(self) -> bool:
        return self.ub_bulk_dgrad and not self.ub_overlap_rs_dgrad


def gemm_methods(
    parallel_mode: str | None, overlap: Overlap, configs: Mapping[str, GemmConfig] | None = None
) -> GemmMethods:
    """The methods of a layer's GEMMs.

    Args:
        parallel_mode: of the layer.
        overlap: its flags.
        configs: of its GEMMs by step, "fprop", "dgrad" and "wgrad"; None where nothing is configured.

    Raises:
        ValueError: a flag asks for what the configuration of the GEMM is not.
    """
    if not overlap.given:
        return GemmMethods(LIBRARY_CHOICE)
    configs = configs or {}
    if parallel_mode == "row":
        return GemmMethods(
            _asked_for(overlap.ub_overlap_rs, configs.get("fprop")),
            _asked_for(overlap.ub_overlap_ag, configs.get("dgrad")),
        )
    fprop = _asked_for(overlap.ub_overlap_ag, configs.get("fprop"))
    if overlap.ub_overlap_rs_dgrad:
        return GemmMethods(fprop, _reducing_dgrad(configs.get("dgrad")))
    if not overlap.ub_bulk_dgrad and not overlap.ub_bulk_wgrad:
        return GemmMethods(fprop, LIBRARY_CHOICE)
    return GemmMethods(
        fprop,
        _bulk("ub_bulk_dgrad", configs.get("dgrad")) if overlap.ub_bulk_dgrad else None,
        _bulk("ub_bulk_wgrad", configs.get("wgrad")) if overlap.ub_bulk_wgrad else None,
    )


def _asked_for(flag: bool, config: GemmConfig | None) -> str:
    """The configured method where the flag is set and there is one."""
    return configured_method(config) if flag and config is not None else LIBRARY_CHOICE


def _reducing_dgrad(config: GemmConfig | None) -> str:
    """By which ``ub_overlap_rs_dgrad`` overlaps: the default configuration, bulk, is for the other way."""
    if config is None or config.is_default:
        return LIBRARY_CHOICE
    if config.method == "bulk":
        raise ValueError(
            f"ub_overlap_rs_dgrad needs a method that reduce-scatters, and ub_cfgs gives {config.name} 'bulk'; use "
            "pipeline, ring_exchange, fused, nccl or auto there, leave it out, or set ub_bulk_dgrad instead of the flag"
        )
    return configured_method(config)


def _bulk(flag: str, config: GemmConfig | None) -> str:
    if config is None:
        return "bulk"
    if config.method != "bulk":
        raise ValueError(
            f"{flag} needs method 'bulk', and ub_cfgs gives {config.name} {config.method!r}; leave it out there, or "
            "set ub_overlap_rs_dgrad instead of the bulk flags"
        )
    return configured_method(config)
