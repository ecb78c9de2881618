"""What the pages say is there: links lead somewhere, and commands name verbs and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator import __main__ as cli
from tests.support.paths import ROOT

FOLDERS = ("docs", "experiments", "tools")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


# Pages about the tree as it is; a record names what was there on its day.
CURRENT = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
TOP = {path.name for path in ROOT.iterdir()} | {path.name for path in (ROOT / "orchestrator").iterdir()}


@pytest.mark.parametrize("page", CURRENT, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    """A path in code quotes, from the project's folder or from orchestrator/. NAME and * stand for something."""
    for path in re.findall(r"`([\w./-]+/[\w./-]*)`", page.read_text(encoding="utf-8")):
        if path.split("/")[0] in TOP and not re.search(r"[A-Z]{2}", path.removesuffix(".md")):
            assert (ROOT / path).exists() or (ROOT / "orchestrator" / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_name_what_exists(page: Path) -> None:
    verbs = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    verbs |= {group.name for group in cli.app.registered_groups}
    for verb, conf in re.findall(
        r"-m orchestrator ([a-z]+)(?: (conf/[\w/-]+\.yaml))?", page.read_text(encoding="utf-8")
    ):
        assert verb in verbs, f"{page.name} shows the verb {verb}"
        assert not conf or (ROOT / conf).is_file(), f"{page.name} names {conf}"
