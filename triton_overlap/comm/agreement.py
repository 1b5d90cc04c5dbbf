"""How ranks judge arguments together, so that a mistake of one is an error of all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import BackendError
from .bootstrap import ranks_in_words

_T = TypeVar("_T")


def agree_on(
    gather: Callable[[Any, str], list[Any]],
    what: str,
    judge: Callable[[], _T],
    compared: Callable[[_T], Any] | None = None,
) -> _T:
    """Collective: what ``judge`` returns here, once every rank's has returned and the results are equal.

    For arguments of collective constructors: ranks meet before any of them gives up, so that a mistake of one is not
    its own error while the others wait for it.

    Args:
        gather: collective, every rank's picklable value in rank order; also gets what for, as an infinitive.
        what: is judged and compared, for messages.
        judge: checks the arguments, and raises where they break a rule. Local.
        compared: what of the result must be equal on every rank, picklable; by default the result itself.

    Raises:
        BackendError, NotImplementedError, TypeError, ValueError, RuntimeError: what ``judge`` raised on some rank,
            on every rank; the message names it.
        ValueError: the results differ; lists them all, of mappings the entries that differ. Or the ranks compare
            different things.
    """
    problem: Exception | None = None
    mine = None
    try:
        result = judge()
        mine = result if compared is None else compared(result)
    except Exception as error:  # noqa: BLE001  # raised below, on every rank
        problem = error
    sent = None if problem is None else (_kind(problem), str(problem))
    purpose = f"compare {what}" if sent is None else f"tell them: {sent[1]}"
    everyone = gather((what, mine, sent), purpose)
    problems = {rank: found for rank, (_, _, found) in enumerate(everyone) if found is not None}
    if problems:
        raise _error_of_ranks(problems, len(everyone)) from problem
    if any(other != what for other, _, _ in everyone):
        come = "; ".join(f"rank {rank}: {other}" for rank, (other, _, _) in enumerate(everyone))
        raise ValueError(f"the ranks compare different things, make the same calls on every rank: {come}")
    values = [value for _, value, _ in everyone]
    if any(other != values[0] for other in values):
        given = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(_differing(values)))
        raise ValueError(f"{what} must be the same on every rank, got {given}")
    return result


def _kind(error: Exception) -> type[Exception]:
    """What ``error`` becomes on all ranks: a class that takes a message, and that all of them have."""
    kinds = (BackendError, NotImplementedError, TypeError, ValueError)
    return next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)


def _error_of_ranks(problems: dict[int, tuple[type[Exception], str]], world_size: int) -> Exception:
    """The error that every rank raises for what was wrong on some: that of the lowest, with those of the others."""
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, text) in problems.items():
        ranks_of.setdefault(text, []).append(rank)
    kind, text = next(iter(problems.values()))
    if len(ranks_of[text]) < world_size:
        text = "; ".join(f"on {ranks_in_words(ranks)}: {each}" for each, ranks in ranks_of.items())
    return kind(text)


def _differing(values: list[Any]) -> list[Any]:
    """Mappings, without the entries that are the same in all of them; anything else as it is."""
    if not all(isinstance(value, dict) for value in values):
        return values
    same = {key for key, x in values[0].items() if all(key in value and value[key] == x for value in values)}
    return [{key: x for key, x in value.items() if key not in same} for value in values]
