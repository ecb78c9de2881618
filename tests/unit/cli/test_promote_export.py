"""`promote --export` asks the gate as `promote` does: only what was measured to its end leaves as files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import __main__ as program
from orchestrator import tracking
from orchestrator.outcome import TrialStatus
from tests.support.stand_in_service import record_campaign, service_experiment, stand_in_result


def promote(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["orchestrator", "promote", *words])
    return program.main()


@pytest.mark.slow
def test_a_failed_trial_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = service_experiment(tmp_path, "exported", 8000)
    failed = replace(
        stand_in_result(experiment, "broken"), status=TrialStatus.FAILED, cause="crashed", reason="it crashed"
    )
    [run_id] = record_campaign(experiment, failed)
    conf = str(tmp_path / "exported.yaml")
    assert promote(monkeypatch, conf, "--run", run_id, "--export", str(tmp_path / "out")) == 1
    assert "broken is not complete but failed (crashed): it crashed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_champion_is_exported_rather_than_the_best_of_the_last_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = service_experiment(tmp_path, "exported", 8000)
    served, faster = record_campaign(
        experiment, stand_in_result(experiment, "served"), stand_in_result(experiment, "faster", tokens_per_s=800.0)
    )
    conf = str(tmp_path / "exported.yaml")
    assert promote(monkeypatch, conf, "--export", str(tmp_path / "best")) == 0
    assert f"MLflow run {faster}" in (tmp_path / "best" / "serve.sh").read_text()
    tracking.set_champion(experiment, served)
    assert promote(monkeypatch, conf, "--export", str(tmp_path / "champion")) == 0
    assert f"MLflow run {served}" in (tmp_path / "champion" / "serve.sh").read_text()
