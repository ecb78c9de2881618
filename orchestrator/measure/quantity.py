"""Samples -> numbers with intervals, and whether two of them differ. Pure arithmetic; non-finite values end here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

Tail = Literal["p50", "p90", "p99", "max"]
TAILS: tuple[Tail, ...] = get_args(Tail)
RESAMPLES = 2000
MOST_RESAMPLED = 1000
MIN_SAMPLES_P99 = 100
_QUANTILES: Mapping[Tail, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Two-sided 95% points of Student's t for 1, 2, ... degrees of freedom; beyond the last it is the normal's.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number with its 95% interval (None when there is nothing to resample) and its number of samples."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 1


def finite_quantity(quantity: Quantity | None) -> Quantity | None:
    """The quantity without what is not finite: None for its value, no bound in place of a bound."""
    if quantity is None or finite(quantity.value) is None:
        return None
    return replace(quantity, low=finite(quantity.low), high=finite(quantity.high))


def quantity_document(quantity: Quantity | None) -> dict[str, Any] | None:
    """{value, low, high, n} for strict JSON; None where the value is absent or not finite."""
    known = finite_quantity(quantity)
    return None if known is None else {"value": known.value, "low": known.low, "high": known.high, "n": known.n}


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
    known = _known(values)
    return _quantile(known, 0.5) if known else None


def over_repeats(repeats: Sequence[float | None], requests: Sequence[float | None] = ()) -> Quantity | None:
    """Median over repeats with a bootstrap interval. n counts requests where given, else repeats.

    With a single repeat the interval comes from its requests, where there are several.
    """
    known = _known(repeats)
    if not known:
        return None
    samples = _known(requests)
    low, high = _bootstrap(known if len(known) > 1 else samples, 0.5)
    return _quantity(_quantile(known, 0.5), low, high, len(samples) if requests else len(known))


def tail(values: Iterable[float | None], which: Tail) -> Quantity | None:
    """One quantile of all samples with its interval, or their maximum without one; no p99 below n = 100.

    A quantile lies between the order statistics around it, so never above the maximum.
    """
    known = _known(values)
    if not known or (which == "p99" and len(known) < MIN_SAMPLES_P99):
        return None
    return Quantity(value=max(known), n=len(known)) if which == "max" else _pooled_quantile(known, _QUANTILES[which])


def ratio(a: Iterable[float | None], b: Iterable[float | None]) -> Quantity | None:
    """median(a) / median(b) with its 95% interval; a and b are the values of the repeats. None where undefined.

    A percentile bootstrap of three repeats can only reach from the least to the greatest of them, which calls two
    identical arms different one time in ten. So the interval is at least as wide as Student's t on the logarithms with
    min(len(a), len(b)) - 1 degrees of freedom. It is unknown (None) with a single repeat on either side.
    """
    left, right = _known(a), _known(b)
    if not left or not right:
        return None
    value = over(median(left), median(right))
    if value is None or min(*left, *right) <= 0:
        return None
    n = min(len(left), len(right))
    if n < 2:
        return Quantity(value=value, n=n)
    logs = np.log(left), np.log(right)
    centre = float(logs[0].mean() - logs[1].mean())
    spread = math.sqrt(sum(float(x.var(ddof=1)) / len(x) for x in logs))
    reach = spread * (_T95[n - 2] if n - 2 < len(_T95) else 1.96)
    with np.errstate(all="ignore"):
        low, high = np.quantile(_medians(left, 0) / _medians(right, 1), (0.025, 0.975))
        student = np.exp((centre - reach, centre + reach))
    return _quantity(value, min(float(low), float(student[0]), value), max(float(high), float(student[1]), value), n)


def differs(a: Iterable[float | None], b: Iterable[float | None]) -> bool:
    """Whether the interval of ratio(a, b) excludes 1; False when it is unknown."""
    found = ratio(a, b)
    if found is None or found.low is None or found.high is None:
        return False
    # Rounding in log and exp must not make two equal arms differ.
    return found.low > 1 + 1e-9 or found.high < 1 - 1e-9


def harmonic_mix(rates: Mapping[str, float | None], shares: Mapping[str, float]) -> float | None:
    """Rate of a mix of work, `shares` being each part's share of the tokens: sum(w) / sum(w / rate)."""
    if not shares or any(not rates.get(name) for name in shares):
        return None
    time_s = sum(share / (rates[name] or math.nan) for name, share in shares.items())
    return over(sum(shares.values()), time_s)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in map(finite, values) if value is not None]


def _quantity(value: float | None, low: float | None, high: float | None, n: int) -> Quantity | None:
    value = finite(value)
    return None if value is None else Quantity(value=value, low=finite(low), high=finite(high), n=n)


def _quantile(known: Sequence[float], q: float) -> float | None:
    # The mean of two values near the largest float is infinite.
    with np.errstate(all="ignore"):
        return finite(float(np.quantile(known, q)))


def _pooled_quantile(known: Sequence[float], q: float) -> Quantity | None:
    low, high = _bootstrap(known, q)
    return _quantity(_quantile(known, q), low, high, len(known))


def _bootstrap(known: Sequence[float], q: float) -> tuple[float | None, float | None]:
    if len(known) < 2:
        return None, None
    if len(known) > MOST_RESAMPLED:
        # The order statistics around the quantile: what the bootstrap tends to, without its cost.
        reach = 1.96 * math.sqrt(len(known) * q * (1 - q)) / len(known)
        low, high = np.quantile(known, (max(0.0, q - reach), min(1.0, q + reach)))
        return float(low), float(high)
    with np.errstate(all="ignore"):
        draws = np.quantile(_resampled(known, 0), q, axis=1)
        low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)


def _medians(known: Sequence[float], stream: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.median(_resampled(known, stream), axis=1)


def _resampled(known: Sequence[float], stream: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    # A fixed seed: the same samples always get the same interval.
    draw = np.random.default_rng([2026, stream])
    values = np.asarray(known, dtype=np.float64)
    return values[draw.integers(0, len(values), (RESAMPLES, len(values)))]
