"""The tracker against a real MLflow server that goes down in the middle of a campaign and comes back."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator import tracking
from orchestrator.config import Tracking, to_yaml
from orchestrator.errors import TrackingError
from orchestrator.tracking import Tracker
from tests.support import mlflow_server
from tests.support.recorded_sweep import sweep_experiment, sweep_result

# A server starts in 7 s on an idle machine and in a minute on a busy one.
pytestmark = pytest.mark.timeout(600)


def test_a_server_that_goes_down_loses_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = mlflow_server.free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    command += ["--artifacts-destination", str(tmp_path / "served"), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    experiment = sweep_experiment(tmp_path, tracking=Tracking(uri=f"http://127.0.0.1:{port}"))
    home = tmp_path / "campaign"
    results = [sweep_result(experiment, k, 200.0 + k, home / "trials") for k in (5, 6, 7)]

    with mlflow_server.running(command, port, tmp_path / "server.log"):
        tracker = Tracker(experiment)
        campaign = tracker.start_campaign(to_yaml(experiment), {"folder": str(home)})
        tracker.start_trial(results[0].spec)
        tracker.record(results[0])
        tracker.start_trial(results[1].spec)

    for attempt in (lambda: tracker.record(results[1]), lambda: tracker.start_trial(results[2].spec)):
        began = time.monotonic()
        with pytest.raises(TrackingError, match=rf"^tracking: http://127\.0\.0\.1:{port}: trial 'k=[67]' cannot be"):
            attempt()
        assert time.monotonic() - began < 15
    with pytest.raises(TrackingError, match="cannot be read"):
        tracking.last_campaign(experiment)

    with mlflow_server.running(command, port, tmp_path / "server.log") as uri:
        written = Tracker(experiment).replay([Path(result.workdir) for result in results])
        assert len(written) == 2
        assert Tracker(experiment).replay([Path(result.workdir) for result in results]) == []
        tracker.end_campaign("FINISHED", results, results[2])
        back = tracking.last_campaign(experiment)
        assert sorted((r.result for r in back), key=lambda r: r.spec.name) == results
        client = MlflowClient(uri)
        runs = client.search_runs([client.get_experiment_by_name(experiment.name).experiment_id])
        assert {run.info.status for run in runs} == {"FINISHED"}
        assert len(runs) == 4
        assert client.get_run(campaign).data.tags["best"] == "k=7"
        assert next(iter(runs)).info.artifact_uri.startswith("mlflow-artifacts:/")
        files = {f.path for f in client.list_artifacts(written[0])}
        assert {"result.json", "engine.log", "plan.json", "traces.jsonl", "figures"} <= files

        tracking.set_champion(experiment, back[0].run_id)
        tracking.set_champion(experiment, back[1].run_id)
        assert tracking.champion(experiment).result == back[1].result
        assert tracking.previous(experiment).result == back[0].result
        assert tracking.load_run(uri, back[2].run_id).result == back[2].result
        with pytest.raises(TrackingError, match="is called 'nope'"):
            tracking.load_run(uri, "nope")
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "")


def test_a_server_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    gone = replace(sweep_experiment(tmp_path), tracking=Tracking(uri=f"http://127.0.0.1:{mlflow_server.free_port()}"))
    with pytest.raises(TrackingError, match="cannot be opened"):
        Tracker(gone)
