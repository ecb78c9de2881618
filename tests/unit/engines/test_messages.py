"""Every sentence that has a rule, in the frame of a recorded failure, and how a contributor adds one."""

from __future__ import annotations

import pytest

from orchestrator.engines import ENGINES
from orchestrator.engines.diagnosis import explain
from orchestrator.engines.diagnosis.causes import CAUSES, Cause
from orchestrator.engines.diagnosis.facts import expression
from orchestrator.engines.diagnosis.rules import RULES, Rule
from orchestrator.outcome import TrialStatus
from tests.support.failure_logs import (
    INFRASTRUCTURE,
    LLAMA_MESSAGES,
    RECORDED_FAILURES,
    SGLANG_MESSAGES,
    VLLM_MESSAGES,
    sglang_log,
    vllm_log,
)
from tests.support.paths import RECORDED
from tests.support.toy_engine import Toy

# Caused by the program around the engine, never read from a log.
FROM_OUTSIDE = {
    *("gpu_busy", "not_released", "no_token", "no_successful_request", "machine", "configuration", "clearly_worse"),
    "trial_process_lost",
    "node_lost",
    "not_placed",
    "internal_error",
}


@pytest.mark.parametrize(
    ("message", "cause"), VLLM_MESSAGES, ids=[f"{c}-{i}" for i, (_, c) in enumerate(VLLM_MESSAGES)]
)
def test_vllm_messages(message: str, cause: str) -> None:
    found = ENGINES["vllm"].diagnose(vllm_log(message), 1)
    assert found.cause == cause
    assert found.status == CAUSES[cause].status
    assert "Engine core initialization failed" not in (found.evidence or "")
    assert found.evidence is not None
    assert " ".join(message.split())[:40] in found.evidence
    assert "{" not in found.summary + (found.lever or "")


@pytest.mark.parametrize(("message", "cause"), SGLANG_MESSAGES, ids=[c for _, c in SGLANG_MESSAGES])
@pytest.mark.parametrize("rank", ["", " TP1", " DP0 TP1"])
def test_sglang_messages(message: str, cause: str, rank: str) -> None:
    found = ENGINES["sglang"].diagnose(sglang_log(message, rank=rank), 1)
    assert (found.status, found.cause) == (CAUSES[cause].status, cause)
    assert message.split("\n")[0][:40] in (found.evidence or "")


def test_an_assertion_without_words_is_reported_by_its_source_line() -> None:
    log = sglang_log("AssertionError").replace(
        "    scheduler = Scheduler(", "    assert self.total_num_heads % tp_size == 0"
    )
    assert ENGINES["sglang"].diagnose(log, 1).cause == "heads_not_divisible"


@pytest.mark.parametrize(
    ("message", "cause"), LLAMA_MESSAGES, ids=[f"{c}-{i}" for i, (_, c) in enumerate(LLAMA_MESSAGES)]
)
def test_llamacpp_messages(message: str, cause: str) -> None:
    log = f"0.00.000.944 I srv  llama_server: initializing ...\n{message}\n0.00.400.000 I srv    exiting due to error\n"
    found = ENGINES["llamacpp"].diagnose(log, 1)
    assert (found.status, found.cause) == (CAUSES[cause].status, cause)


def test_a_missing_module_names_the_package_that_provides_it() -> None:
    found = ENGINES["vllm"].diagnose(vllm_log("ModuleNotFoundError: No module named 'cutlass.cute'"), 1)
    assert "cutlass.cute" in found.summary
    assert "nvidia-cutlass-dsl" in (found.lever or "")
    started = ENGINES["sglang"].diagnose("/opt/bin/python: No module named sglang\n", 1)
    assert (started.cause, started.status) == ("module_missing", INFRASTRUCTURE)


def test_a_mistyped_flag_is_reported_with_the_nearest_that_the_usage_in_the_log_has() -> None:
    text = (RECORDED / "vllm_cpu_fail_bad_flag.log").read_text(encoding="utf-8")
    found = ENGINES["vllm"].diagnose(text.replace("--no-such-flag", "--max-model-length"), 2)
    assert "did you mean --max-model-len?" in (found.lever or "")


def test_a_refused_choice_stays_one_readable_sentence() -> None:
    choices = ", ".join(f"'parser_{number}'" for number in range(200))
    log = f"usage: x [-h]\nx: error: argument --tool-call-parser: invalid choice: 'y' (choose from {choices})\n"
    found = ENGINES["vllm"].diagnose(log, 2)
    assert found.cause == "bad_value"
    assert "--tool-call-parser: invalid choice: 'y'" in found.summary
    assert len(found.summary) < 250


def test_every_cause_with_a_rule_is_tested_and_every_rule_has_a_cause() -> None:
    rows = [*VLLM_MESSAGES, *SGLANG_MESSAGES, *LLAMA_MESSAGES]
    tested = {cause for _, cause in rows} | {row[2] for row in RECORDED_FAILURES}
    tested |= {"command_missing", "draft_weights_missing"}
    tested |= {"weights_too_large", "out_of_memory_start", "graphs_too_large", "out_of_memory_load"}
    assert set(CAUSES) - FROM_OUTSIDE == tested
    assert {rule.code for rule in RULES} <= set(CAUSES) | {"out_of_memory"}


def test_a_new_cause_is_one_row_and_a_new_sentence_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Cause("wrong_shop", TrialStatus.REFUSED, "the engine does not take {flag}", "buy {flag} here")
    rule = Rule("wrong_shop", expression(r"(?P<flag>--\S+) came from another shop"))
    log = "toy-serve: --wheels came from another shop\n"
    assert Toy().diagnose(log, 1).cause == "unknown"
    monkeypatch.setitem(CAUSES, row.code, row)
    monkeypatch.setattr(explain, "RULES", (*RULES, rule))
    for engine in (*ENGINES.values(), Toy()):
        found = engine.diagnose(log, 1)
        assert (found.status, found.cause) == (TrialStatus.REFUSED, "wrong_shop")
        assert (found.summary, found.lever) == ("the engine does not take --wheels", "buy --wheels here")
        assert found.evidence == log.strip()
