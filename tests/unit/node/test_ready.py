"""Ready means ready: what is waited for, what is not, and for how long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.config import Ready
from orchestrator.measure import client
from tests.support.launches import KINDS, engine_spec, failure_of, program, run_stand_in

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_ready_is_not_believed_too_early(tmp_path: Path, kind: str) -> None:
    spec = engine_spec(tmp_path, kind, models_early=True, load_s=0.5, health_late_s=0.7, completion_500_s=0.8)
    began = time.monotonic()
    with run_stand_in(spec, tmp_path) as running:
        assert time.monotonic() - began > 2.0
        assert client.one_completion(running.target)


def test_a_dead_engine_ends_the_wait_at_once(tmp_path: Path) -> None:
    failure, waited_s = failure_of(
        engine_spec(tmp_path, fail="vllm_cpu_fail_bad_flag.log", fail_code=2, fail_after_s=1.0), tmp_path
    )
    assert failure.diagnosis.cause == "unknown_flag"
    assert waited_s < 5.0


def test_slow_progress_is_waited_for(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, load_s=4.0, ready=Ready(timeout_s=60.0, stall_s=2.5))
    with run_stand_in(spec, tmp_path) as running:
        assert running.exit_code is None


@pytest.mark.parametrize("kind", KINDS)
def test_no_progress_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    spec = engine_spec(tmp_path, kind, load_s=0.2, silent_load_s=60.0, ready=Ready(timeout_s=60.0, stall_s=2.0))
    failure, waited_s = failure_of(spec, tmp_path)
    assert failure.diagnosis.cause == "no_progress"
    assert "engine.ready.stall_s" in failure.diagnosis.lever
    assert waited_s < 12.0


def test_an_engine_that_failed_and_hangs_is_not_waited_for(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, fail="vllm_cpu_fail_disk.log", fail_hangs_s=120.0)
    failure, waited_s = failure_of(spec, tmp_path)
    assert failure.diagnosis.cause == "disk_full"
    assert waited_s < 30.0


def test_progress_without_end_is_ended_by_the_cap(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, load_s=60.0, ready=Ready(timeout_s=2.0, stall_s=30.0))
    failure, _ = failure_of(spec, tmp_path)
    assert "engine.ready.timeout_s" in failure.diagnosis.lever


SERVER = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/health":
            self.answer({health}, {{}})
        else:
            self.answer(200, {{"data": [{{"id": "org/model"}}]}})
    def do_POST(self):
        time.sleep(60)
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


def test_our_own_questions_in_its_log_are_no_progress(tmp_path: Path) -> None:
    command = program(tmp_path, SERVER.format(health=503))
    spec = engine_spec(tmp_path, command=command, ready=Ready(timeout_s=60.0, stall_s=2.0))
    failure, waited_s = failure_of(spec, tmp_path)
    assert "/health answers 503" in failure.diagnosis.summary
    assert (tmp_path / "trial" / "engine.log").read_text().count("GET /health") > 3
    assert waited_s < 12.0


def test_a_completion_that_hangs_is_not_readiness(tmp_path: Path) -> None:
    command = program(tmp_path, SERVER.format(health=200))
    spec = engine_spec(tmp_path, command=command, ready=Ready(timeout_s=60.0, stall_s=2.0))
    failure, waited_s = failure_of(spec, tmp_path)
    assert failure.diagnosis.cause == "no_progress"
    assert "a first completion is not answered" in failure.diagnosis.summary
    assert waited_s < 12.0


def test_another_model_is_never_measured(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, model_id="other/model", ready=Ready(timeout_s=60.0, stall_s=2.0))
    failure, _ = failure_of(spec, tmp_path)
    assert "other/model" in failure.diagnosis.summary
