"""The tables of docs/definitions.md as they must stand there: one Markdown row per metric and per check."""

from __future__ import annotations

import re
from collections.abc import Iterable

from orchestrator.measure.checks import Check
from orchestrator.measure.metrics import Metric
from orchestrator.measure.verdict import Level
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "definitions.md"


def metric_row(metric: Metric) -> str:
    """Names, unit, what is better, text."""
    names = ", ".join(f"`{name}`" for name in metric.names)
    return f"| {names} | {metric.unit or '-'} | {metric.better} | {metric.doc} |"


def check_row(check: Check) -> str:
    """Code, level, text; a check that takes nothing from the number is a note."""
    return f"| `{check.code}` | {'note' if check.level is Level.VALID else check.level} | {check.doc} |"


def rows_under(heading: str) -> list[str]:
    """The rows of the tables below one heading of the page, its subsections included."""
    level = heading.partition(" ")[0]
    section = PAGE.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1]
    section = re.split(rf"^#{{1,{len(level)}}} ", section, maxsplit=1, flags=re.MULTILINE)[0]
    return [line for line in section.splitlines() if line.startswith("| `")]


def undocumented(rows: Iterable[str], heading: str) -> list[str]:
    """The rows that do not stand, word for word, under that heading."""
    found = set(rows_under(heading))
    return [row for row in rows if row not in found]
