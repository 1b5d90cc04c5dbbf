"""The data a benchmark keeps: one JSON file a run. What its rows are and how they are shown is in bench/reports."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from triton_overlap.timing import Timing


@dataclass(frozen=True)
class Measurement:
    """One rival on one problem. Times are of the slowest rank."""

    rival: str
    timing: Timing
    relative_error: float


def measurements_of(data: Mapping[str, Any]) -> dict[str, Measurement]:
    """A row's measurements by rival, as JSON has them."""
    return {
        name: Measurement(found["rival"], Timing(**found["timing"]), found["relative_error"])
        for name, found in data.items()
    }


@dataclass(frozen=True)
class Kept(ABC):
    """What every benchmark keeps of a run.

    Attributes:
        created: UTC time, ISO 8601.
        command: the arguments; the first is the benchmark's name.
        commit: git commit, or None.
        hardware, versions: see environment.py.
        method: how it was measured.
    """

    created: str
    command: list[str]
    commit: str | None
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    method: dict[str, Any]

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Ranks that took part."""

    @property
    def name(self) -> str:
        """What the names of files begin with."""
        return self.command[0]

    def file_name(self) -> str:
        """Speaks of the hardware and the time: ``tp_nvidia-h200_2_20260131T120000Z.json``."""
        device = re.sub(r"[^a-z0-9]+", "-", str(self.hardware["device"]).lower()).strip("-")
        return f"{self.name}_{device}_{self.world_size}_{re.sub(r'[-:]', '', self.created)}.json"

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Results(Kept):
    """A run whose results are rows of one kind.

    Attributes:
        kind: a key of ``bench.reports.REPORTS``.
        rows: what the kind's report says, each with a ``world_size``.
    """

    kind: str
    rows: list[Any]

    @property
    def world_size(self) -> int:
        size: int = self.rows[0].world_size
        return size

    @property
    def name(self) -> str:
        return self.kind


def now() -> str:
    """UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def number(value: float | None, digits: int) -> str:
    """For a table's cell; a dash where there is no figure."""
    return "-" if value is None else f"{value:.{digits}f}"
