"""The connection to MLflow: which store, its errors as one line, its searches to the last page.

The package sets the environment variables that MLflow reads at import; see `__init__`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from mlflow import MlflowClient
from mlflow.entities import Run

from orchestrator.config import Experiment
from orchestrator.errors import TrackingError
from orchestrator.masking import mask_urls

# Schema migrations and retries are logged line by line otherwise; what matters of them arrives as a TrackingError.
for _name in ("mlflow", "alembic", "urllib3.connectionpool"):
    logging.getLogger(_name).setLevel(logging.ERROR)

PARENT = "mlflow.parentRunId"
PAGE = 500


def ui_command(experiment: Experiment, port: int) -> list[str]:
    """The command that starts MLflow's UI on this experiment's store, on loopback.

    Raises TrackingError when the store is a server.
    """
    uri = store_uri(experiment)
    if is_server(uri):
        raise TrackingError(f"tracking: {uri} is an MLflow server and shows its UI itself: open it in a browser")
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]


def runs_page(experiment: Experiment, ui_url: str) -> str:
    """The URL of this experiment's runs in the UI at `ui_url`, best first; `ui_url` itself when nothing is recorded."""
    uri = store_uri(experiment)
    with translate_errors(uri, "cannot be read"):
        found = None if is_missing(uri) else connect(uri).get_experiment_by_name(experiment.tracking_name)
    if found is None:
        return ui_url
    # Sorted by a metric, the UI lists all trials. Sorted by time, it folds them under their campaign.
    name = (experiment.objective.metric or "decode_tok_s").rpartition("/")[2]
    order = quote(f"metrics.`{name}`")
    ascending = "true" if experiment.objective.mode == "min" else "false"
    query = f"orderByKey={order}&orderByAsc={ascending}&workflowType=machine_learning"
    return f"{ui_url.rstrip('/')}/#/experiments/{found.experiment_id}/runs?{query}"


def store_uri(experiment: Experiment) -> str:
    """The tracking URI. The path of a database file is made absolute: the current folder must not choose the store."""
    uri = experiment.tracking_uri
    path = sqlite_path(uri)
    return f"sqlite:///{path.absolute()}" if path else uri


def sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def is_missing(uri: str) -> bool:
    path = sqlite_path(uri)
    return path is not None and not path.exists()


def connect(uri: str) -> MlflowClient:
    """A client of the store at `uri`. Creates the database when it is missing.

    Raises TrackingError for a kind of store that MLflow does not write to.
    """
    if not (is_server(uri) or "://" in uri) or uri.startswith("file:"):
        raise TrackingError(
            f"tracking.uri: found {uri!r}, which MLflow no longer writes to; allowed is a database such as "
            "sqlite:///mlruns/mlflow.db, or the address of an MLflow server"
        )
    with _creation_lock(uri):
        return MlflowClient(uri, registry_uri=uri)


@contextmanager
def _creation_lock(uri: str) -> Iterator[None]:
    """Hold a file lock while a client creates the missing tables: two first users at once collide in MLflow."""
    path = sqlite_path(uri)
    if path is None or (path.exists() and not os.access(path.parent, os.W_OK)):
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def translate_errors(uri: str, what: str) -> Iterator[None]:
    """Raise every error of MLflow as a TrackingError of one line that names the store."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        # Broad, because MLflow passes on the errors of its databases, drivers and networks unchanged.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        sentence = f"tracking: {uri}: {what}: {first[:300]}"
        raise TrackingError(mask_urls(sentence)) from error


def search_runs(client: MlflowClient, experiment_id: str, query: str) -> list[Run]:
    """All runs that match a query in MLflow's filter language, newest first, however many pages they fill."""
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment_id], query, max_results=PAGE, order_by=["attributes.start_time DESC"], page_token=token
        )
        runs += page
        token = page.token
        if not token:
            return runs


def campaigns(client: MlflowClient, experiment_id: str) -> list[Run]:
    """The parent runs of an experiment, newest first."""
    return search_runs(client, experiment_id, "tags.kind = 'campaign'")
