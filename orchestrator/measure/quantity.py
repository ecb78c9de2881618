"""Samples -> numbers with intervals, and whether two of them differ. Pure arithmetic; non-finite values end here.

Requests are nested in repeats, so the requests of one repeat are alike and a repeat is the unit of every interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

# Of scipy.stats only binom would be used, and importing it takes four times as long.
from scipy.special import bdtrik

from orchestrator.measure.inference import student_point

Tail = Literal["p50", "p90", "p95", "p99", "max"]
TAILS: tuple[Tail, ...] = get_args(Tail)
Unit = Literal["launches", "repeats", "requests"]
# Probability of each end that a two-sided 95% interval leaves out.
_OUTSIDE = 0.025
_QUANTILES: Mapping[Tail, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
# A sample that has a quantile may all lie below it with at most this probability.
_ALL_BELOW = 0.01
_ROUNDING = 1e-9

_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number with its 95% interval and its number of samples.

    low, high: None where the samples are too few for a bound. over: what the interval is taken over; None without one.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 1
    over: Unit | None = None


def finite_quantity(quantity: Quantity | None) -> Quantity | None:
    """The quantity without what is not finite: None for its value, no bound in place of a bound."""
    if quantity is None or finite(quantity.value) is None:
        return None
    low, high = finite(quantity.low), finite(quantity.high)
    return replace(quantity, low=low, high=high, over=None if low is None and high is None else quantity.over)


def quantity_document(quantity: Quantity | None) -> dict[str, Any] | None:
    """{value, low, high, n, over} for strict JSON; None where the value is absent or not finite."""
    known = finite_quantity(quantity)
    return None if known is None else asdict(known)


def finite(value: float | None) -> float | None:
    """The value, or None when it is absent, infinite or not a number."""
    return float(value) if value is not None and math.isfinite(value) else None


def over(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient; None when a part is unknown or the denominator is not above 0."""
    if numerator is None or denominator is None or not denominator > 0:
        return None
    return finite(numerator / denominator)


def median(values: Iterable[float | None]) -> float | None:
    """Median of what is known, None of nothing."""
    return quantile(values, 0.5)


def quantile(values: Iterable[float | None], q: float) -> float | None:
    """Quantile of what is known, between the order statistics around it, of however few; None of nothing."""
    known = _known(values)
    # The mean of two values near the largest float is infinite.
    with np.errstate(all="ignore"):
        return finite(float(np.quantile(known, q))) if known else None


def samples_needed(which: Tail) -> int:
    """The least number of samples that has this quantile: fewer all lie below it with more than 1% probability.

    The early-stopping rule of MLPerf's LoadGen. Median and maximum need one sample.
    """
    if which not in ("p90", "p95", "p99"):
        return 1
    return math.ceil(math.log(_ALL_BELOW) / math.log(_QUANTILES[which]))


def over_repeats(repeats: Sequence[float | None], requests: Sequence[float | None] = ()) -> Quantity | None:
    """Median over repeats with the interval of Student's t over them. n counts requests where given, else repeats.

    With a single repeat the interval comes from the order statistics of its requests, where there are enough.
    """
    known, samples = _known(repeats), _known(requests)
    value = median(known)
    if value is None:
        return None
    number = Quantity(value=value, n=len(samples) if requests else len(known))
    if len(known) > 1:
        return _with_bounds(number, *_student(known), "repeats")
    return _with_bounds(number, *_order_statistics(samples, 0.5), "requests")


def tail(samples: Iterable[Iterable[float | None]], which: Tail) -> Quantity | None:
    """One quantile of the samples of all repeats together, or their maximum; `samples` holds those of each repeat.

    None below `samples_needed`. The quantile lies between the order statistics around it, so never above the maximum,
    which has no interval. Over several repeats the interval is Student's t: how far the quantiles of the repeats vary,
    around that of all. With one repeat it is that of the order statistics.
    """
    repeats = [known for known in map(_known, samples) if known]
    pooled = [sample for known in repeats for sample in known]
    if not pooled or len(pooled) < samples_needed(which):
        return None
    if which == "max":
        return Quantity(value=max(pooled), n=len(pooled))
    q = _QUANTILES[which]
    value = quantile(pooled, q)
    if value is None:
        return None
    number = Quantity(value=value, n=len(pooled))
    if len(repeats) == 1:
        return _with_bounds(number, *_order_statistics(pooled, q), "requests")
    # At (n + 1) q, half of the samples have the true quantile below: at numpy's (n - 1) q + 1 a p95 of 34 requests is
    # too small more often than too large, and the interval around it held the truth in 92% instead of 95%.
    with np.errstate(all="ignore"):
        each = [float(np.quantile(known, q, method="weibull")) for known in repeats]
        centre = float(np.quantile(pooled, q, method="weibull"))
    return _with_bounds(number, *_student(each, centre), "repeats")


def ratio(a: Iterable[float | None], b: Iterable[float | None]) -> Quantity | None:
    """median(a) / median(b) with its 95% interval; a[r] and b[r] are the values of repeat r in two launches.

    None where it is undefined: nothing known on a side, or a value that is not above 0. The interval is Student's t on
    the logarithms, widened to hold the ratio: of the paired repeats where two or more are known on both sides, since
    all launches send the same prompts in a repeat, otherwise Welch's. Without two values on each side there is none.
    """
    left, right = list(map(finite, a)), list(map(finite, b))
    value = over(median(left), median(right))
    if value is None or not _are_positive([*left, *right]):
        return None
    contrast = _contrast(_logs(left), _logs(right))
    if contrast is None:
        return Quantity(value=value, n=min(len(_known(left)), len(_known(right))))
    low, high, n = contrast
    return _with_bounds(Quantity(value=value, n=n), _exp(low), _exp(high), "repeats")


def differs(a: Iterable[float | None], b: Iterable[float | None]) -> bool:
    """Whether the interval of ratio(a, b) excludes 1; False when it is unknown.

    Where a value is not above 0, there is no logarithm: then whether the interval of the difference excludes 0.
    """
    left, right = list(map(finite, a)), list(map(finite, b))
    medians = median(left), median(right)
    if medians[0] is None or medians[1] is None:
        return False
    scale = 1.0
    if _are_positive([*left, *right]):
        contrast, apart = _contrast(_logs(left), _logs(right)), math.log(medians[0]) - math.log(medians[1])
    else:
        contrast, apart = _contrast(left, right), medians[0] - medians[1]
        scale = max(map(abs, _known([*left, *right])))
    if contrast is None:
        return False
    # Rounding must not make two equal arms differ.
    low, high = min(contrast[0], apart), max(contrast[1], apart)
    return low > _ROUNDING * scale or high < -_ROUNDING * scale


def harmonic_mix(rates: Mapping[str, float | None], shares: Mapping[str, float]) -> float | None:
    """Rate of a mix of work, `shares` being each part's share of the tokens: sum(w) / sum(w / rate)."""
    if not shares or any(not rates.get(name) for name in shares):
        return None
    time_s = sum(share / (rates[name] or math.nan) for name, share in shares.items())
    return over(sum(shares.values()), time_s)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in map(finite, values) if value is not None]


def _are_positive(values: Iterable[float | None]) -> bool:
    return all(value > 0 for value in _known(values))


def _logs(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else math.log(value) for value in values]


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _with_bounds(number: Quantity, low: float | None, high: float | None, unit: Unit | None) -> Quantity:
    """The number with its bounds, widened to hold the value; a bound that is not finite is none."""
    low, high = finite(low), finite(high)
    return replace(
        number,
        low=None if low is None else min(low, number.value),
        high=None if high is None else max(high, number.value),
        over=None if low is None and high is None else unit,
    )


def _student(values: Sequence[float], centre: float | None = None) -> tuple[float, float]:
    """The interval of Student's t around the mean of two or more values, or around `centre` with their spread.

    It is computed on logarithms, and on the plain values where one of them is not above 0.
    """
    everything = [*values, *(() if centre is None else (centre,))]
    if min(everything) == max(everything):
        # Without spread the logarithm and back would leave a bound that rounding moved.
        return values[0], values[0]
    if not _are_positive(everything):
        return _mean_interval(np.asarray(values), centre)
    low, high = _mean_interval(np.log(values), None if centre is None else math.log(centre))
    return _exp(low), _exp(high)


def _mean_interval(values: _Floats, centre: float | None = None) -> tuple[float, float]:
    with np.errstate(all="ignore"):
        middle = float(values.mean()) if centre is None else centre
        reach = student_point(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return middle - reach, middle + reach


def _contrast(a: Sequence[float | None], b: Sequence[float | None]) -> tuple[float, float, int] | None:
    """(low, high, n) of mean(a) - mean(b), n pairs or the smaller side; None with fewer than two values on a side."""
    pairs = [x - y for x, y in zip(a, b, strict=False) if x is not None and y is not None]
    if len(pairs) > 1:
        low, high = _mean_interval(np.asarray(pairs))
        return low, high, len(pairs)
    left, right = np.asarray(_known(a)), np.asarray(_known(b))
    if min(len(left), len(right)) < 2:
        return None
    with np.errstate(all="ignore"):
        middle = float(left.mean() - right.mean())
        variances = [float(side.var(ddof=1)) / len(side) for side in (left, right)]
        # Welch and Satterthwaite; without any spread the degrees of freedom do not matter.
        shares = [v * v / (len(side) - 1) for v, side in zip(variances, (left, right), strict=True)]
        freedom = over(sum(variances) * sum(variances), sum(shares)) or 1.0
        reach = student_point(freedom) * math.sqrt(sum(variances))
    return middle - reach, middle + reach, min(len(left), len(right))


def _order_statistics(known: Sequence[float], q: float) -> tuple[float | None, float | None]:
    """The samples between which a quantile lies with at least 95%, exact for any distribution.

    None for a bound that would have to lie outside of the sample.
    """
    if not known:
        return None, None
    ordered = sorted(known)
    # The number of samples below the quantile is binomial.
    below, above = (math.ceil(bdtrik(p, len(ordered), q)) for p in (_OUTSIDE, 1 - _OUTSIDE))
    return ordered[below - 1] if below > 0 else None, ordered[above] if above < len(ordered) else None
