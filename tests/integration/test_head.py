"""The local Ray head: found again, ended whole and alone; and an engine on another node than the gateway."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from orchestrator import cluster
from orchestrator.config import Placement
from orchestrator.errors import MachineError
from orchestrator.serving import service
from orchestrator.serving.head import Head, _environment, _make_token, local_head, require_room, start_head, stop_head
from tests.support.launches import gone
from tests.support.stand_in_service import record_campaign, service_experiment, stand_in_result

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def family(head: Head) -> list[psutil.Process]:
    root = psutil.Process(head.processes[0].pid)
    return [root, *root.children(recursive=True)]


def test_a_head_is_found_again_and_ended_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        request.addfinalizer(lambda folder=folder: stop_head(folder))
    assert local_head(mine) is None
    assert not stop_head(mine)
    head, foreign = start_head(mine), start_head(other)
    assert local_head(mine) == head
    members, strangers = family(head), family(foreign)
    assert {"gcs_server", "raylet"} <= {process.name() for process in members}

    # A campaign that is started meanwhile gets a Ray of its own.
    code = (
        "from orchestrator import cluster; import ray\n"
        "with cluster.join(None):\n    print(ray.get_runtime_context().gcs_address)"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    ports = {each.address.rpartition(":")[2] for each in (head, foreign)}
    assert asked.stdout.strip().splitlines()[-1].rpartition(":")[2] not in ports

    began = time.monotonic()
    assert stop_head(mine)
    assert time.monotonic() - began < 30
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in members)
    assert all(process.is_running() for process in strangers)
    assert local_head(mine) is None
    assert not Path(head.temp_dir).exists()

    # Half of a head is none: it is cleared away before the next is started.
    server_pid = next(p.pid for p in strangers if p.name() == "gcs_server")
    os.kill(server_pid, signal.SIGKILL)
    assert gone([server_pid])
    assert local_head(other) is None
    second = start_head(other)
    assert second.address != foreign.address
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in strangers)


def test_a_pid_that_was_given_to_another_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        state = {"address": "127.0.0.1:1", "temp_dir": str(tmp_path / "ray")}
        processes = [{"pid": bystander.pid, "started": "another boot/12345"}]
        (tmp_path / "head.json").write_text(json.dumps({**state, "processes": processes}))
        assert local_head(tmp_path) is None
        assert stop_head(tmp_path)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_users_token_is_made_once_and_only_for_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _make_token()
    token = tmp_path / ".ray" / "auth_token"
    first = token.read_text()
    assert len(first) >= 32
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    _make_token()
    assert token.read_text() == first


def test_a_cluster_that_is_not_there_is_named() -> None:
    with (
        pytest.raises(MachineError, match=r"127\.0\.0\.1:9 cannot be reached"),
        cluster.join("127.0.0.1:9"),
    ):
        raise AssertionError("connected to nothing")


def test_an_engine_on_another_node_is_reached(
    tmp_path: Path, free_port: Callable[[], int], request: pytest.FixtureRequest
) -> None:
    """The head has no GPU, the second node has both: the gateway stays on the head, the engine goes to its GPUs."""
    experiment = service_experiment(tmp_path, "far", free_port(), gpus=2)
    folder = tmp_path / "mlruns" / "serving"
    head = start_head(folder, num_gpus=0)
    request.addfinalizer(lambda: stop_head(folder))
    with cluster.join(head.address, with_token=True), pytest.raises(MachineError, match="0 of 1 engines"):
        require_room(Placement(gpus=2, cpus=1), 1)
    node = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head.address}", "--num-gpus=2", "--block"],
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # Its raylet waits half a minute for a head that is gone; nothing of it is worth that.
    request.addfinalizer(lambda: [process.kill() for process in (*psutil.Process(node.pid).children(), node)])
    with cluster.join(head.address, with_token=True):
        deadline = time.monotonic() + 60
        while len(cluster.alive_nodes()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    record_campaign(experiment, stand_in_result(experiment, "far", tokens_per_s=200))
    report = service.promote(experiment)
    assert report.decision == "promoted", report
    body = json.dumps({"model": "served", "prompt": "x", "max_tokens": 5, "stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{report.url}/v1/completions", body, headers)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with urllib.request.urlopen(f"{report.url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    assert page.count("# TYPE orchestrator_requests_total") == 1
    assert "vllm:generation_tokens_total" in page
    assert service.stop(experiment)
    assert local_head(folder) is None
