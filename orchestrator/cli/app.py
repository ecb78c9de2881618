"""The Typer application: every verb under its name, in the order of the help page."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator import __version__
from orchestrator.cli import bench, doctor, engine, promote, results, tune, ui

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Find the engine configuration that is really fastest here, know why, and serve exactly that one.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"orchestrator {__version__}")
        raise typer.Exit


@app.callback()
def _take_global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """--version is answered by its callback; without it Typer goes on to the verb."""


app.command()(tune.tune)
app.command()(results.results)
app.command()(results.compare)
app.command()(bench.bench)
app.command()(doctor.doctor)
app.command()(ui.ui)
app.command()(promote.promote)
app.add_typer(engine.app, name="engine")
