"""Metrics pages -> EngineStats: recorded pages against values read by hand, and what pages in the wild do."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest

from orchestrator.engines import ENGINES, EngineStats
from tests.support.paths import RECORDED


def read(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def stats(kind: str, page: str | None, server_info: dict[str, object] | None = None) -> EngineStats:
    return ENGINES[kind].stats(page, server_info)


def test_vllm_026_page() -> None:
    assert stats("vllm", read("vllm026_h200_dsv4_metrics.txt")) == EngineStats(
        prompt_tokens=172032,
        generation_tokens=6144,
        prefix_hit_tokens=0,
        drafts=1743,
        draft_tokens=10458,
        accepted_tokens=4403,
        accepted_by_position=(1743, 1743, 917, 0, 0, 0),
        preemptions=0,
        requests_running=0,
        requests_waiting=0,
        kv_tokens=511543,
        start_time_s=1.79596163646e09,
    )


def test_vllm_032_cpu_page() -> None:
    assert stats("vllm", read("vllm_cpu_metrics.txt")) == EngineStats(
        prompt_tokens=10735,
        generation_tokens=5320,
        prefix_hit_tokens=8064,
        drafts=878,
        draft_tokens=3512,
        accepted_tokens=2098,
        accepted_by_position=(602, 552, 493, 451),
        preemptions=0,
        requests_running=0,
        requests_waiting=0,
        kv_tokens=46592,
        start_time_s=1.79596073735e09,
    )


def test_sglang_0517_page_under_speculation() -> None:
    """On a CPU, whose missing kernels were stood in for; the scheduler, its counters and the page are the engine's."""
    info = json.loads(read("sglang0517_cpu_ngram_server_info.json"))
    seen = stats("sglang", read("sglang0517_cpu_ngram_metrics.txt"), info)
    assert seen == EngineStats(
        prompt_tokens=662,
        generation_tokens=596,
        prefix_hit_tokens=485,
        drafts=175,
        # Five draft tokens in SGLang's count are four proposals and the bonus token.
        draft_tokens=175 * 4,
        accepted_tokens=596 - 16 - 175,
        requests_running=0,
        requests_waiting=0,
        kv_tokens=20000,
        acceptance_length_gauge=4.5,
    )
    # The last request alone, as the engine itself tells it: its last step was cut at max_tokens, one token of it.
    told = json.loads(read("sglang0517_cpu_ngram_generate.json"))["meta_info"]
    delivered = told["completion_tokens"] - 1 - told["spec_verify_ct"]
    assert (delivered, told["spec_num_correct_drafts"]) == (235, 236)
    assert told["spec_num_proposed_drafts"] == 4 * told["spec_verify_ct"]


def test_llamacpp_page_counts_cached_prompt_tokens_like_the_others() -> None:
    assert stats("llamacpp", read("llama_ngmod_metrics.txt")) == EngineStats(
        prompt_tokens=874 + 3280,
        generation_tokens=2206,
        prefix_hit_tokens=3280,
        drafts=280,
        draft_tokens=2202,
        accepted_tokens=1400,
        accepted_by_position=(259, 242, 199, 189, 178, 142, 113, 78),
        requests_running=0,
        requests_waiting=0,
    )


SGLANG_PAGE = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 4000.0
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 96.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 2010.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 1.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="true",model_name="m"} 10.0
sglang:num_requests_total{is_streaming="false",model_name="m"} 1.0
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{model_name="m"} 500.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 64.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 32.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",tp_rank="0"} 3.7
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{dp_rank="0",tp_rank="0"} 1000.0
sglang:max_total_num_tokens{dp_rank="0",tp_rank="1"} 1000.0
sglang:max_total_num_tokens{dp_rank="1",tp_rank="0"} 900.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 1.0
"""


def test_sglang_acceptance_comes_from_counters() -> None:
    info = {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 6}
    seen = stats("sglang", SGLANG_PAGE, info)
    # 2,011 tokens, 11 of them from prefill, one per step: 1,500 of 2,500 proposed were accepted.
    assert (seen.drafts, seen.accepted_tokens, seen.draft_tokens) == (500, 1500, 2500)
    assert (seen.prompt_tokens, seen.generation_tokens, seen.prefix_hit_tokens) == (4096, 2011, 96)
    assert (seen.kv_tokens, seen.requests_running, seen.requests_waiting) == (1900, 1, None)


def test_sglang_server_info_goes_before_the_gauge_of_the_page() -> None:
    assert stats("sglang", SGLANG_PAGE).acceptance_length_gauge == 3.7
    info = {"internal_states": [{"avg_spec_accept_length": 2.5}]}
    assert stats("sglang", SGLANG_PAGE, info).acceptance_length_gauge == 2.5
    assert stats("sglang", "sglang:spec_accept_length 0.0\n").acceptance_length_gauge is None
    assert stats("sglang", "sglang:spec_accept_length NaN\n").acceptance_length_gauge is None


def test_sglang_without_speculation_or_counters_does_not_invent_acceptance() -> None:
    without = "\n".join(line for line in SGLANG_PAGE.splitlines() if "spec_verify" not in line) + "\n"
    seen = stats("sglang", without)
    assert (seen.drafts, seen.accepted_tokens, seen.draft_tokens) == (None, None, None)
    adaptive = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 6, "speculative_adaptive": True}
    assert stats("sglang", SGLANG_PAGE, adaptive).draft_tokens is None


def test_sglang_hits_that_were_never_counted_are_none_at_all() -> None:
    without = "\n".join(line for line in SGLANG_PAGE.splitlines() if "cached_tokens" not in line) + "\n"
    assert stats("sglang", without).prefix_hit_tokens == 0
    assert stats("sglang", "sglang:num_running_reqs 1.0\n").prefix_hit_tokens is None


RANKS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="org/\\"m\\" 7b"} 1.2e+06
vllm:spec_decode_num_drafts_created{engine="0",model_name="org/\\"m\\" 7b"} 1.7959618381273596e+09
vllm:spec_decode_num_drafts_total{engine="1",model_name="org/\\"m\\" 7b"} 3
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="10"} 1
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="2"} 5
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 7
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 40
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.79e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{engine="0",kv_cache_size_tokens="1000"} 1.0
vllm:cache_config_info{engine="1",kv_cache_size_tokens="2000"} 1.0
"""


def test_counters_are_summed_over_ranks_and_timestamps_are_no_counts() -> None:
    seen = stats("vllm", RANKS)
    assert seen.drafts == 1_200_003
    assert seen.accepted_by_position == (40, 0, 12, 0, 0, 0, 0, 0, 0, 0, 1)
    assert seen.kv_tokens == 3000


def test_old_and_new_names_of_the_prefix_cache() -> None:
    assert stats("vllm", "vllm:gpu_prefix_cache_hits_total 7.0\n").prefix_hit_tokens == 7
    assert stats("vllm", "vllm:prefix_cache_hits_total 7.0\n").prefix_hit_tokens == 7
    assert stats("vllm", "vllm:prompt_tokens_cached_total 7.0\n").prefix_hit_tokens == 7
    both = "vllm:prefix_cache_hits_total 7.0\nvllm:external_prefix_cache_hits_total 2.0\n"
    assert stats("vllm", both).prefix_hit_tokens == 9
    assert stats("vllm", "vllm:gpu_cache_usage_perc 0.5\n").prefix_hit_tokens is None


def test_a_described_counter_without_a_sample_is_zero_and_an_unknown_one_is_none() -> None:
    page = "# HELP vllm:num_preemptions_total x\n# TYPE vllm:num_preemptions_total counter\n"
    assert stats("vllm", page).preemptions == 0
    assert stats("vllm", page).drafts is None


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    "page",
    [None, "", "# nothing\n", "<html>404</html>", 'vllm:prompt_tokens_total{model_name="x', "other_total 4\n"],
)
def test_a_page_that_tells_nothing_is_all_none(kind: str, page: str | None) -> None:
    seen = stats(kind, page)
    assert {field.name: getattr(seen, field.name) for field in fields(seen)} == dict.fromkeys(
        (field.name for field in fields(seen)), None
    )


@pytest.mark.parametrize("kind", ENGINES)
def test_values_that_are_not_finite_never_come_through(kind: str) -> None:
    prefix = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}[kind]
    page = f"{prefix}:prompt_tokens_total NaN\n{prefix}:generation_tokens_total +Inf\nprocess_start_time_seconds NaN\n"
    seen = stats(kind, page)
    values = [getattr(seen, field.name) for field in fields(seen)]
    assert all(value is None or math.isfinite(value) for value in values)


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("vllm", "vllm_cpu_metrics.txt"),
        ("vllm", "vllm026_h200_dsv4_metrics.txt"),
        ("llamacpp", "llama_ngmod_metrics.txt"),
    ],
)
def test_positions_add_up_to_the_accepted_tokens(kind: str, page: str) -> None:
    seen = stats(kind, read(page))
    assert seen.accepted_by_position is not None
    assert sum(seen.accepted_by_position) == seen.accepted_tokens
