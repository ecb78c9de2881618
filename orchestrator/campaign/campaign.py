"""One campaign: which trial runs next, which is tried again, and when to stop. Knows nothing of Ray.

Its folder (ledger.py) is its memory, so a driver that is killed at any moment loses nothing: `--resume` reads the
folder and runs what is missing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator import search
from orchestrator.campaign.bookkeeping import Bookkeeping
from orchestrator.campaign.budget import TimeBudget
from orchestrator.campaign.keys import Keys, explain_change
from orchestrator.campaign.launches import Account, Event, Launch, Sampler
from orchestrator.campaign.ledger import Ledger, claim_folder
from orchestrator.config import Experiment, TrialSpec, trial_spec
from orchestrator.outcome import TrialStatus
from orchestrator.search.space import configuration_id, point_name
from orchestrator.tracking import Recorded
from orchestrator.trial import TrialResult

MAX_ATTEMPTS = 3
# Where a result keeps what its key was made of.
KEY_PARTS = "key_parts"
ALIKE_FAILURES_THAT_STOP = 3
# Causes outside the trial itself. While the campaign is being interrupted, the interrupt is what brings them about.
LOST = frozenset({"trial_process_lost", "node_lost", "not_placed"})


@contextlib.contextmanager
def open_campaign(
    experiment: Experiment,
    *,
    resume: bool,
    on_event: Callable[[Event], None] = lambda _: None,
    make_sampler: Callable[[Experiment, Ledger], Sampler | None] = lambda _experiment, _ledger: None,
    machine: str | None = None,
) -> Iterator[Campaign]:
    """Lock the campaign's folder, plan its launches and open its record; with `resume`, read earlier results back.

    machine: what all trials run on, where it is known in advance; a result of another one is not read back.

    Raises ConfigError for a point that cannot be planned and while another driver holds the folder, MachineError when
    the folder cannot be written, TrackingError when the store cannot be opened.
    """
    with claim_folder(experiment, resume=resume) as ledger:
        specs, skipped = search.points(experiment)
        campaign = Campaign(
            experiment=experiment,
            ledger=ledger,
            bookkeeping=Bookkeeping(experiment),
            budget=TimeBudget(experiment.search.time_budget_s),
            skipped=skipped,
            on_event=on_event,
            keys=Keys(machine=machine),
        )
        campaign.enqueue(search.pass_order(experiment, campaign.keys.add(specs), 1))
        if resume:
            campaign.explain_left_out()
        campaign.sampler = make_sampler(experiment, ledger)
        campaign.bookkeeping.start(ledger.folder)
        try:
            if resume:
                campaign.bookkeeping.replay([ledger.workdir(launch_id) for launch_id in campaign.results])
            yield campaign
        finally:
            campaign.bookkeeping.close("KILLED")


@dataclass(slots=True, kw_only=True)
class Campaign:
    """The state of one run of `tune`. open_campaign makes it, tuning.tune.run_trials drives it."""

    experiment: Experiment
    ledger: Ledger
    bookkeeping: Bookkeeping
    budget: TimeBudget
    skipped: list[tuple[str, str]]
    on_event: Callable[[Event], None]
    keys: Keys
    sampler: Sampler | None = None
    launches: list[Launch] = field(default_factory=list)
    results: dict[str, TrialResult] = field(default_factory=dict)
    interrupted: str | None = None
    stopped: str | None = None
    notes: list[str] = field(default_factory=list)
    _is_over: bool = False
    _pass_number: int = 1
    _queue: deque[Launch] = field(default_factory=deque)
    _running: dict[str, Launch] = field(default_factory=dict)
    _started: dict[str, str] = field(default_factory=dict)
    _earlier: set[str] = field(default_factory=set)
    _dropped: set[str] = field(default_factory=set)
    _samples: dict[str, list[str]] = field(default_factory=dict)
    _alike: list[TrialResult] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.ledger.folder

    def workdir(self, launch: Launch) -> Path:
        """The folder of one launch."""
        return self.ledger.workdir(launch.id)

    def enqueue(self, specs: Iterable[TrialSpec]) -> None:
        """Queue one launch of each point, but take the result where the folder has it from an earlier driver."""
        for spec in specs:
            earlier = [launch for launch in self.launches if launch.spec.key == spec.key]
            number = len(earlier) + 1
            named = replace(spec, name=f"{earlier[0].spec.name}#{number}") if earlier else spec
            launch = Launch(spec=named, launch=number, pass_number=self._pass_number)
            self.launches.append(launch)
            result = self.ledger.read_result(launch.id)
            if result is None:
                self._queue.append(launch)
            else:
                self.results[launch.id] = replace(result, spec=named, pass_number=launch.pass_number)
                self._earlier.add(launch.id)

    def wants_more(self) -> bool:
        """Whether a launch waits in the queue, after a sampler or the next pass was asked for more."""
        if self.interrupted or self.stopped:
            return False
        self._refill()
        return bool(self._queue)

    def next_launch(self) -> Launch | None:
        """The next launch to start, or None. Those that are hopeless or over the budget go to `skipped` on the way."""
        while self.wants_more():
            launch = self._queue.popleft()
            results = list(self.results.values())
            why = search.hopeless(launch.spec, results) or self.budget.refusal(results)
            if why is None:
                return launch
            self.skip(launch, why)
        if self.stopped:
            self.stop(self.stopped)
        return None

    def put_back(self, launch: Launch) -> None:
        """Queue a launch that could not be placed now, as the next one."""
        self._queue.appendleft(launch)

    def skip(self, launch: Launch, why: str) -> None:
        """Never start this launch, for the reason given."""
        if launch.id in self.results:
            # A retry. The row of the first attempt already holds what went wrong.
            return
        self.skipped.append((launch.spec.name, why))
        self._dropped.add(launch.id)
        self._tell_sampler(launch.id)

    def mark_started(self, trial_id: str, launch: Launch) -> None:
        """Take note that a launch was handed over; trial_id is the caller's name for it."""
        self._running[trial_id] = launch
        self._started[launch.id] = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.bookkeeping.start_trial(launch.spec)
        self._emit(launch, "placing")

    def report_phase(self, trial_id: str, phase: str) -> None:
        """Emit an event for a running trial; a trial that ended is past its phases."""
        if trial_id in self._running:
            self._emit(self._running[trial_id], phase)

    def take_result(self, launch: Launch, result: TrialResult) -> None:
        """Keep a result, record it, and queue the point again where the machine was at fault.

        A trial that was lost to the interrupt of the campaign has no result: `--resume` runs it.
        """
        self._running = {k: v for k, v in self._running.items() if v != launch}
        if self.interrupted and result.cause in LOST:
            return
        started_at = result.started_at or self._started.get(launch.id, "")
        provenance = {**result.provenance, KEY_PARTS: self.keys.parts.get(launch.spec.key, {})}
        result = replace(result, started_at=started_at, pass_number=launch.pass_number, provenance=provenance)
        # A trial masks the secrets in what it writes. Another launch of the point needs them.
        self.results[launch.id] = replace(result, spec=launch.spec)
        try:
            self.ledger.write_result(launch.id, result)
        except OSError as error:
            self.stop(f"{self.workdir(launch)}: the result cannot be written: {error.strerror}")
        self._break_circuit(result)
        if result.status is TrialStatus.INFRASTRUCTURE and launch.attempt < MAX_ATTEMPTS and not self.stopped:
            self._queue.append(replace(launch, attempt=launch.attempt + 1))
        else:
            self._tell_sampler(launch.id)
        self.bookkeeping.record(result)
        self._emit(launch, None, result)
        note = self.budget.forecast(self.results.values(), [queued.spec.name for queued in self._queue])
        if note is not None:
            self.on_event(Event(note=note))

    def explain_left_out(self) -> None:
        """Note the finished results of the folder that are of no planned point any more, and what has changed."""
        planned = {configuration_id(launch.spec): launch.spec for launch in self.launches}
        names: dict[str, list[str]] = {}
        for result in self.ledger.read_others({launch.spec.key for launch in self.launches}):
            now = planned.get(configuration_id(result.spec))
            known = result.provenance.get(KEY_PARTS) or {}
            changed = explain_change(known, self.keys.parts[now.key]) if now else "the point is not planned"
            names.setdefault(changed or "of an earlier version of this program", []).append(result.spec.name)
        for why, left_out in names.items():
            note = f"{len(left_out)} results of this folder are left out ({why}): {', '.join(sorted(left_out))}"
            self.notes.append(note)
            self.on_event(Event(note=note))

    def stop(self, why: str) -> None:
        """Start nothing more, for a reason that no further start would change; what is queued is skipped for it."""
        self.stopped = why
        while self._queue:
            self.skip(self._queue.popleft(), why)

    def finish(self) -> tuple[list[Recorded], search.Selection]:
        """Close the record. Returns the results with the numbers that compare trials, and the choice among them."""
        results = search.with_campaign_metrics(self.ordered_results(), self.experiment)
        selection = search.select(self.experiment, results)
        selection = replace(selection, notes=(*selection.notes, *self.notes))
        status = "KILLED" if self.interrupted else "FINISHED"
        return self.bookkeeping.finish(status, results, selection.best), selection

    def ordered_results(self) -> list[TrialResult]:
        """Results in the order in which their launches were planned."""
        return [self.results[launch.id] for launch in self.launches if launch.id in self.results]

    def incumbent(self, launch: Launch) -> TrialResult | None:
        """The best so far, which a launch that may stop early is compared with. None without search.stop_early.

        The baseline may stop early too: it is the slowest point of most sweeps. What is started again may still win, so
        it is measured to its end.
        """
        if not self.experiment.search.stop_early or launch.pass_number > 1:
            return None
        return search.select(self.experiment, self.ordered_results()).best

    def account(self) -> Account:
        """How many launches are planned, started, skipped and not run; they add up at every moment."""
        gone = self._earlier | self._started.keys() | self._dropped
        return Account(
            planned=len(self.launches) + len(self.skipped) - len(self._dropped),
            earlier=len(self._earlier),
            started=len(self._started),
            skipped=len(self.skipped),
            not_run=tuple(launch.spec.name for launch in self.launches if launch.id not in gone),
        )

    def account_document(self) -> dict[str, Any]:
        """The keys of `tune --json` besides the results: the account, what was skipped and why, how it ended."""
        account = self.account()
        return {
            "account": {**asdict(account), "not_run": list(account.not_run)},
            "skipped": [{"name": name, "reason": why} for name, why in self.skipped],
            "interrupted": self.interrupted,
            "stopped": self.stopped,
        }

    def _refill(self) -> None:
        """Queue the sampler's next point; once a pass has ended, the next pass of those that may still win."""
        if not self._queue and self.sampler is not None and self._pass_number == 1:
            self._draw(self.sampler)
        # Of a pass that the folder holds whole, nothing is queued.
        while not self._queue and not self._running and not self._is_over:
            results = self.ordered_results()
            specs = search.next_pass(self.experiment, results, self._pass_number + 1)
            out_of_time = self.budget.refusal(results) if specs else None
            self._is_over = not specs or out_of_time is not None
            if out_of_time is not None:
                self.notes.append(f"no pass {self._pass_number + 1}: {out_of_time}")
            elif specs:
                self._pass_number += 1
                self.enqueue(specs)

    def _draw(self, sampler: Sampler) -> None:
        """Queue one point that was not launched yet; for a point that was, give the sampler the value it has."""
        while not self._queue:
            drawn = sampler.ask()
            if drawn is None:
                if (missing := sampler.shortfall()) is not None and missing not in self.skipped:
                    self.skipped.append(missing)
                return
            sample_id, params = drawn
            (spec,) = self.keys.add([trial_spec(self.experiment, point_name(params), params)])
            twin = next((launch for launch in self.launches if launch.spec.key == spec.key), None)
            if twin is None:
                self.enqueue([self._make_name_unique(spec)])
                twin = self.launches[-1]
            self._samples.setdefault(twin.id, []).append(sample_id)
            if twin.id in self.results:
                self._tell_sampler(twin.id)

    def _make_name_unique(self, spec: TrialSpec) -> TrialSpec:
        names = {launch.spec.name for launch in self.launches}
        candidates = (f"{spec.name}~{n}" if n > 1 else spec.name for n in range(1, len(names) + 2))
        return replace(spec, name=next(name for name in candidates if name not in names))

    def _tell_sampler(self, launch_id: str) -> None:
        """Report the objective of a launch that has ended; a launch that was skipped is an infeasible point."""
        sample_ids, result = self._samples.pop(launch_id, []), self.results.get(launch_id)
        if self.sampler is None or not sample_ids:
            return
        value = None
        if result is not None:
            value = search.value_for_sampler(self.experiment, self.ordered_results(), result)
        for sample_id in sample_ids:
            self.sampler.tell(sample_id, value)

    def _break_circuit(self, result: TrialResult) -> None:
        """Stop when the machine or the environment fails alike several times in a row: further starts would too."""
        at_fault = result.status in (TrialStatus.INFRASTRUCTURE, TrialStatus.FAILED) and not result.measurements
        if not at_fault or (self._alike and not _is_same_fault(self._alike[-1], result)):
            self._alike.clear()
        if at_fault:
            self._alike.append(result)
        if len(self._alike) >= ALIKE_FAILURES_THAT_STOP and not self.stopped:
            kind = "infrastructure failures" if result.status is TrialStatus.INFRASTRUCTURE else "failures"
            self.stop(f"{ALIKE_FAILURES_THAT_STOP} {kind} alike in a row: {result.cause}: {result.reason}")

    def _emit(self, launch: Launch, phase: str | None, result: TrialResult | None = None) -> None:
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


def _is_same_fault(first: TrialResult, second: TrialResult) -> bool:
    """Infrastructure is compared by its cause (pids and ports differ), a failure by its reason too."""
    if (first.status, first.cause) != (second.status, second.cause):
        return False
    return first.status is TrialStatus.INFRASTRUCTURE or first.reason == second.reason
