"""`engine install` and `engine list`: the environments of the engines, one interpreter each."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.shared import Json, print_json, print_message, print_table

app = typer.Typer(no_args_is_help=True, help="Engine environments: each engine has an interpreter of its own.")


@app.command(name="install")
def install_environment(name: Annotated[str, typer.Argument(help="a file in conf/engine/environments")]) -> None:
    """Make an engine's own environment under .engines/NAME; does nothing when it is up to date."""
    from orchestrator.environments import install

    print_message(f"installed: {install.install(name, Path.cwd(), print_message)}")


@app.command(name="list")
def list_environments(*, as_json: Json = False) -> None:
    """The engine environments of this folder and their versions."""
    from orchestrator import report
    from orchestrator.environments import install

    found = install.list_environments(Path.cwd())
    if as_json:
        print_json({"environments": [asdict(info) for info in found]})
        return
    rows = [[info.name, info.state, info.engine_version or "", info.python or ""] for info in found]
    print_table(report.plain_table(["name", "state", "version", "python"], rows))
