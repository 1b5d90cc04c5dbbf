"""What ``auto`` chooses from a table, for every size; tables as files."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_overlap.comm.signals import HeaderOperation, describe_operation, operation_code
from triton_overlap.kernels import choose
from triton_overlap.kernels.choose import DEFAULT, Choices, Members, Product, product_choices
from triton_overlap.kernels.config import TileConfig, tile_config
from triton_overlap.kernels.methods import APPLICABLE, Method, gather_method, parse_for, reduce_method
from triton_overlap.kernels.tables import TABLE_DTYPES, TABLE_OPERATIONS, Table, TableRow

GPUS = Members("NVIDIA H200", 2, copies=True, collectives=True)
TILES = "fused(tiles=128x128x64x4x4)"
GATHER, REDUCE, ALL_REDUCE = TABLE_OPERATIONS


def row(tokens: int, method: str, n: int = 4096, k: int = 8192, **changes: Any) -> TableRow:
    found = {"operation": GATHER, "dtype": "bfloat16", "n": n, "k": k, "tokens": tokens, "method": method}
    return TableRow(**{**found, "times_ms": {method: 1.0}, **changes})


def table(*rows: TableRow, **changes: Any) -> Table:
    return Table(**{"device": GPUS.device, "world_size": 2, "rows": rows, "source": "a.json", **changes})


TABLE = table(
    row(2048, "fused"),
    row(128, "nccl", times_ms={"nccl": 0.5, "ring_exchange(use_ce=True)": 0.6, "fused": 0.7}),
    row(512, TILES),
    row(128, "ring_exchange", n=28672),
    row(256, "pipeline", operation=REDUCE),
)


def choices(*tables: Table, members: Members = GPUS) -> Choices:
    found = Choices(members, "group7", speaks=True)
    for each in reversed(tables):
        found.load(each)
    return found


def chosen(tokens: int, *, operation: str = GATHER, n: int = 4096, k: int = 8192, by: Choices | None = None) -> str:
    return str((by or choices(TABLE)).method(operation, torch.bfloat16, n, k, tokens))


def test_the_nearest_count_by_ratio() -> None:
    # Between 128 and 512 the border is 256, between 512 and 2048 it is 1024.
    expected = {1: "nccl", 128: "nccl", 256: "nccl", 257: TILES, 512: TILES, 1024: TILES, 1025: "fused", 10**6: "fused"}
    assert {tokens: chosen(tokens) for tokens in expected} == expected


@pytest.mark.parametrize(
    "n, k, nearest",
    # 10837 is between 4096 and 28672 by ratio; K counts as much as N.
    [(4096, 8192, 4096), (1, 1, 4096), (10836, 8192, 4096), (10837, 8192, 28672), (10**7, 8192, 28672)],
)
def test_the_nearest_shape_by_ratio(n: int, k: int, nearest: int) -> None:
    explanation = choices(TABLE).explain(GATHER, torch.bfloat16, n, k, 128)
    assert explanation.row is not None
    assert explanation.row.n == nearest


@pytest.mark.parametrize(
    "n, k, nearest",
    # At (4096, 8192) the ratios are 2 and 4, at (4096, 4096) 4 and 2; half-way (5792.6) both are alike.
    [
        (4096, 8192, (8192, 8192)),
        (4096, 4096, (4096, 2048)),
        (4096, 5792, (4096, 2048)),
        (4096, 5793, (8192, 8192)),
        (8192, 4096, (8192, 8192)),
    ],
)
def test_n_and_k_count_alike(n: int, k: int, nearest: tuple[int, int]) -> None:
    by = choices(table(row(128, "nccl", 8192, 8192), row(128, "fused", 4096, 2048)))
    found = by.explain(GATHER, torch.bfloat16, n, k, 128).row
    assert found is not None
    assert (found.n, found.k) == nearest


def test_the_first_table_that_has_the_operation_counts() -> None:
    other = table(row(64, "ring_exchange"), source="b.json")
    assert chosen(64, by=choices(other, TABLE)) == "ring_exchange"
    assert chosen(64, by=choices(TABLE, other)) == "nccl"
    assert chosen(64, operation=REDUCE, by=choices(other, TABLE)) == "pipeline"


def test_rows_stand_in_for_what_was_not_measured() -> None:
    by = choices(TABLE)
    assert chosen(64, operation=ALL_REDUCE, by=by) == "pipeline"
    assert str(by.method(GATHER, torch.float16, 4096, 8192, 128)) == "nccl"
    assert by.method(GATHER, torch.float32, 4096, 8192, 128) == DEFAULT, "true float32 has another balance"
    measured = table(row(64, "nccl", operation=ALL_REDUCE))
    assert chosen(64, operation=ALL_REDUCE, by=choices(measured, TABLE)) == "nccl"


def test_what_the_backend_cannot_run_is_not_chosen() -> None:
    no_collectives = dataclasses.replace(GPUS, collectives=False)
    assert chosen(128, by=choices(TABLE, members=no_collectives)) == "ring_exchange(use_ce=True)"
    nothing = dataclasses.replace(GPUS, collectives=False, copies=False)
    assert chosen(128, by=choices(TABLE, members=nothing)) == "fused"
    explanation = choices(TABLE, members=nothing).explain(GATHER, torch.bfloat16, 4096, 8192, 128)
    assert "the row's own choice, nccl, cannot run here" in str(explanation)


def test_without_a_table_the_default() -> None:
    for members in (GPUS, Members("NVIDIA H200", 4, True, True), Members("shm", 2, True, False)):
        found = product_choices(Product(GATHER, "bfloat16", 8, 8), members, [] if members is GPUS else [TABLE])
        assert found.method(128) == DEFAULT
    one = Members("NVIDIA H200", 1, True, True)
    assert (
        product_choices(Product(GATHER, "bfloat16", 8, 8), one, [table(row(8, "nccl"), world_size=1)]).method(8)
        == DEFAULT
    ), "one rank has nobody to send to"


SIZES = st.integers(1, 1 << 17)
ROWS = st.lists(
    st.builds(
        lambda operation, dtype, n, k, tokens, method: row(
            tokens, method, n, k, operation=operation, dtype=dtype, times_ms={method: 1.0, "fused": 2.0}
        ),
        st.sampled_from(TABLE_OPERATIONS),
        st.sampled_from(TABLE_DTYPES),
        SIZES,
        SIZES,
        st.integers(1, 16384),
        st.sampled_from(["fused", TILES, "ring_exchange", "ring_exchange(use_ce=True)", "nccl"]),
    ),
    max_size=12,
    unique_by=lambda r: (r.operation, r.dtype, r.n, r.k, r.tokens),
)


@settings(max_examples=300, deadline=None)
@given(
    rows=ROWS,
    operation=st.sampled_from([name for name, methods in APPLICABLE.items() if "auto" in methods]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    n=SIZES,
    k=SIZES,
    world_size=st.sampled_from([1, 2, 3, 8]),
    rows_a_rank=st.integers(1, 16384),
    copies=st.booleans(),
    shuffled=st.randoms(),
)
def test_a_choice_for_every_size_whatever_the_order_of_rows(
    rows: list[TableRow],
    operation: str,
    dtype: torch.dtype,
    n: int,
    k: int,
    world_size: int,
    rows_a_rank: int,
    copies: bool,
    shuffled: Any,
) -> None:
    members = Members("NVIDIA H200", world_size, copies, collectives=not copies)
    tokens = max(1, rows_a_rank // world_size) * world_size
    first = choices(table(*rows, world_size=world_size), members=members)
    explanation = first.explain(operation, dtype, n, k, tokens)
    assert parse_for(operation, str(explanation.method)).name != "auto"
    assert members.can_run(explanation.method)
    product = explanation.product
    method = first.method(product.operation, dtype, product.n, product.k, tokens)
    assert method == explanation.method
    # Another rank: rows in another order, other questions before.
    again = list(rows)
    shuffled.shuffle(again)
    second = choices(table(*again, world_size=world_size), members=members)
    second.method(product.operation, dtype, 77, 78, 79)
    assert second.method(product.operation, dtype, product.n, product.k, tokens) == method
    if explanation.row is not None:
        of_shape = [r for r in explanation.choices.rows if (r.n, r.k) == (explanation.row.n, explanation.row.k)]

        def ratio(of: TableRow) -> float:
            return max(of.tokens, tokens) / min(of.tokens, tokens)

        assert ratio(explanation.row) <= min(map(ratio, of_shape)) * (1 + 1e-9), "a nearer count was measured"


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(1, 16384), min_size=1, max_size=8, unique=True),
    rows_a_rank=st.integers(1, 9000),
    world_size=st.sampled_from([2, 3, 8]),
)
def test_one_count_of_each_class_within_the_capacity(counts: list[int], rows_a_rank: int, world_size: int) -> None:
    members = Members("NVIDIA H200", world_size, True, True)
    names = [f"pipeline(num_splits={i + 1})" for i in range(len(counts))]
    rows = [row(t, name, operation=REDUCE) for t, name in zip(counts, names, strict=True)]
    found = product_choices(Product(REDUCE, "bfloat16", 4096, 8192), members, [table(*rows, world_size=world_size)])
    capacity = rows_a_rank * world_size
    touched = found.counts(capacity, world_size)
    assert all(0 < count <= capacity and count % world_size == 0 for count in touched)
    reached = {found.method(t) for t in range(world_size, capacity + 1, world_size)}
    assert {found.method(count) for count in touched} == reached
    assert len(touched) == len(reached)


def test_it_says_once_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triton_overlap.choose")
    by = choices(TABLE)
    by.explain(GATHER, torch.bfloat16, 4096, 8192, 128)
    assert not caplog.records, "nothing was chosen for a call yet"
    for tokens in (128, 4096):
        chosen(tokens, by=by)
    chosen(128, n=512, by=by)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "INFO",
            "group7, method auto: all_gather_matmul, N 4096, K 8192, bfloat16, T 128, 2 ranks of NVIDIA H200: nccl, "
            "by a.json, measured at N 4096, K 8192, T 128",
        )
    ]
    caplog.clear()
    by.method(GATHER, torch.float32, 8, 8, 8)
    assert not caplog.records, "once for each operation"
    by = choices()
    chosen(8, by=by)
    chosen(8, operation=REDUCE, by=by)
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert "fused, the default, since no table has this operation for 2 ranks" in caplog.records[1].getMessage()
    caplog.clear()
    Choices(GPUS, "quiet", speaks=False).method(GATHER, torch.bfloat16, 8, 8, 8)
    assert not caplog.records


def test_an_explanation_shows_the_row() -> None:
    about = {"created": "2026-01-31T12:00:00Z", "versions": {"torch": "2.11.0"}}
    by = choices(dataclasses.replace(TABLE, about=about))
    assert str(by.explain(GATHER, torch.float16, 5000, 8192, 200)) == "\n".join(
        [
            "all_gather_matmul, N 5000, K 8192, float16, T 200, 2 ranks of NVIDIA H200: nccl, by a.json, measured at "
            "N 4096, K 8192, T 128",
            "  the row serves T 1 to 256, and N and K that are nearer to its own than to any other's",
            "  measured for all_gather_matmul in bfloat16, which stand in",
            "  created: 2026-01-31T12:00:00Z",
            "  nccl                           0.5000 ms   1.00  <- taken",
            "  ring_exchange(use_ce=True)     0.6000 ms   1.20",
            "  fused                          0.7000 ms   1.40",
        ]
    )
    assert "serves T 1025 and more" in str(by.explain(GATHER, torch.bfloat16, 4096, 8192, 5000))
    # Forward it multiplies alone; its backward product has N and K exchanged.
    replicated = by.explain("replicated_matmul", torch.bfloat16, 8192, 4096, 64)
    assert replicated.product == Product(ALL_REDUCE, "bfloat16", 4096, 8192)


def test_what_cannot_be_explained() -> None:
    with pytest.raises(ValueError, match="unknown operation 'matmul'; method auto chooses for all_gather_matmul, "):
        choices(TABLE).explain("matmul", torch.bfloat16, 8, 8, 8)
    with pytest.raises(ValueError, match="at least 1, got 8, 0 and 8"):
        choices(TABLE).explain(GATHER, torch.bfloat16, 8, 0, 8)


def test_a_table_for_others_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a.json: a table for 4 ranks of NVIDIA H200, but group7 has 2 ranks of"):
        choices(table(row(8, "fused"), world_size=4))


def test_tables_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.json"
    full = dataclasses.replace(TABLE, about={"commit": None, "versions": {"torch": "2.11"}})
    full.save(path)
    assert Table.load(path) == full
    assert Table.load(path).source == "t.json"
    table().save(path)
    assert Table.load(path) == table()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"format": 99}, "a table of format 99, this version reads 1; measure it again"),
        ({"format": None}, "format None"),
        ({"format": True}, "format True"),
        ({"about": None}, "about a mapping, got .*None"),
        ({"rows": [{**vars(row(8, "fused")), "times_ms": {"fused": 10**400}}]}, "must be positive milliseconds"),
        ({"rows": 3}, "must have device, world_size, about and a list of rows"),
        ({"world_size": 0}, "world_size must be a whole number of at least 1, got 0"),
        ({"rows": [{"operation": GATHER}]}, "row 0: .*missing"),
        ({"rows": [vars(row(8, "fused")), {**vars(row(8, "fused")), "tokens": 0}]}, "row 1: tokens must be a whole"),
        ({"rows": [{**vars(row(8, "fused")), "operation": "matmul"}]}, "row 0: operation must be one of"),
        ({"rows": [{**vars(row(8, "fused")), "dtype": "float8"}]}, "row 0: dtype must be one of bfloat16"),
        ({"rows": [{**vars(row(8, "fused")), "method": "nccl"}]}, "row 0: times_ms must be .*the chosen 'nccl'"),
        ({"rows": [{**vars(row(8, "fused")), "times_ms": {"fused": -1}}]}, "must be positive milliseconds, got -1"),
        ({"rows": [{**vars(row(8, "fused")), "times_ms": {"fused": 1, "auto": 1}}]}, "got 'auto'"),
        ({"rows": [{**vars(row(8, "fused")), "times_ms": {"fused": 1, "pipeline": 1}}]}, "does not apply here"),
        ({"rows": [vars(row(8, "fused"))] * 2}, "more than one row for"),
    ],
)
def test_what_is_no_table_is_said(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**table(row(8, "fused")).to_json(), **changes}))
    with pytest.raises(ValueError, match=f"t.json: .*{words}"):
        Table.load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("missing.json", "text.json", "bytes.json", "deep.json"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read as a table of methods"):
            Table.load(tmp_path / name)
    with pytest.raises(ValueError, match=r"list.json: not a table of methods; `python -m triton_overlap.bench tune`"):
        Table.load(tmp_path / "list.json")


def test_the_variable_names_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(row(8, "ring_exchange")).save(tmp_path / "first.json")
    TABLE.save(tmp_path / "second.json")
    monkeypatch.setenv(choose.TABLES_VARIABLE, f"{tmp_path / 'first.json'}:{tmp_path / 'second.json'}")
    by = choices()
    assert chosen(8, by=by) == "ring_exchange"
    assert chosen(8, operation=REDUCE, by=by) == "pipeline"
    assert chosen(8, by=choices(TABLE)) == "nccl", "a loaded table goes first"
    monkeypatch.setenv(choose.TABLES_VARIABLE, str(tmp_path / "third.json"))
    with pytest.raises(ValueError, match=r"TRITON_OVERLAP_TABLES: .*third.json: cannot be read"):
        chosen(8, by=choices())


def test_every_shipped_table_loads_and_is_of_real_devices() -> None:
    for shipped in choose._shipped_tables():
        assert shipped.rows
        assert shipped.device not in ("shm", "sim")
        assert {"created", "commit", "versions", "hardware"} <= set(shipped.about)


def test_a_tile_configuration_has_a_name() -> None:
    default = tile_config(torch.bfloat16, 4096, 4096, interpreted=False)
    assert TileConfig.named("128x256x64x8x3") == default
    assert TileConfig.named("64x64x32x4x3") == tile_config(torch.float32, 4096, 4096, interpreted=False)
    method = Method("fused", use_ce=True, tiles="128x128x64x4x4")
    assert Method.parse(str(method)) == method
    for text, words in (
        ("128x256x64", "BLOCK_M x BLOCK_N x BLOCK_K x num_warps x num_stages, such as '128x256x64x8x3', got '128x256"),
        ("128x256x64x8xa", "got '128x256x64x8xa'"),
        ("100x256x64x8x3", "must be one of 16, 32, 64, 128, 256, got '100x"),
        ("512x256x64x8x3", "must be one of 16, 32, 64, 128, 256, got '512x"),
        ("128x256x64x7x3", "1, 2, 4, 8 or 16 warps and 1 to 8 stages"),
        ("128x256x64x8x0", "1, 2, 4, 8 or 16 warps and 1 to 8 stages"),
    ):
        with pytest.raises(ValueError, match=words):
            Method("fused", tiles=text)
    with pytest.raises(ValueError, match="tiles must be a text such as"):
        Method("fused", tiles=128)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="method 'ring_exchange' has no option 'tiles'"):
        Method("ring_exchange", tiles="128x256x64x8x3")


def test_backward_chooses_anew() -> None:
    assert gather_method("auto") == reduce_method("auto") == "auto"
    tiles = "fused(tiles=128x128x64x4x4)"
    assert reduce_method("fused(use_ce=True,tiles=128x128x64x4x4)") == gather_method(tiles) == tiles
    with pytest.raises(ValueError, match="use_ce of method 'fused' applies to all_gather_matmul alone"):
        parse_for(REDUCE, "fused(use_ce=False)")


def test_headers_tell_tiles_apart() -> None:
    code = operation_code(HeaderOperation.ALL_GATHER_MATMUL, torch.bfloat16, "fused by copy engine", (256, 16))
    assert 0 < code < 1 << 31
    described = "all_gather_matmul in bfloat16, method fused by copy engine, tiles of 256 x 16"
    assert describe_operation(code) == described
    sizes = [16, 32, 64, 128, 256, 512, 1024]
    codes = {
        operation_code(HeaderOperation.ALL_GATHER_MATMUL, torch.float16, tile=(m, n)) for m in sizes for n in sizes
    }
    assert len(codes) == len(sizes) ** 2
    assert max(codes) < 1 << 31
