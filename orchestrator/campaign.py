"""One campaign: what is planned, started, skipped and finished, on disk and in MLflow. Knows nothing of Ray.

The folder of a campaign is its memory. trials/KEY/result.json exists exactly when that trial finished, so a driver
that was killed at any moment loses nothing: `--resume` reads the folder and runs what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from orchestrator import claims, environments, search, trial
from orchestrator.config import Experiment, TrialSpec, to_yaml
from orchestrator.engines.base import TrialStatus
from orchestrator.errors import ConfigError, MachineError, TrackingError
from orchestrator.tracking import Tracker
from orchestrator.trial import TrialResult

MAX_ATTEMPTS = 3
ALIKE_FAILURES_THAT_STOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of one point. attempt counts retries after infrastructure faults, from 1."""

    spec: TrialSpec
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a person who watches is told. number counts trials from 1; phase is None when the trial ended."""

    number: int
    total: int
    name: str
    phase: str | None
    status: str | None = None
    reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Campaign:
    """The state of one run of `tune`. Made by `opened`, driven by tune.run_trials."""

    experiment: Experiment
    folder: Path
    tracker: Tracker
    planned: list[TrialSpec]
    skipped: list[tuple[str, str]]
    on_event: Callable[[Event], None]
    results: dict[str, TrialResult] = field(default_factory=dict)
    reused: int = 0
    interrupted: str | None = None
    stopped: str | None = None
    _queue: deque[Launch] = field(default_factory=deque)
    _running: dict[str, Launch] = field(default_factory=dict)
    _unrecorded: list[TrialResult] = field(default_factory=list)
    _alike: list[str] = field(default_factory=list)
    _started_s: float = field(default_factory=time.monotonic)

    def wants_more(self) -> bool:
        return bool(self._queue) and not self.interrupted and not self.stopped

    def workdir(self, launch: Launch) -> Path:
        return self.folder / "trials" / launch.spec.key

    def next_launch(self) -> Launch | None:
        """The next start, after points that are proven hopeless or out of budget were moved to `skipped`."""
        while self._queue and not self.stopped and not self.interrupted:
            launch = self._queue.popleft()
            why = search.hopeless(launch.spec, list(self.results.values())) or self._over_budget()
            if why is None:
                return launch
            self.skipped.append((launch.spec.name, why))
        if self.stopped:
            self._skip_rest(self.stopped)
        return None

    def _over_budget(self) -> str | None:
        budget_s = self.experiment.search.time_budget_s
        if budget_s is None:
            return None
        spent_s = time.monotonic() - self._started_s
        durations = [sum(result.phases_s.values()) for result in self.results.values() if result.phases_s]
        needed_s = max(durations, default=0.0)
        if spent_s + needed_s <= budget_s:
            return None
        return f"time budget: {spent_s:.0f} of {budget_s:.0f} s are spent and a trial takes about {needed_s:.0f} s"

    def _skip_rest(self, why: str) -> None:
        self.skipped.extend((launch.spec.name, why) for launch in self._queue)
        self._queue.clear()

    def started(self, trial_id: str, launch: Launch) -> None:
        self._running[trial_id] = launch
        with self._recording():
            self.tracker.start_trial(launch.spec)
        self._tell(launch, "placing")

    def phase(self, trial_id: str, phase: str) -> None:
        if trial_id in self._running:
            self._tell(self._running[trial_id], phase)

    def ended(self, launch: Launch, result: TrialResult) -> None:
        """Take a result in: keep it, record it, or queue the point again when the machine was at fault."""
        self._running = {k: v for k, v in self._running.items() if v != launch}
        if self.interrupted and result.cause == "trial_process_lost":
            return
        retry = result.status is TrialStatus.INFRASTRUCTURE and launch.attempt < MAX_ATTEMPTS
        self._break_circuit(result)
        if retry and not self.stopped:
            self._queue.append(replace(launch, attempt=launch.attempt + 1))
        self.results[launch.spec.key] = result
        if not (self.workdir(launch) / "result.json").exists():
            self.workdir(launch).mkdir(parents=True, exist_ok=True)
            trial.write_result(result, self.workdir(launch))
        if not retry or self.stopped:
            self._record(result)
        self._tell(launch, None, result)

    def _break_circuit(self, result: TrialResult) -> None:
        """The same fault of the machine again and again is not worth another hour of starts."""
        if result.status is not TrialStatus.INFRASTRUCTURE:
            self._alike.clear()
            return
        self._alike.append(f"{result.cause}: {result.reason}")
        alike = self._alike[-ALIKE_FAILURES_THAT_STOP:]
        if len(alike) == ALIKE_FAILURES_THAT_STOP and len({text.partition(":")[0] for text in alike}) == 1:
            self.stopped = f"{ALIKE_FAILURES_THAT_STOP} infrastructure failures alike in a row: {alike[-1]}"

    def incumbent(self) -> TrialResult | None:
        """The best so far, which a trial that may stop early is held against."""
        return search.select(self.experiment, list(self.results.values())).best

    def _record(self, result: TrialResult) -> None:
        try:
            self.tracker.record(result)
        except TrackingError:
            self._unrecorded.append(result)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """A store that is down does not stop the measuring: the results are on disk and are recorded at the end."""
        with contextlib.suppress(TrackingError):
            yield

    def finish(self) -> search.Selection:
        """The choice and the closed record. Raises TrackingError when results could not be recorded."""
        results = search.with_campaign_metrics(self.ordered_results(), self.experiment)
        selection = search.select(self.experiment, results)
        unrecorded, self._unrecorded = self._unrecorded, []
        for result in unrecorded:
            self.tracker.record(result)
        status = "KILLED" if self.interrupted else "FINISHED"
        self.tracker.end_campaign(status, results, selection.best)
        return selection

    def ordered_results(self) -> list[TrialResult]:
        return [self.results[spec.key] for spec in self.planned if spec.key in self.results]

    def _tell(self, launch: Launch, phase: str | None, result: TrialResult | None = None) -> None:
        keys = [spec.key for spec in self.planned]
        self.on_event(
            Event(
                number=keys.index(launch.spec.key) + 1,
                total=len(keys),
                name=launch.spec.name + (f" (attempt {launch.attempt})" if launch.attempt > 1 else ""),
                phase=phase,
                status=result.status.value if result else None,
                reason=result.reason if result else None,
            )
        )


def keyed_points(experiment: Experiment) -> tuple[list[TrialSpec], list[tuple[str, str]]]:
    """The points with their keys, and what was left out with the reason."""
    specs, skipped = search.points(experiment)
    keyed = [
        spec.with_key(environments.engine_version(spec.engine), model_fingerprint(spec.engine.root, spec.engine.model))
        for spec in specs
    ]
    return keyed, skipped


def model_fingerprint(root: str, model: str) -> str | None:
    """Changes when the model's files do: their names, sizes and times. None for a model that is not a local folder."""
    path = Path(root) / model
    if not path.exists():
        return None
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    text = json.dumps([[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def home_of(experiment: Experiment) -> Path:
    """Where the campaigns of an experiment keep their folders."""
    return Path(experiment.tracking.folder).absolute() / "campaigns" / experiment.name


@contextlib.contextmanager
def opened(
    experiment: Experiment, *, resume: bool, on_event: Callable[[Event], None] = lambda _: None
) -> Iterator[Campaign]:
    """A campaign that nobody else runs: folder locked, earlier results read with `resume`, MLflow runs opened."""
    home = home_of(experiment)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{home}: results cannot be written here: {error.strerror}") from None
    with _owned(home):
        planned, skipped = keyed_points(experiment)
        earlier = _campaign_folders(home)
        folder = earlier[-1] if resume and earlier else home / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        results = _finished(folder, planned) if resume else {}
        tracker = Tracker(experiment)
        tracker.close_dead_runs(psutil.pid_exists)
        (folder / "trials").mkdir(parents=True, exist_ok=True)
        campaign = Campaign(
            experiment=experiment,
            folder=folder,
            tracker=tracker,
            planned=planned,
            skipped=skipped,
            on_event=on_event,
            results=results,
            reused=len(results),
        )
        campaign._queue.extend(Launch(spec=spec) for spec in planned if spec.key not in results)
        tracker.start_campaign(to_yaml(experiment), {"folder": str(folder)})
        for result in results.values():
            campaign._record(result)
        yield campaign


def _campaign_folders(home: Path) -> list[Path]:
    return sorted(path.parent for path in home.glob("*/trials") if path.is_dir())


def _finished(folder: Path, planned: list[TrialSpec]) -> dict[str, TrialResult]:
    """Results of an earlier run that still answer a planned point; a torn file counts as not finished."""
    found: dict[str, TrialResult] = {}
    for spec in planned:
        with contextlib.suppress(OSError, ValueError):
            result = trial.from_json((folder / "trials" / spec.key / "result.json").read_bytes())
            if result.status is not TrialStatus.INFRASTRUCTURE:
                found[spec.key] = replace(result, spec=spec)
    return found


@contextlib.contextmanager
def _owned(home: Path) -> Iterator[None]:
    lock = home / "lock"
    owner = lock.read_text().strip() if lock.exists() else ""
    with claims.locked(lock) as free:
        if not free:
            raise ConfigError(
                f"{home}: another campaign of this experiment is running (pid {owner}); wait, or give name="
            )
        lock.write_text(str(os.getpid()))
        yield
