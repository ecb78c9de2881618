"""The command line's side of a service: what it asks of the gateway, and in which order."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from orchestrator.serving import deployment
from orchestrator.serving.deployment import Deployment
from tests.support.stand_in_service import service_experiment


def test_no_renewal_of_the_pause_closes_a_service_that_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    closing = threading.Event()
    made = Deployment(experiment=service_experiment(tmp_path, "raced", 8000))

    def answer(_deployment: Deployment, method: str, *_arguments: object) -> None:
        if method == "close":
            closing.set()
            # A busy gateway answers late: what is asked meanwhile must not overtake.
            time.sleep(0.2)
        calls.append(method)

    monkeypatch.setattr(deployment, "_applications", lambda: {made.gateway_name: None})
    monkeypatch.setattr(Deployment, "_gateway", answer)
    with made.pause("being replaced", 1.0):
        assert closing.wait(10)
        made.open("the version that passed")
    assert calls == ["close", "open"]
