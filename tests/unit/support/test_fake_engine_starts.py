"""The stand-in's keys, flags and starts: those that fail, fail as the real ones do."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import EngineSpec
from orchestrator.engines import ENGINES
from orchestrator.outcome import TrialStatus
from tests.support.dialects import DIALECTS
from tests.support.fake.behaviour import Behaviour, load
from tests.support.fake.flags import parse
from tests.support.fake.talk import (
    FakeEngine,
    ask,
    chat,
    ended,
    events,
    status,
    until,
)

pytestmark = pytest.mark.slow


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
