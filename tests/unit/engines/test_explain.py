"""Which of several errors is the cause, what an exit code proves, and what a running engine reports."""

from __future__ import annotations

import pytest

from orchestrator.engines import ENGINES
from orchestrator.outcome import TrialStatus
from tests.support.failure_logs import (
    COMPLETE,
    FAILED,
    INFRASTRUCTURE,
    LOADED,
    LOADING,
    OOM,
    READY,
    sglang_log,
    vllm_log,
)


def test_a_harmless_import_error_does_not_hide_the_cause() -> None:
    early = vllm_log("ModuleNotFoundError: No module named 'flashinfer'")
    found = ENGINES["vllm"].diagnose(early + vllm_log(OOM, LOADING), 1)
    assert found.cause == "weights_too_large"


def test_the_first_of_two_causes_is_reported() -> None:
    heads = "ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (2)."
    found = ENGINES["vllm"].diagnose(vllm_log(heads) + vllm_log(OOM, LOADING), 1)
    assert found.cause == "heads_not_divisible"
    assert found.summary == "9 attention heads cannot be split over 2 GPUs"


def test_a_warning_with_the_words_of_a_cause_is_no_cause() -> None:
    warning = (
        "(APIServer pid=500) WARNING 11-29 14:06:20 [model.py:2660] User-specified max_model_len (131072) is greater "
        "than the derived max_model_len (max_position_embeddings=8192.0"
    )
    assert ENGINES["vllm"].diagnose(vllm_log("RuntimeError: something new", warning), 1).cause == "unknown"


def test_unknown_stays_unknown_with_the_first_traceback() -> None:
    found = ENGINES["vllm"].diagnose(vllm_log("RuntimeError: something new"), 1)
    assert (found.status, found.cause) == (FAILED, "unknown")
    assert found.summary.endswith("RuntimeError: something new")
    assert found.evidence is not None
    assert found.evidence.startswith("Traceback (most recent call last):")
    assert "run_engine_core" in found.evidence
    assert "Engine core initialization failed" not in found.evidence


def test_an_exception_with_its_message_below_is_reported_whole() -> None:
    found = ENGINES["vllm"].diagnose(
        vllm_log("RuntimeError: \n\n        Something of ours\n        was lost.\n\nMore."), 1
    )
    assert found.summary.endswith("no name yet: RuntimeError: Something of ours was lost.")
    assert "was lost." in (found.evidence or "")


def test_a_log_that_only_says_that_something_failed_names_no_cause() -> None:
    log = "Traceback (most recent call last):\n  File 'x'\nRuntimeError: Engine core initialization failed. See root\n"
    found = ENGINES["vllm"].diagnose(log, 1)
    assert found.summary == "the engine ended and its log names no cause (exit code 1)"
    assert "Engine core initialization failed" in (found.evidence or "")


def test_of_a_chain_the_first_exception_is_reported() -> None:
    chain = (
        "Traceback (most recent call last):\n  File 'a.py', line 1\n    f()\nKeyError: 'root'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 'b.py', line 2\n    g()\nRuntimeError: wrapped\n"
    )
    found = ENGINES["vllm"].diagnose(chain, 1)
    assert "KeyError: 'root'" in found.summary
    assert "RuntimeError: wrapped" in (found.evidence or "")


@pytest.mark.parametrize(
    ("exit_code", "status", "cause", "word"),
    [
        (-9, INFRASTRUCTURE, "killed", "SIGKILL"),
        (137, INFRASTRUCTURE, "killed", "SIGKILL"),
        (-15, INFRASTRUCTURE, "killed", "SIGTERM"),
        (-11, FAILED, "crashed", "SIGSEGV"),
        (139, FAILED, "crashed", "SIGSEGV"),
        (-6, FAILED, "crashed", "SIGABRT"),
        (-4, FAILED, "crashed", "SIGILL"),
        (127, INFRASTRUCTURE, "command_missing", "program"),
        (126, INFRASTRUCTURE, "command_missing", "program"),
        (1, FAILED, "unknown", "exit code 1"),
        (0, FAILED, "unknown", "exit code 0"),
        (255, FAILED, "unknown", "exit code 255"),
    ],
)
@pytest.mark.parametrize("kind", ENGINES)
def test_exit_codes_where_the_log_reports_nothing(
    kind: str, exit_code: int, status: TrialStatus, cause: str, word: str
) -> None:
    found = ENGINES[kind].diagnose("starting\n", exit_code)
    assert (found.status, found.cause) == (status, cause)
    assert word in found.summary
    assert ENGINES[kind].diagnose("", exit_code).cause == cause


def test_ranks_that_an_error_took_along_do_not_hide_it() -> None:
    log = sglang_log("RuntimeError: something new") + (
        "[2026-11-29 14:27:54] Subprocess detokenizer (pid=7) crashed with exit code -9. Triggering SIGQUIT\n"
        "Traceback (most recent call last):\n  File 'x'\n"
        "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9).\n"
    )
    found = ENGINES["sglang"].diagnose(log, -9)
    assert found.cause == "unknown"
    assert "something new" in found.summary


def test_the_process_that_was_killed_is_named() -> None:
    message = "RuntimeError: Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."
    assert "SIGKILL to Worker proc VllmWorker-1" in ENGINES["vllm"].diagnose(message, 1).summary


def test_sglang_errors_without_a_level_are_heard() -> None:
    line = "[2026-11-29 14:27:54] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT\n"
    found = ENGINES["sglang"].diagnose(line, -3)
    assert (found.status, found.cause) == (INFRASTRUCTURE, "killed")
    assert "SIGKILL to Subprocess scheduler_0" in found.summary


def test_a_signal_after_a_known_error_is_that_error() -> None:
    assert ENGINES["vllm"].diagnose(vllm_log(OOM, LOADING), -9).cause == "weights_too_large"


DRAFT_LINES = [
    ("sglang", "[2026-11-29 14:27:42 TP0] DSpark V4 draft: unexpected weight 'mtp.0.ffn.shared_experts.w1' -> 'x'"),
    ("sglang", "[2026-11-29 14:27:42] Eagle3 MLA: skipping unexpected weight midlayer.x"),
    ("vllm", "(Worker pid=7) WARNING 11-29 14:06:20 [x.py:1] Draft model weights not initialized: lm_head"),
]


@pytest.mark.parametrize(("kind", "line"), DRAFT_LINES)
def test_draft_weights_that_were_not_loaded_are_reported_by_a_running_engine(kind: str, line: str) -> None:
    found = ENGINES[kind].diagnose(f"{line}\n{line}\n", None)
    assert (found.status, found.cause) == (COMPLETE, "draft_weights_missing")
    assert found.facts["draft_weights_lost"].value == 2
    assert found.lever


def test_a_front_end_that_outlives_its_engine_is_not_healthy() -> None:
    dying = vllm_log(OOM, LOADING, LOADED, READY).replace("failed to start", "encountered a fatal error")
    assert ENGINES["vllm"].diagnose(dying, None).cause == "out_of_memory_load"
    stopping = vllm_log("ModuleNotFoundError: No module named 'x'", READY)
    assert ENGINES["vllm"].diagnose(stopping, None).cause is None
