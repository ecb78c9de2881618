"""Launches that differ, machines that drift, values that are zero: what is proven, what is not, and what is said."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from orchestrator import search
from orchestrator.config import Experiment, Objective
from orchestrator.measure.inference import Observation, dunnett_point, fit_launches
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
    make_spec,
    with_verdict,
)

STORY = "story-chat"
RATE = f"{WORKLOAD}/decode_tok_s"
SIMPLER = Objective(metric=RATE, prefer={K: "min"})
AGAIN = make_experiment(launches=3)


def name_of(selection: search.Selection) -> str | None:
    return selection.best.spec.name if selection.best else None


def measured(name: str, metric: str, *launches: float, **fields: object) -> list[TrialResult]:
    """One result per pass with one value of a metric in each of three repeats."""
    return [
        make_result(
            name,
            measurements={WORKLOAD: make_measurement(**{metric: (value,) * 3})},
            pass_number=number,
            **fields,
        )
        for number, value in enumerate(launches, start=1)
    ]


def run(experiment: Experiment, measure: Callable[[int, int], float]) -> list[TrialResult]:
    """A whole campaign; measure(k, number of the launch in the campaign) gives the rate of a launch."""
    results: list[TrialResult] = []
    specs = search.pass_order(experiment, [make_spec(k=k) for k in experiment.search.grid[K]], 1)
    number = 1
    while specs:
        for spec in specs:
            rate = measure(spec.params[K], len(results))
            results.append(make_result(spec, rate, k=spec.params[K], pass_number=number))
        number += 1
        specs = search.next_pass(experiment, results, number)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["launches", "drift"])
def test_of_identical_arms_none_is_called_ahead_and_its_number_is_not_the_luckiest(machine: str) -> None:
    """Repeats as the unit called one of seven ahead in 27% (launches differ by 2%) and 67% (drift of 5%)."""
    seven = make_experiment(objective=SIMPLER, launches=3, grid={K: list(range(1, 8))})
    draw = np.random.default_rng(5)
    ahead, lost, errors = 0, 0, []
    for _ in range(60):

        def rate(k: int, number: int) -> float:
            if machine == "launches":
                return float(100 * math.exp(draw.normal(0, 0.02)))
            return float(100 * math.exp(0.05 * number / 21 + draw.normal(0, 0.003)))

        selection = search.select(seven, run(seven, rate))
        assert selection.number is not None
        ahead += "ahead of" in selection.reason
        lost += selection.decided and name_of(selection) != "k=1"
        errors.append(selection.number.value / 100 - 1)
    assert ahead <= 3
    assert lost <= 3
    if machine == "launches":
        assert abs(float(np.mean(errors))) < 3 * 0.02 / math.sqrt(60)


@pytest.mark.slow
def test_an_arm_that_is_five_percent_better_is_crowned() -> None:
    seven = make_experiment(objective=SIMPLER, launches=5, grid={K: list(range(1, 8))})
    draw = np.random.default_rng(6)
    crowned = 0
    for _ in range(40):
        results = run(seven, lambda k, _: float((105 if k == 4 else 100) * math.exp(draw.normal(0, 0.02))))
        crowned += name_of(search.select(seven, results)).partition("#")[0] == "k=4"
    assert crowned >= 36


def test_one_hiccup_in_a_fast_arm_does_not_crown_the_base() -> None:
    """Three repeats of 200, 210 and 60 cannot be told apart from 100; today the base won as their equal."""
    results = [
        *make_launches("base", (100, 101, 99), (100, 99, 101), (101, 100, 100)),
        *make_launches("fast", (200, 210, 60), (201, 200, 202), (199, 200, 201), k=4),
    ]
    assert name_of(search.select(AGAIN, results)) == "fast"
    assert name_of(search.select(make_experiment(), [r for r in results if r.pass_number == 1])) == "fast"


def test_a_preferred_arm_is_held_against_every_arm_and_not_only_the_leader() -> None:
    """The leader is noisy and the base cannot be told apart from it, but a steady third arm is plainly better."""
    results = [
        *make_launches("base", 100.0, 100.5, 100.2),
        *make_launches("steady", 180.0, 180.9, 180.4, k=2),
        *make_launches("noisy", 400.0, 60.0, 270.0, k=4),
    ]
    selection = search.select(AGAIN, results)
    assert name_of(selection) != "base"
    assert "base" not in selection.rivals


@pytest.mark.parametrize(
    ("metric", "mode", "worse", "better"),
    [
        ("acceptance_rate", "max", (0.0, 0.0, 0.0), (0.8, 0.81, 0.79)),
        ("preemptions", "min", (50.0, 51.0, 49.0), (0.0, 0.0, 0.0)),
        ("ttft_p99_s", "min", (3.0, 3.01, 2.99), (1.0, 1.01, 0.99)),
        ("output_tok_s", "max", (10.0, 10.0, 10.0), (20.0, 20.0, 20.0)),
    ],
)
def test_every_objective_has_the_same_rules_zeros_included(
    metric: str, mode: str, worse: tuple[float, ...], better: tuple[float, ...]
) -> None:
    experiment = make_experiment(objective=Objective(metric=f"{WORKLOAD}/{metric}", mode=mode), launches=3)
    results = [*measured("worse", metric, *worse, k=2), *measured("better", metric, *better, k=4)]
    selection = search.select(experiment, results)
    assert name_of(selection) == "better"
    assert selection.decided
    assert "ahead of worse" in selection.reason


def test_an_objective_without_repeats_is_no_exception() -> None:
    """Identical tails were ahead of each other in 20 of 20 campaigns: 2.97 [2, 4] of 3.00 [2, 4]."""
    experiment = make_experiment(objective=Objective(metric=f"{WORKLOAD}/ttft_p99_s", mode="min"), launches=3)

    def tails(name: str, *values: float, k: int) -> list[TrialResult]:
        quantities = [Quantity(value=value, low=2.0, high=4.0, n=500) for value in values]
        return [
            make_result(name, measurements={WORKLOAD: make_measurement(ttft_p99_s=each)}, k=k, pass_number=number)
            for number, each in enumerate(quantities, start=1)
        ]

    selection = search.select(experiment, [*tails("k=1", 3.0, 2.6, 3.3, k=1), *tails("k=8", 2.97, 3.2, 2.7, k=8)])
    assert not selection.decided
    # What a later launch shows counts: the first was lucky.
    lucky = [*tails("A", 1.0, 9.0, 9.1, k=1), *tails("B", 2.0, 2.0, 2.1, k=2)]
    assert name_of(search.select(experiment, lucky)) == "B"


def test_one_known_repeat_of_three_is_a_launch_like_any_other() -> None:
    partly = make_result("partly", measurements={WORKLOAD: make_measurement(decode_tok_s=(300.0, None, None))}, k=5)
    whole = make_result("whole", 295, 296, 297, k=2)
    selection = search.select(make_experiment(), [partly, whole])
    assert not selection.decided
    assert selection.number is not None
    assert selection.number.n == 1


def test_a_suspect_workload_that_the_objective_does_not_use_excludes_nobody() -> None:
    both = make_experiment(workloads=(WORKLOAD, STORY), objective=Objective(metric=RATE))
    numbers = {WORKLOAD: make_measurement(decode_tok_s=(300, 301, 299)), STORY: make_measurement(decode_tok_s=(50,))}
    fast = make_result("fast", measurements=numbers, k=4)
    suspect = with_verdict(fast, Level.SUSPECT, "ramp_and_drain")
    fast = replace(suspect, verdicts={**suspect.verdicts, WORKLOAD: fast.verdicts[WORKLOAD]})
    slow = make_result("slow", measurements={**numbers, WORKLOAD: make_measurement(decode_tok_s=(100, 101, 99))})
    assert name_of(search.select(both, [fast, slow])) == "fast"


@pytest.mark.parametrize("status", [TrialStatus.PRUNED, TrialStatus.INFRASTRUCTURE])
def test_a_launch_that_was_lost_does_not_exclude_the_winner(status: TrialStatus) -> None:
    results = [*make_launches("A", 200, 201, k=4), *make_launches("B", 100, 101, k=2)]
    lost = replace(results[0], status=status, pass_number=3, cause="port_taken")
    selection = search.select(AGAIN, [*results, lost])
    assert name_of(selection) == "A"
    assert any("A: launch 3 is left out" in note for note in selection.notes)


def test_a_launch_that_crashed_excludes_the_point() -> None:
    """What starts two times of three is nothing to serve."""
    results = [*make_launches("A", 200, 201, k=4), *make_launches("B", 100, 101, k=2)]
    crashed = replace(results[0], status=TrialStatus.FAILED, pass_number=3, cause="crashed", measurements={})
    selection = search.select(AGAIN, [*results, crashed])
    assert name_of(selection) == "B"
    assert selection.excluded == {"A": "failed: crashed (in launch 3)"}


def test_an_invalid_launch_is_left_out_and_named() -> None:
    spoilt = make_result("A", 900, k=4, level=Level.INVALID, codes=["gpu_shared"], pass_number=3)
    results = [*make_launches("A", 200, 201, k=4), spoilt, *make_launches("B", 100, 101, 100, k=2)]
    selection = search.select(AGAIN, results)
    assert name_of(selection) == "A"
    assert "A: launch 3 is left out: invalid: gpu_shared" in selection.notes


def sweep(**arguments: object) -> Experiment:
    objective = Objective(metric=f"{WORKLOAD}/speedup")
    return make_experiment(variants={"base": {CONFIG: None}}, baseline="base", objective=objective, **arguments)


def test_speedup_is_an_objective_like_any_other() -> None:
    """It found no finalists, because only the end of a campaign knew it."""
    swept = sweep(launches=3)
    first = [make_result("base", 100), make_result("k=2", 200, k=2), make_result("k=3", 198, k=3)]
    assert {spec.name for spec in search.next_pass(swept, first, 2)} == {"base", "k=2", "k=3"}
    results = [
        *make_launches("base", 100, 110, 121),
        *make_launches("k=2", 200, 220.2, 242.1, k=2),
        *make_launches("k=3", 150, 165.1, 181.4, k=3),
    ]
    selection = search.select(swept, results)
    assert name_of(selection) == "k=2"
    assert selection.decided, "the machine became faster by 10% in every pass, and the speed-up is held within passes"
    constrained = make_experiment(
        variants={"base": {CONFIG: None}},
        baseline="base",
        objective=Objective(metric=RATE, constraints=[f"{WORKLOAD}/speedup >= 1.8"]),
        launches=3,
    )
    assert search.select(constrained, results).excluded["k=3"].startswith(f"{WORKLOAD}/speedup >= 1.8: is 1.5")
    assert search.value_for_sampler(swept, first, first[1]) == pytest.approx(2.0)


def test_there_is_no_speedup_over_an_invalid_baseline() -> None:
    invalid = make_result("base", 10, 10.1, 10.2, level=Level.INVALID, codes=["gpu_shared"])
    fast = make_result("k=2", 200, 201, 202, k=2)
    _, compared = search.with_campaign_metrics([invalid, fast], sweep())
    assert compared.measurements[WORKLOAD].metrics["speedup"] is None
    assert search.select(sweep(), [invalid, fast]).best is None


def test_drift_of_the_machine_is_noted_with_its_size() -> None:
    draw = random.Random(1)
    results = [
        result
        for k in (2, 3, 4)
        for result in make_launches(
            f"k={k}", *(100 * k * (1 + 0.03 * n) * (1 + draw.uniform(-0.001, 0.001)) for n in range(3)), k=k
        )
    ]
    (note,) = [note for note in search.select(AGAIN, results).notes if note.startswith("machine_drifted")]
    assert "+6.0%" in note
    steady = [*make_launches("a", 100, 101, 100, k=2), *make_launches("b", 200, 201, 202, k=3)]
    assert not [note for note in search.select(AGAIN, steady).notes if note.startswith("machine_drifted")]


def test_an_arm_that_is_plainly_noisier_is_compared_with_its_own_noise_and_named() -> None:
    draw = random.Random(3)
    results = [
        result
        for k in range(1, 7)
        for result in make_launches(f"k={k}", *(100 + k + draw.uniform(-0.2, 0.2) for _ in range(5)), k=k)
    ]
    results += make_launches("wild", 140, 80, 125, 70, 150, k=8)
    selection = search.select(make_experiment(launches=5), results)
    assert any(note.startswith("noisy_launches: the launches of wild differ by") for note in selection.notes)
    assert "wild" in (*selection.rivals, name_of(selection))


def test_baseline_is_in_every_pass_and_a_decided_campaign_ends() -> None:
    swept = make_experiment(variants={"base": {CONFIG: None}}, baseline="base", launches=5)
    first = [make_result("base", 10), make_result("k=2", 200, k=2), make_result("k=3", 202, k=3)]
    first += [make_result(f"k={k}", 201 - k, k=k) for k in (4, 5)]
    assert "base" in {spec.name for spec in search.next_pass(swept, first, 2)}
    decided = [*make_launches("A", 200, 201, k=4), *make_launches("B", 100, 100.4, k=2), make_result("C", 90, k=3)]
    assert search.next_pass(make_experiment(launches=5), decided, 3) == []
    assert search.next_pass(make_experiment(launches=1), decided, 2) == []


def test_the_critical_values_are_those_of_the_published_tables() -> None:
    """Dunnett (1955), table 1a: one-sided 5%, six comparisons with 12 degrees of freedom, and with infinitely many."""
    assert dunnett_point(0.05, 6, 12) == pytest.approx(2.58, abs=0.01)
    assert dunnett_point(0.05, 6, math.inf) == pytest.approx(2.29, abs=0.01)
    assert dunnett_point(0.05, 1, 10) == pytest.approx(1.812, abs=0.001)


def test_the_fit_is_that_of_least_squares_and_knows_what_it_cannot_know() -> None:
    draw = np.random.default_rng(0)
    observations = [
        Observation(arm=arm, pass_number=number, value=float(arm + 0.3 * number + draw.normal(0, 0.1)))
        for arm in range(5)
        for number in range(3)
        if number == 0 or (arm + number) % 4
    ]
    design = np.zeros((len(observations), 7))
    for row, each in enumerate(observations):
        design[row, each.arm] = 1
        design[row, 4 + each.pass_number] += each.pass_number > 0
    values = np.array([each.value for each in observations])
    solution, squares, *_ = np.linalg.lstsq(design, values, rcond=None)
    fit = fit_launches(observations)
    assert np.diff(fit.estimates) == pytest.approx(np.diff(solution[:5]))
    assert fit.freedom == len(values) - 7
    assert fit.launch_sd == pytest.approx(math.sqrt(squares[0] / fit.freedom))
    covariance = np.linalg.inv(design.T @ design)
    variance = covariance[1, 1] + covariance[3, 3] - 2 * covariance[1, 3]
    assert fit.errors()[0][1, 3] == pytest.approx(fit.launch_sd * math.sqrt(variance))
    # No pass holds both an arm of the first two and one of the last two.
    apart = [Observation(arm=a, pass_number=a // 2, value=float(a)) for a in (0, 1, 2, 3) for _ in range(2)]
    assert math.isinf(fit_launches(apart).errors()[0][0, 2])


@pytest.mark.parametrize("known", ["p95", "max"])
def test_a_p99_of_too_few_requests_is_given_as_what_the_sample_can_tell(known: str) -> None:
    """The early-stopping rule of MLPerf LoadGen: 459 requests have a p99, 90 a p95."""
    experiment = make_experiment(objective=Objective(metric=f"{WORKLOAD}/ttft_p99_s", mode="min"), launches=3)
    results = [
        make_result(
            name,
            measurements={WORKLOAD: make_measurement(**{f"ttft_{known}_s": Quantity(value=value, n=300)})},
            k=k,
            pass_number=number,
        )
        for name, k, values in (("slow", 2, (3.0, 3.1, 3.05)), ("quick", 4, (1.0, 1.1, 1.05)))
        for number, value in enumerate(values, start=1)
    ]
    selection = search.select(experiment, results)
    assert name_of(selection) == "quick"
    assert f"ttft_{known}_s" in selection.reason
    (note,) = [note for note in selection.notes if "459" in note]
    assert f"is given as {WORKLOAD}/ttft_{known}_s: a p99 needs 459 requests" in note
    bounded = make_experiment(objective=Objective(metric=RATE, constraints=[f"{WORKLOAD}/ttft_p99_s <= 2"]))
    two = make_measurement(decode_tok_s=(100.0,), ttft_max_s=Quantity(value=1.5, n=900))
    kept = search.select(bounded, [make_result("kept", measurements={WORKLOAD: two})])
    assert name_of(kept) == "kept"
    assert any("stands for the maximum of 900: no launch has a p99" in note for note in kept.notes)


def test_the_name_of_a_workload_is_no_quantile() -> None:
    name = "load_p99"
    tails = make_measurement(ttft_max_s=Quantity(value=1.0, n=10))
    spec = make_spec("a", workloads=(name,))
    experiment = make_experiment(
        workloads=(name,),
        objective=Objective(metric=f"{name}/ttft_p99_s", mode="min", constraints=[f"{name}/ttft_p90_s <= 2"]),
    )
    selection = search.select(experiment, [make_result(spec, measurements={name: tails})])
    assert f"{name}/ttft_max_s" in selection.reason
    assert any(f"{name}/ttft_p90_s stands for the maximum of 10: a p90 needs 44" in note for note in selection.notes)


def test_results_of_another_machine_are_left_out_by_name() -> None:
    gpu, cpu = {"gpus": ["NVIDIA H200 140 GiB"], "driver": "560"}, {"cpu": "AMD EPYC", "num_cpus": 2}
    results = make_launches("A", 200, 201, k=4, provenance=gpu) + make_launches("B", 100, 101, k=2, provenance=gpu)
    other = make_result("C", 900, k=6, provenance=cpu)
    again = replace(results[2], pass_number=3, provenance=cpu)
    selection = search.select(AGAIN, [*results, other, again])
    assert name_of(selection) == "A"
    assert selection.excluded["C"] == (
        "measured on another machine (2 x AMD EPYC, not 1 x NVIDIA H200 140 GiB, driver 560)"
    )
    assert any(note.startswith("B: launch 3 is left out: measured on another machine") for note in selection.notes)
