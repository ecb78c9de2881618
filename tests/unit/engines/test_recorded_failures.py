"""Recorded logs -> Diagnosis: every recorded failure, and no fault in a healthy log."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.engines import ENGINES
from orchestrator.outcome import Diagnosis, TrialStatus
from tests.support.failure_logs import COMPLETE, INFRASTRUCTURE, RECORDED_FAILURES, kind_of
from tests.support.paths import RECORDED


def recorded(name: str, exit_code: int | None = 1) -> Diagnosis:
    path = RECORDED / name
    return ENGINES[kind_of(path)].diagnose(path.read_text(encoding="utf-8"), exit_code)


@pytest.mark.parametrize(("name", "status", "cause", "evidence"), RECORDED_FAILURES)
def test_recorded_failures(name: str, status: TrialStatus, cause: str, evidence: str) -> None:
    found = recorded(name)
    assert (found.status, found.cause) == (status, cause)
    assert evidence in (found.evidence or "")
    assert found.summary
    assert found.lever


def test_every_recorded_failure_is_listed() -> None:
    assert {row[0] for row in RECORDED_FAILURES} == {path.name for path in RECORDED.glob("*_fail_*.log")}


def test_sglang_that_could_not_bind_is_given_up_though_it_hangs() -> None:
    log = (RECORDED / "sglang0517_cpu_fail_port_in_use.log").read_text(encoding="utf-8")
    # It said nothing more for 102 s, then its processes were ended from outside.
    hanging, ended, _ = log.partition("[2026-11-29 22:20:46]")
    assert ended
    assert ENGINES["sglang"].diagnose(hanging, None).cause == "port_taken"


def test_the_least_memory_fraction_is_reported() -> None:
    lever = recorded("sglang0517_cpu_fail_memory_fraction.log").lever
    assert lever == "raise mem-fraction-static from 0.001 to more than 0.017"


def test_a_flag_is_not_its_own_nearest() -> None:
    lever = recorded("sglang0517_cpu_fail_bad_flag.log").lever
    assert lever is not None
    assert "did you mean --no-such-flag" not in lever


def test_recorded_kv_failure_in_numbers() -> None:
    found = recorded("vllm_cpu_fail_maxlen_over_kv.log")
    numbers = {name: fact.value for name, fact in found.facts.items()}
    assert numbers["kv_needed_gib"] == 2.81
    assert numbers["kv_available_gib"] == 1.0
    assert numbers["kv_shortfall_gib"] == 1.81
    assert numbers["max_len_tokens"] == 131072
    assert numbers["max_len_estimate_tokens"] == 46464
    assert found.lever is not None
    assert "VLLM_CPU_KVCACHE_SPACE" in found.lever
    assert "46464" in found.lever


HEALTHY = sorted(path for path in RECORDED.glob("*.log") if "_fail_" not in path.name and "made_" not in path.name)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.name)
def test_a_healthy_log_with_warnings_reports_no_fault(path: Path) -> None:
    engine = ENGINES[kind_of(path)]
    text = path.read_text(encoding="utf-8")
    assert (engine.diagnose(text, None).status, engine.diagnose(text, None).cause) == (COMPLETE, None)
    for exit_code in (-15, -2, 143):
        ended = engine.diagnose(text, exit_code)
        assert (ended.status, ended.cause) == (INFRASTRUCTURE, "killed")
    assert engine.diagnose(text, 0).cause == "unknown"
