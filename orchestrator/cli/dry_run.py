"""The plan of a campaign: every command line it would start, checked as far as this machine allows."""

from __future__ import annotations

import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import search, trial
from orchestrator.campaign.ledger import campaigns_folder
from orchestrator.config import EngineSpec, Experiment, Placement, TrialSpec, trial_spec
from orchestrator.engines import LaunchPlan, find_engine
from orchestrator.engines.flags import check_flags
from orchestrator.errors import ConfigError, MachineError
from orchestrator.node.program import check_program, public_env, query_environment, shell_line
from orchestrator.outcome import TrialStatus

HELP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """Every point that a campaign would start. num_starts and estimate_s: the fewest and the most.

    estimate_s is None until a trial of this experiment was timed here.
    """

    experiment: Experiment
    launches: tuple[tuple[TrialSpec, LaunchPlan], ...]
    skipped: tuple[tuple[str, str], ...]
    num_starts: tuple[int, int]
    estimate_s: tuple[float, float] | None
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The JSON document of `tune --dry-run`."""
        return {
            "experiment": self.experiment.name,
            "trials": [
                {
                    "name": spec.name,
                    "argv": list(plan.argv),
                    "env": public_env(plan),
                    "placement": {"gpus": spec.placement.gpus, "cpus": spec.placement.cpus},
                }
                for spec, plan in self.launches
            ],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "num_starts": dict(zip(("least", "most"), self.num_starts, strict=True)),
            "estimate_s": self.estimate_s and dict(zip(("least", "most"), self.estimate_s, strict=True)),
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """The plan for a person: each command line in full, ready to be pasted into a shell."""
        places = [_describe_place(spec.placement) for spec, _ in self.launches]
        alike = len(set(places)) <= 1
        where = (
            f"each on {(places or [_describe_place(self.experiment.placement)])[0]}" if alike else "of several sizes"
        )
        starts = describe_range(*self.num_starts)
        text = [f"{self.experiment.name}: {len(self.launches)} points, {starts} engine starts, {where}"]
        for number, ((spec, plan), place) in enumerate(zip(self.launches, places, strict=True), start=1):
            text += ["", f"# {number} {spec.name}" + ("" if alike else f", on {place}"), shell_line(plan)]
        text += ["", *(f"skipped {name}: {why}" for name, why in self.skipped)] if self.skipped else []
        if self.estimate_s is None:
            text += ["", "No estimate of the time yet: no trial of this experiment has been timed on this machine."]
        else:
            text += [
                "",
                f"About {describe_range(*(round(s / 60) for s in self.estimate_s))} min, from the trials of this "
                "experiment that were timed here.",
            ]
        return text


def describe_range(least: int, most: int) -> str:
    return f"{least} to {most}" if least != most else str(least)


def _describe_place(placement: Placement) -> str:
    return f"{placement.gpus} GPUs and {placement.cpus} CPUs of one node"


def plan_campaign(experiment: Experiment) -> CampaignPlan:
    """Plan every point, and ask each engine for its flags. Raises ConfigError for a point that an engine refuses."""
    specs, skipped = search.points(experiment)
    launches = tuple((spec, plan_launch(spec)) for spec in specs)
    num_starts = count_starts(experiment, len(launches))
    warnings = dict.fromkeys(f"{spec.name}: {text}" for spec, plan in launches for text in plan.warnings)
    warnings.update(dict.fromkeys(_flag_warnings(launches)))
    duration_s = _typical_trial_s(experiment)
    return CampaignPlan(
        experiment=experiment,
        launches=launches,
        skipped=tuple(skipped),
        num_starts=num_starts,
        estimate_s=None if duration_s is None else (duration_s * num_starts[0], duration_s * num_starts[1]),
        warnings=tuple(warnings),
    )


def count_starts(experiment: Experiment, num_points: int) -> tuple[int, int]:
    """(fewest, most) engine starts of a campaign of the points and, with a sampler, of its draws."""
    if experiment.search.sampler == "tpe":
        num_points += experiment.search.num_samples
    return search.count_starts(experiment, num_points)


def check_startable(experiment: Experiment) -> None:
    """Look for every model and every engine's program, before the first trial would.

    Raises ConfigError for a model path that is not there, MachineError for a program that is not there.
    """
    for spec in known_points(experiment):
        check_model(spec.engine)
        check_program(plan_launch(spec))


def known_points(experiment: Experiment) -> list[TrialSpec]:
    """The points that are known before the start; for a sampler, whose are not, the experiment itself."""
    specs, _ = search.points(experiment)
    return specs or [trial_spec(experiment, "base", {})]


def plan_launch(spec: TrialSpec) -> LaunchPlan:
    """The launch of one point, with the first port of the range. Raises ConfigError for arguments that we set."""
    return find_engine(spec.engine.kind).plan(spec.engine, spec.placement.ports[0], Path("trial"))


def check_model(spec: EngineSpec) -> None:
    """Raise ConfigError for a path that is not there. The engine finds a hub name (`organisation/name`) itself."""
    looks_like_path = spec.model.startswith((".", "/", "~")) or spec.model.count("/") > 1
    if looks_like_path and not (Path(spec.root) / spec.model).expanduser().exists():
        raise ConfigError(f"engine.model: there is no file or folder {spec.model} (looked in {spec.root})")


def _flag_warnings(launches: tuple[tuple[TrialSpec, LaunchPlan], ...]) -> list[str]:
    """A sentence for each flag that the installed engine's --help does not list, with the nearest that it lists."""
    answers: dict[tuple[str, ...], HelpAnswer | None] = {}
    complaints = []
    for spec, plan in launches:
        command = find_engine(spec.engine.kind).help_command(spec.engine)
        if command not in answers:
            answers[command] = ask_help(spec.engine, plan)
        answer = answers[command]
        if answer and answer.exit_code == 0:
            complaints += [f"{spec.name}: {line}" for line in check_flags(plan.argv, answer.text)]
    return complaints


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpAnswer:
    """The output of an engine's --help. With another exit code than 0 it holds the reason why it cannot start."""

    exit_code: int
    text: str


def ask_help(spec: EngineSpec, plan: LaunchPlan) -> HelpAnswer | None:
    """Run the engine's --help in its own environment. None where it is not installed, or does not answer in time."""
    command = find_engine(spec.kind).help_command(spec)
    try:
        check_program(plan)
        answer = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=HELP_TIMEOUT_S,
            check=False,
            env=query_environment(plan),
        )
    except (MachineError, OSError, subprocess.TimeoutExpired):
        return None
    return HelpAnswer(exit_code=answer.returncode, text=answer.stdout)


def _typical_trial_s(experiment: Experiment) -> float | None:
    """The median duration of this experiment's complete trials in its results folder; None when there is none."""
    durations = []
    for path in campaigns_folder(experiment).glob("*/trials/*/result.json"):
        try:
            result = trial.from_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        if result.status is TrialStatus.COMPLETE:
            durations.append(sum(result.phases_s.values()))
    return statistics.median(durations) if durations else None
