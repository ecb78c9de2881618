"""The same contract for every engine module, over the stand-in program in the engine's own dialect."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import EngineSpec
from orchestrator.engines import ENGINES, EngineStats, LaunchPlan
from orchestrator.engines.diagnosis.causes import CAUSES
from orchestrator.outcome import Diagnosis, TrialStatus
from tests.support.paths import ROOT

SPECULATION: dict[str, dict[str, Any]] = {
    "vllm": {"speculative-config": {"method": "dspark", "num_speculative_tokens": 5}},
    "sglang": {"speculative-algorithm": "DSPARK", "speculative-num-draft-tokens": 6},
    "llamacpp": {"spec-type": "draft-dspark", "spec-draft-n-max": 5},
}
COUNTS = ("prompt_tokens", "generation_tokens", "drafts", "accepted_tokens")


@dataclass(frozen=True, slots=True)
class Running:
    """A stand-in that was started from a LaunchPlan, with a key told as the plan says."""

    kind: str
    plan: LaunchPlan
    process: subprocess.Popen[bytes]
    key: str

    def get(self, path: str) -> str:
        return self._ask(urllib.request.Request(self.plan.base_url + path))

    def complete(self) -> dict[str, Any]:
        body = {"model": self.plan.model_name, "prompt": "Review this code. " * 20, "max_tokens": 32}
        request = urllib.request.Request(f"{self.plan.base_url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return json.loads(self._ask(request))

    def _ask(self, request: urllib.request.Request) -> str:
        request.add_header("Authorization", f"Bearer {self.key}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read().decode()

    def stats(self) -> EngineStats:
        engine = ENGINES[self.kind]
        info = json.loads(self.get(engine.server_info_path)) if engine.server_info_path else None
        return engine.stats(self.get("/metrics"), info)

    def diagnose(self, exit_code: int | None) -> Diagnosis:
        text = self.plan.log_path.read_text(encoding="utf-8", errors="replace")
        return ENGINES[self.kind].diagnose(text, exit_code)


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path, engine_command: Callable[[str], list[str]], free_port: Callable[[], int]) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(
        kind: str, args: dict[str, Any] | None = None, wait: bool = True, port: int | None = None, **behaviour: Any
    ) -> Running:
        spec = EngineSpec(
            kind=kind,
            model="org/model",
            served_model_name="served",
            command=engine_command(kind),
            args=args or {},
            env={"FAKE_ENGINE": json.dumps({"load_s": 0.0, **behaviour})},
        )
        plan = ENGINES[kind].plan(spec, port or free_port(), tmp_path)
        key = "key-for-this-start"
        told = {plan.api_key_variable: key} if plan.api_key_variable else {}
        argv = [*plan.argv, *([plan.api_key_flag, key] if plan.api_key_flag else [])]
        with plan.log_path.open("wb") as log:
            process = subprocess.Popen(argv, env={**os.environ, **plan.env, **told}, stdout=log, stderr=log)
        started.append(process)
        running = Running(kind, plan, process, key)
        if wait:
            _wait_healthy(running)
        return running

    yield begin
    for process in started:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_healthy(running: Running) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert running.process.poll() is None, running.plan.log_path.read_text()
        try:
            running.get(ENGINES[running.kind].health_path)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError("never healthy")


@pytest.mark.parametrize("kind", ENGINES)
def test_the_planned_command_starts_serves_the_name_and_asks_for_the_key(kind: str, start: Start) -> None:
    running = start(kind)
    assert running.plan.model_name in [model["id"] for model in json.loads(running.get("/v1/models"))["data"]]
    assert running.complete()["usage"]["completion_tokens"] > 0
    with pytest.raises(urllib.error.HTTPError, match="401"):
        Running(kind, running.plan, running.process, "wrong").complete()


@pytest.mark.parametrize("kind", ENGINES)
def test_counters_move_by_what_was_asked(kind: str, start: Start) -> None:
    running = start(kind, SPECULATION[kind])
    running.complete()
    before = running.stats()
    usage = running.complete()["usage"]
    after = running.stats()
    moved = {name: getattr(after, name) - getattr(before, name) for name in COUNTS}
    assert moved["prompt_tokens"] == usage["prompt_tokens"]
    assert moved["generation_tokens"] == usage["completion_tokens"]
    assert 0 < moved["drafts"] < usage["completion_tokens"]
    assert 0 < moved["accepted_tokens"] < usage["completion_tokens"]
    assert running.plan.speculation is not None
    assert running.plan.speculation.proposals == 5


@pytest.mark.parametrize("kind", ENGINES)
def test_without_speculation_nothing_was_drafted(kind: str, start: Start) -> None:
    running = start(kind)
    running.complete()
    seen = running.stats()
    assert (seen.drafts or 0, seen.accepted_tokens or 0) == (0, 0)
    assert running.plan.speculation is None


@pytest.mark.parametrize("kind", ENGINES)
def test_every_counter_is_finite_or_none(kind: str, start: Start) -> None:
    running = start(kind, SPECULATION[kind])
    running.complete()
    seen = running.stats()
    values = [getattr(seen, field.name) for field in fields(seen) if field.name != "accepted_by_position"]
    assert all(value is None or math.isfinite(value) for value in values)
    assert all(math.isfinite(value) for value in seen.accepted_by_position or ())


@pytest.mark.parametrize("kind", ENGINES)
def test_a_living_engine_has_facts_and_no_fault(kind: str, start: Start) -> None:
    running = start(kind)
    running.complete()
    seen = running.diagnose(None)
    assert (seen.status, seen.cause) == (TrialStatus.COMPLETE, None)
    assert seen.facts["kv_tokens"].value > 0
    assert all(fact.source for fact in seen.facts.values())


@pytest.mark.parametrize("kind", ENGINES)
def test_an_unknown_flag_ends_it_refused(kind: str, start: Start) -> None:
    running = start(kind, {"no-such-flag": 1}, wait=False)
    exit_code = running.process.wait(timeout=30)
    seen = running.diagnose(exit_code)
    assert exit_code != 0
    assert (seen.status, seen.cause) == (TrialStatus.REFUSED, "unknown_flag")
    assert "--no-such-flag" in seen.summary


@pytest.mark.parametrize("kind", ENGINES)
def test_a_port_in_use_is_infrastructure(kind: str, start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        running = start(kind, wait=False, port=taken.getsockname()[1])
        seen = running.diagnose(running.process.wait(timeout=30))
    assert (seen.status, seen.cause) == (TrialStatus.INFRASTRUCTURE, "port_taken")


# llama.cpp does not start with a draft model that lacks weights.
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_draft_weights_that_were_not_loaded(kind: str, start: Start) -> None:
    running = start(kind, SPECULATION[kind], draft_warnings=True)
    seen = running.diagnose(None)
    assert (seen.status, seen.cause) == (TrialStatus.COMPLETE, "draft_weights_missing")


def test_the_block_guard_of_vllm(start: Start) -> None:
    args = {"speculative-config": {"method": "dspark", "num_speculative_tokens": 4}}
    running = start("vllm", args, wait=False, refuse_k=[4])
    seen = running.diagnose(running.process.wait(timeout=30))
    assert (seen.status, seen.cause) == (TrialStatus.REFUSED, "block_size")
    assert "4" in seen.summary


def test_troubleshooting_lists_every_cause_with_its_status_and_lever() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    listed = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        status = section.split("\n", 1)[0].strip()
        for code, summary, lever in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", section, re.MULTILINE):
            listed[code] = (status, summary, lever)
    in_code = {
        cause.code: (str(cause.status), *(re.sub(r"\{(\w+)\}", r"*\1*", text) for text in (cause.summary, cause.lever)))
        for cause in CAUSES.values()
    }
    assert listed == in_code


def test_every_cause_that_the_program_gives_is_listed() -> None:
    given = set()
    for path in (ROOT / "orchestrator").rglob("*.py"):
        given |= set(re.findall(r"\bcause ?= ?\"(\w+)\"", path.read_text(encoding="utf-8")))
    assert given <= set(CAUSES)
