"""python -m orchestrator VERB CONF [key=value ...]: the only room that prints results or exits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from orchestrator import config, doctor, environments, plans, report, search, tracking
from orchestrator.errors import ConfigError, OrchestratorError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Find the engine configuration that is really fastest here, know why, and serve exactly that one.",
)
engine_app = typer.Typer(no_args_is_help=True, help="Engine environments: each engine has an interpreter of its own.")
app.add_typer(engine_app, name="engine")

Conf = Annotated[Path, typer.Argument(help="an experiment file, for example conf/quickstart.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, any value may be YAML or JSON")]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout and nothing else")]

people = Console(stderr=True, soft_wrap=True)
tables = Console(soft_wrap=False)


def _emit(document: dict[str, Any]) -> None:
    print(json.dumps(document, allow_nan=False, indent=2, ensure_ascii=False))


def _say(text: str) -> None:
    people.print(text, markup=False, highlight=False)


@app.command()
def tune(
    conf: Conf,
    overrides: Overrides = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print every command line, start nothing")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="skip the trials that are finished")] = False,
    address: Annotated[str | None, typer.Option(help="join the Ray cluster at this address")] = None,
    as_json: Json = False,
) -> None:
    """Run an experiment: every configuration as a trial, measured, recorded, compared."""
    experiment = config.load(conf, overrides)
    search.check(experiment)
    if dry_run:
        plan = plans.dry_run(experiment)
        _emit(plan.document()) if as_json else plans.show(plan, tables)
        for warning in plan.warnings:
            _say(f"warning: {warning}")
        return
    # Ray takes seconds to import; a dry run and a wrong key are answered without it.
    from orchestrator import campaign, progress
    from orchestrator import tune as ray_tune

    if address is None:
        ray_tune.check_local_placement(experiment.placement)
    plans.check_programs(experiment)
    with progress.shown(people) as on_event, campaign.opened(experiment, resume=resume, on_event=on_event) as running:
        _say(
            f"{experiment.name}: {len(running.planned)} trials planned, {running.reused} already finished, "
            f"{len(running.skipped)} skipped; folder {running.folder}"
        )
        with ray_tune.connected(address):
            ray_tune.nodes_that_fit(experiment.placement)
            ray_tune.run_trials(running)
        selection = running.finish()
    results = search.with_campaign_metrics(running.ordered_results(), experiment)
    recorded = tracking.last_campaign(experiment)
    document = report.document(experiment, recorded, selection.best)
    _emit(document) if as_json else report.show_campaign(tables, experiment, results, selection)
    for name, why in running.skipped:
        _say(f"skipped {name}: {why}")
    if running.interrupted:
        _say(f"interrupted ({running.interrupted}); finish it with: python -m orchestrator tune {conf} --resume")
        raise typer.Exit(130)
    if running.stopped:
        _say(f"stopped: {running.stopped}")
        raise typer.Exit(3)
    if selection.best is None:
        raise typer.Exit(1)
    if not as_json:
        _next_commands(conf)


def _next_commands(conf: Path) -> None:
    tables.print("Next:", markup=False)
    for verb, what in (
        (f"results {conf}", "this table again"),
        (f"ui {conf}", "every run, metric, figure and engine log in MLflow"),
        (f"promote {conf}", "serve the best configuration"),
    ):
        tables.print(f"  python -m orchestrator {verb:<32} # {what}", markup=False, highlight=False)


def main() -> int:
    """Run the command line. Returns the exit code of design.md section 3."""
    try:
        app(standalone_mode=False)
    except typer.Exit as end:
        return int(end.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        return 130
    except OrchestratorError as error:
        _say(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`| head`); nothing is left to tell it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
