"""Which way an operation is done, with the choices of that way. Plain Python.

method         what it is                                                              options
fused          one persistent kernel: tiles wait for flags, or store what peers await  use_ce, tiles
ring_exchange  chunk by chunk: the GEMM of one beside the transfer of the next         aggregate, use_ce, num_sm
pipeline       chunks in parts: a part's reduce-scatter beside the next one's GEMM     num_splits, num_sm
bulk           a collective beside a GEMM that does not depend on it                   use_ce, num_sm
nccl           collectives of torch.distributed and torch.matmul, one after the other
auto           one of these, by a measured table (choose.py)
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..comm.method_names import BESIDE_METHODS, GATHER_METHODS, OPTIONS, REDUCE_METHODS
from .config import TileConfig

_EVERY_OPTION = ("aggregate", "use_ce", "num_sm", "num_splits", "tiles")
#: Operations by name, and the methods that apply to each.
APPLICABLE: dict[str, tuple[str, ...]] = {
    "all_gather_matmul": GATHER_METHODS,
    "matmul_reduce_scatter": REDUCE_METHODS,
    "matmul_all_reduce": REDUCE_METHODS,
    "replicated_matmul": REDUCE_METHODS,
    "all_gather_beside_matmul": BESIDE_METHODS,
    "reduce_scatter_beside_matmul": BESIDE_METHODS,
}


@dataclass(frozen=True)
class Method:
    """A method by name, with its options. ``str(method)`` is what operators take; ``Method.parse`` reads it back.

    Attributes:
        NAMES: of every method.
        name: one of them.
        aggregate: all-gather only: exchange chunks in pairs first, then multiply double chunks.
        use_ce: send by the copy engine (True) or by programs (False); None takes the copy engine of a GPU where chunks
            are long. The same on every rank.
        num_sm: programs that move data beside the GEMM; None for a default.
        num_splits: parts of the output, 1 or more; None for a default.
        tiles: of the kernel, ``BLOCK_M x BLOCK_N x BLOCK_K x num_warps x num_stages`` written as ``"128x256x64x8x3"``;
            None for those of ``config.tile_config``. The same on every rank. Each is compiled once.

    Raises:
        TypeError: a name that is no text.
        ValueError: an unknown name, an option that the method does not have, or a number below 1.

    Example::

        >>> str(Method("ring_exchange", aggregate=True, num_sm=8))
        'ring_exchange(aggregate=True,num_sm=8)'
        >>> Method.parse("pipeline(num_splits=2)").num_splits
        2
    """

    NAMES: ClassVar[tuple[str, ...]] = tuple(OPTIONS)

    name: str
    aggregate: bool | None = None
    use_ce: bool | None = None
    num_sm: int | None = None
    num_splits: int | None = None
    tiles: str | None = None
    _text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a method's name must be a str, got {self.name!r}; known methods: {_listed(self.NAMES)}")
        if self.name not in OPTIONS:
            raise ValueError(f"unknown method {self.name!r}; known methods: {_listed(self.NAMES)}")
        for option, value in self.options().items():
            if option not in OPTIONS[self.name]:
                has = _listed(OPTIONS[self.name]) or "none"
                raise ValueError(f"method {self.name!r} has no option {option!r}; it has: {has}")
            if option in ("num_sm", "num_splits"):
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ValueError(f"{option} must be a whole number of at least 1, got {value!r}")
            elif option == "tiles":
                if not isinstance(value, str):
                    raise ValueError(f"tiles must be a text such as '128x256x64x8x3', got {value!r}")
                TileConfig.named(value)
            elif not isinstance(value, bool):
                raise ValueError(f"{option} must be True or False, got {value!r}")
        # Written now, since torch.compile traces no formatting of numbers.
        options = ",".join(f"{name}={value}" for name, value in self.options().items())
        object.__setattr__(self, "_text", f"{self.name}({options})" if options else self.name)

    def options(self) -> dict[str, bool | int | str]:
        """The options that were given."""
        return {name: getattr(self, name) for name in _EVERY_OPTION if getattr(self, name) is not None}

    def __str__(self) -> str:
        return self._text

    @classmethod
    def parse(cls, text: str) -> Method:
        """The method that ``text`` names, as ``str`` writes it.

        Raises:
            TypeError, ValueError: as the constructor; and for a text of another form.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"a method must be text, got {text!r}; give a name, or what str() of a Method writes; known methods: "
                f"{_listed(cls.NAMES)}"
            )
        name, bracket, rest = text.partition("(")
        options: dict[str, Any] = {}
        if bracket and not rest.endswith(")"):
            raise ValueError(f"method {text!r} must be a name, or a name with options such as 'pipeline(num_splits=2)'")
        for item in filter(None, rest.removesuffix(")").split(",")):
            option, _, value = (part.strip() for part in item.partition("="))
            if option not in _EVERY_OPTION:
                raise ValueError(f"unknown option {option!r} of method {text!r}")
            if option == "tiles":
                options[option] = value
            elif value in ("True", "False"):
                options[option] = value == "True"
            elif value.isdecimal():
                options[option] = int(value)
            else:
                raise ValueError(f"option {option!r} of method {text!r} must be True, False or a whole number")
        return cls(name, **options)


@functools.cache
def gather_method(text: str) -> str:
    """What the all-gather GEMM takes in the backward pass of a reduce-scatter done by the method ``text``."""
    method = Method.parse(text)
    # A pipeline splits a reduction, and a gather has none.
    return str(Method("ring_exchange", num_sm=method.num_sm)) if method.name == "pipeline" else text


@functools.cache
def reduce_method(text: str) -> str:
    """What the reduce-scatter takes in the backward pass of an all-gather GEMM done by the method ``text``."""
    method = Method.parse(text)
    # Gathered chunks are multiplied in pairs; sums need none. The fused sum has one sender, programs.
    use_ce = None if method.name == "fused" else method.use_ce
    return str(dataclasses.replace(method, aggregate=None, use_ce=use_ce))


@functools.cache
def parse_for(operation: str, text: str) -> Method:
    """``Method.parse``, or ValueError unless the method is among those that apply to ``operation``."""
    allowed = APPLICABLE[operation]
    try:
        method = Method.parse(text)
    except ValueError as error:
        raise ValueError(f"{operation}: {error}; methods that apply here: {_listed(allowed)}") from error
    if method.name not in allowed:
        raise ValueError(
            f"{operation}: method {method.name!r} does not apply here; methods that apply: {_listed(allowed)}"
        )
    if method.aggregate and operation != "all_gather_matmul":
        raise ValueError(f"{operation}: aggregate applies to all_gather_matmul alone, got method {text!r}")
    if method.name == "fused" and method.use_ce is not None and operation != "all_gather_matmul":
        raise ValueError(
            f"{operation}: use_ce of method 'fused' applies to all_gather_matmul alone, got method {text!r}; "
            "leave it out"
        )
    return method


def missing_part(method: Method, world_size: int, *, copies: bool, collectives: bool) -> str | None:
    """What ``method`` needs and a backend lacks: ``"copies"``, ``"collectives"``, or None where it can run.

    Args:
        method: with its options.
        world_size: ranks of the group.
        copies, collectives: whether the backend has them (comm/backend.py).
    """
    if method.use_ce and not copies:
        return "copies"
    if method.name == "nccl" and world_size > 1 and not collectives:
        return "collectives"
    return None


def chunk_groups(rank: int, world_size: int, aggregate: bool) -> list[tuple[int, int]]:
    """Ranges ``[first, last)`` of chunks that are multiplied together, in the order in which ``rank`` takes them.

    Its own group comes first, then those of the ranks after it. With ``aggregate`` groups are pairs, and the last one
    is a single chunk where ``world_size`` is odd.

    Numeric example: rank 1 of 4 takes (1,2) (2,3) (3,4) (0,1), or (0,2) (2,4) with ``aggregate``.
    """
    size = 2 if aggregate else 1
    groups = [(first, min(first + size, world_size)) for first in range(0, world_size, size)]
    own = rank // size
    return groups[own:] + groups[:own]


def part_of_pieces(pieces: int, num_splits: int) -> list[tuple[int, int]]:
    """``pieces`` in at most ``num_splits`` ranges ``[first, last)`` of nearly equal length, none empty, none left over.

    Numeric example: 7 pieces in 3 parts: (0,2) (2,4) (4,7); 2 pieces in 4 parts: (0,1) (1,2).
    """
    parts = min(pieces, num_splits)
    return [(part * pieces // parts, (part + 1) * pieces // parts) for part in range(parts)]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))
