"""Every fault that the stand-in is asked for is a real one: seen in its bytes, its counters or its processes."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.fake.talk import (
    DSPARK_6,
    FakeEngine,
    ask,
    chat,
    counters,
    ended,
    events,
    nearest,
    status,
    text_of,
    timed,
)

pytestmark = pytest.mark.slow

# --- streams that are wrong ------------------------------------------------------------------------------------------


def test_faults_of_a_stream(fake_engine: Callable[..., FakeEngine]) -> None:
    def broken(**faults: int) -> str:
        return ask(engine := fake_engine("vllm", faults=faults), chat(engine))

    stream = broken(error_object=1)
    assert "error" in events(stream)[-1]
    assert len([e for e in events(stream) if "error" not in e]) == 3
    assert stream.endswith("data: [DONE]\n\n")
    assert "event: error\ndata: {" in broken(error_event=1)
    assert broken(done_only=1) == "data: [DONE]\n\n"
    assert broken(empty=1) == ""
    cut = broken(cut=1)
    assert "[DONE]" not in cut
    assert len(events(cut)) == 3
    with pytest.raises((ConnectionError, http.client.IncompleteRead)):
        broken(reset=1)
    with pytest.raises(urllib.error.HTTPError):
        broken(http_400=1)


def test_every_nth_and_all_but_every_nth(fake_engine: Callable[..., FakeEngine]) -> None:
    def failures(every: int, **more: Any) -> list[int]:
        engine = fake_engine("vllm", faults={"done_only": every}, tokens_per_s=2000, ttft_s=0, **more)
        return [i for i in range(1, 7) if not events(ask(engine, chat(engine, tokens=3)))]

    assert failures(3) == [3, 6]
    assert failures(-3) == [1, 2, 4, 5]
    assert failures(1, faults_after=4) == [5, 6]


def test_usage_in_its_wrong_forms(fake_engine: Callable[..., FakeEngine]) -> None:
    def usage_events(kind: str) -> list[dict]:
        engine = fake_engine("vllm", usage=kind, usage_delay_s=0.2)
        return [e for e in events(ask(engine, chat(engine))) if e.get("usage")]

    assert usage_events("none") == []
    assert [e["choices"] for e in usage_events("null_choices")] == [None]
    begun = time.monotonic()
    assert len(usage_events("late")) == 1
    assert time.monotonic() - begun > 0.2 + 39 / 200


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "reasoning_details"])
def test_reasoning_under_each_name(fake_engine: Callable[..., FakeEngine], field: str) -> None:
    engine = fake_engine("vllm", think_tokens=10, think_field=field, think_content="null")
    got = events(ask(engine, chat(engine, tokens=15)))
    thinking = [e["choices"][0]["delta"] for e in got if e["choices"] and field in e["choices"][0]["delta"]]
    assert len(thinking) == 10
    assert all(delta["content"] is None for delta in thinking)


def test_tool_calls_and_grouped_chunks(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tool_call=True)
    got = events(ask(engine, chat(engine, tokens=5)))
    assert sum("tool_calls" in e["choices"][0]["delta"] for e in got if e["choices"]) == 5
    assert got[-2]["choices"][0]["finish_reason"] == "tool_calls"
    engine = fake_engine("vllm", tokens_per_chunk=3, tokens_per_s=100, continuous_usage=False)
    runs = iter([timed(engine, chat(engine, tokens=60)) for _ in range(3)])

    def tpot() -> float:
        times, usage, _ = next(runs)
        assert (len(times), usage["completion_tokens"]) == (20, 60)
        return (times[-1] - times[0]) / 57

    assert nearest(0.01, tpot) == pytest.approx(0.01, rel=0.03)


def test_ways_of_writing_change_no_text(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", text="prose", tokens_per_s=2000)
    body = chat(engine, tokens=300)
    plain = text_of(ask(engine, body))
    assert any(ord(letter) > 127 for letter in plain)
    for wish in ({"crlf": True}, {"utf8_split": True}, {"comments": True}, {"burst": 4}, {"early_role": True}):
        stream = ask(fake_engine("vllm", text="prose", tokens_per_s=2000, **wish), body)
        assert text_of(stream) == plain, wish
        assert ("\r\n" in stream) is ("crlf" in wish)
        assert (": keepalive" in stream) is ("comments" in wish)


def test_lengths(fake_engine: Callable[..., FakeEngine]) -> None:
    def finish(ignore_eos: bool, **wish: Any) -> tuple[int, str]:
        engine = fake_engine("vllm", tokens_per_s=2000, **wish)
        got = events(ask(engine, chat(engine, tokens=50, ignore_eos=ignore_eos)))
        return got[-1]["usage"]["completion_tokens"], got[-2]["choices"][0]["finish_reason"]

    assert finish(False, eos_tokens=20) == (20, "stop")
    assert finish(True, eos_tokens=20) == (50, "length")
    assert finish(True, short_output=20) == (20, "stop")


def test_looping_text_is_one_word(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", loop_text=True)
    assert set(text_of(ask(engine, chat(engine))).split()) == {"the"}


def test_first_touch_stalls_once_per_length(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", first_touch_s=0.4, ttft_s=0)

    def wait(prompt: str) -> float:
        times, _, sent = timed(engine, chat(engine, prompt, tokens=2))
        return times[0] - sent

    waits = [wait("a" * 400), wait("b" * 400), wait("c" * 4000)]
    assert [w > 0.35 for w in waits] == [True, False, True]
    assert engine.log.count("JIT compilation during inference") == 2


def test_a_hang_stops_the_tokens_but_not_the_health(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", hang={"after": 1, "seconds": 0.8}, tokens_per_s=1000)
    waits = []
    for _ in range(2):
        times, _, _ = timed(engine, chat(engine, tokens=20))
        waits.append(max(b - a for a, b in itertools.pairwise(times)))
    assert waits[0] < 0.4
    assert waits[1] > 0.75


# --- counters that are wrong -----------------------------------------------------------------------------------------


def test_counters_can_start_again(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", counter_reset_after=2)
    ask(engine, chat(engine))
    before = counters(engine)
    ask(engine, chat(engine, "again"))
    after = counters(engine)
    assert (before["generation_tokens_total"], after["generation_tokens_total"]) == (40, 0)
    assert after["process_start_time_seconds"] > before["process_start_time_seconds"]


def test_acceptance_can_collapse(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", *DSPARK_6, collapse_after=1)
    ask(engine, chat(engine, tokens=100))
    before = counters(engine)
    ask(engine, chat(engine, "again", tokens=100))
    after = counters(engine)
    accepted, drafts = "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"
    assert before[accepted] / before[drafts] > 3.5
    assert (after[accepted] - before[accepted]) / (after[drafts] - before[drafts]) < 0.5


def test_synthetic_acceptance_is_the_one_asked_for(fake_engine: Callable[..., FakeEngine]) -> None:
    config = {"method": "dspark", "num_speculative_tokens": 6, "rejection_sample_method": "synthetic"}
    engine = fake_engine("vllm", "-sc", json.dumps(config | {"synthetic_acceptance_length": 3.5}))
    ask(engine, chat(engine, tokens=300))
    c = counters(engine)
    by_position = [c[f"spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(6)]
    drafts = c["spec_decode_num_drafts_total"]
    assert [n / drafts for n in by_position] == pytest.approx([1, 1, 0.5, 0, 0, 0], abs=0.05)


def test_pages_of_several_engines_and_other_spellings(fake_engine: Callable[..., FakeEngine]) -> None:
    wish = {
        "engines": 2,
        "rename_metrics": {"kv_cache_usage_perc": "gpu_cache_usage_perc"},
        "drop_metrics": ["prefix_cache"],
    }
    engine = fake_engine("vllm", *DSPARK_6, **wish)
    ask(engine, chat(engine, tokens=50))
    page = engine.get("/metrics")
    assert 'engine="1"' in page
    assert "vllm:gpu_cache_usage_perc{" in page
    assert "prefix_cache" not in page.replace("prefix_caching", "").replace("external_", "")
    c = counters(engine)
    assert c["generation_tokens_total"] == 50
    assert c["spec_decode_num_draft_tokens_total"] == 6 * c["spec_decode_num_drafts_total"]


@pytest.mark.parametrize(
    ("wish", "want"), [("works", {"success": True}), ("refused", {"success": False}), ("empty", None)]
)
def test_cache_reset(fake_engine: Callable[..., FakeEngine], wish: str, want: dict[str, bool] | None) -> None:
    engine = fake_engine("vllm", cache_reset=wish, env={"VLLM_SERVER_DEV_MODE": "1"})
    prompt = chat(engine, "word " * 200, tokens=2)
    ask(engine, prompt)
    answer = engine.post("/reset_prefix_cache", {})
    assert (json.loads(answer) if answer else None) == want
    ask(engine, prompt)
    assert (counters(engine)["prefix_cache_hits_total"] == 0) is (wish == "works")
    assert status(fake_engine("vllm"), "/reset_prefix_cache") == 404


# --- processes that are wrong ----------------------------------------------------------------------------------------


def test_running_out_of_memory_under_load(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", oom_after=2)
    ask(engine, chat(engine))
    ask(engine, chat(engine, "again"))
    assert ended(engine) == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in engine.log


def test_it_can_be_killed_from_outside(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", die_after_s=0.3)
    assert ended(engine) == -signal.SIGKILL


def test_children_that_ignore_sigterm_outlive_it(fake_engine: Callable[..., FakeEngine], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    engine = fake_engine("vllm", ignore_sigterm=True, children=str(pids))
    child, grandchild = (psutil.Process(int(pid)) for pid in pids.read_text(encoding="utf-8").split())
    try:
        engine.process.terminate()
        time.sleep(0.5)
        assert engine.process.poll() is None
        assert child.ppid() == engine.pid
        assert grandchild.ppid() != engine.pid
        engine.process.kill()
        assert ended(engine) == -signal.SIGKILL
        for process in (child, grandchild):
            process.terminate()
        time.sleep(0.3)
        assert child.is_running()
        assert grandchild.is_running()
    finally:
        for process in (child, grandchild):
            process.kill()


def test_a_file_stays_in_shared_memory(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", shm_file=True)
    path = Path(f"/dev/shm/fake_engine_{engine.pid}")
    engine.process.terminate()
    assert ended(engine) == 0
    try:
        assert path.is_file()
    finally:
        path.unlink()


def test_what_was_sent_is_recorded(fake_engine: Callable[..., FakeEngine], tmp_path: Path) -> None:
    record = tmp_path / "requests.jsonl"
    engine = fake_engine("sglang", record_requests=str(record))
    ask(engine, chat(engine, tokens=2, temperature=0, seed=7))
    sent = json.loads(record.read_text(encoding="utf-8"))
    assert (sent["temperature"], sent["seed"], sent["path"]) == (0, 7, "/v1/chat/completions")
    assert "harbours" in sent["prompt"]


def test_a_stranger_answers_to_any_name_without_a_key(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", stranger=True, env={"VLLM_API_KEY": "secret"})
    assert json.loads(engine.get("/v1/models"))["data"][0]["id"] == "stranger-7b"
    assert events(ask(engine, chat(engine, tokens=3)))[-1]["usage"]["completion_tokens"] == 3
