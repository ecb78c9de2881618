"""Statistics: what an interval promises, held by simulation; and what never becomes a number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from orchestrator.measure.quantity import (
    TAILS,
    Quantity,
    Tail,
    differs,
    finite,
    harmonic_mix,
    median,
    over,
    over_repeats,
    quantity_document,
    ratio,
    samples_needed,
    tail,
)

CAMPAIGNS = 400
# What a 95% interval may hold of so many simulations: 93 to 97%, and three standard errors of the simulation.
LEAST, MOST = 0.897, 0.997


def holds(quantity: Quantity | None, truth: float) -> bool:
    """Whether the interval holds the truth; a bound that is missing holds."""
    assert quantity is not None
    low, high = quantity.low, quantity.high
    return (low is None or low <= truth) and (high is None or truth <= high)


def noise(draw: np.random.Generator, shape: str, repeats: int) -> np.ndarray:
    return draw.normal(0, 0.05, repeats) if shape == "normal" else draw.exponential(0.05, repeats)


@pytest.mark.parametrize("repeats", [2, 3, 5, 12])
@pytest.mark.parametrize("shape", ["normal", "skewed"])
@pytest.mark.parametrize("paired", [True, False])
def test_two_identical_arms_are_no_difference(repeats: int, shape: str, paired: bool) -> None:
    draw = np.random.default_rng(7)
    wrong = 0
    for _ in range(CAMPAIGNS):
        a, b = (list(100 * np.exp(noise(draw, shape, repeats))) for _ in range(2))
        apart = [None] * (0 if paired else repeats)
        wrong += differs([*a, *apart], [*apart, *b])
    assert wrong <= (1 - LEAST) * CAMPAIGNS


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_the_interval_of_a_headline_holds_the_true_median(repeats: int) -> None:
    """A bootstrap of three repeats held it in 75%, of two in half."""
    draw = np.random.default_rng(13)
    held = [holds(over_repeats(list(np.exp(draw.normal(0, 0.03, repeats)))), 1.0) for _ in range(CAMPAIGNS)]
    assert LEAST <= np.mean(held) <= MOST


@pytest.mark.parametrize(("repeats", "requests"), [(3, 34), (5, 34), (3, 100), (5, 100)])
@pytest.mark.parametrize("spread", [0.0, 0.2])
@pytest.mark.parametrize(("which", "z"), [("p50", 0.0), ("p90", 1.2816), ("p95", 1.6449)])
def test_the_interval_of_a_tail_holds_the_true_quantile(
    repeats: int, requests: int, spread: float, which: Tail, z: float
) -> None:
    """Requests of one repeat are alike: a bootstrap of them all held it in 24 to 65% where repeats differ."""
    draw = np.random.default_rng(17)
    truth = math.exp(z * math.hypot(0.5, spread))
    held = []
    for _ in range(CAMPAIGNS):
        logs = draw.normal(0, 0.5, (repeats, requests)) + draw.normal(0, spread, (repeats, 1))
        held.append(holds(tail([list(samples) for samples in np.exp(logs)], which), truth))
    assert LEAST <= np.mean(held) <= MOST


@pytest.mark.parametrize(("repeats", "spread"), [(3, 0.0), (3, 0.2), (5, 0.2)])
def test_the_interval_of_a_p99_of_many_requests_holds(repeats: int, spread: float) -> None:
    draw = np.random.default_rng(19)
    truth = math.exp(2.3263 * math.hypot(0.5, spread))
    held = []
    for _ in range(CAMPAIGNS):
        logs = draw.normal(0, 0.5, (repeats, 400)) + draw.normal(0, spread, (repeats, 1))
        held.append(holds(tail([list(samples) for samples in np.exp(logs)], "p99"), truth))
    assert LEAST <= np.mean(held) <= MOST


@pytest.mark.parametrize(("which", "q"), [("p50", 0.5), ("p90", 0.9), ("p95", 0.95)])
def test_the_order_statistics_of_a_single_repeat_hold_the_true_quantile(which: Tail, q: float) -> None:
    """Exact for any distribution, so never below 95%; that the bounds are samples may make it more."""
    draw = np.random.default_rng(23)
    held = [holds(tail([list(draw.random(100))], which), q) for _ in range(CAMPAIGNS)]
    assert 0.95 - 0.033 <= np.mean(held) <= 0.995


def test_what_the_prompts_of_a_repeat_do_to_both_launches_drops_out() -> None:
    """Prompts that differ by 20% from repeat to repeat hide 5% from a test that does not pair them."""
    draw = np.random.default_rng(29)
    found = 0
    for _ in range(100):
        prompts = draw.normal(0, 0.2, 5)
        a, b = (rate * np.exp(prompts + draw.normal(0, 0.01, 5)) for rate in (105.0, 100.0))
        found += differs(a, b)
    assert found >= 90


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


def test_the_repeats_of_two_launches_are_pairs() -> None:
    """By hand: log ratios 0.1, 0.2 and 0.3 have the mean 0.2, the deviation 0.1, and t is 4.303."""
    base = [100.0, 200.0, 50.0]
    paired = ratio([x * math.exp(0.1 * (r + 1)) for r, x in enumerate(base)], base)
    assert paired is not None
    assert (paired.n, paired.over) == (3, "repeats")
    assert paired.low == pytest.approx(math.exp(0.2 - 4.3027 * 0.1 / math.sqrt(3)), rel=1e-4)
    assert paired.high == pytest.approx(math.exp(0.2 + 4.3027 * 0.1 / math.sqrt(3)), rel=1e-4)


def test_a_missing_repeat_is_left_out_with_its_partner_and_no_other() -> None:
    whole = ratio([1.0, 2.0, 4.0], [2.0, 3.0, 4.0])
    gaps = ratio([1.0, 9.0, None, 2.0, 4.0], [2.0, math.nan, 7.0, 3.0, 4.0, 5.0])
    assert whole is not None
    assert gaps is not None
    assert (gaps.low, gaps.high, gaps.n) == (whole.low, whole.high, 3)


def test_without_two_pairs_the_interval_is_that_of_welch() -> None:
    """By hand: logs 0 and 0.2 against 0, 0.1 and 0.2; variances 0.02 and 0.01, 1.471 degrees of freedom."""
    left, right = [*np.exp([0.0, 0.2]), None, None, None], [None, None, *np.exp([0.0, 0.1, 0.2])]
    found = ratio(left, right)
    assert found is not None
    assert (found.n, found.over) == (2, "repeats")
    freedom = (0.01 + 0.01 / 3) ** 2 / (0.01**2 + (0.01 / 3) ** 2 / 2)
    reach = float(student.ppf(0.975, freedom)) * math.sqrt(0.01 + 0.01 / 3)
    assert found.low == pytest.approx(math.exp(-reach), rel=1e-6)
    assert found.high == pytest.approx(math.exp(reach), rel=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "different"),
    [
        ([0.0, 0.0, 0.0], [0.8, 0.8, 0.8], True),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], False),
        ([0.0, 0.1, 0.0], [0.0, 0.0, 0.1], False),
        ([-3.0, -3.1, -2.9], [3.0, 3.1, 2.9], True),
        ([0.0, None, 0.0], [0.8, 0.8, 0.8], True),
        ([0.0, None, None], [0.8, 0.8, 0.8], False),
    ],
)
def test_a_zero_and_a_negative_value_have_no_ratio_and_still_compare(
    a: list[float | None], b: list[float | None], different: bool
) -> None:
    assert ratio(a, b) is None
    assert differs(a, b) is different
    assert differs(b, a) is different


def test_median_over_repeats_with_its_samples() -> None:
    """By hand: logarithms 0, 0.1 and 0.5 have the mean 0.2 and the deviation 0.2646; t is 4.303."""
    quantity = over_repeats([math.exp(0.5), None, 1.0, math.exp(0.1)], [1.0, 2.0, 3.0, 4.0, None])
    assert quantity is not None
    assert (quantity.value, quantity.n, quantity.over) == (pytest.approx(math.exp(0.1)), 4, "repeats")
    reach = 4.3027 * math.sqrt(0.07) / math.sqrt(3)
    assert quantity.low == pytest.approx(math.exp(0.2 - reach), rel=1e-4)
    assert quantity.high == pytest.approx(math.exp(0.2 + reach), rel=1e-4)
    single = over_repeats([2.5], [1.0, 2.0, 3.0, 4.0])
    assert single is not None
    assert (single.value, single.low, single.high, single.n, single.over) == (2.5, None, None, 4, None)
    # Of six samples the least and the greatest hold the median in 97%, of five in 94%.
    six = over_repeats([3.5], [6.0, 2.0, 3.0, 4.0, 5.0, 1.0])
    assert six is not None
    assert (six.low, six.high, six.over) == (1.0, 6.0, "requests")
    lonely = over_repeats([2.5])
    assert lonely is not None
    assert (lonely.low, lonely.high, lonely.n, lonely.over) == (None, None, 1, None)
    assert over_repeats([None, math.inf]) is None


def test_an_interval_on_plain_values_where_there_is_no_logarithm() -> None:
    quantity = over_repeats([0.0, 0.1, 0.2])
    assert quantity is not None
    assert quantity.low == pytest.approx(0.1 - 4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    constant = over_repeats([8214.0, 8214.0, 8214.0])
    assert constant == Quantity(value=8214.0, low=8214.0, high=8214.0, n=3, over="repeats")


@pytest.mark.parametrize(("which", "needed"), [("p50", 1), ("p90", 44), ("p95", 90), ("p99", 459), ("max", 1)])
def test_a_quantile_needs_its_sample(which: Tail, needed: int) -> None:
    """LoadGen's rule: fewer samples all lie below the quantile with more than 1% probability."""
    assert samples_needed(which) == needed
    values = list(np.random.default_rng(3).exponential(1.0, needed))
    assert tail([values], which) is not None
    assert tail([values[:3], values[3:]], which) is not None
    assert tail([values[1:], [None, math.nan]], which) is None


@pytest.mark.parametrize("n", [5, 44, 459, 5000])
def test_a_quantile_is_never_above_the_maximum(n: int) -> None:
    values = list(np.random.default_rng(3).exponential(1.0, n))
    largest = tail([values[: n // 2], values[n // 2 :]], "max")
    assert largest == Quantity(value=max(values), n=n)
    for which in TAILS[:-1]:
        single = tail([values], which)
        if single is not None and single.high is not None:
            assert single.low is not None
            assert single.low <= single.value <= single.high <= max(values)


def test_a_bound_that_the_sample_cannot_give_is_absent() -> None:
    """Of 5 samples all lie above their true median in 3%, more than the 2.5% that a bound may be wrong."""
    values = [float(i) for i in range(1, 91)]
    assert tail([values], "p95") == Quantity(value=pytest.approx(85.55), low=81.0, high=90.0, n=90, over="requests")
    assert tail([values[:44]], "p90") == Quantity(value=pytest.approx(39.7), low=35.0, high=44.0, n=44, over="requests")
    assert tail([values[:5]], "p50") == Quantity(value=3.0, n=5)


def test_the_repeats_are_the_clusters_of_a_tail() -> None:
    """By hand: the medians of the repeats are 2, 3 and 4, and that of all samples is 3."""
    found = tail([[1.0, 2.0, 3.0], [], [0.0, 3.0, 6.0], [3.0, 4.0, 5.0]], "p50")
    assert found is not None
    assert (found.value, found.n, found.over) == (3.0, 9, "repeats")
    reach = 4.3027 * float(np.std(np.log([2, 3, 4]), ddof=1)) / math.sqrt(3)
    assert found.low == pytest.approx(3 * math.exp(-reach), rel=1e-4)
    assert found.high == pytest.approx(3 * math.exp(reach), rel=1e-4)


def test_a_mix_is_harmonic() -> None:
    assert harmonic_mix({"a": 100.0, "b": 50.0}, {"a": 1.0, "b": 1.0}) == pytest.approx(2 / (1 / 100 + 1 / 50))
    assert harmonic_mix({"a": 100.0, "b": None}, {"a": 1.0, "b": 1.0}) is None
    assert harmonic_mix({"a": 100.0}, {"a": 1.0, "b": 1.0}) is None
    assert harmonic_mix({}, {}) is None


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=8))
def test_nothing_non_finite_comes_out(values: list[float | None]) -> None:
    tails = [tail(samples, which) for which in TAILS for samples in ([values], [values, values[:3]], [values * 60] * 2)]
    differs(values, values[::-1])
    for quantity in (over_repeats(values), ratio(values, values), *tails):
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
        "over": None,
    }
    half = Quantity(value=1.5, low=1.0, high=math.inf, n=3, over="launches")
    assert quantity_document(half) == {"value": 1.5, "low": 1.0, "high": None, "n": 3, "over": "launches"}
    unbounded = Quantity(value=1.5, low=-math.inf, high=math.nan, over="repeats")
    assert quantity_document(unbounded) == {"value": 1.5, "low": None, "high": None, "n": 1, "over": None}
    assert quantity_document(Quantity(value=math.nan, low=1.0, high=2.0)) is None
    assert quantity_document(None) is None
