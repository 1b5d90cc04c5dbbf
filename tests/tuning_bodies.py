"""Method ``auto`` and the measuring of its tables, as bodies for every backend (``ops/cases.py``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_overlap as to
from tests.ops import method_bodies
from tests.ops.cases import Draw, Sizes, assert_close, assert_equal, assert_steady, counters, leaf, leaves64
from triton_overlap import reference
from triton_overlap.kernels import ring_exchange
from triton_overlap.kernels.choose import choices_of
from triton_overlap.kernels.tables import Table, TableRow
from triton_overlap.tuning import decide, default_candidates

CANDIDATES: dict[str, list[str | to.Method]] = {
    "all_gather_matmul": ["fused", "ring_exchange(use_ce=False)"],
    "matmul_reduce_scatter": ["fused(tiles=16x32x32x4x2)", to.Method("pipeline", num_splits=2)],
    "matmul_all_reduce": ["ring_exchange"],
}
#: Two counts whose border is 8 tokens.
COUNTS = (4, 16)


def _problems(group: to.Group, sizes: Sizes, counts: tuple[int, ...]) -> list[to.Problem]:
    world_size, hidden, features = group.world_size, sizes.hidden, sizes.features
    return [
        to.Problem(operation, t * world_size, n, k, world_size, torch.float32)
        for t in counts
        for operation, n, k in (
            ("all_gather_matmul", features, hidden),
            ("matmul_reduce_scatter", hidden, features),
            ("matmul_all_reduce", hidden, features),
        )
    ]


def tuned(group: to.Group, sizes: Sizes, path: str | None) -> Table:
    """A whole measurement: every candidate of every problem, one table on all ranks, which ``auto`` then follows."""
    problems = _problems(group, sizes, (3,))
    allocations = to.symmetric_allocations()
    effort = to.Effort(rounds=1, warmup=0)
    table = to.tune(group, [*problems, problems[0]], candidates=CANDIDATES, effort=effort, path=path)
    assert to.symmetric_allocations() > allocations, "buffers of its own"
    assert group.check_mode == "sync"
    assert all(table == other for other in group.all_gather_object(table))
    assert [(row.operation, row.tokens, row.n, row.k) for row in table.rows] == [
        (p.operation, p.tokens, p.n, p.k) for p in problems
    ]
    for row in table.rows:
        assert list(row.times_ms) == [str(method) for method in CANDIDATES[row.operation]]
        assert row.method in row.times_ms
        found = to.explain(row.operation, group=group, dtype=torch.float32, n=row.n, k=row.k, tokens=row.tokens)
        assert found.row == row
        assert str(found.method) == row.method
    assert (table.device, table.world_size) == (group.device_name, group.world_size)
    assert table.about["measurement"]["problems"] == f"{len(problems)} of {len(problems)}"
    if path is not None:
        assert Table.load(Path(path)) == table
        group.kept.clear()  # as in a later run
        buffer = sizes.buffer(group, torch.float32)
        arguments: dict[str, Any] = {"buffer": buffer, "n": sizes.features, "k": sizes.hidden, "tokens": 6}
        assert to.explain("all_gather_matmul", **arguments).row is None
        assert to.load_table(path, group=group) == table
        assert to.explain("all_gather_matmul", **arguments).row == table.rows[0]
    # The group goes on, and recovers without the closed buffers.
    follows_the_table(group, sizes, table)
    group.recover()
    follows_the_table(group, sizes, table)
    return table


def tuned_by_default(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Every candidate that there is by default, at few and at many tokens; then values and gradients by ``auto``."""
    world_size, hidden, features = group.world_size, sizes.hidden, sizes.features
    problems = [
        to.Problem(operation, rows * world_size, n, k, world_size, dtype)
        for rows in (min(sizes.rows), max(sizes.rows))
        for operation, n, k in (
            ("all_gather_matmul", features, hidden),
            ("matmul_reduce_scatter", hidden, features),
            ("matmul_all_reduce", hidden, features),
        )
    ]
    table = to.tune(group, problems, effort=to.Effort(rounds=3))
    for row in table.rows:
        possible = [name for name in default_candidates(row.operation, dtype) if name in row.times_ms]
        assert list(row.times_ms) == possible
        assert len(possible) >= len(default_candidates(row.operation, dtype)) - 1, "all but nccl, where GPUs are shared"
    method_bodies.once(group, sizes, dtype, ["auto"], ["auto"])
    method_bodies.all_reduce(group, sizes, dtype, ["auto"])


def follows_the_table(group: to.Group, sizes: Sizes, table: Table) -> None:
    """What ``auto`` computes is bit for bit what the table's methods compute, forward and backward."""
    buffer = sizes.buffer(group, torch.float32)
    draw = Draw(group, torch.float32, 11)
    operands = [
        draw.mine(draw.per_rank(*shape))
        for shape in ((3, sizes.hidden), (sizes.hidden, sizes.features), (sizes.features, sizes.hidden))
    ]
    d_out = draw.constant(draw.per_rank(3, sizes.hidden))
    by = {row.operation: row.method for row in table.rows}
    results = []
    for gather, reduce in (("auto", "auto"), (by["all_gather_matmul"], by["matmul_reduce_scatter"])):
        x, b, c = map(leaf, operands)
        h = to.all_gather_matmul(x, b, buffer=buffer, method=gather)
        out = to.matmul_reduce_scatter(h, c, buffer=buffer, method=reduce)
        results.append([h.detach(), out.detach()])
        out.backward(d_out)
        assert x.grad is not None
        if gather == reduce == "auto":
            results[-1].append(x.grad)
        else:
            # Backward, each operation takes what the table has for the other one's product.
            dh = to.all_gather_matmul(d_out, operands[2].detach().t(), buffer=buffer, method=gather)
            dx = to.matmul_reduce_scatter(dh, operands[1].detach().t(), buffer=buffer, method=reduce)
            results[-1].append(dx)
    for auto, named in zip(*results, strict=True):
        assert_equal("auto", auto, named)


def _table(group: to.Group, sizes: Sizes) -> Table:
    """Different methods, senders and tiles for few and for many tokens, forward and backward."""
    hidden, features, world_size = sizes.hidden, sizes.features, group.world_size
    methods = {
        ("all_gather_matmul", features, hidden): ("fused(use_ce=False,tiles=16x32x32x4x2)", "ring_exchange"),
        ("matmul_reduce_scatter", hidden, features): ("pipeline(num_splits=2)", "fused(tiles=16x16x32x4x2)"),
        # Near, and not the nearest. (The backward products of the first two have their sizes.)
        ("matmul_reduce_scatter", hidden, features + 1): ("ring_exchange", "fused"),
        ("matmul_all_reduce", hidden, features): ("fused", "pipeline"),
    }
    rows = tuple(
        TableRow(operation, "float32", n, k, count * world_size, method, {method: 1.0})
        for (operation, n, k), pair in methods.items()
        for count, method in zip(COUNTS, pair, strict=True)
    )
    return Table(group.device_name, world_size, rows, source="by hand")


def every_class(group: to.Group, sizes: Sizes, dtype: torch.dtype) -> None:
    """Values and every gradient by ``auto``, twice at every row count of several classes, and without sequence
    parallelism; after the first round over all classes nothing is specialised anew."""
    choices_of(group).load(_table(group, sizes))
    method_bodies.once(group, sizes, dtype, ["auto"], ["auto"])
    method_bodies.all_reduce(group, sizes, dtype, ["auto"])
    before = counters()
    method_bodies.once(group, sizes, dtype, ["auto"], ["auto"])
    assert_steady("later calls", before)


def backward_chooses(group: to.Group, sizes: Sizes) -> None:
    """Which methods are looked up, forward and backward, in the order of the calls; the same on every rank."""
    choices = choices_of(group)
    choices.load(_table(group, sizes))
    asked: list[tuple[Any, ...]] = []
    plain = choices.method

    def method(*arguments: Any) -> to.Method:
        found = plain(*arguments)
        asked.append((*arguments, str(found)))
        return found

    choices.method = method  # type: ignore[assignment, method-assign]
    buffer = sizes.buffer(group, torch.float32)
    draw = Draw(group, torch.float32, 3)
    hidden, features = sizes.hidden, sizes.features
    for rows in (2, 9):
        x, b, c = leaf(draw.one(rows, hidden)), leaf(draw.one(hidden, features)), leaf(draw.one(features, hidden))
        h = to.all_gather_matmul(x, b, buffer=buffer, method="auto")
        to.matmul_reduce_scatter(h, c, buffer=buffer, method="auto").sum().backward()
    y = leaf(draw.one(2 * group.world_size, hidden))
    to.replicated_matmul(y, leaf(draw.one(hidden, features)), buffer=buffer, method="auto").sum().backward()
    w = group.world_size
    gather = "all_gather_matmul", torch.float32, features, hidden
    reduce = "matmul_reduce_scatter", torch.float32, hidden, features
    few = "fused(use_ce=False,tiles=16x32x32x4x2)", "pipeline(num_splits=2)"
    many = "ring_exchange", "fused(tiles=16x16x32x4x2)"
    assert asked == [
        (*gather, 2 * w, few[0]),
        (*reduce, 2 * w, few[1]),
        (*gather, 2 * w, few[0]),  # of the reduce-scatter
        (*reduce, 2 * w, few[1]),  # of the all-gather
        (*gather, 9 * w, many[0]),
        (*reduce, 9 * w, many[1]),
        (*gather, 9 * w, many[0]),
        (*reduce, 9 * w, many[1]),
        ("matmul_all_reduce", torch.float32, hidden, features, 2 * w, "fused"),
    ]
    assert all(asked == other for other in group.all_gather_object(asked))


def warmed_up(group: to.Group, sizes: Sizes) -> None:
    """``warm_up`` touches every choice; afterwards no token count specialises a kernel."""
    choices_of(group).load(_table(group, sizes))
    buffer = sizes.buffer(group, torch.float32)
    draw = Draw(group, torch.float32, 5)
    b, c = leaf(draw.one(sizes.features, sizes.hidden)), leaf(draw.one(sizes.hidden, sizes.features))
    bias = leaf(draw.one(sizes.hidden))
    touched = [
        to.warm_up("all_gather_matmul", b.t(), buffer=buffer),
        to.warm_up("matmul_reduce_scatter", c.t(), buffer=buffer, bias=bias),
    ]
    forward = ["fused(use_ce=False,tiles=16x32x32x4x2)", "ring_exchange"]
    backward = ["fused(tiles=16x16x32x4x2)", "pipeline(num_splits=2)"]
    assert touched == [sorted(forward + backward)] * 2
    assert b.grad is None
    assert c.grad is None
    assert bias.grad is None
    before = counters()
    for rows in range(1, sizes.max_rows + 1):
        x = leaf(draw.one(rows, sizes.hidden))
        h = to.all_gather_matmul(x, b.t(), buffer=buffer, method="auto")
        to.matmul_reduce_scatter(h, c.t(), buffer=buffer, bias=bias, method="auto").sum().backward()
    assert_steady("later calls", before)
    with torch.no_grad():
        assert to.warm_up("replicated_matmul", b.t().detach(), buffer=buffer) == ["fused", "pipeline"]
    with pytest.raises(ValueError, match="unknown operation 'matmul'"):
        to.warm_up("matmul", b.t(), buffer=buffer)


def compiled(group: to.Group, sizes: Sizes) -> None:
    """One graph for every token count, of several classes: the choice is made when the operator runs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    choices_of(group).load(_table(group, sizes))
    buffer = sizes.buffer(group, torch.float32)
    draw = Draw(group, torch.float32, 29)
    b, c = draw.one(sizes.hidden, sizes.features), draw.one(sizes.features, sizes.hidden)

    def block(x: torch.Tensor) -> torch.Tensor:
        h = to.all_gather_matmul(x, b, buffer=buffer, method="auto")
        return to.matmul_reduce_scatter(torch.relu(h), c, buffer=buffer, method="auto")

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    fast = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for rows in (5, 9, 3, 11):
        results = []
        for function in (block, fast):
            x = leaf(torch.ones(rows, sizes.hidden, device=group.device))
            out = function(x)
            out.sum().backward()
            assert x.grad is not None
            results.append([out.detach(), x.grad])
        for eager, got in zip(*results, strict=True):
            assert_equal("compiled", got, eager)
    assert counter.frame_count == 1


def several_b(group: to.Group, sizes: Sizes) -> None:
    """Several b are looked up by the sum of their columns."""
    hidden, world_size = sizes.hidden, group.world_size
    rows = tuple(
        TableRow("all_gather_matmul", "float32", n, hidden, 8, method, {method: 1.0})
        for n, method in ((8, "fused"), (16, "ring_exchange"))
    )
    choices_of(group).load(Table(group.device_name, world_size, rows))
    buffer = sizes.buffer(group, torch.float32)
    draw = Draw(group, torch.float32, 31)
    x, bs = draw.per_rank(3, hidden), [draw.one(hidden, 8), draw.one(hidden, 8)]
    outs = to.all_gather_matmul(draw.constant(x), bs, buffer=buffer, method="auto")
    by_ring = to.all_gather_matmul(draw.constant(x), bs, buffer=buffer, method="ring_exchange")
    for out, ring, b in zip(outs, by_ring, bs, strict=True):
        assert_equal("auto", out, ring)
        expected = reference.all_gather_matmul(leaves64(x), [b.double()] * world_size)[group.rank]
        assert_close("auto", out, expected.detach(), torch.float32)


def other_tiles(group: to.Group, sizes: Sizes) -> list[str]:
    """Ranks with different tiles or senders of one method: an error that names both, and no wait for a flag."""
    buffer = sizes.buffer(group, torch.float32)
    x, b = torch.ones(sizes.rows[0], sizes.hidden), torch.ones(sizes.hidden, sizes.features)
    messages = []
    for pair, words in (
        (("fused(tiles=16x32x32x4x2)", "fused(tiles=32x32x32x4x2)"), ("tiles of 16 x 32", "tiles of 32 x 32")),
        (("fused", "fused(tiles=32x32x32x4x2)"), ("method fused(?! by|,)", "method fused, tiles of 32 x 32")),
        (("fused(use_ce=True)", "fused(use_ce=False)"), ("fused by copy engine", "method fused(?! by|,)")),
    ):
        with pytest.raises(to.CommMismatchError) as caught:
            to.all_gather_matmul(x, b, buffer=buffer, method=pair[min(group.rank, 1)])
        for word in words:
            assert re.search(word, str(caught.value)), str(caught.value)
        messages.append(str(caught.value))
        group.recover()
    # What the ranks need not agree on.
    by = ("fused(use_ce=False,tiles=16x32x32x4x2)", "fused(use_ce=False,tiles=16x32x64x8x3)")[min(group.rank, 1)]
    out = to.all_gather_matmul(x, b, buffer=buffer, method=by)
    assert_equal("with other steps of the contraction", out, torch.full_like(out, sizes.hidden))
    return messages


def errors(group: to.Group, sizes: Sizes, folder: str) -> None:
    """What cannot be tuned, loaded or explained is said on every rank, and leaves the group as it was."""
    world_size = group.world_size
    problem = to.Problem("all_gather_matmul", 4 * world_size, sizes.features, sizes.hidden, world_size, torch.float32)
    other = to.Problem("all_gather_matmul", 12, 8, 8, 3, torch.float32)

    def tune(problems: Any = (problem,), **arguments: Any) -> Any:
        return lambda: to.tune(group, problems, **{"effort": to.Effort(rounds=1, warmup=0), **arguments})

    def candidates(*methods: Any, operation: str = "all_gather_matmul") -> dict[str, Any]:
        return {"candidates": {operation: methods}}

    file = Path(folder) / f"{group.rank == 0}.json"
    Table("NVIDIA H200", 2, ()).save(file)
    group.barrier()
    for call, words in (
        (tune([]), "at least one problem"),
        (tune([other]), "for the group's 2 ranks, got [3]"),
        (tune(**candidates()), "no candidates for all_gather_matmul"),
        (tune(**candidates("fused", operation="matmul")), "unknown operations ['matmul']"),
        (tune(**candidates("fused", "auto")), "got 'auto'"),
        (tune(**candidates("pipeline")), "does not apply here"),
        (tune(**candidates("fast")), "unknown method 'fast'"),
        (tune(**candidates(f"ring_exchange(num_sm={group.rank + 1})")), "must be the same on every rank"),
        (lambda: to.Effort(rounds=0), "rounds must be at least 1"),
        (lambda: to.Effort(noise=1.0), "noise must be at least 0 and below 1"),
        (lambda: to.Effort(max_seconds=0.0), "max_seconds must be positive"),
        # Rank 0 reads for all.
        (lambda: to.load_table(Path(folder) / "none.json", group=group), "none.json: cannot be read"),
        (lambda: to.load_table(file, group=group), "2 ranks of NVIDIA H200, but group"),
        (lambda: to.explain("all_gather_matmul", n=8, k=8, tokens=8), "give a buffer, or a group and a dtype"),
        (tune(path=Path(folder)), "directory"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value), str(caught.value)
        assert group.broken is None
    library: Any = to  # no type checker lets these through
    buffer = sizes.buffer(group, torch.float32)
    b = torch.ones(sizes.hidden, sizes.features)

    def problem_with(**sizes: Any) -> Any:
        return lambda: to.Problem("all_gather_matmul", **{"tokens": 4, "n": 8, "k": 8, "world_size": 2, **sizes})

    for call, words in (
        (lambda: library.tune([5], [problem]), "tune: group must be a Group; to.init_group() makes one, got [5]"),
        (tune(5), "tune: problems must be a list of Problems; to.Problem(operation, tokens, n, k, world_size)"),
        (tune([5]), "tune: problems[0] must be one of the Problems; to.Problem("),
        (tune(candidates=5), "tune: candidates must be lists of methods by operation, such as {"),
        (tune(candidates={"all_gather_matmul": 5}), "tune: candidates['all_gather_matmul'] must be a list; candidates"),
        (tune(candidates={5: ["fused"]}), "tune: an operation of candidates must be a str; candidates are lists"),
        (tune(effort=5), "tune: effort must be an Effort or None; to.Effort(rounds=10) makes one, got 5"),
        (tune(path=5), "tune: path must be a str, a Path or None, got 5"),
        (lambda: library.load_table(None, group=group), "load_table: path must be a str or a Path, such as"),
        (lambda: library.load_table("table.json", group=None), "load_table: group must be a Group"),
        (lambda: library.warm_up("all_gather_matmul", None, buffer=buffer), "b must be a torch.Tensor, got None"),
        (lambda: library.warm_up("all_gather_matmul", b, buffer=None), "buffer must be a UserBuffer or a communicator"),
        (lambda: library.warm_up("all_gather_matmul", b, buffer=buffer, bias=3), "bias must be a torch.Tensor or None"),
        (lambda: library.explain("all_gather_matmul", n=8, k=8, tokens=8, buffer=3), "buffer must be a UserBuffer or"),
        (
            lambda: library.explain("all_gather_matmul", n=8, k="8", tokens=8, buffer=buffer),
            "explain: k must be an int",
        ),
        (lambda: library.Effort(rounds="3"), "Effort: rounds must be an int; int() makes it one, got '3'"),
        (lambda: library.Effort(noise="low"), "Effort: noise must be a number; float() makes it one, got 'low'"),
        (problem_with(tokens="4"), "Problem: tokens must be an int, got '4'; int() makes it one"),
        (problem_with(n=8.0), "Problem: n must be an int, got 8.0"),
    ):
        with pytest.raises(TypeError) as wrong:
            call()
        assert words in str(wrong.value), str(wrong.value)
        assert group.broken is None
    with pytest.raises(ValueError, match=r"b must have 2 dimensions, \[K, N\], got 1"):
        to.warm_up("all_gather_matmul", b[0], buffer=buffer)
    # One rank's own mistake is an error of all, at once.
    mine = group.rank == 1
    for call, words in (
        (lambda: library.tune(group, [5] if mine else [problem]), "problems[0] must be one of"),
        (lambda: library.load_table(5 if mine else "none.json", group=group), "path must be a str or a Path"),
    ):
        with pytest.raises(TypeError) as wrong:
            call()
        assert str(wrong.value).startswith("on rank 1: ")
        assert words in str(wrong.value), str(wrong.value)
    assert group.broken is None


def a_wrong_candidate(group: to.Group, sizes: Sizes) -> str:
    """A method with a fault on one rank is not timed."""
    problem = to.Problem("all_gather_matmul", 4 * group.world_size, 8, sizes.hidden, group.world_size, torch.float32)
    plain = ring_exchange.all_gather_matmul

    def faulty(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
        outs = plain(*arguments, **keywords)
        outs[0][0, 0] += 1.0
        return outs

    made: list[to.UserBuffer] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "adopt", made.append)
        if group.rank == 1:
            patch.setattr(ring_exchange, "all_gather_matmul", faulty)
        with pytest.raises(to.WrongResult) as caught:
            to.tune(group, [problem], candidates={"all_gather_matmul": ["fused", "ring_exchange"]})
    assert group.broken is None
    assert len(made) == 2
    assert all(buffer.closed for buffer in made), "buffers of the measurement are left"
    return str(caught.value)


def too_little_time(group: to.Group, sizes: Sizes) -> int:
    """Problems that are begun after the limit are left out."""
    effort = to.Effort(rounds=1, warmup=0, max_seconds=1e-6)
    table = to.tune(group, _problems(group, sizes, (1, 2)), candidates=CANDIDATES, effort=effort)
    assert table.about["measurement"]["problems"] == "1 of 6"
    return len(table.rows)


def decision_prefers_the_simpler() -> None:
    times = {"fused": 1.009, "ring_exchange": 1.0, "nccl": 1.2}
    assert decide(times, 0.01) == "fused"
    assert decide(times, 0.005) == "ring_exchange"


def no_collectives(group: to.Group, sizes: Sizes) -> None:
    """Where there is no process group, nccl is no candidate by default, and an error where it is asked for."""
    problem = to.Problem("matmul_reduce_scatter", 2 * group.world_size, 8, 8, group.world_size, torch.float32)
    with pytest.raises(NotImplementedError, match="the sim backend cannot run nccl for matmul_reduce_scatter"):
        to.tune(group, [problem], candidates={"matmul_reduce_scatter": ["fused", "nccl"]})
    table = to.tune(group, [problem], effort=to.Effort(rounds=1, warmup=0))
    assert list(table.rows[0].times_ms) == default_candidates("matmul_reduce_scatter", torch.float32)[:-1]
