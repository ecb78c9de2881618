"""`promote`: serve the best configuration, or ask what is served, go back, stop, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.shared import Conf, Json, Overrides, print_json, print_message, print_table
from orchestrator.errors import ConfigError


def promote(
    conf: Conf,
    overrides: Overrides = None,
    *,
    run: Annotated[str | None, typer.Option(help="an MLflow run id instead of the best")] = None,
    address: Annotated[
        str | None, typer.Option(help="the Ray cluster to serve in; else a local one on loopback")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="also when it is not really better; kept in the record")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="say what is served")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="serve the previous champion again")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="end the service and the Ray it started")] = False,
    export: Annotated[Path | None, typer.Option(help="write the command line and Serve configs here instead")] = None,
    as_json: Json = False,
) -> None:
    """Serve the best configuration: gate, deploy, verify, keep or roll back."""
    if sum((status, rollback, stop, export is not None)) > 1:
        raise ConfigError("promote: --status, --rollback, --stop and --export exclude each other")
    from orchestrator import config, search
    from orchestrator.serving import service

    experiment = config.load(conf, overrides)
    search.check(experiment)
    if status:
        served = service.status(experiment, address=address).document()
        print_json(served) if as_json else _print_pairs(served)
    elif stop:
        ran = service.stop(experiment, address=address, say=print_message)
        print_json({"stopped": ran}) if as_json else print_message("stopped" if ran else "nothing was served")
    elif export is not None:
        files = [str(path) for path in service.export(experiment, run_id=run, folder=export)]
        print_json({"files": files}) if as_json else print("\n".join(files))
    else:
        done = (
            service.rollback(experiment, address=address, say=print_message)
            if rollback
            else service.promote(experiment, run_id=run, address=address, force=force, say=print_message)
        )
        print_json(done.document()) if as_json else print(f"{done.decision}: {done.reason}\n{done.url}")
        raise typer.Exit(done.exit_code)


def _print_pairs(document: dict[str, Any]) -> None:
    """Print what is known of a small document, one line each; the keys of its inner documents stand beside its own."""
    from orchestrator import report

    flat = {key: value for key, value in document.items() if not isinstance(value, dict)}
    for inner in (value for value in document.values() if isinstance(value, dict)):
        flat |= {key: value for key, value in inner.items() if not isinstance(value, dict | list) and key not in flat}
    rows = [[key.replace("_", " "), str(value)] for key, value in flat.items() if value is not None]
    print_table(report.plain_table(["", ""], rows))
