"""`ui`: MLflow's own pages on the experiment's store."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.shared import print_message


def ui(
    conf: Annotated[Path | None, typer.Argument(help="an experiment file; without one, the default store")] = None,
    *,
    port: Annotated[int, typer.Option(help="loopback port")] = 5000,
) -> None:
    """Open MLflow's UI on the right store, on loopback, until Ctrl-C."""
    from orchestrator import config, tracking

    experiment = config.load(conf) if conf else config.Experiment(name="default")
    command = tracking.ui_command(experiment, port)
    page = tracking.runs_page(experiment, f"http://127.0.0.1:{port}")
    print_message(f"{page}\n(Ctrl-C ends it) {shlex.join(command)}")
    os.execvp(command[0], command)
