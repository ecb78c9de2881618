"""Which result wins, and what a wrong name is answered with."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import search
from orchestrator.config import Objective, Serving, Verify
from orchestrator.errors import ConfigError
from orchestrator.measure.metrics import Quantity
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from tests.support.builders import (
    CONFIG,
    WORKLOAD,
    K,
    make_experiment,
    make_launches,
    make_measurement,
    make_result,
)

STORY, TAIL = "story-chat", "tail-100"
RATE = f"{WORKLOAD}/decode_tok_s"
EXPERIMENT = make_experiment()
AGAIN = make_experiment(launches=3)


def _name(selection: search.Selection) -> str | None:
    return selection.best.spec.name if selection.best else None


def test_the_fastest_valid_result_wins() -> None:
    results = [
        *make_launches("slow", 90, 91, 90),
        *make_launches("fast", 270, 271, 272),
        *make_launches("middling", 200, 201, 200),
    ]
    selection = search.select(AGAIN, results)
    assert _name(selection) == "fast"
    assert [r.spec.name for r in selection.ranking] == ["fast", "middling", "slow"]
    assert (selection.decided, selection.rivals) == (True, ())
    assert "ahead of middling by +35" in selection.reason


def test_one_launch_each_marks_the_best_estimate_and_proves_nothing() -> None:
    selection = search.select(EXPERIMENT, [make_result("slow", 90, 91, 92), make_result("fast", 270, 271, 272)])
    assert _name(selection) == "fast"
    assert not selection.decided
    assert "the best estimate of one launch each" in selection.reason
    assert "--launches 3" in selection.reason
    assert "ahead" not in selection.reason


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_what_is_not_finite_never_wins(order: tuple[int, ...]) -> None:
    made = [
        make_result("nan", math.nan),
        make_result("hundred", 100),
        make_result("inf", math.inf),
        make_result("ninety", 90),
    ]
    selection = search.select(EXPERIMENT, [made[i] for i in order])
    assert _name(selection) == "hundred"
    assert {name for name, why in selection.excluded.items() if "not measured" in why} == {"nan", "inf"}


def test_no_valid_result_is_an_answer_with_the_reasons_counted() -> None:
    results = [
        make_result("a", 900, 901, 902, level=Level.INVALID, codes=["prefix_cache_hits"]),
        make_result("b", 800, 801, 802, level=Level.INVALID, codes=["prefix_cache_hits"]),
        make_result("c", status=TrialStatus.REFUSED, cause="refused_by_engine"),
        make_result("d", math.nan),
    ]
    selection = search.select(EXPERIMENT, results)
    assert selection.best is None
    assert "2 x invalid: prefix_cache_hits" in selection.reason
    assert "1 x refused: refused_by_engine" in selection.reason
    assert set(selection.excluded) == {"a", "b", "c", "d"}
    assert search.select(EXPERIMENT, []).reason == "no valid result: nothing was measured"


def test_a_minimiser_does_not_love_what_is_absent() -> None:
    quickest = make_experiment(objective=Objective(metric=f"{WORKLOAD}/ttft_s", mode="min"))
    absent = make_result("absent", measurements={WORKLOAD: make_measurement(ttft_s=None)})
    slow = make_result("slow", measurements={WORKLOAD: make_measurement(ttft_s=(0.9, 0.91, 0.92))})
    quick = make_result("quick", measurements={WORKLOAD: make_measurement(ttft_s=(0.3, 0.31, 0.32))})
    assert _name(search.select(quickest, [absent, slow, quick])) == "quick"


def test_a_suspect_result_wins_only_when_nothing_is_valid() -> None:
    suspect = make_result("garbler", 500, 501, 502, level=Level.SUSPECT, codes=["degenerate_output"])
    valid = make_result("honest", 200, 201, 202)
    selection = search.select(EXPERIMENT, [suspect, valid])
    assert _name(selection) == "honest"
    assert selection.excluded == {"garbler": "suspect: degenerate_output"}
    alone = search.select(EXPERIMENT, [suspect])
    assert _name(alone) == "garbler"
    assert any("suspect" in note for note in alone.notes)


def test_a_pruned_trial_does_not_compete() -> None:
    selection = search.select(EXPERIMENT, [make_result("a", 300, status=TrialStatus.PRUNED), make_result("b", 100)])
    assert _name(selection) == "b"
    assert selection.excluded == {"a": "pruned"}


def test_what_is_as_good_as_every_other_and_preferred_wins() -> None:
    results = [
        *make_launches("k=6", 271.0, 270.5, 271.5, k=6),
        *make_launches("k=5", 270.0, 270.5, 270.0, k=5),
        *make_launches("k=8", 214.0, 214.4, 214.2, k=8),
    ]
    simpler = make_experiment(objective=Objective(metric=RATE, prefer={K: "min"}), launches=3)
    selection = search.select(simpler, results)
    assert _name(selection) == "k=5"
    assert selection.decided
    assert "as good as k=6 (it loses less than 2%) and preferred to them" in selection.reason
    deeper = make_experiment(objective=Objective(metric=RATE, prefer={K: "max"}), launches=3)
    assert _name(search.select(deeper, results)) == "k=6"
    # Without a preference, fewer proposals are.
    assert _name(search.select(AGAIN, results)) == "k=5"


def test_what_cannot_be_told_apart_is_undecided_and_the_better_estimate_is_marked() -> None:
    results = [
        *make_launches("k=6", 268.0, 276.0, 284.0, k=6),
        *make_launches("k=5", 279.0, 269.0, 260.0, k=5),
        *make_launches("k=8", 114.0, 116.0, 119.0, k=8),
    ]
    selection = search.select(AGAIN, results)
    assert _name(selection) == "k=5", "it was the better one when the last pass began"
    assert not selection.decided
    assert selection.rivals == ("k=6",)
    assert re.search(r"k=5 or k=6: undecided, the difference is below \d+%; about \d+ more launches", selection.reason)


def test_the_tie_width_says_how_much_may_be_lost_for_a_preferred_configuration() -> None:
    results = [*make_launches("k=6", 276.0, 276.1, 276.0, k=6), *make_launches("k=5", 268.0, 268.0, 268.1, k=5)]

    def chosen(tie: float) -> str | None:
        return _name(search.select(make_experiment(objective=Objective(metric=RATE, tie=tie), launches=3), results))

    assert (chosen(0.05), chosen(0.01)) == ("k=5", "k=6")


def _with_tail(name: str, rate: float, **tail: Quantity) -> TrialResult:
    rates = make_measurement(decode_tok_s=(rate, rate + 1, rate + 2))
    return make_result(name, measurements={WORKLOAD: rates, TAIL: make_measurement(**tail)})


def _constrained(text: str) -> TrialResult | search.Selection:
    return search.select(
        make_experiment(objective=Objective(metric=RATE, constraints=[text]), workloads=(WORKLOAD, TAIL)),
        [
            _with_tail("spiky", 276, ttft_p99_s=Quantity(value=11.564, n=100), ttft_max_s=Quantity(value=12, n=100)),
            _with_tail("smooth", 261, ttft_p99_s=Quantity(value=0.426, n=100), ttft_max_s=Quantity(value=1, n=100)),
        ],
    )


def test_a_fast_median_with_a_terrible_tail_does_not_win() -> None:
    selection = _constrained(f"{TAIL}/ttft_p99_s <= 3")
    assert isinstance(selection, search.Selection)
    assert _name(selection) == "smooth"
    assert selection.excluded == {"spiky": f"{TAIL}/ttft_p99_s <= 3: is 11.56"}


@pytest.mark.parametrize(("op", "kept"), [("<=", True), (">=", True), ("<", False), (">", False)])
def test_every_operator_means_what_it_says_at_the_bound(op: str, kept: bool) -> None:
    exact = make_experiment(objective=Objective(metric=RATE, constraints=[f"{TAIL}/ttft_p99_s {op} 3"]))
    one = _with_tail("one", 200, ttft_p99_s=Quantity(value=3.0, n=100))
    assert (search.select(exact, [one]).best is not None) is kept


def test_a_p99_of_few_requests_is_their_maximum_and_says_so() -> None:
    tail = make_experiment(objective=Objective(metric=RATE, constraints=[f"{TAIL}/ttft_p99_s <= 3"]))
    one = _with_tail("one", 200, ttft_max_s=Quantity(value=2.0, n=71))
    selection = search.select(tail, [one])
    assert _name(selection) == "one"
    assert any("maximum of 71" in note for note in selection.notes)


def test_what_was_not_measured_keeps_no_constraint() -> None:
    kv = make_experiment(objective=Objective(metric=RATE, constraints=["memory/kv_tokens >= 1048576"]))
    unknown = make_result("unknown", 300)
    enough = make_result("enough", 200, memory={"kv_tokens": 1371214})
    short = make_result("short", 250, memory={"kv_tokens": 303419})
    selection = search.select(kv, [unknown, short, enough])
    assert _name(selection) == "enough"
    assert selection.excluded["unknown"] == "memory/kv_tokens >= 1.04858e+06: not measured"


def test_the_peak_of_the_fullest_gpu_stands_for_all() -> None:
    one = make_result("one", 200, memory={"gpu0_peak_gib": 80.0, "gpu1_peak_gib": 91.0, "host_rss_peak_gib": 4.0})
    peak = search.value(one, "memory/gpu_peak_gib")
    assert peak is not None
    assert peak.value == 91.0


def test_a_mix_weighs_by_tokens_so_that_rates_combine_harmonically() -> None:
    mix = Objective(mix={WORKLOAD: 7, STORY: 3})
    both = make_experiment(objective=mix, workloads=(WORKLOAD, STORY))

    def mixed(name: str, code: float, story: float) -> TrialResult:
        return make_result(
            name,
            measurements={
                WORKLOAD: make_measurement(decode_tok_s=(code,)),
                STORY: make_measurement(decode_tok_s=(story,)),
            },
        )

    lopsided, even = mixed("lopsided", 317.0, 100.0), mixed("even", 268.2, 156.2)
    score = search.score(both, even)
    assert score is not None
    assert score.value == pytest.approx(1 / (0.7 / 268.2 + 0.3 / 156.2))
    assert _name(search.select(both, [lopsided, even])) == "even"
    partial = make_result("partial", measurements={WORKLOAD: make_measurement(decode_tok_s=(900.0,))})
    assert _name(search.select(both, [partial, even])) == "even"


def test_speedup_is_held_against_the_baseline_of_the_same_workload() -> None:
    swept = make_experiment(variants={"no-spec": {CONFIG: None}}, grid={K: [5, 6]}, baseline="no-spec")
    results = [make_result("no-spec", 92, 93, 94), make_result("k=6", 270, 276, 280), make_result("k=5")]
    base, six, nothing = search.with_campaign_metrics(results, swept)
    speedup = six.measurements[WORKLOAD].metrics["speedup"]
    assert speedup is not None
    assert speedup.value == pytest.approx(276 / 93)
    assert speedup.low is not None
    assert speedup.low < 276 / 93
    assert base.measurements[WORKLOAD].metrics["speedup"] == Quantity(value=1.0, n=3)
    assert nothing.measurements == {}
    assert search.with_campaign_metrics(results[1:], swept)[0].measurements[WORKLOAD].metrics["speedup"] is None


def _lengths(**tokens: tuple[float, ...]) -> list[TrialResult]:
    return [
        make_result(
            name, measurements={WORKLOAD: make_measurement(decode_tok_s=(100, 101, 102), completion_tokens=values)}
        )
        for name, values in tokens.items()
    ]


def _flagged(results: list[TrialResult]) -> list[str]:
    judged = search.with_campaign_metrics(results, EXPERIMENT)
    return [r.spec.name for r in judged if r.verdict and any(x.code == "length_differs" for x in r.verdict.reasons)]


def test_output_lengths_that_differ_between_trials_are_suspect() -> None:
    results = _lengths(a=(200, 201, 202), b=(1024, 1024, 1024), c=(1020, 1022, 1024))
    judged = search.with_campaign_metrics(results, EXPERIMENT)
    assert [r.verdict.level for r in judged if r.verdict] == [Level.SUSPECT, Level.VALID, Level.VALID]
    assert "201 tokens per answer where 1022 are usual" in judged[0].verdicts[WORKLOAD].reasons[0].detail
    assert _flagged(search.with_campaign_metrics(results, EXPERIMENT)) == ["a"], "marked once, not twice"


def test_of_two_trials_neither_is_the_usual_one() -> None:
    assert _flagged(_lengths(a=(200, 201, 202), b=(1024, 1024, 1024))) == ["a", "b"]


def test_lengths_within_tolerance_or_chance_are_not_marked() -> None:
    assert _flagged(_lengths(a=(128, 128, 128), b=(128, 128, 128), c=(124, 124, 124))) == []
    assert _flagged(_lengths(a=(137, 170, 110), b=(148, 120, 180), c=(151, 130, 160))) == []


def test_the_pareto_front_drops_what_is_beaten_in_both() -> None:
    def point(name: str, rate: float, ttft: float, **fields: Any) -> TrialResult:
        measured = make_measurement(decode_tok_s=(rate,), ttft_s=(ttft,))
        return make_result(name, measurements={WORKLOAD: measured}, **fields)

    results = [
        point("fast", 300, 0.9),
        point("beaten", 250, 1.0),
        point("quick", 100, 0.1),
        point("between", 200, 0.5),
        point("invalid", 900, 0.01, level=Level.INVALID),
    ]
    front = search.pareto(results, RATE, f"{WORKLOAD}/ttft_s")
    assert [r.spec.name for r in front] == ["fast", "between", "quick"]


SWEEP = make_experiment(variants={"no-spec": {CONFIG: None}}, grid={K: [5, 6]}, workloads=(WORKLOAD, TAIL))


@pytest.mark.parametrize(
    ("objective", "named"),
    [
        (Objective(metric="code-review-8/decode_tok_s"), "did you mean 'code-review-8k'"),
        (Objective(metric=f"{WORKLOAD}/decode_toks"), "did you mean 'decode_tok_s'"),
        (Objective(metric="decode_tok_s"), "allowed is WORKLOAD/NAME"),
        (Objective(metric="memory/kv_token"), "did you mean 'kv_tokens'"),
        (Objective(metric=f"{WORKLOAD}/ttft_s"), "allowed is min"),
        (Objective(metric=RATE, mode="min"), "allowed is max"),
        (Objective(mix={"code-review": 1.0}), "did you mean 'code-review-8k'"),
        (Objective(mix={WORKLOAD: 0.0}), "above 0"),
        (
            Objective(metric=RATE, constraints=["tail-10/ttft_p99_s <= 3"]),
            "did you mean 'tail-100'",
        ),
        (
            Objective(metric=RATE, constraints=["tail-100/ttft_p9_s <= 3"]),
            "did you mean 'ttft_p9",
        ),
        (Objective(metric=RATE, constraints=["tail-100/ttft_p99_s == 3"]), "METRIC OP NUMBER"),
        (Objective(metric=RATE, constraints=["tail-100/ttft_p99_s <= 3 s"]), "METRIC OP NUMBER"),
        (Objective(metric=RATE, constraints=["tail-100/ttft_p99_s <= nan"]), "METRIC OP NUMBER"),
        (Objective(metric=RATE, prefer={f"{K}s": "min"}), f"did you mean '{K}'"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_right_one(objective: Objective, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        search.check(replace(SWEEP, objective=objective))
    assert named in str(raised.value)


def test_baseline_and_verification_must_exist() -> None:
    with pytest.raises(ConfigError, match="did you mean 'no-spec'"):
        search.check(replace(SWEEP, search=replace(SWEEP.search, baseline="no_spec")))
    search.check(replace(SWEEP, search=replace(SWEEP.search, baseline="k=6")))
    with pytest.raises(ConfigError, match="did you mean 'code-review-8k'"):
        search.check(replace(SWEEP, serving=Serving(verify=Verify(workload="code-review"))))
    with pytest.raises(ConfigError, match="workloads"):
        search.check(replace(SWEEP, workloads={}))
    search.check(SWEEP)


@pytest.mark.slow
def test_a_thousand_points_are_planned_and_chosen_from_in_seconds() -> None:
    """Planning made the whole schema per point (80 ms each), and choosing held every result against every other."""
    swept = make_experiment(grid={"engine.args.max-num-seqs": list(range(1, 1001))})
    began_s = time.process_time()
    search.check(swept)
    planned, _ = search.points(swept)
    assert len(planned) == 1000
    results = [replace(make_result(spec.name, 100.0, 101.0, 99.0), spec=spec) for spec in planned]
    assert search.select(swept, results).best is not None
    assert time.process_time() - began_s < 10
