"""Fixtures that every test may use: a stand-in engine on loopback, and an environment without the user's settings."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.fake.talk import FakeEngine
from tests.support.paths import FAKE_ENGINE, TESTS

# A runner in the background, or under nohup, hands ignored signals on to every process that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

_OURS = ("VLLM_", "SGLANG_", "LLAMA_", "FAKE_ENGINE", "MLFLOW_", "RAY_", "HF_", "CUDA_", "NCCL_", "ORCHESTRATOR_")
_FOUND = [name for name in os.environ if name.startswith(_OURS) or name.upper().endswith(("_PROXY", "_API_KEY"))]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real engines and Ray first: with the quick files behind them, workers side by side end together.

    Every integration test is slow.
    """
    for item in items:
        if TESTS / "integration" in item.path.parents:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not (item.get_closest_marker("real") or item.get_closest_marker("ray")))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the person who runs the tests has set for engines, trackers and clusters does not reach them.

    Nor does what a command run in this process sets for its own Ray reach the next test.
    """
    # pytest-xdist sets a width for its workers; people export theirs.
    for name in (*_FOUND, "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)


@pytest.fixture
def engine_command() -> Callable[[str], list[str]]:
    """`engine.command` for a dialect: vllm, sglang or llamacpp. Behaviour goes into engine.env FAKE_ENGINE."""
    return lambda dialect: [sys.executable, str(FAKE_ENGINE), dialect]


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A loopback port that was free a moment ago."""
    return _free_port


@pytest.fixture
def fake_engine(tmp_path: Path) -> Iterator[Callable[..., FakeEngine]]:
    """start(dialect="vllm", *flags, model="org/model", env=None, port=None, wait=True, **behaviour) -> FakeEngine.

    Keyword arguments that are not named here become keys of FAKE_ENGINE. With wait, returns once /health is 200; raises
    AssertionError with the log when the program ends first. Every process is gone when the test is over.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(
        dialect: str = "vllm",
        *flags: str,
        model: str = "org/model",
        env: dict[str, str] | None = None,
        port: int | None = None,
        wait: bool = True,
        **behaviour: Any,
    ) -> FakeEngine:
        port = port or _free_port()
        named = {"vllm": [model], "sglang": ["--model-path", model], "llamacpp": ["-m", model]}[dialect]
        log_path = tmp_path / f"fake_engine_{port}.log"
        environment = {**os.environ, **(env or {}), "FAKE_ENGINE": json.dumps({"load_s": 0.0, **behaviour})}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(FAKE_ENGINE), dialect, *named, "--port", str(port), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        started.append(process)
        engine = FakeEngine(f"http://127.0.0.1:{port}", port, model, process, log_path)
        if wait:
            _wait_healthy(engine)
        return engine

    yield start
    for process in started:
        _reap(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_healthy(engine: FakeEngine, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert engine.process.poll() is None, f"ended with {engine.process.returncode}:\n{engine.log}"
        try:
            engine.get("/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError(f"not healthy after {timeout_s} s:\n{engine.log}")


def _reap(process: subprocess.Popen[bytes]) -> None:
    """TERM, then KILL; its descendants too, each by its own pid."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(timeout=3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=10)
    for child in family:
        if child.is_running():
            child.kill()
