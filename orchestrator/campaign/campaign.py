"""One campaign: what is planned, started, skipped and finished, on disk and in MLflow. Knows nothing of Ray.

Its folder (ledger.py) is its memory, so a driver that was killed at any moment loses nothing: `--resume` reads the
folder and runs what is missing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator import search
from orchestrator.campaign.launches import Account, Event, Launch, Sampler
from orchestrator.campaign.ledger import Ledger, home_of, model_fingerprint, owned
from orchestrator.config import Experiment, TrialSpec, to_yaml, trial_spec
from orchestrator.environments import install
from orchestrator.errors import TrackingError
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.search.objective import misses
from orchestrator.search.space import point_name
from orchestrator.tracking import Recorded, Tracker, last_campaign
from orchestrator.trial import TrialResult

__all__ = ["Account", "Campaign", "Event", "Launch", "Sampler", "home_of", "keyed_points", "opened"]

MAX_ATTEMPTS = 3
ALIKE_FAILURES_THAT_STOP = 3
# Causes that are the doing of the machinery around a trial; while the campaign is being interrupted, of ourselves.
LOST = frozenset({"trial_process_lost", "node_lost", "not_placed"})


@dataclass(slots=True, kw_only=True)
class Campaign:
    """The state of one run of `tune`. Made by `opened`, driven by tune.run_trials."""

    experiment: Experiment
    ledger: Ledger
    tracker: Tracker
    resume: bool
    skipped: list[tuple[str, str]]
    on_event: Callable[[Event], None]
    sampler: Sampler | None = None
    launches: list[Launch] = field(default_factory=list)
    results: dict[str, TrialResult] = field(default_factory=dict)
    interrupted: str | None = None
    stopped: str | None = None
    warnings: list[str] = field(default_factory=list)
    _confirming: bool = False
    _closed: bool = False
    _queue: deque[Launch] = field(default_factory=deque)
    _running: dict[str, Launch] = field(default_factory=dict)
    _started: dict[str, str] = field(default_factory=dict)
    _earlier: set[str] = field(default_factory=set)
    _dropped: set[str] = field(default_factory=set)
    _samples: dict[str, list[str]] = field(default_factory=dict)
    _run_ids: dict[str, str] = field(default_factory=dict)
    _unrecorded: list[TrialResult] = field(default_factory=list)
    _alike: list[TrialResult] = field(default_factory=list)
    _opened_s: float = field(default_factory=time.monotonic)
    _budget_told: bool = False

    @property
    def folder(self) -> Path:
        return self.ledger.folder

    def workdir(self, launch: Launch) -> Path:
        return self.ledger.workdir(launch.id)

    def wants_more(self) -> bool:
        """Whether anything is left to start now."""
        if self.interrupted or self.stopped:
            return False
        self._refill()
        return bool(self._queue)

    def _refill(self) -> None:
        """Queue the sampler's next point; once everything has ended, the finalists again (A B A B)."""
        if not self._queue and self.sampler is not None:
            self._draw(self.sampler)
        if not self._queue and not self._running and not self._confirming:
            self._confirming = True
            selection = search.select(self.experiment, self.ordered_results())
            self.enqueue(search.confirmations(self.experiment, selection))

    def _draw(self, sampler: Sampler) -> None:
        """Queue one point that was not launched yet; one that was is answered from its result, not started again."""
        while not self._queue:
            drawn = sampler.ask()
            if drawn is None:
                if (missing := sampler.shortfall()) is not None and missing not in self.skipped:
                    self.skipped.append(missing)
                return
            sample_id, params = drawn
            spec = keyed(trial_spec(self.experiment, point_name(params), params))
            twin = next((launch for launch in self.launches if launch.spec.key == spec.key), None)
            if twin is None:
                self.enqueue([self._named(spec)])
                twin = self.launches[-1]
            self._samples.setdefault(twin.id, []).append(sample_id)
            if twin.id in self.results:
                self._teach(twin.id, self._worth(self.results[twin.id]))

    def _teach(self, launch_id: str, value: float | None) -> None:
        for sample_id in self._samples.pop(launch_id, ()):
            assert self.sampler is not None
            self.sampler.tell(sample_id, value)

    def _named(self, spec: TrialSpec) -> TrialSpec:
        names = {launch.spec.name for launch in self.launches}
        again = (f"{spec.name}~{n}" if n > 1 else spec.name for n in range(1, len(names) + 2))
        return replace(spec, name=next(name for name in again if name not in names))

    def _worth(self, result: TrialResult) -> float | None:
        """The objective of a result that may compete; None tells the sampler that such a point is infeasible."""
        missed, _ = misses(self.experiment, result)
        quantity = search.score(self.experiment, result)
        measured = result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
        believed = result.verdict is not None and result.verdict.level is not Level.INVALID
        return quantity.value if quantity and measured and believed and not missed else None

    def enqueue(self, specs: Iterable[TrialSpec]) -> None:
        """Queue one launch of each, after reading back those that an earlier driver finished."""
        for spec in specs:
            number = 1 + sum(launch.spec.key == spec.key for launch in self.launches)
            launch = Launch(spec=spec, launch=number)
            self.launches.append(launch)
            result = self.ledger.finished(launch.id) if self.resume else None
            if result is None:
                self._queue.append(launch)
            else:
                self.results[launch.id] = replace(result, spec=spec)
                self._earlier.add(launch.id)

    def next_launch(self) -> Launch | None:
        """The next start, after points that are proven hopeless or out of budget were moved to `skipped`."""
        while self.wants_more():
            launch = self._queue.popleft()
            why = search.hopeless(launch.spec, list(self.results.values())) or self._over_budget()
            if why is None:
                return launch
            self._drop(launch, why)
        if self.stopped:
            self.stop(self.stopped)
        return None

    def _drop(self, launch: Launch, why: str) -> None:
        if launch.id in self.results:
            # A retry: the point has a row already, which says what went wrong.
            return
        self.skipped.append((launch.spec.name, why))
        self._dropped.add(launch.id)
        self._teach(launch.id, None)

    def stop(self, why: str) -> None:
        """End the campaign for a reason that no further start would change; what was queued is skipped for it."""
        self.stopped = why
        while self._queue:
            self._drop(self._queue.popleft(), why)

    def _over_budget(self) -> str | None:
        budget_s = self.experiment.search.time_budget_s
        if budget_s is None:
            return None
        spent_s = time.monotonic() - self._opened_s
        needed_s = max(self._durations_s(), default=0.0)
        if spent_s + needed_s <= budget_s:
            return None
        return f"time budget: {spent_s:.0f} of {budget_s:.0f} s are spent and a trial takes up to {needed_s:.0f} s"

    def _durations_s(self, *statuses: TrialStatus) -> list[float]:
        """Seconds of every trial that was timed; with statuses, of those that ended so."""
        timed = [result for result in self.results.values() if result.phases_s]
        return [sum(each.phases_s.values()) for each in timed if not statuses or each.status in statuses]

    def _tell_budget(self) -> None:
        """After the first complete trial: say now what the budget will not reach, rather than when it is spent."""
        budget_s = self.experiment.search.time_budget_s
        durations_s = self._durations_s(TrialStatus.COMPLETE)
        if self._budget_told or budget_s is None or not durations_s:
            return
        self._budget_told = True
        each_s = statistics.median(durations_s)
        room = max(0, int((budget_s - (time.monotonic() - self._opened_s)) // each_s)) if each_s else len(self._queue)
        beyond = [launch.spec.name for launch in list(self._queue)[room:]]
        if beyond:
            self.on_event(
                Event(
                    note=f"a trial takes about {each_s:.0f} s, so search.time_budget_s={budget_s:g} will not reach "
                    f"{len(beyond)} of {len(self._queue)} trials still to start: {', '.join(beyond)}"
                )
            )

    def started(self, trial_id: str, launch: Launch) -> None:
        self._running[trial_id] = launch
        self._started[launch.id] = datetime.now(UTC).isoformat(timespec="milliseconds")
        with contextlib.suppress(TrackingError):
            # A store that is down does not stop the measuring: results are on disk and recorded at the end.
            self.tracker.start_trial(launch.spec)
        self._tell(launch, "placing")

    def phase(self, trial_id: str, phase: str) -> None:
        if trial_id in self._running:
            self._tell(self._running[trial_id], phase)

    def ended(self, launch: Launch, result: TrialResult) -> None:
        """Take a result in: keep it, record it, and queue the point again when the machine was at fault."""
        self._running = {k: v for k, v in self._running.items() if v != launch}
        if self.interrupted and result.cause in LOST:
            return
        result = result if result.started_at else replace(result, started_at=self._started.get(launch.id, ""))
        # What a trial writes has its secrets masked; another launch of the point needs them.
        self.results[launch.id] = replace(result, spec=launch.spec)
        try:
            self.ledger.write(launch.id, result)
        except OSError as error:
            self.stop(f"{self.workdir(launch)}: the result cannot be written: {error.strerror}")
        self._break_circuit(result)
        if result.status is TrialStatus.INFRASTRUCTURE and launch.attempt < MAX_ATTEMPTS and not self.stopped:
            self._queue.append(replace(launch, attempt=launch.attempt + 1))
        else:
            self._teach(launch.id, self._worth(result))
        self._record(result)
        self._tell(launch, None, result)
        self._tell_budget()

    def _break_circuit(self, result: TrialResult) -> None:
        """The same fault of the machine or the environment again and again is not worth another hour of starts."""
        at_fault = result.status in (TrialStatus.INFRASTRUCTURE, TrialStatus.FAILED) and not result.measurements
        if not at_fault or (self._alike and not _same_fault(self._alike[-1], result)):
            self._alike.clear()
        if at_fault:
            self._alike.append(result)
        if len(self._alike) >= ALIKE_FAILURES_THAT_STOP and not self.stopped:
            kind = "infrastructure failures" if result.status is TrialStatus.INFRASTRUCTURE else "failures"
            self.stop(f"{ALIKE_FAILURES_THAT_STOP} {kind} alike in a row: {result.cause}: {result.reason}")

    def incumbent(self) -> TrialResult | None:
        """The best so far, which a trial that may stop early is held against.

        The baseline too: it is the slowest point of most sweeps, and in full it costs a third of the measuring time.
        """
        if not self.experiment.search.stop_early:
            return None
        return search.select(self.experiment, self.ordered_results()).best

    def _record(self, result: TrialResult) -> None:
        try:
            self._run_ids[result.spec.name] = self.tracker.record(result)
        except TrackingError:
            self._unrecorded.append(result)

    def account(self) -> Account:
        """Planned, started, skipped and not run; they add up at every moment."""
        gone = self._earlier | self._started.keys() | self._dropped
        return Account(
            planned=len(self.launches) + len(self.skipped) - len(self._dropped),
            earlier=len(self._earlier),
            started=len(self._started),
            skipped=len(self.skipped),
            not_run=tuple(launch.spec.name for launch in self.launches if launch.id not in gone),
        )

    def accounted(self) -> dict[str, Any]:
        """What `tune --json` says besides the results: the account in numbers, and why what was skipped."""
        account = self.account()
        return {
            "account": {**asdict(account), "not_run": list(account.not_run)},
            "skipped": [{"name": name, "reason": why} for name, why in self.skipped],
            "interrupted": self.interrupted,
            "stopped": self.stopped,
        }

    @property
    def unfinished(self) -> list[str]:
        """Names of the launches that have no result and were not skipped: what `--resume` runs."""
        return [n.spec.name for n in self.launches if n.id not in self.results and n.id not in self._dropped]

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


def _same_fault(first: TrialResult, second: TrialResult) -> bool:
    """Infrastructure by its cause (pids and ports differ); a failure only when it says the very same."""
    if (first.status, first.cause) != (second.status, second.cause):
        return False
    return first.status is TrialStatus.INFRASTRUCTURE or first.reason == second.reason


def keyed(spec: TrialSpec) -> TrialSpec:
    """The point with the key of its content, its engine's version and its model."""
    return spec.with_key(install.engine_version(spec.engine), model_fingerprint(spec.engine.root, spec.engine.model))


def keyed_points(experiment: Experiment) -> tuple[list[TrialSpec], list[tuple[str, str]]]:
    """The points with their keys, and what was left out with the reason."""
    specs, skipped = search.points(experiment)
    return [keyed(spec) for spec in specs], skipped


@contextlib.contextmanager
def opened(
    experiment: Experiment,
    *,
    resume: bool,
    on_event: Callable[[Event], None] = lambda _: None,
    sampler: Callable[[Experiment, Ledger], Sampler | None] = lambda _experiment, _ledger: None,
) -> Iterator[Campaign]:
    """A campaign that nobody else runs: folder locked, earlier results read with `resume`, MLflow runs opened."""
    with owned(experiment, resume=resume) as ledger:
        planned, skipped = keyed_points(experiment)
        tracker = Tracker(experiment)
        tracker.close_dead_runs()
        campaign = Campaign(
            experiment=experiment, ledger=ledger, tracker=tracker, resume=resume, skipped=skipped, on_event=on_event
        )
        campaign.enqueue(search.in_order(experiment, planned))
        campaign.sampler = sampler(experiment, ledger)
        tracker.start_campaign(to_yaml(experiment), {"folder": str(ledger.folder)})
        try:
            if resume:
                tracker.replay([ledger.workdir(launch_id) for launch_id in campaign.results])
                known = {r.result.spec.name: r.run_id for r in last_campaign(experiment) if r.run_id}
                campaign._run_ids.update(known)
            yield campaign
        finally:
            campaign.close("KILLED")
