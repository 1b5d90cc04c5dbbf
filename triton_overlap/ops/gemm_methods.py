"""A product's methods for forward and backward, and what ``ub_cfgs`` says in these terms."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..comm.gemm_configs import OPTION_KEYS, GemmConfig
from ..comm.method_names import OPTIONS
from ..kernels.methods import Method

__all__ = ["GemmMethods", "backward_operations", "configured_method"]

#: For each product, what its dgrad is by a method other than bulk, and by bulk; and what its wgrad is by bulk.
_BACKWARD: dict[str, tuple[str, str | None, str | None]] = {
    "all_gather_matmul": (
        "matmul_reduce_scatter",
        "all_gather_beside_matmul",
        "reduce_scatter_beside_matmul",
    ),
    "matmul_reduce_scatter": ("all_gather_matmul", None, None),
}


@dataclass(frozen=True)
class GemmMethods:
    """Methods of a product and of the two products of its backward pass. ``str`` is what operators take.

    The backward pass of ``all_gather_matmul`` (a column-parallel layer) reduce-scatters dX and needs the gathered x:

        dgrad                       wgrad    dX is reduce-scattered             x, unless it was saved, is gathered
        None                        None     as fprop                           before wgrad
        a reduce-scatter method     None     with dgrad, by that method         before wgrad
        bulk                        None     after dgrad                        beside dgrad
        bulk                        bulk     beside wgrad                       beside dgrad
        None                        bulk     beside wgrad                       before wgrad

    Where the weight or x wants no gradient there is nothing to do a bulk collective beside, and it is done as for None.
    The backward pass of ``matmul_reduce_scatter`` (a row-parallel layer) gathers dY with dgrad, for wgrad as well:
    ``dgrad`` is an all-gather method, ``wgrad`` None.

    Attributes:
        fprop: of the forward product, a name or what ``str`` of a ``Method`` gives.
        dgrad: of the gradient of the activation; None to follow ``fprop``.
        wgrad: of the gradient of the weight: ``"bulk"``, or None where it communicates nothing.

    Raises:
        TypeError: one of them is no text.
        ValueError: a name or an option is not known, or ``wgrad`` has nothing to reduce-scatter.

    Example::

        >>> str(GemmMethods("ring_exchange", dgrad="bulk", wgrad="bulk(num_sm=8)"))
        'ring_exchange; dgrad=bulk; wgrad=bulk(num_sm=8)'
    """

    fprop: str
    dgrad: str | None = None
    wgrad: str | None = None
    _text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        for gemm in ("fprop", "dgrad", "wgrad"):
            text = getattr(self, gemm)
            if isinstance(text, str):
                Method.parse(text)
            elif text is not None or gemm == "fprop":
                allowed = "a str" if gemm == "fprop" else "a str or None"
                raise TypeError(
                    f"GemmMethods: {gemm} must be {allowed}, got {text!r}; give the name of a method, or what str() of "
                    f"a Method writes; known methods: {', '.join(Method.NAMES)}"
                )
        if self.wgrad is not None and self.dgrad is not None and not self.gathers_beside_dgrad:
            raise ValueError(
                f"wgrad {self.wgrad!r} has nothing to reduce-scatter where dgrad {self.dgrad!r} does it; "
                'leave wgrad out, or give dgrad="bulk"'
            )
        parts = [self.fprop]
        parts += [f"{name}={value}" for name, value in (("dgrad", self.dgrad), ("wgrad", self.wgrad)) if value]
        # Written now, since torch.compile need not trace it then.
        object.__setattr__(self, "_text", "; ".join(parts))

    @property
    def gathers_beside_dgrad(self) -> bool:
        """Whether x is gathered once more beside dgrad, by the bulk method."""
        return self.dgrad is not None and Method.parse(self.dgrad).name == "bulk"

    def __str__(self) -> str:
        return self._text

    @staticmethod
    @functools.cache
    def parse(text: str) -> GemmMethods:
        """The inverse of ``str``; the text of one method leaves backward to follow it."""
        fprop, *backward = text.split("; ")
        methods: dict[str, str] = {}
        for part in backward:
            gemm, _, method = part.partition("=")
            if gemm not in ("dgrad", "wgrad") or gemm in methods:
                raise ValueError(f"method {text!r} must be as str(GemmMethods(..)) writes it, got {part!r}")
            methods[gemm] = method
        return GemmMethods(fprop, **methods)


def backward_operations(operation: str, methods: GemmMethods) -> Iterator[tuple[str, str]]:
    """What the backward pass of a product does by a method that ``methods`` gives: operations and their methods.

    Raises:
        ValueError: ``wgrad`` is given, and communicates nothing.
    """
    if methods.dgrad is None and methods.wgrad is None:
        return
    dgrad, bulk_dgrad, wgrad = _BACKWARD.get(operation, (None, None, None))
    if methods.dgrad is not None:
        beside = bulk_dgrad if methods.gathers_beside_dgrad else None
        if dgrad is None:
            raise ValueError(f"{operation}: backward follows the one method, got dgrad {methods.dgrad!r}; leave it out")
        yield beside or dgrad, methods.dgrad
    if methods.wgrad is not None:
        if wgrad is None:
            raise ValueError(
                f"{operation}: the product of the weight's gradient communicates nothing, got wgrad "
                f"{methods.wgrad!r}; leave it out"
            )
        yield wgrad, methods.wgrad


def configured_method(config: GemmConfig) -> str:
    """The method of a GEMM's configuration, with those of its options that the method has."""
    assert config.method is not None
    options = {name: getattr(config, name) for name in OPTION_KEYS if name in OPTIONS[config.method]}
    if not config.gathers:
        options.pop("aggregate", None)  # sums need no pairs
        if config.method == "fused":
            options.pop("use_ce", None)  # and the fused one has one sender, programs
    return str(Method(config.method, **options))
