"""The stores that the tests of tracking write into."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator.config import Experiment
from orchestrator.tracking import Tracker
from tests.support.recorded_sweep import sweep_experiment


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with MLflow's tables and nothing in them; making them takes seconds."""
    folder = tmp_path_factory.mktemp("empty")
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def experiment(tmp_path: Path, empty_database: Path) -> Experiment:
    """An experiment whose store is there and empty."""
    return _with_store(tmp_path, empty_database)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> tuple[Tracker, Experiment]:
    """A store that the tests of a file share, and the tracker of a campaign that is open in it."""
    experiment = _with_store(tmp_path_factory.mktemp("store"), empty_database)
    tracker = Tracker(experiment)
    tracker.start_campaign("")
    return tracker, experiment


def _with_store(folder: Path, database: Path) -> Experiment:
    experiment = sweep_experiment(folder)
    Path(experiment.tracking.folder).mkdir()
    shutil.copy(database, experiment.tracking.folder)
    return experiment
