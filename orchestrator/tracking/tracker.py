"""Write TrialResults to MLflow. Only the driver of a campaign does.

One MLflow experiment per experiment name, one parent run per campaign, one child run per trial. A store that is down
loses nothing: `record` raises TrackingError, the trial's folder is on disk already, and `replay` records it later.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from orchestrator import trial
from orchestrator.config import Experiment, TrialSpec
from orchestrator.errors import TrackingError
from orchestrator.outcome import TrialStatus
from orchestrator.search.arms import pool_points
from orchestrator.tracking import driver, entries, figures
from orchestrator.tracking.store import (
    PAGE,
    PARENT,
    campaigns,
    connect,
    is_server,
    search_runs,
    store_uri,
    translate_errors,
)
from orchestrator.trial import TrialResult

# MLflow takes at most 100 params in one call.
_CHUNK = 90
_ENDED_AS = {
    TrialStatus.COMPLETE: "FINISHED",
    TrialStatus.PRUNED: "FINISHED",
    TrialStatus.REFUSED: "FAILED",
    TrialStatus.UNFIT: "FAILED",
    TrialStatus.FAILED: "FAILED",
    TrialStatus.INFRASTRUCTURE: "KILLED",
}


class Tracker:
    """The records of one experiment, open for writing. Methods may be called from several threads."""

    def __init__(self, experiment: Experiment) -> None:
        """Open the store. Creates it and the MLflow experiment when they are missing. Raises TrackingError."""
        self.experiment = experiment
        self.uri = store_uri(experiment)
        self.campaign_id: str | None = None
        self._name = experiment.tracking_name
        self._workload = (experiment.objective.metric or "").rpartition("/")[0] or None
        self._lock = threading.RLock()
        self._open: dict[tuple[str, str], list[str]] = {}
        self._recorded: dict[str, str] = {}
        with translate_errors(self.uri, "cannot be opened"):
            self._client = connect(self.uri)
            self._experiment_id = self._experiment(Path(experiment.tracking.folder))

    def _experiment(self, folder: Path) -> str:
        found = self._client.get_experiment_by_name(self._name)
        if found is None:
            # A server chooses the place of artifacts itself. A database would put them into the current folder.
            location = None if is_server(self.uri) else str((folder / "artifacts").absolute())
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

    def close_dead_runs(self) -> int:
        """End as KILLED the runs that a dead driver of this machine left RUNNING. Returns how many."""
        closed = 0
        with self._lock, translate_errors(self.uri, "cannot be read"):
            for run in search_runs(self._client, self._experiment_id, "attributes.status = 'RUNNING'"):
                if driver.is_gone(run.data.tags):
                    self._client.set_tag(run.info.run_id, "cause", "driver_gone")
                    self._client.set_terminated(run.info.run_id, status="KILLED")
                    closed += 1
        return closed

    def start_campaign(self, config_yaml: str, tags: Mapping[str, str] | None = None) -> str:
        """Open the parent run of a campaign and make it current. Returns its run id.

        A campaign with the same `folder` tag is this one, resumed: its runs are kept.
        """
        tags = {"kind": "campaign", **driver.tags(), **(tags or {})}
        with self._lock, translate_errors(self.uri, "the campaign cannot be recorded"):
            self.campaign_id = self._campaign_of(tags.get("folder"))
            if self.campaign_id is None:
                name = f"{self._name} {time.strftime('%Y-%m-%d %H:%M:%S')}"
                self.campaign_id = str(self._client.create_run(self._experiment_id, run_name=name).info.run_id)
            else:
                self._client.update_run(self.campaign_id, status="RUNNING")
                self._recorded |= self._results_of(self.campaign_id)
            self._tag(self.campaign_id, tags)
            self._client.log_text(self.campaign_id, config_yaml, "config.yaml")
        return self.campaign_id

    def _campaign_of(self, folder: str | None) -> str | None:
        """The newest campaign whose folder is this one or contains it."""
        for run in campaigns(self._client, self._experiment_id) if folder else []:
            if (home := run.data.tags.get("folder")) and Path(str(folder)).is_relative_to(home):
                return str(run.info.run_id)
        return None

    def _results_of(self, campaign_id: str) -> dict[str, str]:
        """Identity of each result that a campaign holds completely -> its run id."""
        runs = search_runs(self._client, self._experiment_id, f"tags.`{PARENT}` = '{campaign_id}'")
        ended = [run for run in runs if run.info.status != "RUNNING" and "result" in run.data.tags]
        return {run.data.tags["result"]: str(run.info.run_id) for run in ended}

    def start_trial(self, spec: TrialSpec) -> str:
        """Open the run of one trial, RUNNING, with its params. Returns its run id."""
        with self._lock, translate_errors(self.uri, f"trial {spec.name!r} cannot be opened"):
            run_id = self._create_trial(spec, None)
            self._open.setdefault((spec.name, spec.key), []).append(run_id)
        return run_id

    def record(self, result: TrialResult) -> str:
        """Write params, metrics, series, tags, artifacts and figures, and end the run. Returns its run id.

        A result that this campaign holds already is not written again. Raises TrackingError when the store cannot be
        written to; a second call, or `replay`, then completes the same run.
        """
        if (held := self._recorded.get(entries.identity(result))) is not None:
            return held
        key = (result.spec.name, result.spec.key)
        entry = entries.entry(result, self._workload)
        pictures = figures.trial(result)
        with (
            self._lock,
            translate_errors(self.uri, f"trial {result.spec.name!r} cannot be recorded; its result is on disk"),
        ):
            waiting = self._open.get(key) or [self._create_trial(result.spec, entries.epoch_ms(result.started_at))]
            self._write(waiting[-1], result, entry, pictures)
            self._open[key] = waiting[:-1]
            self._recorded[entry.tags["result"]] = waiting[-1]
        return waiting[-1]

    def end_campaign(self, status: str, results: Sequence[TrialResult], best: TrialResult | None) -> None:
        """End the campaign's run with `status` (FINISHED, FAILED, KILLED), and as KILLED each trial still open.

        results hold the numbers that need the whole campaign (speed-up, verdicts across trials). They are added to
        the runs of the trials.
        """
        pictures = figures.campaign(pool_points(self.experiment, results), self._workload)
        with self._lock, translate_errors(self.uri, "the campaign cannot be closed"):
            if self.campaign_id is None:
                return
            mine = f"attributes.status = 'RUNNING' AND tags.`{PARENT}` = '{self.campaign_id}'"
            for run in search_runs(self._client, self._experiment_id, mine):
                self._client.set_tag(run.info.run_id, "cause", "no_result")
                self._client.set_terminated(run.info.run_id, status="KILLED")
            self._open.clear()
            for result in results:
                self._add_campaign_numbers(result)
            self._tag(self.campaign_id, self._summary(results, best))
            if best is not None:
                values = entries.headline(best.measurements, self._workload)
                self._log_metrics(self.campaign_id, {f"best/{name}": x for name, x in values.items()}, best.ended_at)
            for name, figure in pictures.items():
                self._client.log_figure(self.campaign_id, figure, f"figures/{name}.png")
            self._client.set_terminated(self.campaign_id, status=status)
            self.campaign_id = None

    def _add_campaign_numbers(self, result: TrialResult) -> None:
        run_id = self._recorded.get(entries.identity(result))
        if run_id is not None:
            speedups = {k: v for k, v in entries.metrics(result).items() if "/speedup" in k}
            self._log_metrics(run_id, speedups, result.ended_at)
            self._tag(run_id, entries.verdict_tags(result))

    def _summary(self, results: Sequence[TrialResult], best: TrialResult | None) -> dict[str, str]:
        counts = Counter(str(result.status) for result in results)
        tags = {"trials": ", ".join(f"{number} {status}" for status, number in counts.items()), "best": "none"}
        if best is not None:
            tags["best"] = best.spec.name
            if (run_id := self._recorded.get(entries.identity(best))) is not None:
                self._client.set_tag(run_id, "best", "true")
                tags["best_run_id"] = run_id
        return tags

    def replay(self, workdirs: Sequence[Path]) -> list[str]:
        """Record the results in `workdirs` that the store does not hold. Returns the ids of the runs written.

        Each goes to the campaign whose folder contains its workdir, else to the current or the newest campaign.
        """
        found = [(workdir, result) for workdir in workdirs if (result := _read_result(workdir))]
        before, written = self.campaign_id, []
        with self._lock, translate_errors(self.uri, "cannot be read"):
            known = search_runs(self._client, self._experiment_id, "tags.kind = 'trial'")
            newest = [str(run.info.run_id) for run in campaigns(self._client, self._experiment_id)[:1]]
        held = {run.data.tags.get("result") for run in known if run.info.status != "RUNNING"}
        for workdir, result in found:
            if entries.identity(result) in held:
                continue
            with self._lock, translate_errors(self.uri, "cannot be read"):
                home = self._campaign_of(str(workdir.absolute()))
            self.campaign_id = home or before or next(iter(newest), None) or self.start_campaign("")
            self._continue_run(result, known)
            written.append(self.record(result))
        if not newest and before is None and self.campaign_id is not None:
            with self._lock, translate_errors(self.uri, "the campaign cannot be closed"):
                self._client.set_terminated(self.campaign_id)
        self.campaign_id = before
        return written

    def _continue_run(self, result: TrialResult, known: Sequence[Run]) -> None:
        """Continue the run opened for this trial, if its params are the same; else `record` makes a new one."""
        key = (result.spec.name, result.spec.key)
        wanted, _ = entries.params(result.spec)
        for run in known:
            tags = run.data.tags
            mine = (run.info.run_name, tags.get("key")) == key and tags.get(PARENT) == self.campaign_id
            if mine and "result" not in tags and run.data.params == wanted:
                self._open.setdefault(key, []).append(str(run.info.run_id))
                return

    def _create_trial(self, spec: TrialSpec, start_ms: int | None) -> str:
        if self.campaign_id is None:
            raise TrackingError("tracking: a trial belongs to a campaign, and none is open")
        tags = {**entries.spec_tags(spec), **driver.tags(), PARENT: self.campaign_id}
        run = self._client.create_run(self._experiment_id, start_time=start_ms, tags=tags, run_name=spec.name)
        run_id = str(run.info.run_id)
        short, whole = entries.params(spec)
        pairs = [Param(key, value) for key, value in short.items()]
        for i in range(0, len(pairs), _CHUNK):
            self._client.log_batch(run_id, params=pairs[i : i + _CHUNK])
        for name, text in whole.items():
            self._client.log_text(run_id, text, f"params/{name}.txt")
        return run_id

    def _write(self, run_id: str, result: TrialResult, entry: entries.Entry, pictures: Mapping[str, Figure]) -> None:
        self._log_metrics(run_id, entry.metrics, result.ended_at)
        self._log_series(run_id, result, entry.samples)
        for name, text in entry.texts.items():
            self._client.log_text(run_id, text, name)
        folder = Path(result.workdir)
        for path in sorted(folder.iterdir()) if result.workdir and folder.is_dir() else []:
            if path.is_file() and path.name not in entry.texts and not path.name.startswith("."):
                self._client.log_artifact(run_id, str(path))
        for name, figure in pictures.items():
            self._client.log_figure(run_id, figure, f"figures/{name}.png")
        # Last, because `replay` takes the tag `result` as the mark of a complete run.
        self._tag(run_id, entry.tags)
        self._client.set_terminated(run_id, _ENDED_AS[result.status], entries.epoch_ms(result.ended_at))

    def _log_metrics(self, run_id: str, values: Mapping[str, float], ended_at: str) -> None:
        at = entries.epoch_ms(ended_at) or int(time.time() * 1000)
        self._log_samples(run_id, [Metric(name, value, at, 0) for name, value in values.items()])

    def _log_series(self, run_id: str, result: TrialResult, samples: Sequence[entries.Sample]) -> None:
        start = entries.epoch_ms(result.started_at) or 0
        end = entries.epoch_ms(result.ended_at) or int(time.time() * 1000)
        points = [(s, end if s.time_s is None else start + int(s.time_s * 1000)) for s in samples]
        self._log_samples(run_id, [Metric(s.name, s.value, at, s.step) for s, at in points])

    def _log_samples(self, run_id: str, samples: list[Metric]) -> None:
        for i in range(0, len(samples), PAGE):
            self._client.log_batch(run_id, metrics=samples[i : i + PAGE])

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _read_result(workdir: Path) -> TrialResult | None:
    """The result in a trial's folder; None when the trial did not finish."""
    try:
        return trial.read_result(workdir)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrackingError(f"{workdir / trial.RESULT_FILE}: cannot be replayed: {error}") from None
