"""python -m orchestrator VERB CONF [key=value ...]: the only room that prints results or exits."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from orchestrator import airgap, config, report, search, tracking
from orchestrator import unpack as unpacking
from orchestrator.cli import doctor
from orchestrator.cli import dry_run as planning
from orchestrator.environments import install
from orchestrator.errors import ConfigError, MachineError, OrchestratorError
from orchestrator.measure.verdict import LEVELS
from orchestrator.tuning import interrupt

if TYPE_CHECKING:
    from orchestrator.campaign.campaign import Campaign

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
        plan = planning.dry_run(experiment)
        if as_json:
            _emit(plan.document())
        else:
            print("\n".join(plan.lines()))
        for warning in plan.warnings:
            _say(f"warning: {warning}")
        return
    with interrupt.handle_signals() as interrupts:
        try:
            _run_campaign(experiment, conf, interrupts, resume=resume, address=address, as_json=as_json)
        except KeyboardInterrupt:
            _say(
                f"interrupted ({interrupts.signal or 'SIGTERM'}); "
                f"finish it with: {_resume_command(conf, overrides, address)}"
            )
            raise typer.Exit(interrupt.EXIT_CODE) from None


def _run_campaign(
    experiment: config.Experiment,
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
    # Ray takes seconds to import; a dry run and a wrong key are answered without it.
    from orchestrator import cluster
    from orchestrator.campaign.campaign import open_campaign
    from orchestrator.cli import progress
    from orchestrator.tuning import nodes, sampler
    from orchestrator.tuning import tune as ray_tune

    if address is None:
        nodes.check_local_placement(experiment.placement)
    planning.check_startable(experiment)
    with (
        progress.shown(people) as on_event,
        open_campaign(experiment, resume=resume, on_event=on_event, make_sampler=sampler.make_sampler) as running,
    ):
        _say(
            f"{experiment.name}: {len(running.launches)} trials planned, {len(running.results)} already finished, "
            f"{len(running.skipped)} skipped; folder {running.folder}"
        )
        if running.wants_more():
            with cluster.joined(address, on_lost=lambda why: _end_without_ray(running, why)):
                ray_tune.run_trials(running, interrupts)
        with interrupts.defer():
            recorded, selection = running.finish()
    for warning in running.bookkeeping.warnings:
        _say(f"warning: {warning}")
    for name, why in running.skipped:
        _say(f"skipped {name}: {why}")
    _say(str(running.account()))
    _show_results(experiment, recorded, selection, as_json, running.account_document())
    if running.interrupted:
        raise KeyboardInterrupt
    if running.stopped:
        _say(f"stopped: {running.stopped}")
        raise typer.Exit(3)
    if selection.best is None:
        raise typer.Exit(1)
    if not as_json:
        _next_commands(conf)


def _end_without_ray(running: Campaign, why: str) -> None:
    """From the thread that saw Ray die: Ray may abort this process at any moment, so nothing else is tried."""
    running.bookkeeping.close("KILLED")
    _say(f"error: {why}; finished trials are kept, run the rest with --resume")
    os._exit(MachineError.exit_code)


def _resume_command(conf: Path, overrides: list[str] | None, address: str | None) -> str:
    cluster = ["--address", address] if address else []
    return shlex.join(["python", "-m", "orchestrator", "tune", str(conf), *(overrides or []), *cluster, "--resume"])


def _show_results(
    experiment: config.Experiment,
    recorded: list[tracking.Recorded],
    selection: search.Selection,
    as_json: bool,
    accounted: dict[str, Any] | None = None,
) -> None:
    if as_json:
        _emit(report.document(experiment, recorded, selection.best) | (accounted or {}))
        return
    tables = report.people_console(sys.stdout)
    tables.print(report.campaign_table(experiment, recorded, selection.best))
    for name, why in selection.excluded.items():
        tables.print(f"left out of the choice: {name}: {why}", markup=False, soft_wrap=True)
    for sentence in (f"best: {selection.reason}" if selection.best else selection.reason, *selection.notes):
        tables.print(sentence, markup=False, soft_wrap=True)


@app.command()
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
    experiment = config.load(conf, overrides)
    search.check(experiment)
    found = tracking.last_campaign(experiment, all=every)
    concluded = search.with_campaign_metrics([r.result for r in found], experiment)
    recorded = [replace(r, result=result) for r, result in zip(found, concluded, strict=True)]
    selection = search.select(experiment, concluded)
    if not recorded:
        _say(f"no results of {experiment.name} yet in {experiment.tracking_uri}")
        raise typer.Exit(1)
    published = report.reference_document(experiment, recorded) if reference and as_json else None
    _show_results(experiment, recorded, selection, as_json, {"reference": published} if published else None)
    if csv is not None:
        with csv.open("w", encoding="utf-8", newline="") as stream:
            report.write_csv(stream, recorded)
    if reference and not as_json:
        report.people_console(sys.stdout).print(report.reference_table(experiment, recorded))
    if selection.best is None:
        raise typer.Exit(1)


@app.command()
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
    comparison = report.compare(tracking.load_run(uri, first), tracking.load_run(uri, second))
    if as_json:
        _emit(comparison.document())
    else:
        report.people_console(sys.stdout).print(comparison.table())


@app.command()
def bench(
    conf: Conf,
    overrides: Overrides = None,
    *,
    base_url: Annotated[str, typer.Option(help="the server, with or without /v1")],
    api_key_env: Annotated[str | None, typer.Option(help="the variable that holds its key")] = None,
    as_json: Json = False,
) -> None:
    """Measure a server that already runs, exactly as a trial would."""
    from orchestrator.cli import bench as benching

    if api_key_env and api_key_env not in os.environ:
        raise ConfigError(f"--api-key-env {api_key_env}: this variable is not set")
    experiment = config.load(conf, overrides)
    with people.status("measuring") as status:
        benched = benching.bench(
            experiment,
            base_url,
            os.environ[api_key_env] if api_key_env else None,
            lambda name, phase, done, total: status.update(f"{name}: {phase} {done} of {total}"),
        )
    if as_json:
        _emit(benched.document())
    else:
        table = report.measurements_table({name: run.measurement for name, run in benched.runs.items()})
        report.people_console(sys.stdout).print(table)
        for reason in benched.verdict.reasons:
            _say(f"{LEVELS[reason.code]}: {reason.code}: {reason.detail}")
    if not benched.is_valid:
        raise typer.Exit(1)


@app.command(name="doctor")
def examine(conf: Conf, overrides: Overrides = None, *, as_json: Json = False) -> None:
    """Say what would stop this experiment on this machine."""
    checks = doctor.examine(config.load(conf, overrides))
    if as_json:
        _emit(doctor.document(checks))
    else:
        words = {True: "ok", False: "FAILS", None: "note"}
        report.people_console(sys.stdout).print(
            report.plain_table(["check", "", "detail"], [[c.name, words[c.ok], c.detail] for c in checks])
        )
    if any(check.ok is False for check in checks):
        raise typer.Exit(3)


@app.command()
def ui(
    conf: Annotated[Path | None, typer.Argument(help="an experiment file; without one, the default store")] = None,
    *,
    port: Annotated[int, typer.Option(help="loopback port")] = 5000,
) -> None:
    """Open MLflow's UI on the right store, on loopback, until Ctrl-C."""
    experiment = config.load(conf) if conf else config.Experiment(name="default")
    command = tracking.ui_command(experiment, port)
    _say(f"{tracking.runs_page(experiment, f'http://127.0.0.1:{port}')}\n(Ctrl-C ends it) {shlex.join(command)}")
    os.execvp(command[0], command)


@engine_app.command(name="install")
def install_environment(name: Annotated[str, typer.Argument(help="a file in conf/engine/environments")]) -> None:
    """Make an engine's own environment under .engines/NAME; does nothing when it is up to date."""
    _say(f"installed: {install.install(name, Path.cwd(), _say)}")


@engine_app.command()
def pack(
    names: Annotated[list[str], typer.Argument(help="engine environments, or requirements files")],
    *,
    out: Annotated[Path, typer.Option(help="folder for the parts")],
    python: Annotated[str, typer.Option(help="the host's Python")] = "3.12",
    platform: Annotated[str, typer.Option(help="as uv names it")] = airgap.DEFAULT_PLATFORM,
    exclude_from: Annotated[Path | None, typer.Option(help="what the host has, NAME or NAME==VERSION a line")] = None,
    part_mb: Annotated[int, typer.Option(help="size of a part in MB")] = 60,
) -> None:
    """Pack environments for a host without a package index; its unpack.py needs only Python there."""
    airgap.pack(
        names,
        Path.cwd(),
        out,
        python=python,
        platform=platform,
        exclude_from=exclude_from,
        part_bytes=part_mb * 1_000_000,
        echo=_say,
    )


@engine_app.command()
def unpack(
    folder: Annotated[Path, typer.Argument(help="the parts that `engine pack` wrote")],
    names: Annotated[list[str] | None, typer.Argument(help="only these")] = None,
) -> None:
    """Unpack what `engine pack` wrote into .engines."""
    try:
        unpacking.unpack(folder, Path(".engines"), names or [])
    except unpacking.UnpackError as error:
        raise MachineError(str(error)) from None


@engine_app.command(name="list")
def list_engines(*, as_json: Json = False) -> None:
    """The engine environments of this folder and their versions."""
    found = install.listed(Path.cwd())
    if as_json:
        _emit({"environments": [asdict(info) for info in found]})
        return
    rows = [[info.name, info.state, info.engine_version or "", info.python or ""] for info in found]
    report.people_console(sys.stdout).print(report.plain_table(["name", "state", "version", "python"], rows))


@app.command()
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
    from orchestrator.serving import service

    if sum((status, rollback, stop, export is not None)) > 1:
        raise ConfigError("promote: --status, --rollback, --stop and --export exclude each other")
    experiment = config.load(conf, overrides)
    search.check(experiment)
    if status:
        told = service.status(experiment, address=address).document()
        _emit(told) if as_json else _pairs(told)
    elif stop:
        ran = service.stop(experiment, address=address, say=_say)
        _emit({"stopped": ran}) if as_json else _say("stopped" if ran else "nothing was served")
    elif export is not None:
        from orchestrator.serving import export as exporting
        from orchestrator.serving import gate

        files = [str(path) for path in exporting.export(experiment, gate.candidate(experiment, run), export)]
        _emit({"files": files}) if as_json else print("\n".join(files))
    else:
        done = (
            service.rollback(experiment, address=address, say=_say)
            if rollback
            else service.promote(experiment, run_id=run, address=address, force=force, say=_say)
        )
        _emit(done.document()) if as_json else print(f"{done.decision}: {done.reason}\n{done.url}")
        raise typer.Exit(done.exit_code)


def _pairs(document: dict[str, Any]) -> None:
    """A small document for a person: what is known, one line each."""
    flat = {key: value for key, value in document.items() if not isinstance(value, dict)}
    for inner in (value for value in document.values() if isinstance(value, dict)):
        flat |= {key: value for key, value in inner.items() if not isinstance(value, dict | list) and key not in flat}
    rows = [[key.replace("_", " "), str(value)] for key, value in flat.items() if value is not None]
    report.people_console(sys.stdout).print(report.plain_table(["", ""], rows))


def _next_commands(conf: Path) -> None:
    tables = report.people_console(sys.stdout)
    tables.print("Next:", markup=False)
    for verb, what in (
        (f"results {conf}", "this table again"),
        (f"ui {conf}", "every run, metric, figure and engine log in MLflow"),
        (f"promote {conf}", "serve the best configuration"),
    ):
        tables.print(f"  python -m orchestrator {verb:<34} # {what}", markup=False, highlight=False)


def main() -> int:
    """Run the command line. Returns the exit code of design.md section 3."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        _say(f"error: {getattr(error, 'format_message', error.__str__)()}")
        return 2
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
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
