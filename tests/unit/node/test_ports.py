"""Ports: one for each start, and nobody else's."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import MachineError
from orchestrator.node import claims
from orchestrator.node.server import Server
from tests.support.launches import KINDS, engine_spec, failure_of, marked, program, run_stand_in


class Stranger(http.server.BaseHTTPRequestHandler):
    """Answers everything with 200, lists our model and remembers the keys that it was shown."""

    keys: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.keys.append(self.headers.get("Authorization"))
        body = b'{"data": [{"id": "org/model"}], "choices": [{"text": "a"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        return


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Stranger) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield
        other.shutdown()


def test_a_stranger_on_our_port_is_never_measured_nor_shown_the_key(tmp_path: Path) -> None:
    Stranger.keys.clear()
    command = program(tmp_path, "time.sleep(60)")
    with contextlib.ExitStack() as stack:

        def take_its_port(running: Server) -> None:
            stack.enter_context(stranger(int(running.plan.base_url.rsplit(":", 1)[1])))

        failure, waited_s = failure_of(engine_spec(tmp_path, command=command), tmp_path, on_start=take_its_port)
    assert failure.diagnosis.cause == "port_taken"
    assert failure.diagnosis.status == "infrastructure"
    assert f"pid {os.getpid()}" in failure.diagnosis.summary
    assert set(Stranger.keys) == {None}
    assert waited_s < 5.0


def test_a_port_that_somebody_has_is_not_handed_out(tmp_path: Path) -> None:
    with stranger(24001), socket.socket() as bound:
        # Bound, not listening yet: vLLM takes its port before it loads.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 24008))
        with claims.reserve_port((24000, 24099)) as port:
            assert port == 24016
        with pytest.raises(MachineError, match="no block of 8 free ports"), claims.reserve_port((24000, 24007)):
            pass


def test_a_port_in_time_wait_is_used_when_there_is_no_other() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 24200))
        listener.listen()
        with socket.create_connection(("127.0.0.1", 24200)):
            accepted, _ = listener.accept()
            accepted.close()
    with claims.reserve_port((24200, 24215)) as port:
        assert port == 24208
        with claims.reserve_port((24200, 24215)) as second:
            assert second == 24200


@pytest.mark.slow
def test_eight_starts_at_once_share_no_port_and_no_cache(tmp_path: Path) -> None:
    record = tmp_path / "record"
    together = threading.Barrier(8)

    def start(number: int) -> tuple[str, str, str]:
        spec = engine_spec(tmp_path, KINDS[number % 3], lock_cache=True, record=str(record))
        with run_stand_in(spec, tmp_path / str(number)) as running:
            together.wait(60)
            return running.plan.base_url, running.given_env["TRITON_CACHE_DIR"], running.given_env["TMPDIR"]

    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(start, range(8)))
    for column in zip(*claimed, strict=True):
        assert len(set(column)) == 8
    argvs = [json.loads(line)["argv"] for line in record.read_text().splitlines()]
    meeting = [argv[argv.index("--nccl-port") + 1] for argv in argvs if argv[0] == "sglang"]
    assert len(set(meeting)) == len(meeting) > 0
    assert marked() == []
