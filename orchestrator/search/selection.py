"""Which result wins, for whoever asks: the choice with its reason, and the checks of what was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.config import Experiment
from orchestrator.errors import ConfigError
from orchestrator.measure.metrics import Quantity
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.search import wording
from orchestrator.search.arms import judged_level, pool_launches
from orchestrator.search.comparison import with_campaign_metrics
from orchestrator.search.objective import (
    check_metric,
    direction,
    find_misses,
    objective_metrics,
    parse_constraint,
    require_name,
    score,
    settings,
    with_known_tails,
)
from orchestrator.search.order import conclude
from orchestrator.search.space import check_engines, plan, swept_keys
from orchestrator.trial import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which result is the best, and why.

    best: the last launch of the winner. number: the winner's objective, from launches that had no part in the choice.
    decided: whether the choice is proven; else `rivals` names what may be as good or better. ranking: one pooled result
    per point that competed, best estimate first. excluded: name -> why a point did not compete. notes: what a reader of
    the choice should know. passes: how many the campaign had.
    """

    best: TrialResult | None
    reason: str
    number: Quantity | None = None
    decided: bool = False
    rivals: tuple[str, ...] = ()
    ranking: tuple[TrialResult, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    passes: int = 0


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
    """The best result of the launches of all passes: decision.py has the rules.

    Complete and valid results compete, suspect ones only when nothing is valid; constraints must hold.
    """
    known = conclude(experiment, results)
    excluded, decision = known.field.excluded, known.decision
    if decision is None:
        counted = Counter(excluded.values())
        reasons = "; ".join(f"{count} x {why}" for why, count in counted.most_common())
        return Selection(best=None, reason=f"no valid result: {reasons or 'nothing was measured'}", excluded=excluded)
    chosen = decision.arms[decision.choice]
    notes = [*known.field.notes, *wording.notes(known)]
    if chosen.level is Level.SUSPECT:
        notes.append("nothing is valid, so that the best of the suspect results is named")
    return Selection(
        best=next(r for r, compared in zip(results, known.results, strict=True) if compared is chosen.launches[-1]),
        reason=wording.reason(known),
        number=known.number,
        decided=decision.decided,
        rivals=tuple(decision.arms[i].name for i in decision.rivals),
        ranking=tuple(pool_launches(decision.arms[i].launches) for i in decision.order),
        excluded=excluded,
        notes=tuple(dict.fromkeys(notes)),
        passes=len(known.passes),
    )


def value_for_sampler(experiment: Experiment, results: Sequence[TrialResult], result: TrialResult) -> float | None:
    """The objective of a result that may compete; None for one that may not, which is an infeasible point.

    results: all of the campaign, which speed-ups are held against.
    """
    experiment, _ = with_known_tails(experiment, results)
    compared = zip(results, with_campaign_metrics(results, experiment), strict=True)
    result = next((with_speedup for known, with_speedup in compared if known is result), result)
    missed, _ = find_misses(experiment, result)
    quantity = score(experiment, result)
    measured = result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
    believed = judged_level(experiment, result) not in (None, Level.INVALID)
    return quantity.value if quantity and measured and believed and not missed else None
