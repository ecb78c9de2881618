"""Which arm wins, and what the launches cannot tell yet. The launch is the unit: repeats inside one say nothing here.

Arms are compared with the best of the others (Hsu, Multiple Comparisons with the Best, 1996): the errors of all claims
about one campaign together stay below ERROR_RATE, over its arms (Dunnett) and over its passes (an equal share each).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.config import Objective
from orchestrator.measure.inference import Array, Fit, Observation, dunnett_point, fit_launches, student_point
from orchestrator.measure.metrics import Quantity
from orchestrator.search.arms import Arm, scale_of

ERROR_RATE = 0.05
# The standard deviation of one launch that is assumed before launches have shown their own, relative to the value, and
# how many degrees of freedom that assumption counts as. It only says who is not started again, never who wins.
ASSUMED_LAUNCH_SD = 0.03
ASSUMED_FREEDOM = 8
# A smaller change from the first pass to the last is not worth a note.
LEAST_DRIFT = 0.005
# Rounding in logarithms must not make two equal arms differ.
_SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One arm over another, paired by pass, with its 95% interval (None where launches are too few)."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        gain = f"{100 * (self.value - 1):+.1f}%"
        if self.low is None or self.high is None:
            return gain
        return f"{gain} ({100 * (self.low - 1):+.1f} to {100 * (self.high - 1):+.1f}%)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the launches up to one pass say about the arms (all indices are into `arms`).

    order: best estimate first. choice: the arm to name now. decided: whether it is proven good enough, or `ahead`:
    better than every other. lost: arms proven to be more than objective.tie behind another; dropped: not proven so, but
    too far behind to be started again. rivals: what an undecided choice may still lose to. launches_needed:
    further launches of each that would decide, about.
    """

    arms: tuple[Arm, ...]
    order: tuple[int, ...]
    choice: int
    decided: bool
    ahead: bool
    lost: frozenset[int]
    dropped: frozenset[int]
    rivals: tuple[int, ...]
    launches_needed: int | None
    fit: Fit
    is_log: bool

    def ratio(self, first: int, second: int) -> Ratio | None:
        """arms[first] over arms[second]; None on a scale without ratios (a value is not above 0)."""
        if not self.is_log:
            return None
        gain = self.fit.estimates[first] - self.fit.estimates[second]
        errors, freedom = self.fit.errors()
        if math.isinf(errors[first, second]):
            return Ratio(value=math.exp(gain), low=None, high=None)
        reach = student_point(float(freedom[first, second])) * float(errors[first, second])
        return Ratio(value=math.exp(gain), low=math.exp(gain - reach), high=math.exp(gain + reach))

    def number(self, passes: Sequence[int]) -> Quantity:
        """The value of the choice in these passes alone.

        Its interval is the pooled spread of launches, passes included: another campaign has other passes.
        """
        arm = self.arms[self.choice]
        pairs = zip(arm.launches, arm.values, strict=True)
        values = [value for launch, value in pairs if launch.pass_number in passes] or list(arm.values)
        forth, back = scale_of([value for each in self.arms for value in each.values])
        centre = statistics.fmean(map(forth, values))
        spread = self.fit.noisy.get(self.choice, self.fit.spread)
        if spread is None:
            return Quantity(value=back(centre), n=len(values))
        sd, freedom = spread
        reach = student_point(freedom) * sd / math.sqrt(len(values))
        low, high = back(centre - reach), back(centre + reach)
        return Quantity(value=back(centre), low=low, high=high, n=len(values), over="launches")


def decide(objective: Objective, arms: Sequence[Arm], looks: int) -> Decision:
    """Judge `arms` (one or more). looks: how often in the campaign a decision is looked for (1 or more)."""
    table = _Table(objective, arms, looks)
    indices = range(len(arms))
    order = tuple(sorted(indices, key=lambda i: (-table.estimates[i], arms[i].rank)))
    proven = table.gains - table.reach
    lost = frozenset(np.flatnonzero((proven > table.tie + _SAME).any(axis=0)).tolist())
    dropped = frozenset(np.flatnonzero((table.gains > table.far).any(axis=0)).tolist()) - lost
    left = [i for i in order if i not in lost]
    # The most preferred of those that may be good enough; among equally preferred ones the better estimate.
    preferred = min(left, key=lambda i: arms[i].rank)
    losses = table.gains[:, preferred] + table.reach[:, preferred]
    is_good = len(arms) == 1 or all(losses[i] <= table.tie for i in left if i != preferred)
    choice = preferred if is_good else left[0]
    ahead = all(proven[choice, i] > _SAME for i in indices if i != choice)
    decided = is_good or ahead
    rivals = () if decided else tuple(i for i in left if i != choice and i not in dropped)
    return Decision(
        arms=tuple(arms),
        order=order,
        choice=choice,
        decided=decided,
        ahead=ahead,
        lost=lost,
        dropped=dropped,
        rivals=rivals,
        launches_needed=None if decided else table.launches_needed(preferred, left),
        fit=table.fit,
        is_log=table.is_log,
    )


class _Table:
    """The arms on a scale where differences mean something and more is better.

    gains[a, b]: arm a over arm b. reach[a, b]: how far they may be apart by chance, over all claims of the campaign.
    far[a, b]: how far b must be behind a to be given up. tie: the tolerated loss.
    """

    def __init__(self, objective: Objective, arms: Sequence[Arm], looks: int) -> None:
        values = [value for arm in arms for value in arm.values]
        forth, _ = scale_of(values)
        self.is_log = forth is math.log
        sign = 1.0 if objective.mode == "max" else -1.0
        numbers = sorted({launch.pass_number for arm in arms for launch in arm.launches})
        self.fit = fit_launches(
            [
                Observation(arm=i, pass_number=numbers.index(launch.pass_number), value=forth(value))
                for i, arm in enumerate(arms)
                for launch, value in zip(arm.launches, arm.values, strict=True)
            ]
        )
        self._comparisons = max(1, len(arms) - 1)
        self._share = ERROR_RATE / looks
        level = statistics.median(map(abs, values))
        self.tie = _tie_width(objective) if self.is_log else objective.tie * level
        self.estimates = sign * np.array(self.fit.estimates)
        self.gains = self.estimates[:, None] - self.estimates[None, :]
        self.reach = self._reach()
        self.far = self._far(ASSUMED_LAUNCH_SD * (1.0 if self.is_log else level))

    def _reach(self) -> Array:
        errors, freedom = self.fit.errors()
        if not self.fit.freedom:
            return errors
        rounded = np.round(freedom, 1)
        points = np.zeros_like(rounded)
        for value in np.unique(rounded):
            points[rounded == value] = dunnett_point(self._share, self._comparisons, float(value))
        return points * errors

    def _far(self, assumed_sd: float) -> Array:
        own = self.fit.freedom * (self.fit.launch_sd or 0.0) ** 2
        freedom = ASSUMED_FREEDOM + self.fit.freedom
        sd = math.sqrt((ASSUMED_FREEDOM * assumed_sd**2 + own) / freedom)
        return dunnett_point(ERROR_RATE / 2, self._comparisons, float(freedom)) * self.fit.errors(sd)[0]

    def launches_needed(self, arm: int, left: Sequence[int]) -> int | None:
        """About how many more launches of each tell whether the arm is good enough; None when unknown."""
        sd = self.fit.launch_sd
        loss = max((float(self.gains[i, arm]) for i in left if i != arm), default=None)
        if not sd or loss is None:
            return None
        point = dunnett_point(self._share, self._comparisons, float(max(20, self.fit.freedom)))
        have = min(self.fit.counts[i] for i in left)
        return max(1, math.ceil(2 * (point * sd / max(abs(self.tie - loss), _SAME)) ** 2) - have)


def _tie_width(objective: Objective) -> float:
    """The tolerated loss as a difference of logarithms."""
    return -math.log1p(-objective.tie) if objective.mode == "max" else math.log1p(objective.tie)


def find_drift(decision: Decision) -> str | None:
    """A sentence when the same configurations measured otherwise in the last pass than in the first, else None."""
    fit, last = decision.fit, len(decision.fit.passes) - 1
    if last < 1 or fit.launch_sd is None or not decision.is_log:
        return None
    gain, error = fit.passes[last], fit.pass_error(last)
    if math.isinf(error):
        return None
    reach = student_point(fit.freedom) * error
    if abs(gain) <= reach + _SAME or abs(gain) < LEAST_DRIFT:
        return None
    ends = f"{100 * math.expm1(gain - reach):+.1f} to {100 * math.expm1(gain + reach):+.1f}%"
    return (
        f"machine_drifted: the same configurations measured {100 * math.expm1(gain):+.1f}% ({ends}) in the last pass "
        "against the first; they are compared within passes, so that this cancels"
    )
