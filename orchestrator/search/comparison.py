"""Trials of one campaign against each other: speed-up, the checks that need peers, the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.config import Experiment
from orchestrator.measure.checks import judge_among_peers
from orchestrator.measure.evidence import Case
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.measure.quantity import ratio
from orchestrator.measure.verdict import Level, worst
from orchestrator.outcome import TrialStatus
from orchestrator.search.objective import direction, value
from orchestrator.search.space import configuration_id
from orchestrator.trial import TrialResult


def with_campaign_metrics(results: Sequence[TrialResult], experiment: Experiment) -> list[TrialResult]:
    """The results with what only a comparison knows: `speedup` per workload, and the checks among peers.

    A speed-up is held against the baseline's launch in the same pass, so that what the machine did in between cancels.
    It is absent where that launch is missing or its numbers are invalid.
    """
    baselines = _baseline_launches(results, experiment)
    compared = [_with_speedup(result, baselines) for result in results]
    return [_with_peers_judged(result, compared) for result in compared]


def _baseline_launches(results: Sequence[TrialResult], experiment: Experiment) -> list[TrialResult]:
    first = next((r for r in results if r.spec.name == experiment.search.baseline), None)
    if first is None:
        return []
    identity = configuration_id(first.spec)
    return [r for r in results if r.measurements and configuration_id(r.spec) == identity]


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


def _with_speedup(result: TrialResult, baselines: Sequence[TrialResult]) -> TrialResult:
    reference = next((r for r in baselines if r.pass_number == result.pass_number), None)
    measurements = dict(result.measurements)
    for workload, measurement in result.measurements.items():
        verdict = reference.verdicts.get(workload) if reference else None
        is_believed = verdict is None or verdict.level is not Level.INVALID
        base = reference.measurements.get(workload) if reference and is_believed else None
        gain = _speedup(measurement, base) if base else None
        if gain is not None and result in baselines:
            gain = Quantity(value=1.0, n=gain.n)
        measurements[workload] = replace(measurement, metrics={**measurement.metrics, "speedup": gain})
    return replace(result, measurements=measurements)


def _speedup(measurement: Measurement, base: Measurement) -> Quantity | None:
    return ratio(measurement.repeats.get("decode_tok_s", ()), base.repeats.get("decode_tok_s", ()))


def _with_peers_judged(result: TrialResult, results: Sequence[TrialResult]) -> TrialResult:
    """The result with the verdicts that its workloads have beside the believed results of the campaign."""
    verdicts = dict(result.verdicts)
    for workload, measurement in result.measurements.items():
        if workload in verdicts:
            peers = tuple(r.measurements[workload] for r in results if workload in r.measurements and _believed(r))
            case = Case(workload=result.spec.workloads[workload], measurement=measurement, peers=peers)
            verdicts[workload] = judge_among_peers(verdicts[workload], case)
    if verdicts == result.verdicts:
        return result
    return replace(result, verdicts=verdicts, verdict=worst(verdicts.values()))


def _believed(result: TrialResult) -> bool:
    judged = result.verdict is not None and result.verdict.level is not Level.INVALID
    return result.status is TrialStatus.COMPLETE and judged
