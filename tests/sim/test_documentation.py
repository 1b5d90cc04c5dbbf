"""The page about the simulator says what is so."""

from __future__ import annotations

import dataclasses
import inspect
import re
import runpy
from pathlib import Path

import pytest

from triton_overlap import sim
from triton_overlap.errors import DeadlockError, RaceError

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return str(code)


def run(code: str, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir(exist_ok=True)
    (folder / "example.py").write_text(code)
    runpy.run_path(str(folder / "example.py"))


def on_the_page(title: str) -> str:
    """The page's report that begins with ``title``, in one line."""
    return " ".join(re.findall(rf"```text\n{title}: (.*?)```", PAGE, re.DOTALL)[0].split())


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(example(), tmp_path)
    assert capsys.readouterr().out == "20 schedules\n"


def test_the_race_that_the_page_shows(tmp_path: Path) -> None:
    with pytest.raises(RaceError) as caught:
        run(example().replace('sem="release"', 'sem="relaxed"'), tmp_path)
    report = on_the_page("RaceError").removesuffix(" simulated world: world_size=3, seed=0")
    # Which rank comes first belongs to the seed, which this page does not pin.
    assert re.sub(r"rank\d", "rank", str(caught.value)) == re.sub(r"rank\d", "rank", report)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("    tl.debug_barrier()\n", ""),
        ('sem="acquire"', 'sem="relaxed"'),
        (
            "    return out\n",
            "    shift_kernel[(1,)](x, out, memory.table, group.rank, group.world_size, FLAG=FLAG, N=16)\n"
            "    return out\n",
        ),
    ],
    ids=["no barrier", "no acquire", "two launches"],
)
def test_the_other_faults_of_the_page_are_races(good: str, bad: str, tmp_path: Path) -> None:
    assert example().count(good) == 1
    with pytest.raises(RaceError):
        run(example().replace(good, bad), tmp_path)


def test_a_flag_before_the_store_is_a_race(tmp_path: Path) -> None:
    lines = example().splitlines(keepends=True)
    store = next(number for number, line in enumerate(lines) if "tl.store(right" in line)
    flag = next(number for number, line in enumerate(lines) if "tl.atomic_xchg" in line)
    lines.insert(store, lines.pop(flag))
    with pytest.raises(RaceError):
        run("".join(lines), tmp_path)


def test_the_deadlock_that_the_page_shows(tmp_path: Path) -> None:
    with pytest.raises(DeadlockError) as caught:
        run(example().replace("!= 1:", "!= 2:"), tmp_path)
    shown = re.findall(r"```text\nDeadlockError: (.*?)```", PAGE, re.DOTALL)[0].splitlines()[:-1]
    assert set(shown) <= set(str(caught.value).splitlines())


def test_every_public_name_is_on_the_page() -> None:
    for name in sim.__all__:
        if name not in ("Fault", "SignalFault", "LogEntry"):  # bases, and a record whose fields the page lists
            assert name in PAGE, name
    for setting in dataclasses.fields(sim.Settings):
        assert setting.name in PAGE, setting.name
    signature = re.findall(r"`World\((.*?)\)`", PAGE)[0]
    for setting in dataclasses.fields(sim.Settings):
        if setting.name not in inspect.signature(sim.World).parameters:
            default = "2_000_000" if setting.name == "max_steps" else repr(setting.default).replace("'", '"')
            assert f"{setting.name}={default}" in signature, setting.name
