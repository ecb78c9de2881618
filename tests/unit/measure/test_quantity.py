"""Statistics: what an interval promises, held by simulation; and what never becomes a number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.measure.quantity import (
    TAILS,
    Quantity,
    differs,
    finite,
    harmonic_mix,
    median,
    over,
    over_repeats,
    quantity_document,
    ratio,
    tail,
)

CAMPAIGNS = 400


@pytest.mark.parametrize("repeats", [2, 3, 5, 12])
@pytest.mark.parametrize("shape", ["normal", "skewed"])
def test_two_identical_arms_are_no_difference(repeats: int, shape: str) -> None:
    draw = np.random.default_rng(7)

    def arm() -> list[float]:
        noise = draw.normal(0, 0.05, repeats) if shape == "normal" else draw.exponential(0.05, repeats)
        return list(100 * np.exp(noise))

    wrong = sum(differs(arm(), arm()) for _ in range(CAMPAIGNS))
    assert wrong <= 0.05 * CAMPAIGNS


def test_a_percentile_bootstrap_alone_would_be_wrong_more_often() -> None:
    """Why the interval is widened: three repeats against three are disjoint by chance one time in ten."""
    draw = np.random.default_rng(7)
    arms = draw.normal(100, 5, (CAMPAIGNS, 2, 3))
    disjoint = sum(a.min() > b.max() or b.min() > a.max() for a, b in arms)
    assert disjoint > 0.06 * CAMPAIGNS


@pytest.mark.parametrize(("repeats", "gain"), [(3, 1.15), (5, 1.06)])
def test_a_real_difference_is_found(repeats: int, gain: float) -> None:
    draw = np.random.default_rng(11)
    found = sum(differs(gain * draw.normal(100, 2, repeats), draw.normal(100, 2, repeats)) for _ in range(100))
    assert found >= 90


def test_ratio_is_of_medians_and_inverts() -> None:
    a, b = [110.0, 112.0, 300.0], [100.0, 101.0, 102.0]
    found, inverse = ratio(a, b), ratio(b, a)
    assert found is not None
    assert inverse is not None
    assert found.value == pytest.approx(112 / 101)
    assert found.n == 3
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high
    assert found.value * inverse.value == pytest.approx(1)
    assert ratio(a, b) == found


def test_ratio_knows_what_it_cannot_know() -> None:
    single = ratio([110.0], [100.0, 101.0])
    assert single is not None
    assert (single.value, single.low, single.high, single.n) == (pytest.approx(110 / 100.5), None, None, 1)
    assert not differs([110.0], [1.0])
    assert ratio([], [1.0]) is None
    assert ratio([None, math.nan], [1.0]) is None
    assert ratio([1.0, 2.0], [0.0, 0.0]) is None
    assert differs([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert not differs([2.0, 2.0, 2.0], [2.0, 2.0, 2.0])


def test_median_over_repeats_with_its_samples() -> None:
    quantity = over_repeats([3.0, None, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0, None])
    assert quantity is not None
    assert (quantity.value, quantity.low, quantity.high, quantity.n) == (2.0, 1.0, 3.0, 4)
    single = over_repeats([2.5], [1.0, 2.0, 3.0, 4.0])
    assert single is not None
    assert (single.value, single.n) == (2.5, 4)
    assert single.low is not None
    assert 1.0 <= single.low < 2.5
    lonely = over_repeats([2.5])
    assert lonely is not None
    assert (lonely.low, lonely.high, lonely.n) == (None, None, 1)
    assert over_repeats([None, math.inf]) is None


@pytest.mark.parametrize("n", [1, 5, 71, 99, 100, 1000, 5000])
def test_no_p99_below_a_hundred_samples_and_never_above_the_maximum(n: int) -> None:
    values = list(np.random.default_rng(3).exponential(1.0, n))
    largest = tail(values, "max")
    assert largest is not None
    assert (largest.value, largest.n) == (max(values), n)
    p99 = tail(values, "p99")
    assert (p99 is None) == (n < 100)
    if p99 is not None:
        assert p99.low is not None
        assert p99.high is not None
        assert p99.low <= p99.value <= p99.high <= max(values)


def test_many_samples_have_the_interval_of_the_bootstrap() -> None:
    values = list(np.random.default_rng(5).normal(10, 1, 1001))
    few, many = tail(values[:1000], "p50"), tail(values, "p50")
    assert few is not None
    assert many is not None
    assert few.low == pytest.approx(many.low, abs=0.02)
    assert few.high == pytest.approx(many.high, abs=0.02)


def test_a_mix_is_harmonic() -> None:
    assert harmonic_mix({"a": 100.0, "b": 50.0}, {"a": 1.0, "b": 1.0}) == pytest.approx(2 / (1 / 100 + 1 / 50))
    assert harmonic_mix({"a": 100.0, "b": None}, {"a": 1.0, "b": 1.0}) is None
    assert harmonic_mix({"a": 100.0}, {"a": 1.0, "b": 1.0}) is None
    assert harmonic_mix({}, {}) is None


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=8))
def test_nothing_non_finite_comes_out(values: list[float | None]) -> None:
    for quantity in (over_repeats(values), ratio(values, values), *(tail(values, which) for which in TAILS)):
        if quantity is not None:
            assert math.isfinite(quantity.value)
            assert all(bound is None or math.isfinite(bound) for bound in (quantity.low, quantity.high))
    assert finite(median(values)) == median(values)


def test_absent_is_not_zero() -> None:
    assert over(1.0, 0.0) is None
    assert over(None, 1.0) is None
    assert over(0.0, 2.0) == 0.0
    assert over(1e308, 1e-308) is None
    assert finite(math.inf) is None
    assert median([]) is None


def test_a_document_of_a_number_is_strict_json() -> None:
    assert quantity_document(Quantity(value=1.5, low=1.0, high=2.0, n=3)) == {
        "value": 1.5,
        "low": 1.0,
        "high": 2.0,
        "n": 3,
    }
    unbounded = Quantity(value=1.5, low=-math.inf, high=math.nan)
    assert quantity_document(unbounded) == {"value": 1.5, "low": None, "high": None, "n": 1}
    assert quantity_document(Quantity(value=math.nan, low=1.0, high=2.0)) is None
    assert quantity_document(None) is None
