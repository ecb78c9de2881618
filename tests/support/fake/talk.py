"""How the tests talk to a stand-in: requests, their events, its counters, and measuring on a busy machine."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

DSPARK_6 = ("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 6}')


@dataclass(frozen=True, slots=True)
class FakeEngine:
    """A running stand-in. base_url has no /v1."""

    base_url: str
    port: int
    model: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str) -> str:
        """Body of a GET. Raises urllib's HTTPError for a status of 400 and more."""
        with urllib.request.urlopen(self.base_url + path, timeout=10) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, Any], api_key: str | None = None) -> str:
        """Whole body of a POST, streams included."""
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        request = urllib.request.Request(self.base_url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()


def chat(engine: FakeEngine, prompt: str = "Tell me about harbours.", tokens: int = 40, **more: Any) -> dict:
    return {
        "model": engine.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def ask(engine: FakeEngine, body: dict, api_key: str | None = None) -> str:
    return engine.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body, api_key)


def events(stream: str) -> list[dict]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def text_of(stream: str, field: str = "content") -> str:
    deltas = [event["choices"][0].get("delta", {}) for event in events(stream) if event.get("choices")]
    return "".join(delta.get(field) or "" for delta in deltas)


def shape(value: object) -> object:
    """The keys of a document, without its values."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in sorted(value.items())}
    return [shape(inner) for inner in value] if isinstance(value, list) else None


def counters(engine: FakeEngine) -> dict[str, float]:
    """Counter name -> sum over its labels; per-position counters as NAME[i]."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(engine.get("/metrics")):
        for sample in family.samples:
            position = sample.labels.get("position")
            name = sample.name.partition(":")[2] or sample.name
            name += f"[{position}]" if position else ""
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def timed(engine: FakeEngine, body: dict) -> tuple[list[float], dict, float]:
    """Arrival of each text event, the usage, and when the request was sent."""
    times, usage, sent = [], {}, time.monotonic()
    request = urllib.request.Request(engine.base_url + "/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {") and b'"content":"' in line and b'"role":"assistant"' not in line:
                times.append(time.monotonic())
            if b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
    return times, usage, sent


def nearest(want: float, measure: Callable[[], float]) -> float:
    """The nearest of three measurements: a busy machine delays this process, never the engine's schedule."""
    return min((measure() for _ in range(3)), key=lambda value: abs(value - want))


def ended(engine: FakeEngine, timeout: float = 20.0) -> int:
    return engine.process.wait(timeout=timeout)


def status(engine: FakeEngine, path: str) -> int | None:
    try:
        engine.get(path)
        return 200
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError):
        return None


def until(condition: Callable[[], bool], timeout: float = 15.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.05)
