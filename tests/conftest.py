"""Shared by all tests: how kernels run in the pytest process, uninitialised memory, marks and rank processes."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

# Decided before anything imports triton, which decorates its own device functions when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.distributed import Ranks, close_pools, fill_uninitialized_memory

torch.set_num_threads(1)

# How long an example takes says how loaded the machine is, above all where kernels are interpreted.
hypothesis.settings.register_profile(
    "loaded machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("loaded machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long matrices and campaigns too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:
        gpu = item.get_closest_marker("gpu")
        if gpu is not None:
            needed = gpu.args[0] if gpu.args else 1
            if devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs GPUs: {needed}, torch sees {devices}"))
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long; runs with --long"))


def pytest_unconfigure() -> None:
    close_pools()


@pytest.fixture(autouse=True)
def uninitialized_memory() -> None:
    """Every test starts with ``torch.empty`` filling memory with NaN, whatever the test before it changed."""
    fill_uninitialized_memory()


@pytest.fixture(params=[pytest.param(ranks, marks=pytest.mark.gpu, id=f"gpu-{ranks}-ranks") for ranks in (2, 4, 8)])
def gpu_ranks(request: pytest.FixtureRequest) -> Ranks:
    """2, 4 and 8 ranks on the GPUs; more ranks than GPUs share them, which is for correctness and not for speed."""
    return Ranks(request.param, "cuda")
