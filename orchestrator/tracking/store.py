"""The connection to MLflow: which store, its errors in one line, its searches to the last page.

Importing this package sets what MLflow reads from the environment; see `__init__`.
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
    """The command that shows this experiment's store in MLflow's UI, on loopback."""
    uri = store_uri(experiment)
    if is_server(uri):
        raise TrackingError(f"tracking: {uri} is an MLflow server and shows its UI itself: open it in a browser")
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]


def runs_page(experiment: Experiment, ui_url: str) -> str:
    """The address, in the UI at `ui_url`, of this experiment's runs, the fastest first. Its start page when unknown."""
    uri = store_uri(experiment)
    with border(uri, "cannot be read"):
        found = None if is_missing(uri) else connect(uri).get_experiment_by_name(experiment.tracking_name)
    if found is None:
        return ui_url
    # Sorted by a metric the trials stand side by side; sorted by time they are hidden under their campaign.
    name = (experiment.objective.metric or "decode_tok_s").rpartition("/")[2]
    order = quote(f"metrics.`{name}`")
    ascending = "true" if experiment.objective.mode == "min" else "false"
    query = f"orderByKey={order}&orderByAsc={ascending}&workflowType=machine_learning"
    return f"{ui_url.rstrip('/')}/#/experiments/{found.experiment_id}/runs?{query}"


def store_uri(experiment: Experiment) -> str:
    """The tracking URI; a database file is made absolute, so that it is the same store from every folder."""
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
    """A client of the store at `uri`; a database is made when missing. Raises TrackingError for a kind of store that
    MLflow does not write to.
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
    """Held while a client is made, which creates missing tables: MLflow's own lock lets two first users collide."""
    path = sqlite_path(uri)
    if path is None or (path.exists() and not os.access(path.parent, os.W_OK)):
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def border(uri: str, what: str) -> Iterator[None]:
    """Translate whatever MLflow raises into one line that names the store."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        # Broad, because MLflow lets the errors of its databases, drivers and networks through as they are.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        sentence = f"tracking: {uri}: {what}: {first[:300]}"
        raise TrackingError(mask_urls(sentence)) from error


def search(client: MlflowClient, experiment_id: str, query: str) -> list[Run]:
    """All runs that match, newest first."""
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
    return search(client, experiment_id, "tags.kind = 'campaign'")
