"""Results read back from the store, as the objects that were written."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from orchestrator import trial
from orchestrator.config import Experiment
from orchestrator.engines.base import TrialStatus
from orchestrator.errors import TrackingError
from orchestrator.tracking.store import PARENT, border, campaigns, connect, is_missing, search, store_uri
from orchestrator.trial import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A result and the run that holds it (None: not recorded, for example because the store is down)."""

    result: TrialResult
    run_id: str | None = None
    campaign_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


def last_campaign(experiment: Experiment, *, all: bool = False) -> list[Recorded]:
    """The results of the newest campaign, oldest trial first; with `all`, of every campaign, newest first.

    A fault of the machine is left out where the same point was measured after all.
    """
    uri = store_uri(experiment)
    with border(uri, "cannot be read"):
        if is_missing(uri):
            return []
        client = connect(uri)
        found = client.get_experiment_by_name(experiment.tracking_name)
        if found is None:
            return []
        parents = campaigns(client, found.experiment_id)
        runs = search(client, found.experiment_id, "tags.kind = 'trial'")
    chosen = [run.info.run_id for run in (parents if all else parents[:1])]
    children = [run for c in chosen for run in reversed(runs) if run.data.tags.get(PARENT) == c]
    results = [recorded(client, uri, run) for run in children if "result" in run.data.tags]
    answered = {(r.campaign_id, r.result.spec.key) for r in results if r.result.status != TrialStatus.INFRASTRUCTURE}
    return [
        r
        for r in results
        if r.result.status != TrialStatus.INFRASTRUCTURE or (r.campaign_id, r.result.spec.key) not in answered
    ]


def load_run(tracking_uri: str, run_id: str) -> Recorded:
    """The result that one run holds. Raises TrackingError when there is no such run or it holds none."""
    with border(tracking_uri, f"run {run_id!r} cannot be read"):
        if is_missing(tracking_uri):
            raise TrackingError(f"tracking: {tracking_uri}: there is no such database")
        client = connect(tracking_uri)
        run = client.get_run(run_id)
    return recorded(client, tracking_uri, run)


def recorded(client: MlflowClient, uri: str, run: Run) -> Recorded:
    run_id = str(run.info.run_id)
    with border(uri, f"result.json of run {run_id!r} cannot be read"), tempfile.TemporaryDirectory() as folder:
        text = Path(client.download_artifacts(run_id, "result.json", folder)).read_text(encoding="utf-8")
        result = trial.from_json(text)
    tags = dict(run.data.tags)
    return Recorded(run_id=run_id, result=result, campaign_id=tags.get(PARENT), tags=tags)
