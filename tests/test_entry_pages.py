"""The program on the README's first screen does what it says, and links in the entry pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import run_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "triton_overlap/comm", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.md"))
]


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, 2 * hidden)
        self.fc2 = nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(16), Block(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def make_model_and_batches() -> tuple[Model, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(3)
    return Model(), [(torch.randn(t, 16), torch.randn(t, 16)) for t in (8, 20, 6)]


def program() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    lines = blocks[0].splitlines()
    # The ranks of the tests have a process group and no GPU.
    kept = [line for line in lines if not line.startswith(("torch.cuda.set_device", "dist.init_process_group"))]
    assert len(kept) == len(lines) - 2
    return "\n".join(kept).replace("max_tokens=8192", "max_tokens=32")


def train_as_the_readme_says() -> dict[str, Tensor]:
    model, batches = make_model_and_batches()
    names: dict[str, Any] = {"model": model, "batches": batches}
    exec(program(), names)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["blocks.0.fc1.weight"] == [32 // dist.get_world_size(), 16]
    names["group"].close()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_readme_trains_like_one_process() -> None:
    model, batches = make_model_and_batches()
    optimizer = torch.optim.AdamW(model.parameters())
    for x, target in batches:
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = dict(model.named_parameters())
    ranks = run_ranks(2, train_as_the_readme_says)
    for name, expected in plain.items():
        shards = [found[name] for found in ranks]
        if shards[0].shape == expected.shape:
            found = shards
        else:
            dim = next(i for i in range(expected.dim()) if shards[0].shape[i] != expected.shape[i])
            found = [torch.cat(shards, dim)]
        for each in found:
            torch.testing.assert_close(each, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    prose = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)  # in code, `](` calls a kernel
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        named = set(
            re.findall(r"(?:^ {4}|`)(?:[A-Z_]+=\S+ )?make ([a-z-]+)", (ROOT / page).read_text(), flags=re.MULTILINE)
        )
        assert named <= targets, page


@pytest.mark.parametrize("page", PAGES)
def test_source_files_that_pages_name_exist(page: str) -> None:
    folders = ("benchmarks", "docs", "examples", "tests", "triton_overlap")  # and no environment that lies beside them
    found = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    there = [f"/{path.relative_to(ROOT)}" for path in found]
    named = set(re.findall(r"`([\w/-]+\.(?:py|md|toml))`", (ROOT / page).read_text()))
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in there)]
    assert not missing
