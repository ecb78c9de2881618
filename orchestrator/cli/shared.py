"""What the verbs share: their common arguments, and the two ways out. Results go to stdout, messages to stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType

Conf = Annotated[Path, typer.Argument(help="an experiment file, for example conf/quickstart.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, any value may be YAML or JSON")]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout and nothing else")]

stderr_console = Console(stderr=True, soft_wrap=True)


def print_json(document: dict[str, Any]) -> None:
    """Write the one document of a verb to stdout. Raises ValueError for NaN and infinity, which JSON does not have."""
    print(json.dumps(document, allow_nan=False, indent=2, ensure_ascii=False))


def print_message(text: str) -> None:
    """Write a line for a person to stderr, as it is: no markup, no highlighting."""
    stderr_console.print(text, markup=False, highlight=False)


def print_table(table: RenderableType) -> None:
    """Write a table to stdout, as wide as the terminal or as wanted."""
    from orchestrator import report

    report.people_console(sys.stdout).print(table)


def print_lines(*lines: str) -> None:
    """Write sentences to stdout below a table; a long one is not wrapped."""
    from orchestrator import report

    console = report.people_console(sys.stdout)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
