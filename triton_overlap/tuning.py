"""Tables for method ``auto``: measure one, load one, see what it says, and compile all that it may choose.

``tune`` and ``load_table`` are collective and leave every rank of a group with the same table, so that ``auto`` chooses
the same on every rank (kernels/choose.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import environment, ops
from .comm.group import Group
from .comm.user_buffers import Communicator, UserBuffer
from .kernels.choose import Explanation, choices_of
from .kernels.methods import Method, parse_for
from .kernels.tables import TABLE_OPERATIONS, Table, TableRow
from .ops.validation import check_optional_tensors, check_tensors, handle_of
from .problems import TOLERANCE, Inputs, Problem, WrongResult, cache_bytes_of, leave_nan
from .reference import relative_error
from .timing import EventTimer, HostTimer, Timer, Timing, slowest, take_turns

__all__ = [
    "Effort",
    "applies",
    "can_run",
    "default_candidates",
    "explain",
    "load_table",
    "run_method",
    "tune",
    "warm_up",
]

#: Tiles for 2-byte dtypes beside those of ``tile_config``, for few tokens: smaller ones keep more multiprocessors busy,
#: and lose at many tokens. On two H200s 128 x 128 was the best all-gather at 512 tokens, 256 x 128 at 1024.
_SMALLER_TILES = ("256x128x64x8x3", "128x128x64x4x4", "64x128x64x4x4")
#: Rounds of the first pass, and how much slower than its best a candidate may be to be in the second.
_FIRST_ROUNDS = 3
_FIRST_MARGIN = 1.15
#: The operation whose product an operation's backward pass is, with N and K exchanged.
_BACKWARD = {
    "all_gather_matmul": "matmul_reduce_scatter",
    "matmul_reduce_scatter": "all_gather_matmul",
    "replicated_matmul": "matmul_all_reduce",
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Effort:
    """How much ``tune`` measures.

    Attributes:
        rounds: timed calls of each candidate that the first, shorter pass leaves.
        warmup: untimed calls of each before those.
        noise: how much slower than the fastest, in parts of 1, an earlier candidate may be and still be chosen.
        max_seconds: begin no other problem after this time, in seconds; None for no limit.
        seed: of inputs, and of the order of candidates in each round.

    Raises:
        TypeError: one of them is of another type.
        ValueError: ``rounds`` below 1, ``warmup`` below 0, ``noise`` not in [0, 1), or ``max_seconds`` not positive.
    """

    rounds: int = 10
    warmup: int = 1
    noise: float = 0.01
    max_seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "warmup", "seed"):
            _check_type(f"Effort: {name}", getattr(self, name), (int,), "an int; int() makes it one")
        for name in ("noise", "max_seconds") if self.max_seconds is not None else ("noise",):
            _check_type(f"Effort: {name}", getattr(self, name), (int, float), "a number; float() makes it one")
        if self.rounds < 1 or self.warmup < 0:
            raise ValueError(f"rounds must be at least 1 and warmup 0, got {self.rounds} and {self.warmup}")
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise must be at least 0 and below 1, got {self.noise}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds must be positive or None, got {self.max_seconds}")


def default_candidates(operation: str, dtype: torch.dtype) -> list[str]:
    """What ``tune`` measures where the caller does not say: simpler methods first."""
    tiles = () if dtype == torch.float32 else _SMALLER_TILES
    if operation == "all_gather_matmul":
        fused = ["fused", *(f"fused(use_ce={ce})" for ce in (True, False))]
        fused += [f"fused(use_ce={ce},tiles={size})" for size in tiles for ce in (True, False)]
        rings = [f"ring_exchange({more}use_ce={ce})" for more in ("", "aggregate=True,") for ce in (True, False)]
        return [*fused, *rings, "nccl"]
    fused = ["fused", *(f"fused(tiles={size})" for size in tiles)]
    rings = [f"ring_exchange(use_ce={ce})" for ce in (True, False)]
    return [*fused, *rings, "pipeline", "pipeline(num_splits=2)", "nccl"]


def applies(operation: str, method: str) -> bool:
    """Whether the method is one for ``operation``.

    Raises:
        ValueError: no operation has the method.
    """
    Method.parse(method)
    try:
        parse_for(operation, method)
    except ValueError:
        return False
    return True


def can_run(group: Group, method: str) -> bool:
    """Whether the group's backend has what the method needs."""
    return choices_of(group).members.can_run(Method.parse(method))


def run_method(problem: Problem, inputs: Inputs, buffer: UserBuffer, method: str) -> Tensor:
    """The library's result for ``problem``, on a buffer with its hidden size and dtype."""
    function: Callable[..., Tensor] = getattr(ops, problem.operation)
    return function(inputs.a, inputs.b, buffer=buffer, method=method)


def tune(
    group: Group,
    problems: Sequence[Problem],
    *,
    candidates: Mapping[str, Sequence[str | Method]] | None = None,
    effort: Effort | None = None,
    path: str | Path | None = None,
) -> Table:
    """Collective: measure which method is best for each of ``problems``, and choose by that from now on.

    Each candidate's result is compared with a float64 reference before it is timed. Candidates then take turns, with a
    barrier between any two calls. Rank 0 decides for all, by the median of the slowest rank. The table is loaded into
    ``group``; it is for groups of this size on devices of this name. On ``shm`` and ``sim`` all this runs as well, and
    its times mean nothing.

    Registers buffers of its own for the largest token counts, and releases them at the end.

    Args:
        group: whose methods are measured.
        problems: all of the group's size. ``auto`` takes the nearest for sizes in between (docs/choosing.md).
        candidates: methods to measure, by operation, simpler ones first: one that is within ``effort.noise`` of the
            fastest goes before a later one. By default ``default_candidates``, as far as the backend can run them.
        effort: how much to measure.
        path: file to write the table to, on rank 0, for ``load_table``.

    Returns:
        The table; with ``effort.max_seconds`` perhaps of the first problems only.

    Raises:
        TypeError: an argument is of another type than its annotation says, on some rank; on every rank, as the others.
        ValueError: no problems, no candidates for one, an operation or a method that does not exist, another group
            size, ranks that ask for different things, or a path that cannot be written.
        NotImplementedError: the group's backend cannot run a candidate.
        WrongResult: a candidate's result is wrong on some rank.
    """
    _check_group("tune", group)

    def judge() -> tuple[list[Problem], dict[Problem, list[str]], Effort]:
        if path is not None:
            _check_type("tune: path", path, (str, Path), "a str, a Path or None")
        if effort is not None:
            _check_type("tune: effort", effort, (Effort,), "an Effort or None; to.Effort(rounds=10) makes one")
        checked = _checked_problems(group, problems)
        return checked, _checked_candidates(group, checked, candidates), effort or Effort()

    problems, methods, effort = group.agree_on("what to tune", judge)
    began = time.monotonic()
    rows: list[TableRow] = []
    with _own_buffers(group, problems) as buffers, _without_synchronising(group):
        trial = _Trial(group, effort, _timer(group, buffers[0]))
        for problem in problems:
            rows.append(trial.row(problem, buffers[1][problem.hidden, problem.dtype], methods[problem]))
            if _from_rank_0(group, lambda: time.monotonic() - began > (effort.max_seconds or float("inf"))):
                break
    about = _from_rank_0(group, lambda: _about(group, effort, len(rows), len(problems)))
    table = Table(group.device_name, group.world_size, tuple(rows), about, "the table that tune() measured")
    choices_of(group).load(table)
    if path is not None:
        _from_rank_0(group, lambda: table.save(Path(path)))
    return table


def load_table(path: str | Path, *, group: Group) -> Table:
    """Collective: let ``auto`` choose by the table in ``path``, before any other table. Rank 0 reads it for all.

    Raises:
        TypeError: on every rank, where ``path`` is neither a str nor a Path on some.
        ValueError: on every rank, where the file cannot be read, is no table, has another version, or is for other
            devices or another group size.
    """
    _check_group("load_table", group)
    remedy = 'a str or a Path, such as "table.json" that tune(.., path=..) has written'
    group.agree_on("paths of tables", lambda: _check_type("load_table: path", path, (str, Path), remedy))
    table = _from_rank_0(group, lambda: Table.load(Path(path)))
    choices_of(group).load(table)
    return table


def explain(
    operation: str,
    *,
    n: int,
    k: int,
    tokens: int,
    buffer: UserBuffer | Communicator | None = None,
    group: Group | None = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Which method ``auto`` takes for a call, and why: print it. Local; nothing is run.

    Args:
        operation: name of the function.
        n, k: columns and contracted size of this rank's GEMM, ``b`` being [k, n].
        tokens: T, of all ranks.
        buffer: of the call; or give
        group, dtype: its group and dtype.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: an unknown operation, a size below 1, or neither a buffer nor a group with a dtype.
    """
    if buffer is not None:
        handle_of("explain", buffer)
        group, dtype = buffer.group, dtype or buffer.dtype
    if group is None or dtype is None:
        raise ValueError("explain: give a buffer, or a group and a dtype")
    _check_group("explain", group)
    _check_type("explain: dtype", dtype, (torch.dtype,), "a torch.dtype, such as torch.bfloat16")
    for name, size in (("n", n), ("k", k), ("tokens", tokens)):
        _check_type(f"explain: {name}", size, (int,), "an int; int() makes it one")
    return choices_of(group).explain(operation, dtype, n, k, tokens)


def warm_up(operation: str, b: Tensor, *, buffer: UserBuffer | Communicator, bias: Tensor | None = None) -> list[str]:
    """Collective: call ``operation`` with method ``auto`` once for each choice it has within the buffer's capacity.

    Afterwards no token count compiles a kernel for it, as called without ``activation`` or ``residual``. Where ``b``
    requires a gradient, the same for the backward pass; gradients of ``b`` and ``bias`` stay as they are.

    Args:
        operation: name of the function.
        b: [K, N], this rank's right operand, laid out as in later calls.
        buffer: of later calls.
        bias: of later calls.

    Returns:
        The methods that were run, in forward and backward passes.

    Raises:
        TypeError: an argument is of another type than its annotation says. Local, as with the operation itself.
        ValueError: an unknown operation, or operands that do not fit.
    """
    handle_of("warm_up", buffer)
    check_tensors("warm_up", b=b)
    check_optional_tensors("warm_up", bias=bias)
    if b.dim() != 2:
        raise ValueError(f"warm_up: b must have 2 dimensions, [K, N], got {b.dim()} ({list(b.shape)})")
    group = buffer.group
    k, n = b.shape
    choices = choices_of(group)
    explained = choices.explain(operation, b.dtype, n, k, tokens=1)
    products = [explained.choices]
    if b.requires_grad and operation in _BACKWARD:
        products.append(choices.product(_BACKWARD[operation], b.dtype, k, n))
    max_tokens = buffer.capacity_shape[0]
    counts = sorted({count for each in products for count in each.counts(max_tokens, group.world_size)})
    function: Callable[..., Tensor] = getattr(ops, operation)
    for tokens in counts:
        rows = tokens // group.world_size if operation == "all_gather_matmul" else tokens
        with torch.enable_grad():
            x = torch.zeros(rows, k, dtype=b.dtype, device=b.device, requires_grad=b.requires_grad)
            out = function(x, _alias(b), buffer=buffer, bias=None if bias is None else _alias(bias), method="auto")
            if b.requires_grad:
                out.backward(torch.zeros_like(out))
    return sorted({str(each.method(tokens)) for each in products for tokens in counts})


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, with a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _check_type(what: str, value: object, types: tuple[type, ...], allowed: str) -> None:
    """TypeError unless ``value`` is one of ``types``; a bool is no number."""
    if not isinstance(value, types) or isinstance(value, bool):
        raise TypeError(f"{what} must be {allowed}, got {value!r}")


def _check_group(what: str, group: object) -> None:
    _check_type(f"{what}: group", group, (Group,), "a Group; to.init_group() makes one")


def _checked_problems(group: Group, problems: Sequence[Problem]) -> list[Problem]:
    """Each once, or the rule that one breaks."""
    remedy = "Problems; to.Problem(operation, tokens, n, k, world_size) makes one"
    if isinstance(problems, str) or not isinstance(problems, Iterable):
        raise TypeError(f"tune: problems must be a list of {remedy}, got {problems!r}")
    problems = list(problems)
    for index, problem in enumerate(problems):
        _check_type(f"tune: problems[{index}]", problem, (Problem,), f"one of the {remedy}")
    if not problems:
        raise ValueError("tune: give at least one problem")
    sizes = {problem.world_size for problem in problems} - {group.world_size}
    if sizes:
        raise ValueError(f"tune: problems must be for the group's {group.world_size} ranks, got {sorted(sizes)}")
    return list(dict.fromkeys(problems))


def _checked_candidates(
    group: Group, problems: Sequence[Problem], candidates: Mapping[str, Sequence[str | Method]] | None
) -> dict[Problem, list[str]]:
    """The methods to measure for each problem."""
    remedy = 'lists of methods by operation, such as {"all_gather_matmul": ["fused", "nccl"]}'
    if candidates is not None:
        _check_type("tune: candidates", candidates, (Mapping,), remedy)
    for operation, several in (candidates or {}).items():
        _check_type("tune: an operation of candidates", operation, (str,), f"a str; candidates are {remedy}")
        _check_type(f"tune: candidates[{operation!r}]", several, (list, tuple), f"a list; candidates are {remedy}")
    unknown = sorted(set(candidates or ()) - set(TABLE_OPERATIONS))
    if unknown:
        raise ValueError(f"tune: unknown operations {unknown} of candidates; known: {', '.join(TABLE_OPERATIONS)}")
    members = choices_of(group).members
    found: dict[Problem, list[str]] = {}
    for problem in problems:
        operation = problem.operation
        given = candidates is not None and operation in candidates
        texts = [str(method) for method in (candidates or {}).get(operation, ())]
        if not given:
            texts = default_candidates(operation, problem.dtype)
        methods = [parse_for(operation, text) for text in dict.fromkeys(texts)]
        impossible = [str(method) for method in methods if not members.can_run(method)]
        if given and impossible:
            raise NotImplementedError(
                f"tune: the {group.backend.name} backend cannot run {', '.join(impossible)} for {operation}: it lacks "
                "a copy engine or a process group's collectives; leave them out"
            )
        if any(method.name == "auto" for method in methods):
            raise ValueError(f"tune: candidates for {operation} must be methods to choose from, got 'auto'")
        if not methods:
            raise ValueError(f"tune: no candidates for {operation}; give at least one method")
        found[problem] = [str(method) for method in methods if members.can_run(method)]
    return found


class _Trial:
    """Measures one problem after the other."""

    def __init__(self, group: Group, effort: Effort, timer: Timer) -> None:
        self._group = group
        self._effort = effort
        self._timer = timer

    def row(self, problem: Problem, buffer: UserBuffer, methods: Sequence[str]) -> TableRow:
        """Collective: what the table says of ``problem``."""
        group, effort = self._group, self._effort
        num_sets = problem.num_input_sets(cache_bytes_of(group.device))
        sets = [problem.inputs(group.rank, effort.seed + i, group.device) for i in range(num_sets)]
        self._check(problem, sets[0], buffer, methods)

        def timed(names: Sequence[str], rounds: int) -> dict[str, Timing]:
            calls = {name: (lambda index, name=name: run_method(problem, sets[index], buffer, name)) for name in names}
            mine = take_turns(
                calls, timer=self._timer, num_sets=num_sets, rounds=rounds, warmup=effort.warmup, seed=effort.seed
            )
            return slowest(group.all_gather_object(mine))

        first = timed(methods, min(_FIRST_ROUNDS, effort.rounds))
        limit = _FIRST_MARGIN * min(timing.median_ms for timing in first.values())
        # Every rank has the same figures. Rank 0 decides all the same: two machines need not round alike.
        finalists = _from_rank_0(group, lambda: [name for name in methods if first[name].median_ms <= limit])
        last = timed(finalists, effort.rounds)
        times = {name: (last.get(name) or first[name]).median_ms for name in methods}
        method = _from_rank_0(group, lambda: decide({name: times[name] for name in finalists}, effort.noise))
        return TableRow(
            operation=problem.operation,
            dtype=str(problem.dtype).removeprefix("torch."),
            n=problem.n,
            k=problem.k,
            tokens=problem.tokens,
            method=method,
            times_ms=times,
        )

    def _check(self, problem: Problem, inputs: Inputs, buffer: UserBuffer, methods: Sequence[str]) -> None:
        """Compare every candidate's result with the reference; all ranks go on, or all raise."""
        reference = problem.reference(self._group.rank, self._effort.seed, self._group.device)
        errors: dict[str, float] = {}
        for method in methods:
            leave_nan(problem.out_shape, inputs.a)
            errors[method] = relative_error(run_method(problem, inputs, buffer, method), reference)
        tolerance = TOLERANCE[problem.dtype]
        everyone = self._group.all_gather_object(errors)
        worst = {method: max(of_rank[method] for of_rank in everyone) for method in methods}
        wrong = {method: error for method, error in worst.items() if not error <= tolerance}
        if wrong:
            listed = ", ".join(f"{method} {error:.1e}" for method, error in wrong.items())
            raise WrongResult(f"tune: {problem}: relative error over {tolerance:.0e}: {listed}")


def decide(times_ms: Mapping[str, float], noise: float) -> str:
    """The first candidate that is at most ``1 + noise`` times as slow as the fastest."""
    limit = (1 + noise) * min(times_ms.values())
    return next(name for name, time_ms in times_ms.items() if time_ms <= limit)


def _timer(group: Group, small: UserBuffer) -> Timer:
    if group.device.type != "cuda":
        return HostTimer(group.barrier)
    row = torch.zeros(1, small.capacity_shape[1], dtype=small.dtype, device=group.device)
    return EventTimer(group.barrier, lambda: ops.all_gather(row, buffer=small))


@contextmanager
def _own_buffers(
    group: Group, problems: Sequence[Problem]
) -> Iterator[tuple[UserBuffer, dict[tuple[int, torch.dtype], UserBuffer]]]:
    """A buffer of one row a rank, and one for each hidden size and dtype, closed at the end. Where the group broke, it
    keeps them: peers may still use them."""
    capacities: dict[tuple[int, torch.dtype], int] = {}
    for problem in problems:
        key = problem.hidden, problem.dtype
        capacities[key] = max(problem.tokens, capacities.get(key, 0))
    with ExitStack() as owned:

        def own(tokens: int, hidden: int, dtype: torch.dtype) -> UserBuffer:
            buffer = UserBuffer(group, tokens, hidden, dtype)
            group.adopt(buffer)
            owned.callback(buffer.close)
            return buffer

        small = own(group.world_size, 8, torch.float32)
        buffers = {(hidden, dtype): own(t, hidden, dtype) for (hidden, dtype), t in capacities.items()}
        try:
            yield small, buffers
            group.check()
            group.barrier()  # no peer's kernel uses them any more
        except WrongResult:  # every rank's, and no kernel has failed
            group.barrier()
            raise
        except BaseException:
            owned.pop_all()
            raise


@contextmanager
def _without_synchronising(group: Group) -> Iterator[None]:
    """On a GPU a call that waits for the device would be timed with the host's share."""
    before = group.check_mode
    if group.device.type == "cuda":
        group.check_mode = "async"
    try:
        yield
    finally:
        group.check_mode = before


def _about(group: Group, effort: Effort, measured: int, asked: int) -> dict[str, Any]:
    return {
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": environment.commit(),
        "hardware": environment.hardware(group.device),
        "versions": environment.versions(),
        "measurement": {
            **asdict(effort),
            "backend": group.backend.name,
            "time": "median over rounds on the slowest rank; see triton_overlap/timing.py",
            "problems": f"{measured} of {asked}",
        },
    }


def _from_rank_0(group: Group, make: Callable[[], _T]) -> _T:
    """Collective: what ``make`` returns on rank 0. An error there is a ValueError on every rank, which wait for it."""
    mine: tuple[Any, str | None] = (None, None)
    if group.rank == 0:
        try:
            mine = (make(), None)
        except (OSError, ValueError) as error:
            mine = (None, str(error))
        except Exception as error:  # noqa: BLE001  # raised below, on every rank
            mine = (None, f"{type(error).__name__} on rank 0: {error}")
    value, problem = group.all_gather_object(mine)[0]
    if problem is not None:
        raise ValueError(problem)
    result: _T = value
    return result
