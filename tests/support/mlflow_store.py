"""What a test reads from an experiment's MLflow store, and a campaign written into it."""

from __future__ import annotations

from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from orchestrator import tracking
from orchestrator.config import Experiment, to_yaml
from orchestrator.tracking import Tracker
from orchestrator.trial import TrialResult


def client_of(experiment: Experiment) -> MlflowClient:
    return MlflowClient(tracking.store_uri(experiment))


def runs_of(experiment: Experiment, query: str = "") -> list[Run]:
    client = client_of(experiment)
    found = client.get_experiment_by_name(experiment.tracking_name)
    return client.search_runs([found.experiment_id], query, order_by=["attributes.start_time ASC"])


def recorded_campaign(experiment: Experiment, results: list[TrialResult], best: TrialResult | None = None) -> Tracker:
    tracker = Tracker(experiment)
    tracker.start_campaign(to_yaml(experiment), {"folder": str(Path(experiment.tracking.folder) / "campaign")})
    for result in results:
        tracker.start_trial(result.spec)
        tracker.record(result)
    tracker.end_campaign("FINISHED", results, best)
    return tracker
