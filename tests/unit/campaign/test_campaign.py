"""The queue of a campaign: what runs next, what is tried again, what stops it, what wins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import search
from orchestrator.campaign.budget import TimeBudget
from orchestrator.campaign.launches import Launch
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from tests.support.builders import WORKLOAD, K
from tests.support.campaigns import NO_SPEC, answer, by_k, drive, fault, k_sweep, open_checked, runs

pytestmark = pytest.mark.slow


def test_every_point_is_started_once_and_the_best_is_named(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path, variants=NO_SPEC, baseline="no-spec")
    with open_checked(swept) as running:
        assert sorted(drive(running, by_k)) == ["k=2", "k=4", "k=6", "no-spec"]
        recorded, selection = running.finish()
    assert selection.best is not None
    assert selection.best.spec.name == "k=4"
    found = {r.result.spec.name: r.result for r in recorded}
    assert found["k=4"].measurements[WORKLOAD].metrics["speedup"].value == pytest.approx(2.8)
    pooled = search.pool_points(swept, list(found.values()))
    assert [r.spec.name for r in pooled] == ["no-spec", "k=2", "k=4", "k=6"], "as they are written"
    assert str(running.account()) == "4 planned: 4 started, 0 skipped"
    assert [status for _, status, _ in runs(swept)] == ["FINISHED"] * 4


def test_machine_at_fault_is_tried_again_and_every_attempt_is_recorded(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    faults = iter(["port_taken", "gpu_busy"])

    def respond(launch: Launch) -> TrialResult:
        cause = next(faults, None) if launch.spec.params[K] == 4 else None
        return fault(launch, TrialStatus.INFRASTRUCTURE, cause) if cause else by_k(launch)

    with open_checked(swept) as running:
        assert drive(running, respond) == ["k=2", "k=4", "k=6", "k=4", "k=4"]
        recorded, _ = running.finish()
    assert [r.result.status for r in recorded] == [TrialStatus.COMPLETE] * 3
    assert [run for run in runs(swept) if run[0] == "k=4"] == [
        ("k=4", "KILLED", "port_taken"),
        ("k=4", "KILLED", "gpu_busy"),
        ("k=4", "FINISHED", None),
    ]


@pytest.mark.parametrize(
    ("status", "cause", "num_starts"),
    [
        (TrialStatus.INFRASTRUCTURE, "gpu_busy", 3),
        (TrialStatus.FAILED, "missing_module", 3),
        # The engine's own answer to a value is a result each time, however alike.
        (TrialStatus.REFUSED, "unknown_flag", 6),
        (TrialStatus.UNFIT, "out_of_memory_load", 6),
    ],
)
def test_three_faults_alike_in_a_row_stop(tmp_path: Path, status: TrialStatus, cause: str, num_starts: int) -> None:
    # Points of which none is proven hopeless by another.
    points = {f"point {number}": {"engine.args.point": str(number)} for number in range(6)}
    with open_checked(k_sweep(tmp_path, grid={}, variants=points)) as running:
        assert len(drive(running, lambda launch: fault(launch, status, cause))) == num_starts
        assert (running.stopped is not None) == (num_starts == 3)
        if running.stopped:
            assert cause in running.stopped
            assert len(running.skipped) == 3
            assert all(why == running.stopped for _, why in running.skipped)


def test_faults_that_differ_do_not_stop(tmp_path: Path) -> None:
    reasons = iter(range(100))
    with open_checked(k_sweep(tmp_path, grid={K: [1, 2, 3, 4, 5]})) as running:
        drive(running, lambda launch: fault(launch, TrialStatus.FAILED, "crashed", f"at address {next(reasons)}"))
        assert running.stopped is None
        assert len(running.results) == 5


def test_passes_start_what_may_still_win_again_and_all_launches_decide(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path, launches=3)
    # In its first launch k=4 was lucky: seen alone, it is 8% ahead.
    rates = {2: [60.0, 60.0, 60.1], 4: [130.0, 99.0, 99.5], 6: [120.0, 119.5, 120.5]}

    def respond(launch: Launch) -> TrialResult:
        return answer(launch, rates[launch.spec.params[K]][launch.launch - 1])

    with open_checked(swept) as running:
        started = drive(running, respond)
        first = [result for result in running.ordered_results() if result.pass_number == 1]
        assert search.select(swept, first).best == by_name(first, "k=4")
        _, selection = running.finish()
    assert [sorted(started[i : i + 3]) for i in (0, 3)] == [["k=2", "k=4", "k=6"], ["k=2#2", "k=4#2", "k=6#2"]]
    # A pass has an order of its own, and k=2 has no chance left.
    assert sorted(started[6:]) == ["k=4#3", "k=6#3"]
    assert not selection.decided
    assert "k=6 or k=4" in selection.reason or "k=4 or k=6" in selection.reason


def test_campaign_ends_with_the_pass_that_decides(tmp_path: Path) -> None:
    with open_checked(k_sweep(tmp_path, variants=NO_SPEC, baseline="no-spec", launches=5)) as running:
        started = drive(running, lambda launch: by_k(launch, noise=0.001))
        _, selection = running.finish()
    assert selection.decided
    assert "ahead of k=6" in selection.reason
    assert "after it was singled out" in selection.reason
    # Three of the best again, and the baseline in every pass.
    assert len(started) == 4 + 4
    assert sum(name.startswith("no-spec") for name in started) == 2


def test_launch_is_named_after_its_point_where_the_first_one_does_not_count(tmp_path: Path) -> None:
    """It was named after the first launch that counts: k=4#2#3."""

    def respond(launch: Launch) -> TrialResult:
        spoilt = launch.spec.name == "k=4"
        level, codes = (Level.INVALID, ["gpu_shared"]) if spoilt else (Level.VALID, [])
        rate = 100 + random.Random(launch.spec.name).uniform(-3, 3)
        return answer(launch, rate, level=level, codes=codes)

    with open_checked(k_sweep(tmp_path, launches=4)) as running:
        drive(running, respond, most=3)
        # Somebody started it again all the same.
        running.enqueue([next(n.spec for n in running.launches if n.spec.name == "k=4")])
        names = drive(running, respond)
    assert "k=4#3" in names
    assert not [name for name in names if name.count("#") > 1]


def test_order_of_a_pass_is_random_and_the_same_again(tmp_path: Path) -> None:
    orders = []
    for seed in (0, 0, 1, 2):
        with open_checked(k_sweep(tmp_path, grid={K: list(range(1, 9))}, seed=seed)) as running:
            orders.append(tuple(launch.spec.name for launch in running.launches))
    assert orders[0] == orders[1]
    assert len(set(orders)) == 3


def test_time_budget_ends_a_campaign_between_passes(tmp_path: Path) -> None:
    with open_checked(k_sweep(tmp_path, launches=5, time_budget_s=3600.0)) as running:
        started = drive(running, lambda launch: by_k(launch, phases_s={"measuring": 1800.0 + launch.launch}), most=3)
        running.budget = TimeBudget(1.0)
        assert running.next_launch() is None
        assert len(started) == 3
        assert running.account().not_run == ()
        assert running.skipped == []
        _, selection = running.finish()
    assert any("no pass 2: time budget" in note for note in selection.notes)


def by_name(results: Sequence[TrialResult], name: str) -> TrialResult:
    return next(result for result in results if result.spec.name == name)


def test_hopeless_point_is_skipped_with_its_witness(tmp_path: Path) -> None:
    with open_checked(k_sweep(tmp_path, grid={"engine.args.max-model-len": [4096, 8192, 16384]})) as running:
        started = drive(
            running, lambda n: answer(n) if n.spec.params["engine.args.max-model-len"] == 4096 else unfit(n)
        )
        assert len(started) == 2
        assert len(running.skipped) == 1
        assert "did not fit" in running.skipped[0][1]
        assert "8192" in running.skipped[0][1]


def unfit(launch: Launch) -> TrialResult:
    return fault(launch, TrialStatus.UNFIT, "kv_cache_too_small")


def test_every_trial_is_held_against_the_best_so_far(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path, variants=NO_SPEC, baseline="no-spec", stop_early=True)
    with open_checked(swept) as running:
        launch = running.next_launch()
        assert launch is not None
        assert running.incumbent(launch) is None
        running.mark_started("0", launch)
        running.take_result(launch, by_k(launch))
        best = running.incumbent(launch)
        assert best is not None
        assert best.spec.name == launch.spec.name


def test_without_stop_early_there_is_no_incumbent(tmp_path: Path) -> None:
    with open_checked(k_sweep(tmp_path)) as running:
        drive(running, by_k)
        assert running.incumbent(running.launches[0]) is None


def test_what_is_started_again_is_measured_to_its_end(tmp_path: Path) -> None:
    with open_checked(k_sweep(tmp_path, stop_early=True, launches=2)) as running:
        drive(running, by_k, most=3)
        again = running.next_launch()
        assert again is not None
        assert again.pass_number == 2
        assert running.incumbent(again) is None


def test_pruned_trial_is_recorded_and_cannot_win(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path, stop_early=True)

    def respond(launch: Launch) -> TrialResult:
        result = by_k(launch)
        # Better than the rest, to show that its number is not even looked at.
        return replace(answer(launch, 900.0), status=TrialStatus.PRUNED) if launch.spec.params[K] == 6 else result

    with open_checked(swept) as running:
        drive(running, respond)
        _, selection = running.finish()
    assert selection.best is not None
    assert selection.best.spec.name == "k=4"
    assert ("k=6", "FINISHED", None) in runs(swept)


def test_interrupted_trial_is_not_a_result(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept) as running:
        drive(running, by_k, most=1)
        launch = running.next_launch()
        assert launch is not None
        running.mark_started("1", launch)
        running.interrupted = "SIGINT"
        running.take_result(launch, fault(launch, TrialStatus.INFRASTRUCTURE, "trial_process_lost"))
        assert running.next_launch() is None
        recorded, _ = running.finish()
        assert len(recorded) == 1
        finished = running.results
        assert [n.spec.name for n in running.launches if n.id not in finished] == ["k=4", "k=6"]
        assert running.account().not_run == ("k=6",)
        assert running.skipped == []
    assert runs(swept)[1] == ("k=4", "KILLED", "no_result")
