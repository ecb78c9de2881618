"""`tune`: run an experiment, or print with --dry-run what it would start."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.results import print_results
from orchestrator.cli.shared import Conf, Json, Overrides, print_json, print_lines, print_message, stderr_console
from orchestrator.errors import MachineError
from orchestrator.tuning import interrupt

if TYPE_CHECKING:
    from orchestrator.campaign.campaign import Campaign
    from orchestrator.config import Experiment


def tune(
    conf: Conf,
    overrides: Overrides = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print every command line, start nothing")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="skip the trials that are finished")] = False,
    launches: Annotated[
        int | None,
        typer.Option(min=1, help="the most starts of one configuration; 1 is a quick look that proves nothing"),
    ] = None,
    address: Annotated[str | None, typer.Option(help="join the Ray cluster at this address")] = None,
    as_json: Json = False,
) -> None:
    """Run an experiment: every configuration as a trial, measured, recorded, compared."""
    from orchestrator import config, search

    overrides = [*(overrides or []), *([f"search.launches={launches}"] if launches else [])]
    experiment = config.load(conf, overrides)
    search.check(experiment)
    if dry_run:
        _print_plan(experiment, as_json)
        return
    with interrupt.handle_signals() as interrupts:
        try:
            _run_campaign(experiment, conf, interrupts, resume=resume, address=address, as_json=as_json)
        except KeyboardInterrupt:
            print_message(
                f"interrupted ({interrupts.signal or 'SIGTERM'}); "
                f"finish it with: {_resume_command(conf, overrides, address)}"
            )
            raise typer.Exit(interrupt.EXIT_CODE) from None


def _print_plan(experiment: Experiment, as_json: bool) -> None:
    from orchestrator.cli import dry_run

    plan = dry_run.plan_campaign(experiment)
    if as_json:
        print_json(plan.document())
    else:
        print("\n".join(plan.lines()))
    for warning in plan.warnings:
        print_message(f"warning: {warning}")


def _run_campaign(
    experiment: Experiment,
    conf: Path,
    interrupts: interrupt.Interrupts,
    *,
    resume: bool,
    address: str | None,
    as_json: bool,
) -> None:
    if address is None:
        # Read when Ray is imported: every socket of an embedded Ray then listens on loopback only.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from orchestrator import cluster
    from orchestrator.campaign.campaign import open_campaign
    from orchestrator.cli import dry_run, progress
    from orchestrator.node.provenance import describe_machine
    from orchestrator.tuning import nodes, sampler
    from orchestrator.tuning import tune as ray_tune

    if address is None:
        nodes.check_local_placements(dry_run.known_points(experiment))
    dry_run.check_startable(experiment)
    with (
        progress.live_view(stderr_console) as on_event,
        open_campaign(
            experiment,
            resume=resume,
            on_event=on_event,
            make_sampler=sampler.make_sampler,
            machine=describe_machine() if address is None else None,
        ) as campaign,
    ):
        print_message(
            f"{experiment.name}: {len(campaign.launches)} launches planned, {len(campaign.results)} already finished, "
            f"{len(campaign.skipped)} skipped; folder {campaign.folder}"
        )
        if campaign.wants_more():
            with cluster.join(address, on_lost=lambda why: _exit_without_ray(campaign, why)):
                ray_tune.run_trials(campaign, interrupts)
        with interrupts.defer():
            recorded, selection = campaign.finish()
    for warning in campaign.bookkeeping.warnings:
        print_message(f"warning: {warning}")
    for name, why in campaign.skipped:
        print_message(f"skipped {name}: {why}")
    print_message(str(campaign.account()))
    print_results(experiment, recorded, selection, as_json, campaign.account_document())
    if campaign.interrupted:
        raise KeyboardInterrupt
    if campaign.stopped:
        print_message(f"stopped: {campaign.stopped}")
        raise typer.Exit(3)
    if selection.best is None:
        raise typer.Exit(1)
    if not as_json:
        _print_next_commands(conf)


def _exit_without_ray(campaign: Campaign, why: str) -> None:
    """Close the record and exit. The thread that saw Ray die calls this; Ray may abort this process at any moment."""
    campaign.bookkeeping.close("KILLED")
    print_message(f"error: {why}; finished trials are kept, run the rest with --resume")
    os._exit(MachineError.exit_code)


def _resume_command(conf: Path, overrides: list[str] | None, address: str | None) -> str:
    cluster = ["--address", address] if address else []
    return shlex.join(["python", "-m", "orchestrator", "tune", str(conf), *(overrides or []), *cluster, "--resume"])


def _print_next_commands(conf: Path) -> None:
    commands = (
        (f"results {conf}", "this table again"),
        (f"ui {conf}", "every run, metric, figure and engine log in MLflow"),
        (f"promote {conf}", "serve the best configuration"),
    )
    print_lines("Next:", *(f"  python -m orchestrator {verb:<34} # {what}" for verb, what in commands))
