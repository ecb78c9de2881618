"""Ctrl-C, SIGTERM and SIGHUP at every phase of a campaign: nothing is left running, nothing finished is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from orchestrator.tuning.interrupt import handle_signals
from tests.support.drivers import Driver, wait_until

pytestmark = pytest.mark.ray
NO_ENGINE_AFTER_S = 15.0
PHASES = {
    "waiting": "waiting for its place",
    "loading": "no-spec: starting the engine",
    "warming": "no-spec: warming up",
    "measuring": "no-spec: measuring",
    "second": "k=2: measuring",
}
# What each phase needs to last long enough to be hit.
SLOW = {"loading": {"load_s": 30.0}, "warming": {"ttft_s": 6.0}, "measuring": {"tokens_per_s": 10.0}}


def _ray_processes(folder: Path) -> list[psutil.Process]:
    """Ray's processes that work in the folder of the test: those that its driver started."""
    found = []
    for process in psutil.process_iter(["name", "cmdline", "cwd"]):
        command = " ".join(process.info["cmdline"] or [])
        if process.info["cwd"] == str(folder) and (
            "raylet" in command or "gcs_server" in command or "ray::" in command
        ):
            found.append(process)
    return found


def _nothing_is_left(driver: Driver) -> None:
    wait_until(lambda: not driver.engines_alive(), NO_ENGINE_AFTER_S, "no engine alive")
    wait_until(lambda: not _ray_processes(driver.folder), NO_ENGINE_AFTER_S, "no process of Ray alive")


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGINT, "waiting"),
        (signal.SIGTERM, "loading"),
        (signal.SIGHUP, "warming"),
        (signal.SIGINT, "measuring"),
        (signal.SIGTERM, "second"),
    ],
)
def test_first_signal_ends_in_order(driver: Callable[..., Driver], number: signal.Signals, phase: str) -> None:
    campaign = driver(
        behaviour=SLOW.get(phase), workloads={"chat": {"repeats": 40 if "measur" in PHASES[phase] else 3}}
    )
    process = campaign.start()
    campaign.wait_said(PHASES[phase])
    finished = campaign.finished()
    # A terminal signals the whole group: Ray's own processes get it too.
    os.killpg(process.pid, number)
    assert process.wait(timeout=30) == 130, campaign.said
    assert "--resume" in campaign.said.splitlines()[-1]
    assert number.name in campaign.said.splitlines()[-1]
    assert "Traceback" not in campaign.said
    _nothing_is_left(campaign)
    assert not [run for run in campaign.runs() if run[1] == "RUNNING"]
    assert finished.items() <= campaign.finished().items()
    assert len(finished) == (1 if phase == "second" else 0)


def test_signal_before_ray_is_there(driver: Callable[..., Driver]) -> None:
    campaign = driver()
    process = campaign.start()
    campaign.wait_said("launches planned")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    assert "--resume" in campaign.said.splitlines()[-1]
    _nothing_is_left(campaign)
    assert campaign.starts == []
    assert {status for _, status in campaign.runs()} == {"KILLED"}


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_signal_ends_at_once(driver: Callable[..., Driver]) -> None:
    campaign = driver(behaviour={"load_s": 30.0, "ignore_sigterm": True})
    process = campaign.start()
    wait_until(lambda: bool(campaign.starts), 60, "the engine's start")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    assert "ended at once" in campaign.said
    wait_until(lambda: not campaign.engines_alive(), NO_ENGINE_AFTER_S, "no engine alive")


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_ray_dies(driver: Callable[..., Driver], name: str) -> None:
    campaign = driver(behaviour={"load_s": 60.0})
    process = campaign.start()
    wait_until(lambda: bool(campaign.starts), 60, "the engine's start")
    part = next(p for p in psutil.Process(process.pid).children() if name in p.name())
    part.kill()
    assert process.wait(timeout=30) == 3, campaign.said
    assert f"Ray's process {name}" in campaign.said
    _nothing_is_left(campaign)
    assert not [run for run in campaign.runs() if run[1] == "RUNNING"]


def test_killed_trial_is_tried_again(driver: Callable[..., Driver]) -> None:
    campaign = driver(workloads={"chat": {"repeats": 10}}, search={})
    process = campaign.start("--json")
    campaign.wait_said("measuring")
    os.kill(_trial_process(process), signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, campaign.said
    assert "attempt 2" in campaign.said
    assert output.count('"complete"') == 1
    assert len(campaign.starts) == 2
    assert sorted(status for _, status in campaign.runs()) == ["FINISHED", "FINISHED", "KILLED"]


def _trial_process(driver: subprocess.Popen[str]) -> int:
    """The parent of the engine's keeper."""
    for process in psutil.Process(driver.pid).children(recursive=True):
        if any("keeper.py" in word for word in process.cmdline()):
            parent = process.parent()
            assert parent is not None
            return parent.pid
    raise AssertionError("no trial is running")
