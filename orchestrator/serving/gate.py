"""Which recorded result may be promoted, and whether it is really better than the champion."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from orchestrator import search, tracking
from orchestrator.config import Experiment
from orchestrator.errors import PromotionError
from orchestrator.measure.inference import student_point
from orchestrator.measure.metrics import Quantity
from orchestrator.measure.quantity import ratio
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.search.arms import judged_verdict
from orchestrator.search.decision import ASSUMED_LAUNCH_SD
from orchestrator.search.objective import find_misses, objective_metrics, samples, score
from orchestrator.search.space import configuration_id
from orchestrator.tracking import Recorded
from orchestrator.trial import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Challenger over champion on the objective. ratio has its 95% interval; better: the interval says so."""

    metric: str
    challenger: Quantity | None
    champion: Quantity | None
    ratio: Quantity | None
    better: bool

    def sentence(self) -> str:
        if self.challenger is None or self.champion is None:
            missing = "the challenger" if self.challenger is None else "the champion"
            return f"{self.metric} of {missing} is not recorded, so that they cannot be compared"
        numbers = f"{self.metric} {self.challenger.value:.4g} against the champion's {self.champion.value:.4g}"
        if self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return f"{numbers}: too few repeats to tell whether that is a difference"
        interval = f"ratio {self.ratio.value:.3f}, 95% interval {self.ratio.low:.3f} to {self.ratio.high:.3f}"
        return f"{numbers}: {interval}{'' if self.better else ', which does not prove it better'}"


def find_candidate(experiment: Experiment, run_id: str | None) -> Recorded:
    """The run that was named, or the best of the last campaign. Raises PromotionError when there is none."""
    if run_id is not None:
        return tracking.load_run(tracking.store_uri(experiment), run_id)
    recorded = tracking.last_campaign(experiment)
    if not recorded:
        raise PromotionError(f"{experiment.tracking_name}: no campaign is recorded; run `tune` first")
    results = search.with_campaign_metrics([r.result for r in recorded], experiment)
    selection = search.select(experiment, results)
    if selection.best is None:
        raise PromotionError(f"{experiment.tracking_name}: {selection.reason}")
    chosen = next(i for i, result in enumerate(results) if result is selection.best)
    return replace(recorded[chosen], result=results[chosen])


def find_objections(experiment: Experiment, result: TrialResult) -> tuple[str, ...]:
    """Why this result may not be promoted; empty when it is complete, valid and keeps every constraint."""
    found: list[str] = []
    verdict = judged_verdict(experiment, result)
    if verdict is None:
        found.append("it has no verdict")
    elif verdict.level is not Level.VALID:
        reasons = "; ".join(f"{reason.code}: {reason.detail}" for reason in verdict.reasons)
        found.append(f"its numbers are {verdict.level.value} ({reasons or 'no reason given'})")
    missed, _ = find_misses(experiment, result)
    found.extend(f"constraint not kept: {each}" for each in missed)
    return tuple(found)


def require_complete(result: TrialResult) -> None:
    """Raises PromotionError unless the trial was measured to its end: not even --force serves what never worked."""
    if result.status is not TrialStatus.COMPLETE or not result.measurements:
        why = f"{result.status.value}{f' ({result.cause})' if result.cause else ''}"
        raise PromotionError(f"{result.spec.name} is not complete but {why}: {result.reason or 'nothing was measured'}")


def compare_with_champion(experiment: Experiment, challenger: Recorded, champion: Recorded) -> Comparison:
    """Whether the challenger's objective is better by more than two starts of one configuration differ.

    Where both were started again in the last campaign, its launches tell; else there is one launch of each, whose
    repeats know nothing of the next start, so that the noise of a launch is assumed.
    """
    gain = _ratio_of_launches(experiment, challenger, champion)
    if gain is None:
        gain = _with_launch_noise(ratio(samples(experiment, challenger.result), samples(experiment, champion.result)))
    better = False
    if gain is not None and gain.low is not None and gain.high is not None:
        better = gain.low > 1 if experiment.objective.mode == "max" else gain.high < 1
    return Comparison(
        metric=" + ".join(objective_metrics(experiment.objective, experiment.workloads)),
        challenger=score(experiment, challenger.result),
        champion=score(experiment, champion.result),
        ratio=gain,
        better=better,
    )


def _ratio_of_launches(experiment: Experiment, challenger: Recorded, champion: Recorded) -> Quantity | None:
    recorded = tracking.last_campaign(experiment)
    if challenger.run_id not in {each.run_id for each in recorded}:
        return None
    decision = search.conclude(experiment, [each.result for each in recorded]).decision
    if decision is None:
        return None
    arms = [configuration_id(arm.spec) for arm in decision.arms]
    sides = [configuration_id(each.result.spec) for each in (challenger, champion)]
    if sides[0] == sides[1] or not all(side in arms for side in sides):
        return None
    found = decision.ratio(*(arms.index(side) for side in sides))
    if found is None or found.low is None:
        return None
    return Quantity(value=found.value, low=found.low, high=found.high, over="launches")


def _with_launch_noise(gain: Quantity | None) -> Quantity | None:
    """The ratio of one launch of each with an interval that holds what two launches may differ by."""
    if gain is None or gain.low is None or gain.high is None:
        return gain
    of_launches = student_point(math.inf) * math.sqrt(2) * ASSUMED_LAUNCH_SD
    below, above = (math.hypot(math.log(end / gain.value), of_launches) for end in (gain.low, gain.high))
    low, high = gain.value * math.exp(-below), gain.value * math.exp(above)
    return Quantity(value=gain.value, low=low, high=high, n=1, over="launches")
