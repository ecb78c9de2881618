"""The stand-in writes what real engines wrote: the recorded streams, errors, metrics pages and log lines."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.dialects import DIALECTS, SPEC_FLAGS
from tests.support.fake import logs
from tests.support.fake.behaviour import Behaviour
from tests.support.fake.counters import Counters
from tests.support.fake.flags import parse
from tests.support.fake.generation import Job
from tests.support.fake.talk import (
    DSPARK_6,
    FakeEngine,
    ask,
    chat,
    counters,
    events,
    shape,
    status,
)
from tests.support.paths import FAKE_ENGINE, RECORDED


def test_every_key_is_documented() -> None:
    program = FAKE_ENGINE.read_text(encoding="utf-8").split('"""')[1]
    documented = set(re.findall(r"^  ([a-z0-9_]+) +\S", program, re.M))
    assert documented == {field.name for field in fields(Behaviour)}


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
