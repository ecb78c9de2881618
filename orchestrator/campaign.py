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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from orchestrator import claims, environments, search, trial
from orchestrator.config import Experiment, TrialSpec, to_yaml
from orchestrator.engines.base import TrialStatus
from orchestrator.errors import ConfigError, MachineError, TrackingError
from orchestrator.tracking import Recorded, Tracker, last_campaign
from orchestrator.trial import TrialResult

MAX_ATTEMPTS = 3
ALIKE_FAILURES_THAT_STOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of one point. launch counts the starts that count (confirmations), attempt the retries; from 1."""

    spec: TrialSpec
    launch: int = 1
    attempt: int = 1

    @property
    def id(self) -> str:
        """Names the launch on disk: the point's key, with the launch's number from the second on."""
        return self.spec.key if self.launch == 1 else f"{self.spec.key}-{self.launch}"


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
    resume: bool
    skipped: list[tuple[str, str]]
    on_event: Callable[[Event], None]
    launches: list[Launch] = field(default_factory=list)
    results: dict[str, TrialResult] = field(default_factory=dict)
    interrupted: str | None = None
    stopped: str | None = None
    warnings: list[str] = field(default_factory=list)
    _confirming: bool = False
    _closed: bool = False
    _queue: deque[Launch] = field(default_factory=deque)
    _running: dict[str, Launch] = field(default_factory=dict)
    _run_ids: dict[str, str] = field(default_factory=dict)
    _unrecorded: list[TrialResult] = field(default_factory=list)
    _alike: list[str] = field(default_factory=list)
    _started_s: float = field(default_factory=time.monotonic)

    def wants_more(self) -> bool:
        """Whether anything is left to start; when all points are done, the finalists are queued once more."""
        if not self._queue and not self._confirming:
            self._confirming = True
            selection = search.select(self.experiment, self.ordered_results())
            self.enqueue(search.confirmations(self.experiment, selection))
        return bool(self._queue) and not self.interrupted and not self.stopped

    def enqueue(self, specs: Iterable[TrialSpec]) -> None:
        """Queue one launch of each, after reading back those that an earlier driver finished."""
        for spec in specs:
            number = 1 + sum(launch.spec.key == spec.key for launch in self.launches)
            launch = Launch(spec=spec, launch=number)
            self.launches.append(launch)
            result = _finished(self.workdir(launch)) if self.resume else None
            if result is None:
                self._queue.append(launch)
            else:
                self.results[launch.id] = replace(result, spec=spec)

    def workdir(self, launch: Launch) -> Path:
        return self.folder / "trials" / launch.id

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
        self.results[launch.id] = result
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
            self._run_ids[result.spec.name] = self.tracker.record(result)
        except TrackingError:
            self._unrecorded.append(result)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """A store that is down does not stop the measuring: the results are on disk and are recorded at the end."""
        with contextlib.suppress(TrackingError):
            yield

    def finish(self) -> tuple[list[Recorded], search.Selection]:
        """Close the record; the results with campaign-wide numbers, and the choice among them.

        A store that is down costs only the run ids: the results are on disk, and `--resume` records them.
        """
        results = search.with_campaign_metrics(self.ordered_results(), self.experiment)
        selection = search.select(self.experiment, results)
        try:
            unrecorded, self._unrecorded = self._unrecorded, []
            for result in unrecorded:
                self._run_ids[result.spec.name] = self.tracker.record(result)
        except TrackingError as error:
            self.warnings.append(f"{error}; nothing is lost, record it later with --resume")
        self.close("KILLED" if self.interrupted else "FINISHED", results, selection.best)
        return [Recorded(result=r, run_id=self._run_ids.get(r.spec.name)) for r in results], selection

    def close(self, status: str, results: Sequence[TrialResult] = (), best: TrialResult | None = None) -> None:
        """End the campaign's record, once; whatever run is still open ends with it."""
        if self._closed:
            return
        self._closed = True
        try:
            self.tracker.end_campaign(status, results, best)
        except TrackingError as error:
            self.warnings.append(f"{error}; the runs are closed by the next campaign")

    def ordered_results(self) -> list[TrialResult]:
        """Results in the order in which their launches were planned."""
        return [self.results[launch.id] for launch in self.launches if launch.id in self.results]

    def _tell(self, launch: Launch, phase: str | None, result: TrialResult | None = None) -> None:
        ids = [known.id for known in self.launches]
        self.on_event(
            Event(
                number=ids.index(launch.id) + 1,
                total=len(ids),
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
    _make(home)
    with _owned(home):
        planned, skipped = keyed_points(experiment)
        earlier = _campaign_folders(home)
        folder = earlier[-1] if resume and earlier else home / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        tracker = Tracker(experiment)
        tracker.close_dead_runs(psutil.pid_exists)
        _make(folder / "trials")
        campaign = Campaign(
            experiment=experiment, folder=folder, tracker=tracker, resume=resume, skipped=skipped, on_event=on_event
        )
        campaign.enqueue(search.in_order(experiment, planned))
        tracker.start_campaign(to_yaml(experiment), {"folder": str(folder)})
        tracker.replay([folder / "trials" / launch_id for launch_id in campaign.results])
        campaign._run_ids.update({r.result.spec.name: r.run_id for r in last_campaign(experiment) if r.run_id})
        try:
            yield campaign
        finally:
            campaign.close("KILLED")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: results cannot be written here: {error.strerror}") from None


def _campaign_folders(home: Path) -> list[Path]:
    return sorted(path.parent for path in home.glob("*/trials") if path.is_dir())


def _finished(workdir: Path) -> TrialResult | None:
    """The result of a launch that ended; None for one that must run (again). A torn file counts as not finished."""
    try:
        result = trial.from_json((workdir / "result.json").read_bytes())
    except (OSError, ValueError):
        return None
    return None if result.status is TrialStatus.INFRASTRUCTURE else result


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
