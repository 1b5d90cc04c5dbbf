"""The mixture-of-experts example, run as a user runs it, for a few steps on small ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import text_training
import train_moe_lm as example
from tests.examples.running import check_report, run_example

SCRIPT = "train_moe_lm.py"
SMALL = ["--steps", "4", "--hidden", "16", "--heads", "2", "--max-tokens", "24", "--lr", "0.03"]


@pytest.mark.parametrize("ranks", (2, pytest.param(4, marks=pytest.mark.long)))
def test_it_keeps_its_promises(tmp_path: Path, ranks: int) -> None:
    found = run_example(SCRIPT, [*SMALL, "--ranks", str(ranks)], tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    check_report(found.stdout, ranks)
    assert (tmp_path / "train_moe_lm.png").read_bytes().startswith(b"\x89PNG")


def test_it_refuses_experts_that_the_ranks_do_not_divide() -> None:
    with pytest.raises(SystemExit):
        example.parse_args(["--ranks", "3", "--experts", "4"])
    assert example.parse_args(["--ranks", "2", "--experts", "4"]).experts == 4


def test_each_document_is_some_rank_s() -> None:
    batch = text_training.pack([torch.arange(length) + 10 * length for length in (5, 3, 2)])
    shares = [example.documents_of(batch, rank, 2) for rank in range(2)]
    assert [share.documents.lengths for share in shares] == [[5, 2], [3]]
    for share in shares:
        tokens = share.tokens.split(share.documents.lengths)
        assert all(int(document[0]) == 10 * len(document) for document in tokens)
        assert share.positions.tolist() == [i for document in tokens for i in range(len(document))]
    assert sum(int((share.labels != text_training.IGNORED).sum()) for share in shares) == 7


def test_plain_experts_are_a_weighted_sum() -> None:
    torch.manual_seed(0)
    moe = example.PlainMoE(8, 4, experts=3)
    x = torch.randn(5, 8)
    idx, weights, loss = moe.router(x)
    for row in range(5):
        terms = [moe.experts(x[row : row + 1], int(e))[0] * w for e, w in zip(idx[row], weights[row], strict=True)]
        torch.testing.assert_close(moe(x)[row], torch.stack(terms).sum(0))
    torch.testing.assert_close(weights.sum(1), torch.ones(5))
    assert float(loss.detach()) > 0
