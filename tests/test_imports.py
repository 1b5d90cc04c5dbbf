"""The directions of the package (CONTRIBUTING.md): who may import whom, who may spin, and what an import costs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "triton_overlap"

#: For each part, the parts it may import, beside itself. Parts are the longest matching prefix of a module's name.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "arguments": set(),
    "packing": set(),
    "activations": set(),
    "reference": {"activations"},
    "environment": set(),
    "problems": set(),
    "timing": set(),
    "timeline": set(),
    "comm": {"arguments", "errors"},
    "comm.backends": {"comm", "errors"},
    "comm.backends.sim": {"comm", "errors"},
    "comm.networks": {"comm", "errors"},
    "sim": {"comm", "comm.backends.sim", "errors"},  # which makes its own groups
    "kernels": {"comm", "errors"},
    "expert_buffer": {"kernels", "comm", "arguments", "errors"},
    "ops": {"expert_buffer", "kernels", "comm", "arguments", "errors"},
    "nn": {"ops", "expert_buffer", "comm", "arguments", "errors", "activations"},
    # Measures the operations, and checks what it measures.
    "tuning": {"ops", "kernels", "comm", "errors", "environment", "problems", "reference", "timing"},
    # The entry to the package gathers what is public.
    "": {"comm", "errors", "expert_buffer", "nn", "ops", "packing", "sim", "kernels", "problems", "tuning"},
    # Benchmarks use the package from outside, and check their results.
    "bench": {"", "bench.host", "bench.tasks", "environment", "problems", "reference", "sim", "timing", "tuning"},
    # These take a call apart.
    "bench.host": {"", "bench", "kernels", "problems", "reference"},
    "bench.tasks": {"bench", "kernels", "problems", "timeline", "tuning"},
}
#: Imports against the directions that load late, inside a function, and why each must.
LATE = {
    ("comm.group", "comm.backends"): "a group loads only the backend it was asked for",
    ("comm.network", "comm.networks"): "a buffer loads only the network it was asked for",
    ("comm.backends.sim", "sim"): "the backend is made by the simulator and names its types",
}
#: Modules of plain Python: usable and testable where neither Triton nor torch is installed.
PLAIN = {
    "arguments",
    "errors",
    "comm.gemm_configs",
    "comm.layout",
    "comm.method_names",
    "kernels.ep_geometry",
    "kernels.ep_layout",
}
#: Planning that names torch's dtypes and needs no Triton.
WITHOUT_TRITON = PLAIN | {"kernels.config", "kernels.methods", "kernels.tables", "kernels.choose"}
#: Operations whose result in a loop's condition or body makes the loop a spin.
SPINS = re.compile(r"sem\s*=\s*['\"](acquire|acq_rel)['\"]|volatile\s*=\s*True")


def module_name(path: Path) -> str:
    """Name below the package: "" for its __init__, "comm.layout" for comm/layout.py."""
    parts = list(path.relative_to(ROOT / PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    return max((part for part in MAY_IMPORT if part == "" or f"{module}.".startswith(f"{part}.")), key=len)


MODULES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def imports(module: str, source: str, is_package: bool) -> Iterator[tuple[str, bool]]:
    """Absolute names that ``source`` imports, and whether that happens as soon as the module is imported.

    Names imported from a package of ours come out as the submodule where there is one of that name.
    """
    tree = ast.parse(source)
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    package = [PACKAGE, *module.split(".")] if module else [PACKAGE]
    if not is_package:
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in late
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                inside = name.removeprefix(f"{PACKAGE}.")
                yield (name if inside in MODULES else origin), id(node) not in late


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def own_imports(module: str) -> Iterator[tuple[str, bool]]:
    """Modules of the package that ``module`` imports, named below the package."""
    path = MODULES[module]
    for name, at_once in imports(module, path.read_text(), path.name == "__init__.py"):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            yield name.removeprefix(PACKAGE).removeprefix("."), at_once


def foreign_imports(module: str) -> set[str]:
    path = MODULES[module]
    return {name for name, _ in imports(module, path.read_text(), path.name == "__init__.py")}


def test_every_part_is_known() -> None:
    assert {module.split(".")[0] for module in MODULES} <= {part.split(".")[0] for part in MAY_IMPORT}
    assert WITHOUT_TRITON | set(MAY_IMPORT) <= set(MODULES), "the rules name what does not exist"


def test_the_walk_sees_relative_absolute_and_late_imports() -> None:
    source = "from ..comm import layout\nimport torch\ndef f():\n    from . import launching\nfrom .tiles import a\n"
    assert list(imports("kernels.gemm", source, is_package=False)) == [
        ("triton_overlap.comm.layout", True),
        ("torch", True),
        ("triton_overlap.kernels.tiles", True),
        ("triton_overlap.kernels.launching", False),
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module: str) -> None:
    part = part_of(module)
    wrong = []
    for target, at_once in own_imports(module):
        target_part = part_of(target)
        if target_part == part or target_part in MAY_IMPORT[part]:
            continue
        if not at_once and any(
            module == importer and f"{target}.".startswith(f"{imported}.") for importer, imported in LATE
        ):
            continue
        wrong.append(target)
    assert not wrong, f"{module} imports {wrong}; {part or 'the entry'} may import {sorted(MAY_IMPORT[part])}"


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) == "kernels"])
def test_kernels_know_no_backend_and_no_process_group(module: str) -> None:
    wrong = {
        name
        for name in foreign_imports(module)
        if name.startswith(("torch.distributed", f"{PACKAGE}.comm.backends", f"{PACKAGE}.comm.group"))
    }
    assert not wrong


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("comm.backends.")])
def test_backends_do_not_know_each_other(module: str) -> None:
    others = {target for target, _ in own_imports(module) if target.startswith("comm.backends.")} - {module}
    assert not others


@pytest.mark.parametrize("module", sorted(WITHOUT_TRITON))
def test_planning_needs_no_triton(module: str) -> None:
    avoided = {"triton", "torch"} if module in PLAIN else {"triton"}
    assert not {name for name in foreign_imports(module) if name.split(".")[0] in avoided}


@pytest.mark.parametrize("module", MODULES)
def test_private_symmetric_memory_stays_in_its_files(module: str) -> None:
    if module in ("comm.backends.cuda", "comm.networks.nvshmem"):  # memory, and puts from kernels
        return
    assert not {name for name in foreign_imports(module) if name.startswith("torch.distributed._symmetric_memory")}


def spins(source: str) -> list[str]:
    """Names of jitted functions in ``source`` that loop until another program or rank has written something, and do
    not ask ``may_wait`` how long."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            continue
        loops = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.While)]
        if any(SPINS.search(loop) and "may_wait(" not in loop for loop in loops):
            found.append(function.name)
    return found


def test_a_spin_is_recognised_and_a_task_loop_is_not() -> None:
    poll = "x = tl.atomic_add(p, 0, sem='acquire', scope='sys')"
    claim = "x = tl.atomic_add(p, 1, sem='relaxed', scope='gpu')"
    bounded = f"{poll}; ok = may_wait(b, x)"
    for body, expected in ((poll, ["f"]), (bounded, []), (claim, []), ("x = tl.load(p, volatile=True)", ["f"])):
        assert spins(f"@triton.jit\ndef f(p):\n    x = 0\n    while x < 5:\n        {body}\n") == expected


@pytest.mark.parametrize("module", MODULES)
def test_only_the_device_functions_spin_without_a_bound(module: str) -> None:
    found = spins(MODULES[module].read_text())
    if module == "comm.device":
        assert found, "the waits are here; if they moved, this test looks at the wrong file"
    else:
        assert not found


def test_no_tracked_file_names_a_machine_path() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    # Spelled so that this file is not among those it finds.
    machine_path = re.compile(r"(?<![\w.])/(?:" + "|".join(("home", "root", "work", "Users", "tmp")) + r")/[\w.-]")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue  # deleted, not yet committed
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # an image
        found += [f"{name}:{number}" for number, line in enumerate(text.splitlines(), 1) if machine_path.search(line)]
    assert not found


@pytest.mark.long
def test_import_is_cheap_beside_torch() -> None:
    program = (
        "import time, torch\nstart = time.process_time()\nimport triton_overlap\nprint(time.process_time() - start)\n"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(times) < 0.3, f"import triton_overlap took {times} s beside torch"
