"""Reading a store: by name and by alias, from anywhere, and what is reported when it cannot be read."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import tracking
from orchestrator.config import Experiment, Tracking
from orchestrator.errors import TrackingError
from orchestrator.tracking import Recorded, Tracker
from tests.support.mlflow_store import client_of, recorded_campaign
from tests.support.recorded_sweep import sweep_experiment, sweep_result


def test_reading_makes_no_store(tmp_path: Path) -> None:
    experiment = sweep_experiment(tmp_path)
    assert tracking.last_campaign(experiment) == []
    assert tracking.champion(experiment) is None
    assert not Path(experiment.tracking.folder).exists()
    with pytest.raises(TrackingError, match="there is no such database"):
        tracking.load_run(tracking.store_uri(experiment), "abc")


@pytest.mark.slow
def test_the_champion_and_the_one_before(experiment: Experiment, tmp_path: Path) -> None:
    results = [sweep_result(experiment, k, 200.0 + k, tmp_path) for k in (5, 6)]
    recorded_campaign(experiment, results, results[1])
    five, six = tracking.last_campaign(experiment)
    assert tracking.champion(experiment) is None
    first = tracking.set_champion(experiment, five.run_id, {"application": "orchestrator"})
    assert champions(experiment) == (five.run_id, None)
    second = tracking.set_champion(experiment, six.run_id)
    assert first != second
    assert champions(experiment) == (six.run_id, five.run_id)
    assert tracking.set_champion(experiment, six.run_id) == second
    assert champions(experiment) == (six.run_id, five.run_id)
    assert tracking.set_champion(experiment, five.run_id) == first
    assert champions(experiment) == (five.run_id, six.run_id)
    version = client_of(experiment).get_model_version_by_alias("dspark-k-sweep", "champion")
    assert version.tags == {"trial": "k=5", "application": "orchestrator"}
    assert tracking.champion(experiment).result == results[0]


def champions(experiment: Experiment) -> tuple[str | None, str | None]:
    found: list[Recorded | None] = [tracking.champion(experiment), tracking.previous(experiment)]
    return found[0].run_id if found[0] else None, found[1].run_id if found[1] else None


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("./mlruns", "tracking.uri: found './mlruns'"),
        ("file:///tmp/mlruns", "allowed is a database such as"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9: cannot be opened"),
        ("nonsense://somewhere", "nonsense://somewhere"),
        ("sqlite:////proc/nowhere/mlflow.db", "sqlite:////proc/nowhere/mlflow.db: cannot be opened"),
        ("postgresql://user:s3cret@127.0.0.1:9/db", "cannot be opened"),
    ],
)
def test_a_store_that_cannot_be_opened_is_one_line_within_seconds(experiment: Experiment, uri: str, told: str) -> None:
    began = time.monotonic()
    with pytest.raises(TrackingError) as caught:
        Tracker(replace(experiment, tracking=Tracking(uri=uri)))
    assert time.monotonic() - began < 20
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_file_that_is_no_database_is_named(experiment: Experiment, tmp_path: Path) -> None:
    broken = tmp_path / "broken.db"
    broken.write_text("this is not a database" * 100)
    with pytest.raises(TrackingError, match="file is not a database"):
        Tracker(replace(experiment, tracking=Tracking(uri=f"sqlite:///{broken}")))


def test_a_deleted_experiment_is_told_with_the_cure(experiment: Experiment) -> None:
    Tracker(experiment)
    client = client_of(experiment)
    client.delete_experiment(client.get_experiment_by_name(experiment.name).experiment_id)
    with pytest.raises(TrackingError, match="mlflow experiments restore --experiment-id 1"):
        Tracker(experiment)


def test_an_unknown_run_is_told(store: tuple[Tracker, Experiment]) -> None:
    _, experiment = store
    uri = tracking.store_uri(experiment)
    with pytest.raises(TrackingError, match="no run and no recorded trial is called 'nope'"):
        tracking.load_run(uri, "nope")
    with pytest.raises(TrackingError, match=r"run '0{32}' cannot be read: .*not found"):
        tracking.load_run(uri, "0" * 32)


def test_a_run_that_holds_no_result_is_told(store: tuple[Tracker, Experiment]) -> None:
    tracker, experiment = store
    with pytest.raises(TrackingError, match=r"result\.json of run .* cannot be read"):
        tracking.load_run(tracking.store_uri(experiment), tracker.campaign_id)


@pytest.mark.slow
def test_a_trial_is_found_by_its_name(experiment: Experiment, tmp_path: Path) -> None:
    uri = tracking.store_uri(experiment)
    other = replace(experiment, name="other")
    first = sweep_result(experiment, 6, 270.0, tmp_path / "1")
    again = sweep_result(experiment, 6, 275.9, tmp_path / "2", started_at="2026-11-29T16:00:00+00:00")
    elsewhere = sweep_result(other, 6, 100.0, tmp_path / "3", started_at="2026-11-29T17:00:00+00:00")
    for owner, results in ((experiment, [first, again]), (other, [elsewhere])):
        tracker = Tracker(owner)
        tracker.start_campaign("")
        for result in results:
            tracker.record(result)
        tracker.end_campaign("FINISHED", results, results[0])
    assert tracking.load_run(uri, "k=6").result == elsewhere
    assert tracking.load_run(uri, f"{experiment.name}/k=6").result == again


def test_artifacts_stay_under_the_tracking_folder_whatever_the_working_directory(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relative = replace(experiment, tracking=Tracking(folder="mlruns"))
    monkeypatch.chdir(tmp_path)
    uri = tracking.store_uri(relative)
    result = sweep_result(relative, 5, 268.2, tmp_path / "trials")
    recorded_campaign(relative, [result], result)
    run_id = tracking.last_campaign(relative)[0].run_id
    monkeypatch.chdir("/")
    assert tracking.load_run(uri, run_id).result == result
    assert uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert list((tmp_path / "mlruns" / "artifacts").glob(f"{run_id}/artifacts/result.json"))


def test_the_ui_command_names_the_store_and_loopback(experiment: Experiment) -> None:
    command = tracking.ui_command(experiment, 5123)
    assert command[command.index("--backend-store-uri") + 1] == tracking.store_uri(experiment)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "5123"
    with pytest.raises(TrackingError, match="open it in a browser"):
        tracking.ui_command(replace(experiment, tracking=Tracking(uri="http://127.0.0.1:5000")), 5123)
