"""Memory: what did not fit, by the phase of the start, and what to change in numbers."""

from __future__ import annotations

import pytest

from orchestrator.engines import ENGINES
from tests.support.failure_logs import (
    CAPTURED,
    CAPTURING,
    INFO,
    LOADED,
    LOADING,
    OOM,
    READY,
    SERVED,
    UNFIT,
    VLLM_MESSAGES,
    sglang_log,
    vllm_log,
)


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ([LOADING], "weights_too_large"),
        ([LOADING, LOADED], "out_of_memory_start"),
        ([LOADING, LOADED, CAPTURING], "graphs_too_large"),
        ([LOADING, LOADED, CAPTURING, CAPTURED], "out_of_memory_start"),
        ([LOADING, LOADED, CAPTURING, CAPTURED, READY, *[SERVED] * 10], "out_of_memory_load"),
    ],
)
def test_out_of_memory_is_reported_by_what_the_engine_was_doing(before: list[str], cause: str) -> None:
    found = ENGINES["vllm"].diagnose(vllm_log(OOM, *before), 1)
    assert (found.status, found.cause) == (UNFIT, cause)
    assert found.facts["oom_tried_gib"].value == 2.5
    if cause == "out_of_memory_load":
        assert found.facts["requests_served"].value == 10
        assert "after 10 answered requests" in found.summary


def test_the_first_runner_names_the_weights_itself() -> None:
    message = f"Failed to load model - not enough GPU memory. Try lowering x. (original error: {OOM})"
    assert ENGINES["vllm"].diagnose(vllm_log(message, LOADING), 1).cause == "weights_too_large"


def test_out_of_memory_in_mib() -> None:
    found = ENGINES["vllm"].diagnose(vllm_log(OOM.replace("2.50 GiB", "512.00 MiB"), LOADING), 1)
    assert found.facts["oom_tried_gib"].value == 0.5


def test_the_cache_pool_of_sglang_under_load() -> None:
    log = sglang_log(
        "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 4 tokens.",
        "[2026-11-29 14:27:53] The server is fired up and ready to roll!",
    )
    assert ENGINES["sglang"].diagnose(log, 1).cause == "out_of_memory_load"


def kv_message(needed: str, available: str, estimate: str | None = "1,003,520", apostrophe: str = "'s") -> str:
    hint = f" Based on the available memory, the estimated maximum model length is {estimate}." if estimate else ""
    return (
        f"ValueError: To serve at least one request with the model{apostrophe} max seq len (1048576), ({needed} GiB KV "
        f"cache is needed, which is larger than the available KV cache memory ({available} GiB).{hint} Try increasing"
    )


@pytest.mark.parametrize(
    ("message", "needed", "available", "estimate"),
    [
        (kv_message("14.56", "14.26"), 14.56, 14.26, 1003520),
        (kv_message("26", "3", None), 26, 3, None),
        (kv_message("1,026.33", "3.5", "96000", "s's"), 1026.33, 3.5, 96000),
        (kv_message("26.33", "-0.38", None), 26.33, -0.38, None),
    ],
)
def test_kv_messages_of_several_versions(message: str, needed: float, available: float, estimate: float | None) -> None:
    found = ENGINES["vllm"].diagnose(vllm_log(message), 1)
    assert found.cause == "kv_cache_too_small"
    assert found.facts["kv_needed_gib"].value == needed
    assert found.facts["kv_available_gib"].value == available
    assert found.facts["kv_shortfall_gib"].value == pytest.approx(needed - available)
    estimated = found.facts.get("max_len_estimate_tokens")
    assert (estimated.value if estimated else None) == estimate


SETTINGS = (
    "(APIServer pid=500) INFO 11-29 14:06:20 [utils.py:1] non-default args: {'max_model_len': 1048576, "
    "'gpu_memory_utilization': 0.95, 'max_num_batched_tokens': 8192}"
)


@pytest.mark.parametrize(
    ("switch", "words"),
    [
        ("enabled", "2 concurrent batches x max-num-batched-tokens 8,192 = 16,384 (no-async-scheduling halves it)"),
        ("disabled", "1 concurrent batches x max-num-batched-tokens 8,192 = 8,192"),
    ],
)
def test_the_kv_lever_counts_tokens_in_flight_before_context(switch: str, words: str) -> None:
    scheduling = f"(APIServer pid=500) INFO 11-29 14:06:20 [vllm.py:1] Asynchronous scheduling is {switch}."
    found = ENGINES["vllm"].diagnose(vllm_log(kv_message("14.56", "14.26"), SETTINGS, scheduling), 1)
    assert found.lever is not None
    assert words in found.lever
    assert "from 0.95 up by 0.01" in found.lever
    assert found.lever.index("in flight") < found.lever.index("0.01") < found.lever.index("context")


def test_the_utilisation_step_is_computed_where_the_size_of_the_gpu_is_known() -> None:
    total = (
        f"{INFO}Free memory on device (139.29/139.8 GiB) on startup. Desired GPU memory utilization is (0.95, 132.81 "
        "GiB). Actual usage is 92.9 GiB for weight, 2.91 GiB for peak activation, 0.23 GiB for non-torch memory, and "
        "0.24 GiB for CUDAGraph memory."
    )
    found = ENGINES["vllm"].diagnose(vllm_log(kv_message("14.56", "12.26"), SETTINGS, total), 1)
    # 2.3 GiB short, 1.398 GiB per hundredth: two hundredths.
    assert "from 0.95 to 0.97" in (found.lever or "")


def test_a_busy_gpu_is_reported_with_the_largest_utilisation_that_fits() -> None:
    message = next(m for m, cause in VLLM_MESSAGES if cause == "gpu_memory_busy")
    found = ENGINES["vllm"].diagnose(vllm_log(message), 1)
    assert "12.5 of 139.8 GiB free, 134.21 GiB wanted" in found.summary
    assert "127.3 GiB" in (found.lever or "")
    assert "0.08 or less" in (found.lever or "")
