"""Is what is served as good as what was recorded? A real request, then the experiment's workload, through the URL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.config import Experiment, Workload
from orchestrator.engines import find_engine
from orchestrator.errors import EngineFailure, MachineError, PromotionError
from orchestrator.measure import client
from orchestrator.measure.client import Target
from orchestrator.measure.metrics import Quantity
from orchestrator.measure.run import Stalled, Surroundings, WorkloadRun, measure
from orchestrator.measure.verdict import Level
from orchestrator.search.objective import direction, objective_metrics
from orchestrator.trial import TrialResult

ATTEMPTS = 3
# Faults of the measuring side: they can make a good service look slow, never a slow one good.
OURS = frozenset({"client_late"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome. ratio is measured / recorded; None where nothing could be measured."""

    ok: bool
    reason: str
    workload: str
    metric: str
    recorded: float | None = None
    measured: Quantity | None = None
    ratio: float | None = None

    def document(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "reason": self.reason,
            "workload": self.workload,
            "metric": self.metric,
            "recorded": self.recorded,
            "measured": self.measured.value if self.measured else None,
            "ratio": self.ratio,
        }


def choose_check(experiment: Experiment, result: TrialResult) -> tuple[str, Workload, str]:
    """(workload name, one repeat of it, metric name) that a service of this result is verified with."""
    weighted = [metric.partition("/") for metric in objective_metrics(experiment.objective, experiment.workloads)]
    places = {place: name for place, _, name in weighted if place in result.measurements}
    name = experiment.serving.verify.workload or next(iter([*places, *result.measurements]), None)
    if name is None or name not in result.measurements:
        raise PromotionError(f"serving.verify.workload: the run has no measurement of {name!r} to verify against")
    workload = result.spec.workloads[name]
    metric = places.get(name) or ("prefill_tok_s" if workload.kind == "prefill" else "decode_tok_s")
    return name, replace(workload, repeats=1), metric


def verify(experiment: Experiment, result: TrialResult, target: Target, say: Callable[[str], None]) -> Verification:
    """Ask the service once, then measure it once (again where our own client was late), and judge."""
    name, workload, metric = choose_check(experiment, result)
    failed = Verification(ok=False, reason="", workload=name, metric=metric)
    try:
        listed = client.list_models(target.base_url, target.api_key)
        if target.model not in listed:
            return replace(failed, reason=f"it lists the models {listed}, not {target.model!r}")
        client.one_completion(target, workload.stall_s)
        say(f"{target.base_url} answers; measuring {name} once")
        for attempt in range(ATTEMPTS):
            run = measure(
                target,
                find_engine(result.spec.engine.kind),
                name,
                workload,
                surroundings=Surroundings(speculation=result.speculation),
                # A drafter that learns from answers would know those of the attempt before.
                first_text=attempt * workload.num_prompts,
            )
            found = hold_against_record(experiment, result, failed, run)
            if found.ok or not {reason.code for reason in run.verdict.reasons} & OURS:
                return found
        return found
    except (Stalled, MachineError, EngineFailure) as error:
        return replace(failed, reason=str(error))


def hold_against_record(
    experiment: Experiment, result: TrialResult, empty: Verification, run: WorkloadRun
) -> Verification:
    """One measurement against the recorded one: wrong, slower than the tolerance allows, or good."""
    measurement, tolerance = run.measurement, experiment.serving.verify.tolerance
    if measurement.num_failed:
        counts = f"{measurement.num_failed} of {measurement.num_requests} requests failed"
        return replace(empty, reason=f"{counts}, the first with: {measurement.first_error}")
    wrong = [r for r in run.verdict.reasons if run.verdict.level is Level.INVALID and r.code not in OURS]
    if wrong and any(r.code not in {reason.code for reason in _reasons(result)} for r in wrong):
        return replace(empty, reason="; ".join(f"{r.code}: {r.detail}" for r in wrong))
    recorded, measured = (
        result.measurements[empty.workload].metrics.get(empty.metric),
        measurement.metrics.get(empty.metric),
    )
    if recorded is None or measured is None or not recorded.value > 0:
        return replace(empty, reason=f"{empty.metric} is unknown, so that the service cannot be judged")
    ratio = measured.value / recorded.value
    slower_by = 1 - ratio if direction(f"{empty.workload}/{empty.metric}") == "max" else ratio - 1
    numbers = f"{empty.workload}/{empty.metric} {measured.value:.4g}, recorded {recorded.value:.4g} ({ratio - 1:+.1%})"
    return replace(
        empty,
        ok=slower_by <= tolerance,
        reason=numbers
        if slower_by <= tolerance
        else f"{numbers}: worse than serving.verify.tolerance ({tolerance:.0%})",
        recorded=recorded.value,
        measured=measured,
        ratio=ratio,
    )


def _reasons(result: TrialResult) -> tuple[Any, ...]:
    return result.verdict.reasons if result.verdict else ()
