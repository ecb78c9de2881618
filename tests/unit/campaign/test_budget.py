"""The time budget of a campaign: it is forecast once, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.campaign.budget import TimeBudget
from orchestrator.campaign.launches import Event, Launch
from orchestrator.outcome import TrialStatus
from tests.support.campaigns import answer, drive, fault, k_sweep, open_checked


def test_budget_is_told_after_the_first_start_and_kept(tmp_path: Path) -> None:
    told: list[Event] = []
    with open_checked(k_sweep(tmp_path, time_budget_s=300.0), on_event=told.append) as running:
        assert drive(running, lambda launch: answer(launch, phases_s={"measuring": 400.0})) == ["k=2"]
        notes = [event.note for event in told if event.note]
        assert len(notes) == 1
        assert "k=6" in notes[0]
        assert [name for name, _ in running.skipped] == ["k=4", "k=6"]
        assert "300" in running.skipped[0][1]


@pytest.mark.slow
def test_no_budget_no_note(tmp_path: Path) -> None:
    told: list[Event] = []
    with open_checked(k_sweep(tmp_path), on_event=told.append) as running:
        drive(running, answer)
    assert not [event for event in told if event.note]


@pytest.mark.slow
def test_a_refused_start_does_not_count_as_the_time_of_a_trial(tmp_path: Path) -> None:
    (launch,) = plan_launches(tmp_path)
    budget = TimeBudget(1000.0)
    refused = fault(launch, TrialStatus.REFUSED, "unknown_flag")
    assert budget.forecast([refused], ["k=4"]) is None
    # The first complete trial is forecast, whatever was refused before; then nothing is said again.
    note = budget.forecast([refused, answer(launch, phases_s={"measuring": 400.0})], ["k=4", "k=6", "k=8"])
    assert note is not None
    assert "will not reach 1 of 3 trials still to start: k=8" in note
    assert budget.forecast([answer(launch, phases_s={"measuring": 900.0})], ["k=4", "k=6", "k=8"]) is None


def test_the_longest_trial_decides_whether_another_fits(tmp_path: Path) -> None:
    (launch,) = plan_launches(tmp_path)
    results = [answer(launch, phases_s={"measuring": seconds}) for seconds in (10.0, 400.0, 20.0)]
    assert TimeBudget(None).refusal(results) is None
    assert TimeBudget(500.0).refusal(results) is None
    assert TimeBudget(300.0).refusal(results) == "time budget: 0 of 300 s are spent and a trial takes up to 400 s"


def plan_launches(folder: Path) -> list[Launch]:
    with open_checked(k_sweep(folder, grid={})) as running:
        return list(running.launches)
