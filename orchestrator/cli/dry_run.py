"""What a campaign would start, without starting it: every command line, checked as far as this machine allows."""

from __future__ import annotations

import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import trial
from orchestrator.campaign import campaign
from orchestrator.config import EngineSpec, Experiment, TrialSpec, trial_spec
from orchestrator.engines import LaunchPlan, find_engine
from orchestrator.engines.flags import check_flags
from orchestrator.errors import ConfigError, MachineError
from orchestrator.masking import mask_env
from orchestrator.node.program import check_program, query_environment, shell_line
from orchestrator.outcome import TrialStatus

HELP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """Every launch a campaign would make. estimate_s is None until a trial of this experiment has been timed."""

    experiment: Experiment
    launches: tuple[tuple[TrialSpec, LaunchPlan], ...]
    skipped: tuple[tuple[str, str], ...]
    num_starts: int
    estimate_s: float | None
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The JSON document of `tune --dry-run`."""
        return {
            "experiment": self.experiment.name,
            "trials": [
                {"name": spec.name, "argv": list(plan.argv), "env": mask_env(plan.env)} for spec, plan in self.launches
            ],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "num_starts": self.num_starts,
            "estimate_s": self.estimate_s,
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """The plan for a person: each command line whole, so that it can be pasted into a shell."""
        placement = self.experiment.placement
        where = f"{placement.gpus} GPUs and {placement.cpus} CPUs of one node"
        text = [
            f"{self.experiment.name}: {len(self.launches)} trials, {self.num_starts} engine starts, each on {where}"
        ]
        for number, (spec, plan) in enumerate(self.launches, start=1):
            text += ["", f"# {number} {spec.name}", shell_line(plan)]
        text += ["", *(f"skipped {name}: {why}" for name, why in self.skipped)] if self.skipped else []
        if self.estimate_s is None:
            text += ["", "No estimate of the time yet: no trial of this experiment has been timed on this machine."]
        else:
            text += [
                "",
                f"About {self.estimate_s / 60:.0f} min, from the trials of this experiment that were timed here.",
            ]
        return text


def dry_run(experiment: Experiment) -> CampaignPlan:
    """Plan every point. Raises ConfigError where the engine module or its --help would refuse one."""
    specs, skipped = campaign.keyed_points(experiment)
    launches = tuple((spec, launch_plan(spec)) for spec in specs)
    num_starts = number_of_starts(experiment, len(launches))
    warnings = dict.fromkeys(f"{spec.name}: {text}" for spec, plan in launches for text in plan.warnings)
    warnings.update(dict.fromkeys(_flag_warnings(launches)))
    duration_s = _typical_trial_s(experiment)
    return CampaignPlan(
        experiment=experiment,
        launches=launches,
        skipped=tuple(skipped),
        num_starts=num_starts,
        estimate_s=None if duration_s is None else duration_s * num_starts,
        warnings=tuple(warnings),
    )


def number_of_starts(experiment: Experiment, num_points: int) -> int:
    """Engine starts of a campaign: one per point, the draws of a sampler, and the finalists' confirmations."""
    confirm = experiment.search.confirm
    if experiment.search.sampler == "tpe":
        num_points += experiment.search.num_samples
    return num_points + min(confirm.top, num_points) * confirm.launches


def check_startable(experiment: Experiment) -> None:
    """Fail now, not in the first trial: model folders and programs that are not there.

    Raises ConfigError for a model path, MachineError for a missing program.
    """
    specs, _ = campaign.keyed_points(experiment)
    # A sampler's points are not known yet; they differ from this one.
    for spec in specs or [trial_spec(experiment, "base", {})]:
        check_model(spec.engine)
        check_program(launch_plan(spec))


def launch_plan(spec: TrialSpec) -> LaunchPlan:
    return find_engine(spec.engine.kind).plan(spec.engine, spec.placement.ports[0], Path("trial"))


def check_model(spec: EngineSpec) -> None:
    """A hub name (`organisation/name`) is the engine's business; a path has to be there. Raises ConfigError."""
    looks_like_path = spec.model.startswith((".", "/", "~")) or spec.model.count("/") > 1
    if looks_like_path and not (Path(spec.root) / spec.model).expanduser().exists():
        raise ConfigError(f"engine.model: there is no file or folder {spec.model} (looked in {spec.root})")


def _flag_warnings(launches: tuple[tuple[TrialSpec, LaunchPlan], ...]) -> list[str]:
    """Flags that the installed engine's own --help does not list, with the nearest that it does."""
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
    """What an installed engine said when asked for its flags; with another exit code than 0, why it cannot start."""

    exit_code: int
    text: str


def ask_help(spec: EngineSpec, plan: LaunchPlan) -> HelpAnswer | None:
    """Ask the engine itself for its flags, in its own environment. None where it is not installed or never answers."""
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
    """The median duration of this experiment's complete trials on this machine; a refused start says nothing."""
    home = campaign.home_of(experiment)
    durations = []
    for path in home.glob("*/trials/*/result.json"):
        try:
            result = trial.from_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        if result.status is TrialStatus.COMPLETE:
            durations.append(sum(result.phases_s.values()))
    return statistics.median(durations) if durations else None
