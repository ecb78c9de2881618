"""`results` and `compare`: what the MLflow store holds, as tables or JSON documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.shared import Conf, Json, Overrides, print_json, print_lines, print_message, print_table

if TYPE_CHECKING:
    from orchestrator.config import Experiment
    from orchestrator.search import Selection
    from orchestrator.tracking import Recorded


def results(
    conf: Conf,
    overrides: Overrides = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="the trials of every campaign, not only of the last")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="the published numbers beside ours")] = False,
    csv: Annotated[Path | None, typer.Option(help="write every number here too, one a row")] = None,
    as_json: Json = False,
) -> None:
    """Show the table of the last campaign, the best marked."""
    from orchestrator import config, report, search, tracking

    experiment = config.load(conf, overrides)
    search.check(experiment)
    found = tracking.last_campaign(experiment, all=every)
    concluded = search.with_campaign_metrics([r.result for r in found], experiment)
    recorded = [replace(r, result=result) for r, result in zip(found, concluded, strict=True)]
    selection = search.select(experiment, concluded)
    if not recorded:
        print_message(f"no results of {experiment.name} yet in {experiment.tracking_uri}")
        raise typer.Exit(1)
    published = report.reference_document(experiment, recorded) if reference and as_json else None
    print_results(experiment, recorded, selection, as_json, {"reference": published} if published else None)
    if csv is not None:
        with csv.open("w", encoding="utf-8", newline="") as stream:
            report.write_csv(stream, recorded)
    if reference and not as_json:
        print_table(report.reference_table(experiment, recorded))
    if selection.best is None:
        raise typer.Exit(1)


def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="a run id, a trial's name (the newest), or EXPERIMENT/NAME")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="another")],
    *,
    uri: Annotated[str, typer.Option(help="the MLflow store that holds both")] = "sqlite:///mlruns/mlflow.db",
    as_json: Json = False,
) -> None:
    """Two runs side by side: what differs, and which differences are real."""
    from orchestrator import report, tracking

    comparison = report.compare(tracking.load_run(uri, first), tracking.load_run(uri, second))
    if as_json:
        print_json(comparison.document())
    else:
        print_table(comparison.table())


def print_results(
    experiment: Experiment,
    recorded: list[Recorded],
    selection: Selection,
    as_json: bool,
    more: dict[str, Any] | None = None,
) -> None:
    """Write the table and the choice to stdout, or one JSON document with the keys of `more` added."""
    from orchestrator import report

    if as_json:
        choice = {"choice": report.choice_document(selection)}
        print_json(report.document(experiment, recorded, selection.best) | choice | (more or {}))
        return
    print_table(report.campaign_table(experiment, recorded, selection.best))
    print_lines(
        *(f"left out of the choice: {name}: {why}" for name, why in selection.excluded.items()),
        f"best: {selection.reason}" if selection.best else selection.reason,
        *selection.notes,
    )
