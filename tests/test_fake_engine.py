"""The stand-in must be true: its streams and pages have the recorded shapes, and its rates hold."""

from __future__ import annotations

import json


def events(stream: str) -> list[dict]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def test_vllm_stream_tells_its_usage(fake_engine):
    engine = fake_engine("vllm", "--speculative-config", '{"method":"dspark","num_speculative_tokens":6}')
    body = {"model": engine.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
    got = events(
        engine.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert got[-1]["usage"]["completion_tokens"] == 40
    assert "vllm:generation_tokens_total" in engine.get("/metrics")
