"""Several drivers and trials on one store, and drivers that died."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import tracking
from orchestrator.config import Experiment
from orchestrator.errors import TrackingError
from orchestrator.tracking import Tracker
from orchestrator.trial import TrialResult
from tests.support.mlflow_store import client_of, runs_of
from tests.support.paths import ROOT
from tests.support.recorded_sweep import sweep_experiment, sweep_result

pytestmark = pytest.mark.slow


def test_four_trials_that_end_at_the_same_moment_on_a_fresh_store(tmp_path: Path) -> None:
    experiment = sweep_experiment(tmp_path)
    results = [sweep_result(experiment, k, 200.0 + k, tmp_path) for k in (5, 6, 7, 8)]
    tracker = Tracker(experiment)
    tracker.start_campaign("")
    gate, failed = threading.Barrier(4), []

    def end(result: TrialResult) -> None:
        gate.wait()
        try:
            tracker.record(result)
        except TrackingError as error:
            failed.append(error)

    threads = [threading.Thread(target=end, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    tracker.end_campaign("FINISHED", results, results[1])
    back = {r.result.spec.name: r.result for r in tracking.last_campaign(experiment)}
    assert back == {result.spec.name: result for result in results}


DRIVER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from orchestrator.tracking import Tracker
from tests.support.recorded_sweep import sweep_experiment, sweep_result
folder, name, how = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
experiment = replace(sweep_experiment(folder), name=name)
tracker = Tracker(experiment)
tracker.start_campaign("")
results = [sweep_result(experiment, k, 200.0 + k, folder / name) for k in (5, 6, 7)]
for result in results:
    tracker.start_trial(result.spec)
    if how == "die" and result is results[-1]:
        print("running", flush=True)
        sys.stdin.read()
    tracker.record(result)
tracker.end_campaign("FINISHED", results, results[0])
"""


def driver(folder: Path, name: str, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error::DeprecationWarning:orchestrator", "-c", DRIVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, str(ROOT), str(folder), name, how], text=True, **pipes)


def test_two_drivers_that_create_one_fresh_store_at_once_and_say_nothing(tmp_path: Path) -> None:
    drivers = [driver(tmp_path, name, "finish") for name in ("first", "second")]
    told = [process.communicate(timeout=120) for process in drivers]
    assert [process.returncode for process in drivers] == [0, 0], told
    assert told == [("", "")] * 2
    for name in ("first", "second"):
        assert len(tracking.last_campaign(replace(sweep_experiment(tmp_path), name=name))) == 3


def test_runs_of_a_killed_driver_are_closed_and_the_campaign_is_resumed(experiment: Experiment, tmp_path: Path) -> None:
    with driver(tmp_path, experiment.name, "die") as process:
        assert process.stdout.readline() == "running\n"
        assert Tracker(experiment).close_dead_runs() == 0
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert len(runs_of(experiment, "attributes.status = 'RUNNING'")) == 2
    tracker = Tracker(experiment)
    assert tracker.close_dead_runs() == 2
    assert tracker.close_dead_runs() == 0
    assert runs_of(experiment, "attributes.status = 'RUNNING'") == []
    killed = runs_of(experiment, "attributes.status = 'KILLED'")
    assert {run.data.tags["cause"] for run in killed} == {"driver_gone"}
    assert [r.result.spec.name for r in tracking.last_campaign(experiment)] == ["k=5", "k=6"]


def test_a_pid_that_is_used_again_is_not_the_driver(experiment: Experiment) -> None:
    tracker = Tracker(experiment)
    campaign = tracker.start_campaign("")
    assert tracker.close_dead_runs() == 0
    client_of(experiment).set_tag(campaign, "driver_start", "another boot/12345")
    assert tracker.close_dead_runs() == 1


def test_a_driver_on_another_host_is_left_alone(experiment: Experiment) -> None:
    tracker = Tracker(experiment)
    client_of(experiment).set_tag(tracker.start_campaign(""), "driver_host", "elsewhere")
    assert tracker.close_dead_runs() == 0
