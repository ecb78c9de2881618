"""MLflow: write TrialResults, read them back, set the champion. The only room that imports MLflow."""

# ruff: noqa: E402
import os

# MLflow reads these when it is imported or called. A store that is down must be reported in seconds, not minutes.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)

from orchestrator.tracking.champion import champion, previous, set_champion
from orchestrator.tracking.reading import Recorded, last_campaign, load_run
from orchestrator.tracking.store import runs_page, store_uri, ui_command
from orchestrator.tracking.tracker import Tracker

__all__ = [
    "Recorded",
    "Tracker",
    "champion",
    "last_campaign",
    "load_run",
    "previous",
    "runs_page",
    "set_champion",
    "store_uri",
    "ui_command",
]
