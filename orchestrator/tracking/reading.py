"""Read TrialResults back from the store. Their memory series stay there, in the artifact memory.csv."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from orchestrator import trial
from orchestrator.config import Experiment
from orchestrator.errors import TrackingError
from orchestrator.outcome import TrialStatus
from orchestrator.tracking.store import PARENT, campaigns, connect, is_missing, search_runs, store_uri, translate_errors
from orchestrator.trial import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A result, without memory series, and the run that holds it. run_id is None when the result is not recorded."""

    result: TrialResult
    run_id: str | None = None
    campaign_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


def last_campaign(experiment: Experiment, *, all: bool = False) -> list[Recorded]:
    """The results of the newest campaign, oldest trial first; with `all`, of every campaign, newest first.

    An infrastructure failure is left out where the same point was measured in another attempt.
    """
    uri = store_uri(experiment)
    with translate_errors(uri, "cannot be read"):
        if is_missing(uri):
            return []
        client = connect(uri)
        found = client.get_experiment_by_name(experiment.tracking_name)
        if found is None:
            return []
        parents = campaigns(client, found.experiment_id)
        runs = search_runs(client, found.experiment_id, "tags.kind = 'trial'")
    chosen = [run.info.run_id for run in (parents if all else parents[:1])]
    children = [run for c in chosen for run in reversed(runs) if run.data.tags.get(PARENT) == c]
    results = [recorded(client, uri, run) for run in children if "result" in run.data.tags]
    results = _number_passes(results, chosen)
    answered = {(r.campaign_id, r.result.spec.key) for r in results if r.result.status != TrialStatus.INFRASTRUCTURE}
    return [
        r
        for r in results
        if r.result.status != TrialStatus.INFRASTRUCTURE or (r.campaign_id, r.result.spec.key) not in answered
    ]


def _number_passes(results: list[Recorded], campaigns: list[str]) -> list[Recorded]:
    """Passes numbered over all campaigns, the oldest first: the first passes of two campaigns are not one."""
    found: dict[str | None, list[Recorded]] = {campaign: [] for campaign in reversed(campaigns)}
    for each in results:
        found[each.campaign_id].append(each)
    before, offsets = 0, dict[str | None, int]()
    for campaign, members in found.items():
        offsets[campaign] = before
        before += max((each.result.pass_number for each in members), default=0)
    return [
        replace(each, result=replace(each.result, pass_number=each.result.pass_number + offsets[each.campaign_id]))
        for each in results
    ]


def load_run(tracking_uri: str, run: str) -> Recorded:
    """The result of one run. `run` is a run id, or a trial's name, which selects the newest trial of that name.

    EXPERIMENT/NAME selects among one experiment. Raises TrackingError when no run matches or it holds no result.
    """
    with translate_errors(tracking_uri, f"run {run!r} cannot be read"):
        if is_missing(tracking_uri):
            raise TrackingError(f"tracking: {tracking_uri}: there is no such database")
        client = connect(tracking_uri)
        found = client.get_run(run) if re.fullmatch("[0-9a-f]{32}", run) else next(_named(client, run), None)
        if found is None:
            raise TrackingError(f"tracking: {tracking_uri}: no run and no recorded trial is called {run!r}")
    return recorded(client, tracking_uri, found)


def _named(client: MlflowClient, name: str) -> Iterator[Run]:
    """The runs of the trials of that name that hold a result, newest first."""
    within, _, last = name.rpartition("/")
    ended = []
    for experiment in client.search_experiments():
        runs = search_runs(client, experiment.experiment_id, "tags.kind = 'trial'")
        called = [run for run in runs if run.info.run_name in (name, *([last] if experiment.name == within else []))]
        ended += [run for run in called if "result" in run.data.tags]
    return iter(sorted(ended, key=lambda run: -run.info.start_time))


def recorded(client: MlflowClient, uri: str, run: Run) -> Recorded:
    """A run with its result. Raises TrackingError when the run holds no readable result."""
    run_id = str(run.info.run_id)
    with (
        translate_errors(uri, f"result.json of run {run_id!r} cannot be read"),
        tempfile.TemporaryDirectory() as folder,
    ):
        text = Path(client.download_artifacts(run_id, "result.json", folder)).read_text(encoding="utf-8")
        result = trial.from_json(text)
    tags = dict(run.data.tags)
    return Recorded(run_id=run_id, result=result, campaign_id=tags.get(PARENT), tags=tags)
