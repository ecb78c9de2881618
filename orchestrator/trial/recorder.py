"""What happens in one trial, kept phase by phase until it becomes a TrialResult."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from orchestrator.config import TrialSpec, Workload
from orchestrator.measure.formulas import RequestTrace
from orchestrator.measure.metrics import MEMORY_METRICS, Measurement, metric_names
from orchestrator.measure.run import Surroundings, WorkloadRun, measure
from orchestrator.measure.verdict import worst
from orchestrator.node.memory import MemorySampler
from orchestrator.node.provenance import provenance
from orchestrator.node.server import Server
from orchestrator.outcome import Diagnosis, Fact, TrialStatus
from orchestrator.trial.result import TrialResult, write_text

EVIDENCE_CHARS = 2000
_TRACES = TypeAdapter(list[RequestTrace])

OnProgress = Callable[[str, int, int], None]
OnMeasurement = Callable[[str, Measurement], bool]


@dataclass(slots=True, kw_only=True)
class TrialRecorder:
    """What happened so far in one trial; becomes a TrialResult."""

    spec: TrialSpec
    workdir: Path
    engine_version: str | None
    on_progress: OnProgress
    outcome: Diagnosis = field(default_factory=lambda: Diagnosis(status=TrialStatus.COMPLETE))
    server: Server | None = None
    sampler: MemorySampler | None = None
    runs: dict[str, WorkloadRun] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    started_at: str = field(default_factory=lambda: _now())
    _phase: str = ""
    _entered_s: float = 0.0

    def enter(self, phase: str) -> None:
        """End the phase that ran, and begin this one (empty: none). Seconds of a phase that returns add up."""
        now = time.monotonic()
        if self._phase:
            self.phases_s[self._phase] = round(self.phases_s.get(self._phase, 0.0) + now - self._entered_s, 3)
        self._phase, self._entered_s = phase, now
        if phase:
            self.on_progress(phase, 0, 0)

    def take_server(self, started: Server) -> None:
        """Called between the start and readiness, so that memory is sampled from the first moment."""
        self.server = started
        self.sampler = MemorySampler(pid=started.keeper.pid, gpu_ids=started.gpu_ids)
        self.sampler.start()
        write_text(self.workdir / "plan.json", json.dumps(started.record(), indent=1))

    @contextlib.contextmanager
    def mark_stopping(self) -> Iterator[None]:
        """What follows the body belongs to the phase of stopping."""
        try:
            yield
        finally:
            self.enter("stopping")

    def measure(self, running: Server, name: str, workload: Workload, on_measurement: OnMeasurement) -> None:
        """Measure one workload and keep it. A workload without any answer fails the trial. Raises as `measure` does."""

        def progress(phase: str, done: int, total: int) -> None:
            if phase != self._phase:
                self.enter(phase)
            self.on_progress(phase, done, total)

        def go_on(so_far: Measurement) -> bool:
            if on_measurement(name, so_far):
                return True
            self.outcome = Diagnosis(
                status=TrialStatus.PRUNED, cause="clearly_worse", summary="clearly worse than the best"
            )
            return False

        surroundings = Surroundings(
            log_text=running.log_text,
            foreign_gpu_users=running.foreign_gpu_users,
            check_alive=running.check_alive,
            speculation=running.plan.speculation,
        )
        run = measure(
            running.target,
            running.engine,
            name,
            workload,
            surroundings=surroundings,
            on_progress=progress,
            on_repeat=go_on,
            # Every engine is fresh, so that all trials may be asked exactly the same.
            nonce_seed=str(workload.seed),
        )
        self.keep(name, run)
        if run.measurement.num_failed and run.measurement.num_failed == run.measurement.num_requests:
            running.check_alive()
            self.outcome = self.explain(
                Diagnosis(
                    status=TrialStatus.FAILED,
                    cause="no_successful_request",
                    summary=f"{name}: none of its {run.measurement.num_requests} requests succeeded, the first with: "
                    f"{run.measurement.first_error}",
                )
            )

    def keep(self, name: str, run: WorkloadRun) -> None:
        """Take in what a workload yielded; its requests are appended to traces.jsonl."""
        self.runs[name] = run
        lines = (
            json.dumps({"workload": name, **trace}) for trace in _TRACES.dump_python(list(run.traces), mode="json")
        )
        with (self.workdir / "traces.jsonl").open("a", encoding="utf-8") as traces:
            traces.writelines(f"{line}\n" for line in lines)

    def stop_sampling(self) -> None:
        if self.sampler:
            self.sampler.stop()

    def explain(self, seen: Diagnosis) -> Diagnosis:
        """What the client saw; where the log shows that an engine which still answers is dead inside, that."""
        if self.server is None:
            return seen
        logged = self.server.engine.diagnose(self.server.log_text(), None)
        if logged.status is not TrialStatus.COMPLETE:
            return replace(logged, summary=f"{logged.summary} ({seen.summary})")
        return replace(seen, evidence=self.server.log_text()[-EVIDENCE_CHARS:].strip() or None)

    def to_result(self) -> TrialResult:
        """Everything that is known now, as the result of the trial."""
        self.enter("")
        outcome = self.outcome
        if self.server:
            alive = self.server.engine.diagnose(self.server.log_text(), None)
            self.facts = {**alive.facts, **outcome.facts}
            if outcome.status is TrialStatus.COMPLETE and alive.cause:
                outcome = replace(alive, status=TrialStatus.COMPLETE)
            outcome = _blame_remains(outcome, self.server)
        verdicts = {name: run.verdict for name, run in self.runs.items()}
        memory = {name: fact for name, fact in self.facts.items() if name in metric_names(MEMORY_METRICS)}
        return TrialResult(
            spec=self.spec,
            status=outcome.status,
            cause=outcome.cause,
            reason=outcome.summary or None,
            lever=outcome.lever,
            evidence=outcome.evidence,
            measurements={name: run.measurement for name, run in self.runs.items()},
            verdicts=verdicts,
            verdict=worst(verdicts.values()) if verdicts else None,
            memory={**memory, **(self.sampler.peaks() if self.sampler else {})},
            memory_series=self.sampler.series if self.sampler else {},
            facts=self.facts,
            speculation=self.server.plan.speculation if self.server else None,
            phases_s=self.phases_s,
            started_at=self.started_at,
            ended_at=_now(),
            launch=self.server.record() if self.server else {},
            provenance=provenance(self.engine_version),
            workdir=str(self.workdir),
        )


def _blame_remains(outcome: Diagnosis, server: Server) -> Diagnosis:
    """An engine that is not wholly gone is the machine's fault, whatever else happened; its numbers are kept."""
    remains = [*server.held, *(f"pid {pid} could not be killed" for pid in server.left)]
    if not remains:
        return outcome
    before = f"; the trial itself ended as {outcome.status.value}: {outcome.summary}" if outcome.cause else ""
    return replace(
        outcome,
        status=TrialStatus.INFRASTRUCTURE,
        cause="not_released",
        summary="; ".join(remains) + before,
        lever="end the named process or reset the node; the GPU is not used again until it is free",
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
