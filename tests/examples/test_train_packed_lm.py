"""The example, run as a user runs it, for a few steps on small ranks."""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import pytest
import torch

import text_training
import train_packed_lm as example
from tests.examples.running import check_report, run_example

SMALL = ["--steps", "4", "--blocks", "1", "--hidden", "32", "--heads", "4", "--max-tokens", "128"]


SCRIPT = "train_packed_lm.py"


def test_it_keeps_its_promises_on_two_ranks(tmp_path: Path) -> None:
    found = run_example(SCRIPT, [*SMALL, "--ranks", "2"], tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    check_report(found.stdout, ranks=2)
    assert (tmp_path / "train_packed_lm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_it_keeps_its_promises_on_four_ranks(tmp_path: Path) -> None:
    found = run_example(SCRIPT, [*SMALL, "--ranks", "4"], tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    check_report(found.stdout, ranks=4)


def test_it_refuses_heads_that_the_ranks_do_not_divide(tmp_path: Path) -> None:
    found = run_example(SCRIPT, [*SMALL, "--ranks", "3"], tmp_path)
    assert found.returncode == 2
    assert "--heads must be a multiple of the 3 ranks, got 4" in found.stderr


def test_batches_are_packed_documents_with_labels_of_their_own() -> None:
    documents = text_training.read_documents(max_length=64)
    found = list(text_training.batches(documents, steps=20, max_tokens=128, multiple=8, seed=1))
    counts = [len(batch.tokens) for batch in found]
    assert all(count % 8 == 0 and 0 < count <= 128 for count in counts)
    assert len(set(counts)) > 3
    known = {bytes(document.tolist()) for document in documents}
    for batch in found:
        assert len(batch.labels) == len(batch.positions) == sum(batch.lengths) == len(batch.tokens)
        ends = batch.cu_seqlens.tolist()
        for begin, end in itertools.pairwise(ends):
            tokens, labels = batch.tokens[begin:end], batch.labels[begin:end]
            if bool((labels == text_training.IGNORED).all()):  # the pad tokens
                assert end == ends[-1]
                assert end - begin < 8
                continue
            assert bytes(tokens.tolist()) in known
            assert torch.equal(labels[:-1], tokens[1:])
            assert labels[-1] == text_training.IGNORED
            assert torch.equal(batch.positions[begin:end], torch.arange(end - begin))


def test_attention_is_causal_within_each_document() -> None:
    torch.manual_seed(0)
    batch = text_training.pack([torch.arange(5), torch.arange(3)])
    query, key, value = torch.randn(3, 8, 2, 4)
    found = text_training.attention(query, key, value, batch)
    for begin, end in ((0, 5), (5, 8)):
        for row in range(begin, end):
            weights = torch.einsum("hd,shd->hs", query[row], key[begin : row + 1]).div(2.0).softmax(-1)
            expected = torch.einsum("hs,shd->hd", weights, value[begin : row + 1])
            torch.testing.assert_close(found[row], expected)


@pytest.mark.parametrize(
    ("last_loss", "specializations", "allocations", "expected"),
    [
        (2.0, 0, 0, []),
        (2.1, 0, 0, ["the loss curves differ by 1.00e-01, more than 1e-03"]),
        (math.nan, 0, 0, ["the loss curves differ by nan, more than 1e-03"]),
        (2.0, 3, 0, ["3 kernel specialisations after the first step, expected none"]),
        (2.0, 0, 1, ["1 symmetric allocations after the first step, expected none"]),
    ],
)
def test_broken_promises_are_reported(
    tmp_path: Path, last_loss: float, specializations: int, allocations: int, expected: list[str]
) -> None:
    parallel = text_training.Run([3.0, last_loss], [8, 16], specializations, allocations)
    args = argparse.Namespace(dtype="float32", out=tmp_path)
    plain = text_training.Run([3.0, 2.0], [8, 16])
    assert text_training.report(example.EXAMPLE, parallel, plain, args, 2, torch.device("cpu")) == expected
