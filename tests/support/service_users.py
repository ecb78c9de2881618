"""Users of a service: they ask, stream and watch; and the starts that its engines noted."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from orchestrator import tracking
from orchestrator.config import Experiment

# The header of every 503 that any request of these tests has met; -1 where it was missing.
RETRY_AFTER: list[int] = []


def get(
    experiment: Experiment, path: str, body: dict[str, Any] | None = None, key: str | None = None
) -> tuple[int, str]:
    """(status, text) of one request; (0, reason) when nobody listens or the answer broke off."""
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"http://127.0.0.1:{experiment.serving.port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 503:
            RETRY_AFTER.append(int(error.headers.get("Retry-After", -1)))
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def served(experiment: Experiment) -> dict[str, Any]:
    status, text = get(experiment, "/orchestrator")
    assert status == 200, text
    document: dict[str, Any] = json.loads(text)
    return document


def aliases(experiment: Experiment) -> tuple[str | None, str | None]:
    champion, previous = tracking.champion(experiment), tracking.previous(experiment)
    return champion.run_id if champion else None, previous.run_id if previous else None


def starts(record: Path) -> list[dict[str, Any]]:
    """What the stand-in noted of each of its starts, the oldest first."""
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []


def running(record: Path) -> list[int]:
    return [start["pid"] for start in starts(record) if psutil.pid_exists(start["pid"])]


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Seconds until it came true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "the condition did not come true"
        time.sleep(0.05)
    return time.monotonic() - began


class Stream:
    """An answer whose first line is here; what follows is read in the background."""

    def __init__(self, experiment: Experiment, body: dict[str, Any]) -> None:
        self._text = ""
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(experiment.serving.port, body))
        self._thread.start()
        assert self._begun.wait(30)

    def rest(self) -> str:
        """All that came, once the answer has ended."""
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        return self._text

    def _read(self, port: int, body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                self._text += line.decode()
                self._begun.set()


class Watch:
    """Asks again and again, as users do, and keeps the statuses."""

    def __init__(self, experiment: Experiment) -> None:
        self.statuses: list[int] = []
        self._experiment = experiment
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.2):
            self.statuses.append(get(self._experiment, "/v1/models")[0])
