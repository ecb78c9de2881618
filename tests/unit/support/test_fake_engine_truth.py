"""The stand-in is true: its counters count what was served, and its rates are those that were set."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import aiohttp
import pytest

from tests.support.dialects import DIALECTS, SPEC_FLAGS
from tests.support.fake.behaviour import DEFAULT_ACCEPTANCE, Behaviour
from tests.support.fake.flags import parse
from tests.support.fake.model import Pace, PrefixCache
from tests.support.fake.talk import (
    DSPARK_6,
    FakeEngine,
    ask,
    chat,
    counters,
    events,
    nearest,
    text_of,
    timed,
)

pytestmark = pytest.mark.slow


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
