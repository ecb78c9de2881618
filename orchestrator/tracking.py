"""Write TrialResults to MLflow and read them back. The only room that knows MLflow, and only the driver enters it.

One MLflow experiment per experiment name, one parent run per campaign, one child run per trial. A store that goes down
loses nothing: `record` raises TrackingError, result.json is on disk already, and `replay` records what is missing.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# MLflow reads these when it is imported or called; a store that is down must be told in seconds, not minutes.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "GIT_PYTHON_REFRESH": "quiet",
}.items():
    os.environ.setdefault(_name, _value)

from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param, Run, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

from orchestrator import figures, record, trial  # noqa: E402
from orchestrator.config import Experiment, TrialSpec  # noqa: E402
from orchestrator.engines.base import TrialStatus  # noqa: E402
from orchestrator.errors import TrackingError  # noqa: E402
from orchestrator.trial import TrialResult  # noqa: E402

# Schema migrations and retries are told line by line otherwise; what matters of them arrives as a TrackingError.
for _name in ("mlflow", "alembic", "urllib3.connectionpool"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_PARENT = "mlflow.parentRunId"
_PAGE = 500
_CHUNK = 90
_ENDED_AS = {
    TrialStatus.COMPLETE: "FINISHED",
    TrialStatus.PRUNED: "FINISHED",
    TrialStatus.REFUSED: "FAILED",
    TrialStatus.UNFIT: "FAILED",
    TrialStatus.FAILED: "FAILED",
    TrialStatus.INFRASTRUCTURE: "KILLED",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A result and the run that holds it (None: not recorded, for example because the store is down)."""

    result: TrialResult
    run_id: str | None = None
    campaign_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


class Tracker:
    """One experiment's records, open for writing. Methods may be called from several threads."""

    def __init__(self, experiment: Experiment) -> None:
        """Open the store, and create it and the MLflow experiment when missing. Raises TrackingError."""
        self.uri = store_uri(experiment)
        self.campaign_id: str | None = None
        self._name = experiment.tracking_name
        self._workload = (experiment.objective.metric or "").rpartition("/")[0] or None
        self._lock = threading.RLock()
        self._open: dict[tuple[str, str], list[str]] = {}
        with _border(self.uri, "cannot be opened"):
            if (path := _sqlite_path(self.uri)) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._client = _client(self.uri)
            self._experiment_id = self._experiment(Path(experiment.tracking.folder))

    def _experiment(self, folder: Path) -> str:
        found = self._client.get_experiment_by_name(self._name)
        if found is None:
            # A server has its own place for artifacts; a database has none, and would use the current folder.
            location = None if _is_server(self.uri) else str((folder / "artifacts").absolute())
            try:
                return str(self._client.create_experiment(self._name, artifact_location=location))
            except MlflowException:
                found = self._client.get_experiment_by_name(self._name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise TrackingError(
                f"tracking: the MLflow experiment {self._name!r} in {self.uri} is deleted; restore it with "
                f"`mlflow experiments restore --experiment-id {found.experiment_id}` or choose tracking.experiment"
            )
        return str(found.experiment_id)

    def close_dead_runs(self, alive: Callable[[int], bool]) -> int:
        """End as KILLED what a driver of this machine left RUNNING and that is gone. Returns how many."""
        closed = 0
        with self._lock, _border(self.uri, "cannot be read"):
            for run in _search(self._client, self._experiment_id, "attributes.status = 'RUNNING'"):
                if _is_dead(run.data.tags, alive):
                    self._client.set_tag(run.info.run_id, "cause", "driver_gone")
                    self._client.set_terminated(run.info.run_id, status="KILLED")
                    closed += 1
        return closed

    def start_campaign(self, config_yaml: str, tags: Mapping[str, str] | None = None) -> str:
        """Open the parent run of a campaign and make it current. Returns its run id."""
        with self._lock, _border(self.uri, "the campaign cannot be recorded"):
            name = f"{self._name} {time.strftime('%Y-%m-%d %H:%M:%S')}"
            run = self._client.create_run(
                self._experiment_id, run_name=name, tags={"kind": "campaign", **_driver_tags(), **(tags or {})}
            )
            self.campaign_id = str(run.info.run_id)
            self._client.log_text(self.campaign_id, config_yaml, "config.yaml")
        return self.campaign_id

    def resume_campaign(self) -> str | None:
        """Open the newest campaign again and make it current. Returns its run id, None when there is none."""
        with self._lock, _border(self.uri, "the campaign cannot be resumed"):
            newest = _campaigns(self._client, self._experiment_id)[:1]
            if not newest:
                return None
            self.campaign_id = str(newest[0].info.run_id)
            self._client.update_run(self.campaign_id, status="RUNNING")
            self._tag(self.campaign_id, _driver_tags())
        return self.campaign_id

    def start_trial(self, spec: TrialSpec) -> str:
        """Open the child run of one trial, RUNNING, with its params. Returns its run id."""
        with self._lock, _border(self.uri, f"trial {spec.name!r} cannot be opened"):
            run_id = self._create_trial(spec, None)
            self._open.setdefault((spec.name, spec.key), []).append(run_id)
        return run_id

    def record(self, result: TrialResult) -> str:
        """Write params, metrics, series, tags, artifacts and figures, and end the run. Returns its run id.

        Raises TrackingError when the store cannot be written to; the run then stays for `replay`.
        """
        key = (result.spec.name, result.spec.key)
        with self._lock, _border(self.uri, f"trial {result.spec.name!r} cannot be recorded; its result is on disk"):
            waiting = self._open.get(key) or [self._create_trial(result.spec, record.epoch_ms(result.started_at))]
            self._write(waiting[0], result)
            self._open[key] = waiting[1:]
        return waiting[0]

    def end_campaign(self, status: str, results: Sequence[TrialResult], best: TrialResult | None) -> None:
        """Close the campaign and whatever trial is still open (KILLED). status: FINISHED, FAILED or KILLED."""
        with self._lock, _border(self.uri, "the campaign cannot be closed"):
            for run_id in [run_id for waiting in self._open.values() for run_id in waiting]:
                self._client.set_terminated(run_id, status="KILLED")
            self._open.clear()
            if self.campaign_id is None:
                return
            counts = {str(s): sum(r.status == s for r in results) for s in TrialStatus}
            tags = {"trials": ", ".join(f"{n} {name}" for name, n in counts.items() if n), "best": "none"}
            if best is not None:
                tags |= {"best": best.spec.name, **self._mark_best(best)}
                self._log_metrics(self.campaign_id, record.metrics(best), best.ended_at)
            self._tag(self.campaign_id, tags)
            for name, figure in figures.campaign(results, self._workload).items():
                self._client.log_figure(self.campaign_id, figure, f"figures/{name}.png")
            self._client.set_terminated(self.campaign_id, status=status)
            self.campaign_id = None

    def attach(self, name: str, text: str) -> None:
        """Keep a text (a table, a document) with the current campaign, under `name`."""
        if self.campaign_id is None:
            raise TrackingError(f"tracking: no campaign is open to keep {name!r} with")
        with self._lock, _border(self.uri, f"{name!r} cannot be kept"):
            self._client.log_text(self.campaign_id, text, name)

    def replay(self, workdirs: Sequence[Path]) -> list[str]:
        """Record every result.json in `workdirs` that the store does not have yet. Returns the run ids written."""
        written = []
        with self._lock, _border(self.uri, "cannot be read"):
            self.campaign_id = self.campaign_id or self.resume_campaign() or self.start_campaign("")
            known = _search(self._client, self._experiment_id, "tags.kind = 'trial'")
        complete = {run.data.tags.get("result") for run in known if run.info.status != "RUNNING"}
        for path in [workdir / "result.json" for workdir in workdirs]:
            result = _read_result(path)
            if result is not None and record.identity(result) not in complete:
                self._reopen(result, known)
                written.append(self.record(result))
        return written

    def _reopen(self, result: TrialResult, known: Sequence[Run]) -> None:
        """Continue the unfinished run of this trial where its params are the same; else a new run is made."""
        key = (result.spec.name, result.spec.key)
        wanted, _ = record.params(result.spec)
        for run in known:
            tags = run.data.tags
            same = (run.info.run_name, tags.get("key")) == key and run.data.params == wanted
            if same and "result" not in tags and run.info.run_id not in self._open.get(key, []):
                self._open.setdefault(key, []).insert(0, run.info.run_id)
                return

    def _create_trial(self, spec: TrialSpec, start_ms: int | None) -> str:
        if self.campaign_id is None:
            raise TrackingError("tracking: a trial belongs to a campaign, and none is open")
        tags = {**record.spec_tags(spec), **_driver_tags(), _PARENT: self.campaign_id}
        run = self._client.create_run(self._experiment_id, start_time=start_ms, tags=tags, run_name=spec.name)
        run_id = str(run.info.run_id)
        short, whole = record.params(spec)
        pairs = [Param(key, value) for key, value in short.items()]
        for i in range(0, len(pairs), _CHUNK):
            self._client.log_batch(run_id, params=pairs[i : i + _CHUNK])
        for name, text in whole.items():
            self._client.log_text(run_id, text, f"params/{name}.txt")
        return run_id

    def _write(self, run_id: str, result: TrialResult) -> None:
        values = record.metrics(result)
        # Bare names repeat the objective's workload: MLflow's filters take `metrics.decode_tok_s > 200` unquoted.
        values = record.headline(result.measurements, self._workload) | values
        self._log_metrics(run_id, values, result.ended_at)
        self._log_series(run_id, result)
        self._client.log_text(run_id, trial.to_json(record.finite(result)), "result.json")
        for path in sorted(Path(result.workdir).iterdir()) if result.workdir and Path(result.workdir).is_dir() else []:
            if path.is_file() and path.name != "result.json" and not path.name.startswith("."):
                self._client.log_artifact(run_id, str(path))
        for name, figure in figures.trial(result).items():
            self._client.log_figure(run_id, figure, f"figures/{name}.png")
        # Last, because `replay` takes this tag for "everything is there".
        self._tag(run_id, record.result_tags(result))
        self._client.set_terminated(run_id, _ENDED_AS[result.status], record.epoch_ms(result.ended_at))

    def _log_metrics(self, run_id: str, values: Mapping[str, float], ended_at: str) -> None:
        at = record.epoch_ms(ended_at) or int(time.time() * 1000)
        self._log_samples(run_id, [Metric(name, value, at, 0) for name, value in values.items()])

    def _log_series(self, run_id: str, result: TrialResult) -> None:
        start = record.epoch_ms(result.started_at) or 0
        end = record.epoch_ms(result.ended_at) or int(time.time() * 1000)
        samples = record.series(result)
        points = [(s, end if s.time_s is None else start + int(s.time_s * 1000)) for s in samples]
        self._log_samples(run_id, [Metric(s.name, s.value, at, s.step) for s, at in points])

    def _log_samples(self, run_id: str, samples: list[Metric]) -> None:
        for i in range(0, len(samples), _PAGE):
            self._client.log_batch(run_id, metrics=samples[i : i + _PAGE])

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def _mark_best(self, best: TrialResult) -> dict[str, str]:
        query = f"tags.result = '{record.identity(best)}'"
        for run in _search(self._client, self._experiment_id, query):
            self._client.set_tag(run.info.run_id, "best", "true")
            return {"best_run_id": str(run.info.run_id)}
        return {}


def replay(experiment: Experiment, workdirs: Sequence[Path]) -> list[str]:
    """Record the results on disk that the store missed while it was down. Returns the run ids written."""
    return Tracker(experiment).replay(workdirs)


def last_campaign(experiment: Experiment, *, all: bool = False) -> list[Recorded]:
    """The results of the newest campaign, oldest trial first; with `all`, of every campaign, newest first."""
    uri = store_uri(experiment)
    with _border(uri, "cannot be read"):
        if _is_missing(uri):
            return []
        client = _client(uri)
        found = client.get_experiment_by_name(experiment.tracking_name)
        if found is None:
            return []
        campaigns = _campaigns(client, found.experiment_id)
        runs = _search(client, found.experiment_id, "tags.kind = 'trial'")
    chosen = [run.info.run_id for run in (campaigns if all else campaigns[:1])]
    children = [run for c in chosen for run in reversed(runs) if run.data.tags.get(_PARENT) == c]
    return [_recorded(client, uri, run) for run in children if "result" in run.data.tags]


def load_run(tracking_uri: str, run_id: str) -> Recorded:
    """The result that one run holds. Raises TrackingError when there is no such run or it holds none."""
    with _border(tracking_uri, f"run {run_id!r} cannot be read"):
        if _is_missing(tracking_uri):
            raise TrackingError(f"tracking: {tracking_uri}: there is no such database")
        client = _client(tracking_uri)
        run = client.get_run(run_id)
    return _recorded(client, tracking_uri, run)


def ui_command(experiment: Experiment, port: int) -> list[str]:
    """The command that shows this experiment's store in MLflow's UI, on loopback."""
    uri = store_uri(experiment)
    if _is_server(uri):
        raise TrackingError(f"tracking: {uri} is an MLflow server and shows its UI itself: open it in a browser")
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]


def store_uri(experiment: Experiment) -> str:
    """The tracking URI; a database file is made absolute, so that it is the same store from every folder."""
    uri = experiment.tracking_uri
    path = _sqlite_path(uri)
    return f"sqlite:///{path.absolute()}" if path else uri


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _is_missing(uri: str) -> bool:
    path = _sqlite_path(uri)
    return path is not None and not path.exists()


def _client(uri: str) -> MlflowClient:
    if not (_is_server(uri) or "://" in uri) or uri.startswith("file:"):
        raise TrackingError(
            f"tracking.uri: found {uri!r}, which MLflow no longer writes to; allowed is a database such as "
            "sqlite:///mlruns/mlflow.db, or the address of an MLflow server"
        )
    return MlflowClient(uri, registry_uri=uri)


@contextmanager
def _border(uri: str, what: str) -> Iterator[None]:
    """Translate whatever MLflow raises into one line that names the store."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        # Broad, because MLflow lets the errors of its databases, drivers and networks through as they are.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrackingError(f"tracking: {uri}: {what}: {first[:300]}") from error


def _search(client: MlflowClient, experiment_id: str, query: str) -> list[Run]:
    """All runs that match, newest first."""
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment_id], query, max_results=_PAGE, order_by=["attributes.start_time DESC"], page_token=token
        )
        runs += page
        token = page.token
        if not token:
            return runs


def _campaigns(client: MlflowClient, experiment_id: str) -> list[Run]:
    return _search(client, experiment_id, "tags.kind = 'campaign'")


def _recorded(client: MlflowClient, uri: str, run: Run) -> Recorded:
    run_id = str(run.info.run_id)
    with _border(uri, f"result.json of run {run_id!r} cannot be read"), tempfile.TemporaryDirectory() as folder:
        text = Path(client.download_artifacts(run_id, "result.json", folder)).read_text(encoding="utf-8")
        result = trial.from_json(text)
    tags = dict(run.data.tags)
    return Recorded(run_id=run_id, result=result, campaign_id=tags.get(_PARENT), tags=tags)


def _read_result(path: Path) -> TrialResult | None:
    """The result in a trial's folder; None when the trial never finished one."""
    try:
        return trial.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrackingError(f"{path}: cannot be replayed: {error}") from None


def _driver_tags() -> dict[str, str]:
    return {"driver_pid": str(os.getpid()), "driver_host": socket.gethostname(), "driver_start": _start(os.getpid())}


def _start(pid: int) -> str:
    """Boot and start time of a process: a pid alone is soon used again, in a container at once."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        ticks = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return "unknown"
    return f"{boot}/{ticks}"


def _is_dead(tags: Mapping[str, Any], alive: Callable[[int], bool]) -> bool:
    if "driver_pid" not in tags or tags.get("driver_host") != socket.gethostname():
        return False
    pid = int(tags["driver_pid"])
    return not alive(pid) or _start(pid) != tags.get("driver_start")
