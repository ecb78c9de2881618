"""Launches -> estimates that can be compared. Pure arithmetic on values that somebody else chose to compare.

The model: value = arm + pass + launch, on a scale where differences mean something (the logarithm of a rate). Every
start of an engine differs a little from the one before, by the machine's own launch noise, which is pooled over arms;
what a whole pass shares, such as a machine that gets warmer, cancels because arms are compared within passes.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

# An arm is called noisier than the others when chance alone would show that in fewer than one campaign in a hundred.
NOISIER_P = 0.01
# Nodes of the two integrals of Dunnett's distribution: more change no digit that is shown.
_NODES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One launch: which arm and which pass (both numbered from 0), and its value."""

    arm: int
    pass_number: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The least-squares fit of arm and pass effects.

    estimates[a]: arm a at the level of the average pass. launch_sd: the pooled standard deviation of one launch, None
    with no degree of freedom left. spread: that of a launch around its arm, with all that passes differ by, and its
    degrees of freedom; an absolute number is uncertain by it. noisy: arm -> its own standard deviation and degrees of
    freedom, where the pooled one does not hold. counts[a]: launches of arm a. passes[p]: the effect of pass p against
    the first.
    """

    estimates: tuple[float, ...]
    launch_sd: float | None
    freedom: int
    spread: tuple[float, int] | None
    noisy: dict[int, tuple[float, int]]
    counts: tuple[int, ...]
    passes: tuple[float, ...]
    _layout: _Layout

    def errors(self, launch_sd: float | None = None) -> tuple[Array, Array]:
        """(standard error of estimates[a] - estimates[b], its degrees of freedom), each arms x arms.

        The error is infinite where the launches cannot tell. launch_sd: taken in place of the pooled one.
        """
        shape = (len(self.estimates),) * 2
        pooled = self.launch_sd if launch_sd is None else launch_sd
        if pooled is None:
            return np.full(shape, math.inf), np.ones(shape)
        own = np.zeros(shape[0])
        own_squared = np.zeros(shape[0])
        pooled_share = 1 / self._layout.counts
        for arm, (sd, freedom) in self.noisy.items():
            own[arm] = sd**2 / self.counts[arm]
            own_squared[arm] = own[arm] ** 2 / freedom
            pooled_share[arm] = 0.0
        shared = pooled**2 * (pooled_share[:, None] + pooled_share[None, :] + self._layout.pass_variance())
        variance = own[:, None] + own[None, :] + shared
        squared = own_squared[:, None] + own_squared[None, :] + shared**2 / max(1, self.freedom)
        # Satterthwaite's degrees of freedom of a sum of variances.
        freedom_of = np.divide(variance**2, squared, out=np.full(shape, float(max(1, self.freedom))), where=squared > 0)
        return np.where(self._layout.is_estimable(), np.sqrt(variance), math.inf), freedom_of

    def pass_error(self, number: int) -> float:
        """Standard error of passes[number]; infinite when unknown."""
        if self.launch_sd is None:
            return math.inf
        contrast = np.zeros(len(self.passes))
        contrast[[0, number]] = -1.0, 1.0
        return self.launch_sd * math.sqrt(self._layout.variance_of(contrast))


class _Layout:
    """Which arm had how many launches in which pass, and what follows from it for the variances.

    The arms are eliminated, so that a thousand of them cost no more than the passes: John, Cyclic Designs (1987), 1.3.
    """

    def __init__(self, observations: Sequence[Observation]) -> None:
        arms, passes = (1 + max(getattr(o, name) for o in observations) for name in ("arm", "pass_number"))
        incidence = np.zeros((arms, passes))
        self._arm = np.array([o.arm for o in observations])
        self._pass = np.array([o.pass_number for o in observations])
        self._values = np.array([o.value for o in observations])
        np.add.at(incidence, (self._arm, self._pass), 1)
        self.counts = incidence.sum(axis=1)
        # An arm number without an observation has no estimate, and adds nothing.
        self._shares = incidence / np.maximum(self.counts, 1)[:, None]
        information = np.diag(incidence.sum(axis=0)) - incidence.T @ self._shares
        self._inverse = np.linalg.pinv(information, hermitian=True)
        self._range = information @ self._inverse

    def solve(self) -> tuple[Array, Array, float, int]:
        """(arm effects, pass effects against the first, sum of squared residuals, degrees of freedom)."""
        means = self._mean_by_arm(self._values)
        totals = np.zeros(len(self._inverse))
        np.add.at(totals, self._pass, self._values - means[self._arm])
        passes = self._inverse @ totals
        passes = passes - passes[0]
        arms = self._mean_by_arm(self._values - passes[self._pass])
        rest = self._values - arms[self._arm] - passes[self._pass]
        # Rounding is no noise: launches that are equal to the last digits are equal.
        rest[np.abs(rest) < 1e-12 * max(1.0, float(np.abs(self._values).max()))] = 0.0
        rank = int((self.counts > 0).sum()) + round(float(np.trace(self._range)))
        return arms, passes, float(rest @ rest), len(self._values) - rank

    def _mean_by_arm(self, values: Array) -> Array:
        sums = np.zeros(len(self.counts))
        np.add.at(sums, self._arm, values)
        means: Array = sums / np.maximum(self.counts, 1)
        return means

    def pass_variance(self) -> Array:
        """What not knowing the passes adds to the variance of a difference of two arms, in units of a launch's."""
        cross = self._shares @ self._inverse @ self._shares.T
        own = np.diag(cross)
        variance: Array = np.maximum(0.0, own[:, None] + own[None, :] - 2 * cross)
        return variance

    def is_estimable(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether passes connect two arms, so that their difference can be known."""
        beyond = np.round(self._shares - self._shares @ self._range, 9)
        component = np.unique(beyond, axis=0, return_inverse=True)[1].ravel()
        connected: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = component[:, None] == component[None, :]
        return connected

    def variance_of(self, contrast: Array) -> float:
        """Variance of a contrast of passes, in units of a launch's; infinite when it cannot be known."""
        if np.abs(contrast - self._range @ contrast).max() > 1e-6:
            return math.inf
        return max(0.0, float(contrast @ self._inverse @ contrast))


def fit_launches(observations: Sequence[Observation]) -> Fit:
    """Estimate every arm. Arms and passes are numbered from 0 without gaps; ValueError for no observation at all."""
    if not observations:
        raise ValueError("no launch to estimate from")
    noisy: dict[int, tuple[float, int]] = {}
    while (found := _noisiest(observations, noisy)) is not None:
        noisy[found[0]] = found[1:]
    layout = _Layout(observations)
    arms, passes, _, _ = layout.solve()
    regular = [o for o in observations if o.arm not in noisy]
    squares, freedom = _squares(regular)
    around, around_freedom = _squares([replace(o, pass_number=0) for o in regular])
    return Fit(
        estimates=tuple(float(x) for x in arms + passes.mean()),
        launch_sd=math.sqrt(squares / freedom) if freedom else None,
        freedom=freedom,
        spread=(math.sqrt(around / around_freedom), around_freedom) if around_freedom else None,
        noisy=noisy,
        counts=tuple(int(n) for n in layout.counts),
        passes=tuple(float(x) for x in passes),
        _layout=layout,
    )


def _squares(observations: Sequence[Observation]) -> tuple[float, int]:
    """(sum of squared residuals, degrees of freedom) of arms and passes."""
    if not observations:
        return 0.0, 0
    passes = {number: i for i, number in enumerate(sorted({o.pass_number for o in observations}))}
    numbered = [Observation(arm=o.arm, pass_number=passes[o.pass_number], value=o.value) for o in observations]
    return _Layout(numbered).solve()[2:]


def _noisiest(
    observations: Sequence[Observation], known: dict[int, tuple[float, int]]
) -> tuple[int, float, int] | None:
    """(arm, its standard deviation, degrees of freedom) of the arm that is plainly noisier than the rest, if any."""
    counts = collections.Counter(o.arm for o in observations)
    # An arm with one launch tells nothing about noise.
    left = [o for o in observations if o.arm not in known and counts[o.arm] > 1]
    total, freedom = _squares(left)
    found: list[tuple[float, int, float, int]] = []
    for arm in sorted({o.arm for o in left}):
        rest, rest_freedom = _squares([o for o in left if o.arm != arm])
        own_freedom = freedom - rest_freedom
        if own_freedom < 1 or rest_freedom < 2 or rest <= 0:
            continue
        variance = max(0.0, total - rest) / own_freedom
        by_chance = float(special.fdtrc(own_freedom, rest_freedom, variance / (rest / rest_freedom)))
        found.append((by_chance, arm, math.sqrt(variance), own_freedom))
    if not found or min(found)[0] * len(found) > NOISIER_P:
        return None
    return min(found)[1:]


@functools.cache
def dunnett_point(error_rate: float, comparisons: int, freedom: float) -> float:
    """The one-sided critical value of Dunnett's comparison of several arms with one of them.

    error_rate: that any of the `comparisons` (1 or more) is called by chance; freedom: of the pooled variance, may be
    infinite. The arms are taken to have equally many launches. Source: Dunnett, JASA 50 (1955); the integral is
    Hochberg and Tamhane, Multiple Comparison Procedures (1987), appendix 3.
    """
    if comparisons == 1:
        return float(-special.ndtri(error_rate) if math.isinf(freedom) else -special.stdtrit(freedom, error_rate))
    low, high = 0.0, 2.0
    while _dunnett_cdf(high, comparisons, freedom) < 1 - error_rate:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        below = _dunnett_cdf(middle, comparisons, freedom) < 1 - error_rate
        low, high = (middle, high) if below else (low, middle)
    return high


def _dunnett_cdf(point: float, comparisons: int, freedom: float) -> float:
    share, weight = _nodes()
    normal = special.ndtri(share)
    scale = np.ones(1) if math.isinf(freedom) else np.sqrt(2 * special.gammaincinv(freedom / 2, share) / freedom)
    inner = special.ndtr(math.sqrt(2) * point * scale[:, None] + normal[None, :]) ** comparisons
    over_control = inner @ weight
    return float(over_control[0] if math.isinf(freedom) else over_control @ weight)


@functools.cache
def _nodes() -> tuple[Array, Array]:
    """Gauss and Legendre's nodes and weights on 0 to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return (nodes + 1) / 2, weights / 2


def student_point(freedom: float, confidence: float = 0.95) -> float:
    """The two-sided point of Student's t."""
    return float(special.stdtrit(freedom, (1 + confidence) / 2))
