"""`doctor`: what would stop this experiment on this machine, in one screen."""

from __future__ import annotations

import typer

from orchestrator.cli.shared import Conf, Json, Overrides, print_json, print_table

STATES = {True: "ok", False: "FAILS", None: "note"}


def doctor(conf: Conf, overrides: Overrides = None, *, as_json: Json = False) -> None:
    """Say what would stop this experiment on this machine."""
    from orchestrator import config, report
    from orchestrator.cli import machine_checks

    checks = machine_checks.check_machine(config.load(conf, overrides))
    if as_json:
        print_json(machine_checks.document(checks))
    else:
        rows = [[check.name, STATES[check.ok], check.detail] for check in checks]
        print_table(report.plain_table(["check", "", "detail"], rows))
    if any(check.ok is False for check in checks):
        raise typer.Exit(3)
