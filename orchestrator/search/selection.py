"""Which result wins: validity, constraints, noise, preference."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.config import Experiment, TrialSpec
from orchestrator.errors import ConfigError
from orchestrator.measure.quantity import differs
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.search.objective import (
    check_metric,
    direction,
    find_misses,
    objective_metrics,
    parse_constraint,
    preference,
    require_name,
    samples,
    score,
    settings,
)
from orchestrator.search.space import (
    check_engines,
    configuration_id,
    plan,
    swept_keys,
)
from orchestrator.trial import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which result is the best, and why.

    ranking: what competed, best objective first (not always the winner: see ties). ties: names of competitors within
    the noise of the first. excluded: name -> why it did not compete. notes: what a reader of the choice should know.
    """

    best: TrialResult | None
    reason: str
    ranking: tuple[TrialResult, ...] = ()
    ties: tuple[str, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def check(experiment: Experiment) -> None:
    """Raise ConfigError, naming the nearest valid name, on an engine.kind or anything in search, objective or
    serving.verify that does not exist. Nothing is started before this passes.
    """
    check_engines(experiment)
    objective, planned = experiment.objective, plan(experiment)
    if not experiment.workloads:
        raise ConfigError("workloads: there is none, so that nothing would be measured")
    if experiment.search.baseline is not None:
        names = [*(spec.name for spec in planned.points), *(skipped.name for skipped in planned.skipped)]
        require_name(experiment.search.baseline, names, "search.baseline: variant")
    for workload, weight in (objective.mix or {}).items():
        require_name(workload, experiment.workloads, "objective.mix: workload")
        if not weight > 0:
            raise ConfigError(f"objective.mix.{workload}: found {weight}, allowed is a share above 0")
    weighted = objective_metrics(objective, experiment.workloads)
    for metric in weighted:
        check_metric(experiment, metric, "objective.metric")
    worse = [metric for metric in weighted if direction(metric) != objective.mode]
    if worse:
        better = direction(worse[0])
        raise ConfigError(f"objective.mode: {objective.mode} of {worse[0]} would pick the worst, allowed is {better}")
    for text in objective.constraints:
        check_metric(experiment, parse_constraint(text).metric, f"objective.constraints: {text!r}")
    keys = {*swept_keys(experiment), *(key for spec in planned.points for key in settings(spec))}
    for key in objective.prefer:
        require_name(key, keys, "objective.prefer: key")
    if experiment.serving.verify.workload is not None:
        require_name(experiment.serving.verify.workload, experiment.workloads, "serving.verify.workload: workload")


def select(experiment: Experiment, results: Sequence[TrialResult]) -> Selection:
    """The best result. Launches of the same point count together.

    Complete and valid results compete, suspect ones only when nothing is valid; constraints must hold. The winner is
    the preferred one (objective.prefer, then fewer proposals, then the order of `results`) of those that do not
    differ from the first by more than the noise, or by more than objective.tie.
    """
    candidates, excluded, notes = _candidates(experiment, results)
    if not candidates:
        counted = Counter(excluded.values())
        reasons = "; ".join(f"{count} x {why}" for why, count in counted.most_common())
        return Selection(best=None, reason=f"no valid result: {reasons or 'nothing was measured'}", excluded=excluded)
    sign = -1.0 if experiment.objective.mode == "max" else 1.0
    ranking = sorted(candidates, key=lambda c: sign * c.value)
    tied = [c for c in ranking if c is ranking[0] or not _worse(experiment, c, ranking[0])]
    chosen = min(tied, key=lambda c: (preference(experiment.objective, c.result.spec), c.proposals, c.position))
    names = tuple(c.name for c in tied if c is not chosen)
    if chosen.level is Level.SUSPECT:
        notes.append("nothing is valid, so that the best of the suspect results is named")
    return Selection(
        best=chosen.result,
        reason=_reason(experiment, chosen, ranking, names),
        ranking=tuple(c.result for c in ranking),
        ties=names,
        excluded=excluded,
        notes=tuple(dict.fromkeys(notes)),
    )


def value_for_sampler(experiment: Experiment, result: TrialResult) -> float | None:
    """The objective of a result that may compete; None for one that may not, which is an infeasible point."""
    missed, _ = find_misses(experiment, result)
    quantity = score(experiment, result)
    measured = result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
    believed = result.verdict is not None and result.verdict.level is not Level.INVALID
    return quantity.value if quantity and measured and believed and not missed else None


def confirmations(experiment: Experiment, selection: Selection) -> list[TrialSpec]:
    """confirm.launches more of each finalist, interleaved (A B A B), because two starts of the same command differ."""
    confirm = experiment.search.confirm
    others = [r for r in selection.ranking if r is not selection.best]
    finalists = [r.spec for r in (selection.best, *others) if r is not None][: confirm.top]
    return [
        replace(spec, name=f"{spec.name}#{launch}") for launch in range(2, confirm.launches + 2) for spec in finalists
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One point that competes, with all its launches."""

    name: str
    result: TrialResult
    value: float
    repeats: tuple[float, ...]
    level: Level
    proposals: int
    position: int


def _candidates(
    experiment: Experiment, results: Sequence[TrialResult]
) -> tuple[list[_Candidate], dict[str, str], list[str]]:
    """(what competes, name -> why a result does not, notes)."""
    found: list[_Candidate] = []
    excluded: dict[str, str] = {}
    notes: list[str] = []
    for position, launches in enumerate(_launches(results)):
        first, why = launches[0], None
        for result in launches:
            missed, said = find_misses(experiment, result)
            notes += said
            why = why or _unfit_to_compete(experiment, result) or (missed[0] if missed else None)
        if why is not None:
            excluded[first.spec.name] = why
            continue
        repeats = tuple(x for result in launches for x in samples(experiment, result))
        quantity = score(experiment, first)
        assert quantity is not None
        found.append(
            _Candidate(
                name=first.spec.name,
                result=first,
                value=statistics.median(repeats) if len(launches) > 1 and repeats else quantity.value,
                repeats=repeats,
                level=max((r.verdict.level for r in launches if r.verdict), key=list(Level).index),
                proposals=(first.speculation.proposals or 0) if first.speculation else 0,
                position=position,
            )
        )
    valid = [c for c in found if c.level is Level.VALID]
    if valid:
        excluded |= {c.name: f"suspect: {_codes(c.result)}" for c in found if c.level is not Level.VALID}
    return valid or found, excluded, notes


def _launches(results: Sequence[TrialResult]) -> list[list[TrialResult]]:
    groups: dict[str, list[TrialResult]] = {}
    for result in results:
        groups.setdefault(configuration_id(result.spec), []).append(result)
    return list(groups.values())


def _unfit_to_compete(experiment: Experiment, result: TrialResult) -> str | None:
    if result.status is not TrialStatus.COMPLETE:
        return f"{result.status.value}: {result.cause}" if result.cause else result.status.value
    if result.verdict is None:
        return "without a verdict"
    if result.verdict.level is Level.INVALID:
        return f"invalid: {_codes(result)}"
    if score(experiment, result) is None:
        return f"{', '.join(objective_metrics(experiment.objective, experiment.workloads))} was not measured"
    return None


def _codes(result: TrialResult) -> str:
    reasons = result.verdict.reasons if result.verdict else ()
    return ", ".join(dict.fromkeys(reason.code for reason in reasons)) or "no reason given"


def _worse(experiment: Experiment, candidate: _Candidate, leader: _Candidate) -> bool:
    """Whether the candidate is behind the leader by more than the tie width, or than the measured noise."""
    if experiment.objective.tie is not None:
        return abs(candidate.value / leader.value - 1) > experiment.objective.tie if leader.value else True
    if len(candidate.repeats) > 1 and len(leader.repeats) > 1:
        return differs(candidate.repeats, leader.repeats)
    return candidate.value != leader.value


def _reason(experiment: Experiment, chosen: _Candidate, ranking: Sequence[_Candidate], ties: Sequence[str]) -> str:
    metric = " + ".join(objective_metrics(experiment.objective, experiment.workloads))
    if len(ranking) == 1:
        return f"{chosen.name}: the only result that competes, {metric} {chosen.value:.4g}"
    if ties:
        width = "the noise" if experiment.objective.tie is None else f"{experiment.objective.tie:.0%}"
        return f"{chosen.name}: {metric} {chosen.value:.4g}, within {width} of {', '.join(ties)} and preferred to them"
    return f"{chosen.name}: {metric} {chosen.value:.4g}, ahead of {ranking[1].name} ({ranking[1].value:.4g})"
