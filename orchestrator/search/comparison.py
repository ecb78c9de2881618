"""Trials of one campaign against each other: speed-up, output lengths that differ, the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.config import Experiment
from orchestrator.measure import metrics
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.measure.verdict import Level, Reason, Verdict, worst
from orchestrator.outcome import TrialStatus
from orchestrator.search.objective import direction, value
from orchestrator.trial import TrialResult

LENGTH_TOLERANCE = 0.05


def baseline(experiment: Experiment, results: Sequence[TrialResult]) -> TrialResult | None:
    """The result that speed-ups are held against; None when none is named or it was not measured."""
    return next((r for r in results if r.spec.name == experiment.search.baseline and r.measurements), None)


def with_campaign_metrics(results: Sequence[TrialResult], experiment: Experiment) -> list[TrialResult]:
    """The results with what only a comparison knows: `speedup` per workload, and the verdict `length_differs`."""
    reference = baseline(experiment, results)
    compared = [_with_speedup(result, reference) for result in results]
    return [_with_lengths_judged(result, compared) for result in compared]


def pareto(results: Sequence[TrialResult], a: str, b: str) -> list[TrialResult]:
    """The results that no other beats in one of two metrics without losing in the other, ordered by `a`.

    Only complete results that are not invalid and have both metrics take part.
    """
    judged: list[tuple[float, float, TrialResult]] = []
    for result in results:
        first, second = value(result, a), value(result, b)
        if first is None or second is None or not _believed(result):
            continue
        signs = [1.0 if direction(metric) == "max" else -1.0 for metric in (a, b)]
        judged.append((signs[0] * first.value, signs[1] * second.value, result))
    front = [
        (x, y, result)
        for x, y, result in judged
        if not any(u >= x and v >= y and (u > x or v > y) for u, v, _ in judged)
    ]
    return [result for *_, result in sorted(front, key=lambda point: -point[0])]


def _with_speedup(result: TrialResult, reference: TrialResult | None) -> TrialResult:
    measurements = dict(result.measurements)
    for workload, measurement in result.measurements.items():
        base = reference.measurements.get(workload) if reference else None
        gain = _speedup(measurement, base) if base else None
        if reference is not None and result.spec.name == reference.spec.name and gain is not None:
            gain = Quantity(value=1.0, n=gain.n)
        measurements[workload] = replace(measurement, metrics={**measurement.metrics, "speedup": gain})
    return replace(result, measurements=measurements)


def _speedup(measurement: Measurement, base: Measurement) -> Quantity | None:
    return metrics.ratio(measurement.repeats.get("decode_tok_s", ()), base.repeats.get("decode_tok_s", ()))


def _with_lengths_judged(result: TrialResult, results: Sequence[TrialResult]) -> TrialResult:
    """Mark every workload that generated a different amount of text than is usual in this campaign."""
    verdicts = dict(result.verdicts)
    for workload, measurement in result.measurements.items():
        peers = [r.measurements[workload] for r in results if workload in r.measurements and _believed(r)]
        detail = _unusual_length(measurement, [peer for peer in peers if _length(peer) is not None])
        judged = verdicts.get(workload)
        if detail is None or judged is None or any(reason.code == "length_differs" for reason in judged.reasons):
            continue
        level = Level.SUSPECT if judged.level is Level.VALID else judged.level
        reason = Reason(code="length_differs", detail=detail)
        verdicts[workload] = Verdict(level=level, reasons=(*judged.reasons, reason))
    if verdicts == result.verdicts:
        return result
    return replace(result, verdicts=verdicts, verdict=worst(verdicts.values()))


def _unusual_length(measurement: Measurement, peers: Sequence[Measurement]) -> str | None:
    """A sentence when the answers are longer or shorter than the median trial's by more than tolerance and noise."""
    length = _length(measurement)
    others = [peer for peer in peers if peer is not measurement]
    if length is None or not others:
        return None
    # Of two trials neither is the usual one: each is held against the other.
    ordered = sorted(peers if len(peers) > 2 else others, key=lambda peer: _length(peer) or 0.0)
    usual = ordered[(len(ordered) - 1) // 2]
    usual_length = _length(usual) or 0.0
    mine, theirs = (m.repeats.get("completion_tokens", ()) for m in (measurement, usual))
    by_chance = min(len(mine), len(theirs)) > 1 and not metrics.differs(mine, theirs)
    if usual is measurement or abs(length - usual_length) <= LENGTH_TOLERANCE * usual_length or by_chance:
        return None
    return f"{length:.0f} tokens per answer where {usual_length:.0f} are usual in this campaign"


def _length(measurement: Measurement) -> float | None:
    quantity = measurement.metrics.get("completion_tokens")
    return quantity.value if quantity else None


def _believed(result: TrialResult) -> bool:
    judged = result.verdict is not None and result.verdict.level is not Level.INVALID
    return result.status is TrialStatus.COMPLETE and judged
