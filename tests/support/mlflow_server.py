"""A real `mlflow server` on loopback for the tests: started, stopped and started again on the same port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[str]:
    """The server of `command`, answering on `port`; ended with everything it started."""
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with log.open("a") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=log.parent, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        # Not asked to end well: its database is SQLite's, which survives this, and its goodbye takes ten seconds.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}: {log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"no answer from {url} within {START_S} s: {log.read_text()[-2000:]}")
