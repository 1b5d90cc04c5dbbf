"""The page about modules says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import triton_overlap as to
from tests.ops.cases import on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "modules.md").read_text()


def run_examples(group: to.Group) -> None:
    torch.manual_seed(group.rank)
    names: dict[str, object] = {"group": group}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, names)
    model = names["model"]
    assert isinstance(model, torch.nn.ModuleList)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if parameter.sequence_parallel:  # type: ignore[attr-defined]
            for other in group.all_gather_object(parameter.grad):
                assert torch.equal(parameter.grad, other), f"gradient of {name} differs between ranks"


def test_the_examples_run() -> None:
    assert PAGE.count("```python") == 3
    on_ranks(2, run_examples)


def test_every_public_name_is_on_the_page() -> None:
    missing = [name for name in to.nn.__all__ if f"nn.{name}" not in PAGE]
    assert not missing
