"""The client against the stand-in engines: what it sends, when it stamps, and what it calls a failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Workload
from orchestrator.measure import formulas
from orchestrator.measure.client import Client, RequestError, Target, list_models, one_completion
from orchestrator.measure.formulas import Window
from orchestrator.measure.workload import SizedText, build_prompts
from tests.support.dialects import DIALECTS
from tests.support.fake.talk import FakeEngine


def run(engine: FakeEngine, workload: Workload, repeat: int = 0, **how: Any) -> Window:
    async def go() -> Window:
        async with Client(Target(base_url=engine.base_url, model=engine.model)) as client:
            texts = [SizedText(text=f"Tell me of day {i}.", tokens=None) for i in range(workload.num_prompts)]
            return await client.run(build_prompts(workload, "w", texts, repeat, "seed"), workload, repeat, **how)

    return asyncio.run(go())


def short(**changes: Any) -> Workload:
    return Workload(**{"num_prompts": 4, "output_tokens": 16, "stall_s": 20.0, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ["chat", "completion", "prefill", "tokens"])
def test_every_kind_of_request_on_every_engine(fake_engine: Callable[..., FakeEngine], dialect: str, kind: str) -> None:
    engine = fake_engine(dialect, tokens_per_s=2000.0)
    workload = short(kind=kind, num_prompts=2, prompt_tokens=20 if kind == "tokens" else None)
    window = run(engine, workload)
    assert [t.error for t in window.traces] == [None, None]
    for trace in window.traces:
        assert trace.completion_tokens == 16
        assert trace.prompt_tokens
        assert trace.finish_reason == "length"
        assert trace.text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_was_sent_is_what_the_trace_says(
    fake_engine: Callable[..., FakeEngine], dialect: str, tmp_path: Path
) -> None:
    engine = fake_engine(dialect, tokens_per_s=2000.0, record_requests=str(tmp_path / "requests"))
    window = run(engine, short(temperature=0.5, top_p=0.9, seed=7, ignore_eos=True))
    received = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    assert len(received) == 4
    for trace, request in zip(window.traces, received, strict=True):
        assert {name: request.get(name) for name in trace.sent} == dict(trace.sent)
        assert (request["temperature"], request["top_p"], request["seed"]) == (0.5, 0.9, 7)


@pytest.mark.slow
def test_decode_rate_is_the_engines_own_whatever_a_chunk_holds(fake_engine: Callable[..., FakeEngine]) -> None:
    for behaviour in ({}, {"tokens_per_chunk": 4}, {"comments": True, "crlf": True}, {"utf8_split": True}):
        engine = fake_engine("vllm", tokens_per_s=200.0, **behaviour)
        window = run(engine, short(num_prompts=5, output_tokens=64))
        rates = [formulas.decode_tok_s(trace) or 0.0 for trace in window.traces]
        # A busy machine disturbs some requests; a wrong formula would disturb all.
        assert min(rates, key=lambda rate: abs(rate - 200.0)) == pytest.approx(200.0, rel=0.03), (behaviour, rates)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "reasoning_details"])
def test_ttft_is_the_first_thought_and_content_is_told_apart(
    fake_engine: Callable[..., FakeEngine], field: str
) -> None:
    engine = fake_engine(
        "vllm",
        tokens_per_s=100.0,
        early_role=True,
        ttft_s=0.2,
        think_tokens=30,
        think_field=field,
        think_content="empty",
    )
    trace = run(engine, short(num_prompts=1, output_tokens=60)).traces[0]
    assert formulas.ttft_s(trace) == pytest.approx(0.2, abs=0.1)
    assert formulas.first_content_s(trace) == pytest.approx(0.5, abs=0.12)
    assert formulas.decode_tok_s(trace) == pytest.approx(100.0, rel=0.05)


def test_late_usage_does_not_lengthen_the_answer(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=400.0, usage="late", usage_delay_s=0.7)
    trace = run(engine, short(num_prompts=1, output_tokens=40)).traces[0]
    assert trace.completion_tokens == 40
    assert (formulas.e2e_s(trace) or 9.0) < 0.5
    assert formulas.decode_tok_s(trace) == pytest.approx(400.0, rel=0.1)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("error_object", ""),
        ("error_event", ""),
        ("done_only", "without a token"),
        ("empty", "without a token"),
        ("cut", "cut before its end"),
        ("reset", "Client"),
        ("http_400", "HTTP 400: "),
        ("http_429", "HTTP 429: "),
        ("http_500", "HTTP 500: "),
    ],
)
def test_every_way_to_fail_is_a_failure(fake_engine: Callable[..., FakeEngine], fault: str, error: str) -> None:
    engine = fake_engine("vllm", tokens_per_s=2000.0, faults={fault: 2})
    window = run(engine, short())
    failed = [trace for trace in window.traces if trace.error is not None]
    assert len(failed) == 2
    for trace in failed:
        assert trace.error
        assert error in trace.error
        assert "\n" not in trace.error


def test_a_server_that_is_gone_is_an_error_per_request(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm")
    engine.process.kill()
    engine.process.wait()
    window = run(engine, short(num_prompts=2))
    assert all(trace.error and "Connect" in trace.error for trace in window.traces)


def test_a_closed_loop_keeps_its_streams_busy_and_no_more(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=200.0)
    window = run(engine, short(num_prompts=9, concurrency=3, output_tokens=40))
    spans = [(t.sent_s, t.chunk_times_s[-1]) for t in window.traces]
    running = [sum(a <= start < b for a, b in spans) for start, _ in spans]
    assert max(running) == 3
    share = formulas.full_concurrency_share(window)
    assert share is not None
    assert share > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("arrival", ["constant", "poisson"])
def test_an_open_loop_starts_by_its_schedule_not_by_completions(
    fake_engine: Callable[..., FakeEngine], arrival: str
) -> None:
    engine = fake_engine("vllm", tokens_per_s=100.0)
    window = run(engine, short(num_prompts=12, request_rate=20.0, arrival=arrival, output_tokens=60))
    assert all(trace.error is None for trace in window.traces)
    lateness = [formulas.lateness_s(trace) or 0.0 for trace in window.traces]
    assert min(lateness) >= 0
    assert sorted(lateness)[6] < 0.02
    # Twelve answers of 0.6 s each would take 7 s one after the other.
    assert window.wall_s < 2.5
    assert window.concurrency is None


def test_a_request_without_a_token_ends_the_run_and_is_kept(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=500.0, hang={"after": 2, "seconds": 60})
    began = time.monotonic()
    window = run(engine, short(num_prompts=6, stall_s=0.8))
    assert time.monotonic() - began < 8
    assert window.stalled
    assert "no token for 0.8 s" in window.stalled
    assert [trace.error is None for trace in window.traces] == [True, True, False]
    assert window.traces[2].chunk_times_s


def test_what_the_watch_raises_ends_the_run(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=5.0)

    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    began = time.monotonic()
    with pytest.raises(Gone):
        run(engine, short(output_tokens=500), check=check)
    assert time.monotonic() - began < 6


def test_the_client_watches_itself(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=100.0)
    window = run(engine, short(num_prompts=1, output_tokens=100))
    assert 50 < len(window.loop_lags_s) < 150
    assert window.client_cpu_share is not None
    assert 0 < window.client_cpu_share < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_models_are_listed_with_or_without_v1(
    fake_engine: Callable[..., FakeEngine], dialect: str, suffix: str
) -> None:
    engine = fake_engine(dialect, model_id="a served name/x")
    assert list_models(engine.base_url + suffix) == ["a served name/x"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_completion_and_its_refusals(fake_engine: Callable[..., FakeEngine], dialect: str) -> None:
    engine = fake_engine(dialect)
    assert one_completion(Target(base_url=engine.base_url + "/v1", model=engine.model), 10.0) is True
    broken = fake_engine(dialect, completion_500_s=30.0)
    with pytest.raises(RequestError, match="HTTP 500"):
        one_completion(Target(base_url=broken.base_url, model=broken.model), 10.0)


def test_a_wrong_model_is_refused_in_the_servers_words(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm")
    with pytest.raises(RequestError, match="does not exist"):
        one_completion(Target(base_url=engine.base_url, model="/data/my models/x y"), 10.0)


def test_a_key_is_sent_and_asked_for(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", "--api-key", "secret")
    with pytest.raises(RequestError, match="HTTP 401"):
        list_models(engine.base_url)
    assert list_models(engine.base_url, "secret") == [engine.model]
    assert one_completion(Target(base_url=engine.base_url, model=engine.model, api_key="secret"), 10.0)


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(RequestError) as caught:
        list_models("http://127.0.0.1:9")
    assert "127.0.0.1:9" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tokens_are_counted_by_the_server(fake_engine: Callable[..., FakeEngine], dialect: str) -> None:
    engine = fake_engine(dialect)

    async def count() -> tuple[int | None, str | None]:
        async with Client(Target(base_url=engine.base_url, model=engine.model)) as client:
            return await client.count_tokens("abcd" * 50), await client.get("/no-such-page")

    assert asyncio.run(count()) == (50, None)
