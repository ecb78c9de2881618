"""`bench`: the measurement of a trial against a server that somebody else runs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from orchestrator.cli.shared import Conf, Json, Overrides, print_json, print_message, print_table, stderr_console
from orchestrator.errors import ConfigError


def bench(
    conf: Conf,
    overrides: Overrides = None,
    *,
    base_url: Annotated[str, typer.Option(help="the server, with or without /v1")],
    api_key_env: Annotated[str | None, typer.Option(help="the variable that holds its key")] = None,
    as_json: Json = False,
) -> None:
    """Measure a server that already runs, exactly as a trial would."""
    from orchestrator import config, report
    from orchestrator.cli.bench_server import bench_server
    from orchestrator.measure.checks import LEVELS

    if api_key_env and api_key_env not in os.environ:
        raise ConfigError(f"--api-key-env {api_key_env}: this variable is not set")
    experiment = config.load(conf, overrides)
    with stderr_console.status("measuring") as status:
        benched = bench_server(
            experiment,
            base_url,
            os.environ[api_key_env] if api_key_env else None,
            lambda name, phase, done, total: status.update(f"{name}: {phase} {done} of {total}"),
        )
    if as_json:
        print_json(benched.document())
    else:
        print_table(report.measurements_table({name: run.measurement for name, run in benched.runs.items()}))
        for reason in benched.verdict.reasons:
            print_message(f"{LEVELS[reason.code]}: {reason.code}: {reason.detail}")
    if not benched.is_valid:
        raise typer.Exit(1)
