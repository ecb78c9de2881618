"""The tracker against real SQLite stores."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from orchestrator import tracking, trial
from orchestrator.config import Experiment, Tracking, to_yaml
from orchestrator.errors import TrackingError
from orchestrator.measure.metrics import Quantity
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.tracking import Recorded, Tracker
from orchestrator.trial import TrialResult
from tests.support.builders import WORKLOAD, K, make_spec, with_verdict
from tests.support.paths import ROOT
from tests.support.recorded_sweep import MEMORY_SERIES, sweep_experiment, sweep_measurement, sweep_result


def client_of(experiment: Experiment) -> MlflowClient:
    return MlflowClient(tracking.store_uri(experiment))


def runs_of(experiment: Experiment, query: str = "") -> list[Run]:
    client = client_of(experiment)
    found = client.get_experiment_by_name(experiment.tracking_name)
    return client.search_runs([found.experiment_id], query, order_by=["attributes.start_time ASC"])


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with MLflow's tables and nothing in them; making them takes seconds."""
    folder = tmp_path_factory.mktemp("empty")
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def experiment(tmp_path: Path, empty_database: Path) -> Experiment:
    """An experiment whose store is there and empty."""
    found = sweep_experiment(tmp_path)
    Path(found.tracking.folder).mkdir()
    shutil.copy(empty_database, found.tracking.folder)
    return found


def recorded_campaign(experiment: Experiment, results: list[TrialResult], best: TrialResult | None = None) -> Tracker:
    tracker = Tracker(experiment)
    tracker.start_campaign(to_yaml(experiment), {"folder": str(Path(experiment.tracking.folder) / "campaign")})
    for result in results:
        tracker.start_trial(result.spec)
        tracker.record(result)
    tracker.end_campaign("FINISHED", results, best)
    return tracker


def test_results_read_back_are_the_results_that_were_written(experiment: Experiment, tmp_path: Path) -> None:
    results = [sweep_result(experiment, k, decode, tmp_path) for k, decode in [(None, 92.9), (4, None), (6, 275.9)]]
    recorded_campaign(experiment, results, results[2])
    back = tracking.last_campaign(experiment)
    assert [r.result for r in back] == results
    assert [tracking.load_run(tracking.store_uri(experiment), r.run_id).result for r in back] == results
    assert back[2].tags["best"] == "true"


def test_a_run_holds_params_metrics_series_tags_and_files(experiment: Experiment, tmp_path: Path) -> None:
    sampled = sweep_result(experiment, 6, 275.9, tmp_path, memory_series=MEMORY_SERIES)
    result = with_verdict(sampled, Level.SUSPECT, "few_repeats")
    recorded_campaign(experiment, [result], result)
    parent, child = runs_of(experiment)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (child.info.run_name, child.info.status, parent.info.status) == ("k=6", "FINISHED", "FINISHED")
    assert child.info.end_time == 1795964700000
    assert child.data.params[K] == "6"
    wanted = {"status": "complete", "verdict": "suspect", "verdict_reasons": "few_repeats", "key": "key of k=6"}
    assert wanted.items() <= child.data.tags.items()
    assert child.data.tags["point"] == "num_speculative_tokens=6"
    assert child.data.metrics[f"{WORKLOAD}/decode_tok_s"] == 275.9
    assert child.data.metrics["memory/kv_tokens"] == 1371214.0
    client = client_of(experiment)
    history = client.get_metric_history(child.info.run_id, f"{WORKLOAD}/decode_tok_s.by_repeat")
    assert [(m.step, m.value) for m in history] == list(
        enumerate(result.measurements[WORKLOAD].repeats["decode_tok_s"])
    )
    history = client.get_metric_history(child.info.run_id, f"{WORKLOAD}/acceptance_by_position")
    assert [m.step for m in history] == [0, 1, 2, 3, 4, 5]
    memory = client.get_metric_history(child.info.run_id, "memory/gpu0_gib.over_time")
    assert memory[1].timestamp - memory[0].timestamp == 500
    files = {f.path for folder in ("", "figures") for f in client.list_artifacts(child.info.run_id, folder)}
    assert {"result.json", "memory.csv", "plan.json", "engine.log", "traces.jsonl"} <= files
    assert {f"figures/{name}.png" for name in ("memory", "acceptance_by_position", "ttft")} <= files


def test_the_parent_run_has_the_config_the_best_and_the_figures(experiment: Experiment, tmp_path: Path) -> None:
    results = [sweep_result(experiment, k, decode, tmp_path) for k, decode in [(4, None), (5, 268.2), (6, 275.9)]]
    tracker = Tracker(experiment)
    campaign = tracker.start_campaign(to_yaml(experiment))
    for result in results:
        tracker.record(result)
    tracker.end_campaign("FINISHED", results, results[2])
    client = client_of(experiment)
    run = client.get_run(campaign)
    assert run.data.tags["best"] == "k=6"
    assert client.get_run(run.data.tags["best_run_id"]).info.run_name == "k=6"
    assert run.data.tags["trials"] == "1 refused, 2 complete"
    assert run.data.metrics["best/decode_tok_s"] == 275.9
    files = {f.path for folder in ("", "figures") for f in client.list_artifacts(campaign, folder)}
    assert {"config.yaml", f"figures/decode_tok_s.{WORKLOAD}.png"} <= files
    assert Path(client.download_artifacts(campaign, "config.yaml")).read_text() == to_yaml(experiment)


def test_a_campaign_without_a_best_says_so(experiment: Experiment, tmp_path: Path) -> None:
    recorded_campaign(experiment, [sweep_result(experiment, 4, None, tmp_path)])
    assert runs_of(experiment, "tags.kind = 'campaign'")[0].data.tags["best"] == "none"


def test_numbers_of_the_whole_campaign_are_added_to_its_runs(experiment: Experiment, tmp_path: Path) -> None:
    result = sweep_result(experiment, 6, 275.9, tmp_path)
    tracker = Tracker(experiment)
    tracker.start_campaign("")
    run_id = tracker.record(result)
    faster = sweep_measurement(275.9, 6, speedup=Quantity(value=2.97, low=2.9, high=3.0, n=3))
    judged = with_verdict(replace(result, measurements={WORKLOAD: faster}), Level.SUSPECT, "length_differs")
    tracker.end_campaign("FINISHED", [judged], judged)
    run = client_of(experiment).get_run(run_id)
    assert run.data.metrics[f"{WORKLOAD}/speedup"] == 2.97
    assert run.data.metrics[f"{WORKLOAD}/speedup.low"] == 2.9
    assert run.data.tags["verdict_reasons"] == "length_differs"


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        (TrialStatus.COMPLETE, "FINISHED"),
        (TrialStatus.PRUNED, "FINISHED"),
        (TrialStatus.REFUSED, "FAILED"),
        (TrialStatus.UNFIT, "FAILED"),
        (TrialStatus.FAILED, "FAILED"),
        (TrialStatus.INFRASTRUCTURE, "KILLED"),
    ],
)
def test_every_status_has_its_end(
    store: tuple[Tracker, Experiment], status: TrialStatus, ended: str, tmp_path: Path
) -> None:
    tracker, experiment = store
    run_id = tracker.record(sweep_result(experiment, 6, 275.9, tmp_path, status=status))
    run = client_of(experiment).get_run(run_id)
    assert (run.info.status, run.data.tags["status"]) == (ended, status.value)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tracker, Experiment]:
    experiment = sweep_experiment(tmp_path_factory.mktemp("store"))
    tracker = Tracker(experiment)
    tracker.start_campaign("")
    return tracker, experiment


def database(experiment: Experiment) -> sqlite3.Connection:
    return sqlite3.connect(Path(experiment.tracking.folder) / "mlflow.db")


def test_nothing_that_is_not_finite_reaches_the_database(store: tuple[Tracker, Experiment], tmp_path: Path) -> None:
    tracker, experiment = store
    odd = sweep_measurement(200.0, 6, tpot_s=Quantity(value=math.nan), request_rate=Quantity(value=math.inf))
    result = sweep_result(experiment, 6, 200.0, tmp_path)
    run_id = tracker.record(replace(result, measurements={WORKLOAD: odd}))
    with database(experiment) as db:
        rows = db.execute("SELECT key, value, is_nan FROM metrics WHERE run_uuid = ?", (run_id,)).fetchall()
    assert len(rows) > 20
    assert all(abs(value) < 1e300 and not is_nan for _, value, is_nan in rows)
    back = tracking.load_run(tracking.store_uri(experiment), run_id)
    assert back.result.measurements[WORKLOAD].metrics["tpot_s"] is None
    assert back.tags["nonfinite"] == f"{WORKLOAD}/request_rate, {WORKLOAD}/tpot_s"


def test_one_odd_metric_name_costs_no_other(store: tuple[Tracker, Experiment], tmp_path: Path) -> None:
    tracker, experiment = store
    odd = {name: Quantity(value=float(i)) for i, name in enumerate(["a:b", "a_b", "a@1", "a(ms)", "a,b", "ü"])}
    result = sweep_result(experiment, 7, 262.2, tmp_path)
    run_id = tracker.record(replace(result, measurements={WORKLOAD: sweep_measurement(262.2, 7, **odd)}))
    metrics = client_of(experiment).get_run(run_id).data.metrics
    mine = {k: v for k, v in metrics.items() if re.match(rf"{WORKLOAD}/(a|_)", k) and "cceptance" not in k}
    assert sorted(mine.values()) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert metrics[f"{WORKLOAD}/decode_tok_s"] == 262.2


def test_two_hundred_params_and_one_of_ten_kilobytes(store: tuple[Tracker, Experiment], tmp_path: Path) -> None:
    tracker, experiment = store
    args = {f"flag-{i}": i for i in range(199)} | {"hf-overrides": "x" * 10_000}
    spec = make_spec(k=8, args=args, experiment=experiment)
    run_id = tracker.record(sweep_result(experiment, 8, 216.3, tmp_path, spec=spec))
    client = client_of(experiment)
    params = client.get_run(run_id).data.params
    assert sum(key.startswith("engine.args.flag-") for key in params) == 199
    whole = Path(client.download_artifacts(run_id, "params/engine.args.hf-overrides.txt")).read_text()
    assert whole == "x" * 10_000


def test_metrics_are_found_by_filters_and_sorted(store: tuple[Tracker, Experiment], tmp_path: Path) -> None:
    tracker, experiment = store
    for k, decode in [(11, 1000.0), (12, 1200.0)]:
        tracker.record(sweep_result(experiment, k, decode, tmp_path))
    for query in ("metrics.decode_tok_s > 900 and metrics.ttft_s < 5", f"metrics.`{WORKLOAD}/decode_tok_s` > 900"):
        assert {run.info.run_name for run in runs_of(experiment, query)} == {"k=11", "k=12"}
    client = client_of(experiment)
    experiment_id = client.get_experiment_by_name(experiment.tracking_name).experiment_id
    ordered = client.search_runs([experiment_id], "tags.kind = 'trial'", order_by=["metrics.decode_tok_s DESC"])
    assert [run.info.run_name for run in ordered][:2] == ["k=12", "k=11"]


def test_a_hundred_thousand_samples_become_a_short_series(store: tuple[Tracker, Experiment], tmp_path: Path) -> None:
    tracker, experiment = store
    series = {"gpu0_gib": [(i / 10, 90.0 + i % 7) for i in range(100_000)]}
    began = time.monotonic()
    run_id = tracker.record(sweep_result(experiment, 13, 100.0, tmp_path, memory_series=series))
    assert time.monotonic() - began < 20
    with database(experiment) as db:
        query = "SELECT count(*) FROM metrics WHERE run_uuid = ? AND key LIKE 'memory/%over_time'"
        assert 100 <= db.execute(query, (run_id,)).fetchone()[0] <= 200


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


def test_a_resumed_campaign_is_the_same_run_and_holds_every_result_once(experiment: Experiment, tmp_path: Path) -> None:
    folder = {"folder": str(tmp_path / "campaign")}
    first = sweep_result(experiment, 5, 268.2, tmp_path)
    tracker = Tracker(experiment)
    campaign = tracker.start_campaign("name: old", folder)
    run_id = tracker.record(first)
    tracker.end_campaign("KILLED", [first], None)

    again = Tracker(experiment)
    assert again.start_campaign("name: new", folder) == campaign
    assert again.record(first) == run_id
    changed = make_spec(
        k=5, experiment=experiment, key="changed", engine=replace(experiment.engine, args={"max-num-seqs": 2})
    )
    later = "2026-11-29T15:10:00+00:00"
    other = sweep_result(experiment, 5, 250.0, tmp_path / "changed", spec=changed, started_at=later)
    assert again.record(other) != run_id
    again.end_campaign("FINISHED", [first, other], first)
    assert [r.result for r in tracking.last_campaign(experiment)] == [first, other]
    assert client_of(experiment).get_run(campaign).info.status == "FINISHED"
    assert client_of(experiment).get_run(run_id).data.params["engine.args.max-num-seqs"] == "1"


def test_a_new_campaign_is_the_last_and_the_old_one_is_kept(experiment: Experiment, tmp_path: Path) -> None:
    old, new = sweep_result(experiment, 5, 268.2, tmp_path / "1"), sweep_result(experiment, 6, 275.9, tmp_path / "2")
    for result in (old, new):
        tracker = Tracker(experiment)
        tracker.start_campaign("", {"folder": str(tmp_path / result.spec.name)})
        tracker.record(result)
        tracker.end_campaign("FINISHED", [result], result)
    assert [r.result for r in tracking.last_campaign(experiment)] == [new]
    assert [r.result for r in tracking.last_campaign(experiment, all=True)] == [new, old]


def test_a_trial_that_is_open_when_the_campaign_ends_is_killed(experiment: Experiment, tmp_path: Path) -> None:
    tracker = Tracker(experiment)
    tracker.start_campaign("")
    left = tracker.start_trial(make_spec(k=6, experiment=experiment))
    tracker.end_campaign("KILLED", [], None)
    run = client_of(experiment).get_run(left)
    assert (run.info.status, run.data.tags["cause"]) == ("KILLED", "no_result")
    assert tracking.last_campaign(experiment) == []


def test_a_fault_of_the_machine_gives_way_to_the_measurement_that_came_after(
    experiment: Experiment, tmp_path: Path
) -> None:
    fault = {"status": TrialStatus.INFRASTRUCTURE, "cause": "port_taken", "measurements": {}, "verdict": None}
    lost = sweep_result(experiment, 5, 268.2, tmp_path / "1", **fault, verdicts={})
    found = sweep_result(experiment, 5, 268.2, tmp_path / "2")
    only = sweep_result(experiment, 6, 275.9, tmp_path / "3", **fault, verdicts={})
    recorded_campaign(experiment, [lost, found, only])
    assert [r.result for r in tracking.last_campaign(experiment)] == [found, only]


def test_replay_records_what_is_missing_and_nothing_twice(experiment: Experiment, tmp_path: Path) -> None:
    home = tmp_path / "campaign"
    results = [sweep_result(experiment, k, 200.0 + k, home / "trials") for k in (5, 6, 7)]
    tracker = Tracker(experiment)
    campaign = tracker.start_campaign("", {"folder": str(home)})
    opened = [tracker.start_trial(result.spec) for result in results[:2]]
    tracker.record(results[0])
    later = Tracker(experiment)
    later.start_campaign("", {"folder": str(tmp_path / "later")})
    later.end_campaign("FINISHED", [], None)

    folders = [*(Path(result.workdir) for result in results), home / "trials" / "never-ended"]
    written = tracking.replay(experiment, folders)
    assert written[0] == opened[1]
    assert len(written) == 2
    assert tracking.replay(experiment, folders) == []
    found = tracking.last_campaign(experiment, all=True)
    assert {r.campaign_id for r in found} == {campaign}
    assert sorted((r.result for r in found), key=lambda r: r.spec.name) == results


@pytest.mark.parametrize("version", [1, 2])
def test_replay_keeps_the_memory_of_each_version_of_result_json(
    experiment: Experiment, tmp_path: Path, version: int
) -> None:
    result = sweep_result(experiment, 5, 268.2, tmp_path, memory_series=MEMORY_SERIES)
    workdir = Path(result.workdir)
    if version == 1:
        document = json.loads((workdir / "result.json").read_text())
        del document["speculation"]
        document |= {"schema_version": 1, "memory_series": MEMORY_SERIES, "proposals": 5}
        (workdir / "result.json").write_text(json.dumps(document))
        (workdir / "memory.csv").unlink()
    (run_id,) = tracking.replay(experiment, [workdir])
    client = client_of(experiment)
    assert len(client.get_metric_history(run_id, "memory/gpu0_gib.over_time")) == 100
    assert [f.path for f in client.list_artifacts(run_id, "figures") if "memory" in f.path] == ["figures/memory.png"]
    kept = Path(client.download_artifacts(run_id, "memory.csv", str(tmp_path)))
    assert trial.read_memory(kept) == MEMORY_SERIES


def test_replay_into_a_store_that_has_no_campaign_makes_one_and_closes_it(
    experiment: Experiment, tmp_path: Path
) -> None:
    result = sweep_result(experiment, 5, 268.2, tmp_path)
    tracking.replay(experiment, [Path(result.workdir)])
    assert [r.result for r in tracking.last_campaign(experiment)] == [result]
    assert runs_of(experiment, "attributes.status = 'RUNNING'") == []


def test_a_torn_result_is_named(experiment: Experiment, tmp_path: Path) -> None:
    result = sweep_result(experiment, 5, 268.2, tmp_path)
    torn = Path(result.workdir) / "result.json"
    torn.write_text(torn.read_text()[:-20])
    with pytest.raises(TrackingError, match=re.escape(str(torn))):
        tracking.replay(experiment, [Path(result.workdir)])


def test_result_json_is_strict_and_keeps_unicode_and_null(experiment: Experiment, tmp_path: Path) -> None:
    spec = make_spec(k=6, experiment=experiment, name="k=6 “ü” 猫", params={K: 6, "engine.args.x": None})
    result = sweep_result(experiment, 6, 1e308, tmp_path, spec=spec, reason=None)
    recorded_campaign(experiment, [result], result)
    back = tracking.last_campaign(experiment)[0]
    text = Path(client_of(experiment).download_artifacts(back.run_id, "result.json")).read_text(encoding="utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(text, parse_constant=refuse)["spec"]["name"] == "k=6 “ü” 猫"
    assert back.result == result == trial.from_json(text)


def test_reading_makes_no_store(tmp_path: Path) -> None:
    experiment = sweep_experiment(tmp_path)
    assert tracking.last_campaign(experiment) == []
    assert tracking.champion(experiment) is None
    assert not Path(experiment.tracking.folder).exists()
    with pytest.raises(TrackingError, match="there is no such database"):
        tracking.load_run(tracking.store_uri(experiment), "abc")


def test_the_champion_and_the_one_before(experiment: Experiment, tmp_path: Path) -> None:
    results = [sweep_result(experiment, k, 200.0 + k, tmp_path) for k in (5, 6)]
    recorded_campaign(experiment, results, results[1])
    five, six = tracking.last_campaign(experiment)
    assert tracking.champion(experiment) is None
    first = tracking.set_champion(experiment, five.run_id, {"application": "orchestrator"})
    assert champions(experiment) == (five.run_id, None)
    second = tracking.set_champion(experiment, six.run_id)
    assert first != second
    assert champions(experiment) == (six.run_id, five.run_id)
    assert tracking.set_champion(experiment, six.run_id) == second
    assert champions(experiment) == (six.run_id, five.run_id)
    assert tracking.set_champion(experiment, five.run_id) == first
    assert champions(experiment) == (five.run_id, six.run_id)
    version = client_of(experiment).get_model_version_by_alias("dspark-k-sweep", "champion")
    assert version.tags == {"trial": "k=5", "application": "orchestrator"}
    assert tracking.champion(experiment).result == results[0]


def champions(experiment: Experiment) -> tuple[str | None, str | None]:
    found: list[Recorded | None] = [tracking.champion(experiment), tracking.previous(experiment)]
    return found[0].run_id if found[0] else None, found[1].run_id if found[1] else None


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("./mlruns", "tracking.uri: found './mlruns'"),
        ("file:///tmp/mlruns", "allowed is a database such as"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9: cannot be opened"),
        ("nonsense://somewhere", "nonsense://somewhere"),
        ("sqlite:////proc/nowhere/mlflow.db", "sqlite:////proc/nowhere/mlflow.db: cannot be opened"),
        ("postgresql://user:s3cret@127.0.0.1:9/db", "cannot be opened"),
    ],
)
def test_a_store_that_cannot_be_opened_is_one_line_within_seconds(experiment: Experiment, uri: str, told: str) -> None:
    began = time.monotonic()
    with pytest.raises(TrackingError) as caught:
        Tracker(replace(experiment, tracking=Tracking(uri=uri)))
    assert time.monotonic() - began < 20
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_file_that_is_no_database_is_named(experiment: Experiment, tmp_path: Path) -> None:
    broken = tmp_path / "broken.db"
    broken.write_text("this is not a database" * 100)
    with pytest.raises(TrackingError, match="file is not a database"):
        Tracker(replace(experiment, tracking=Tracking(uri=f"sqlite:///{broken}")))


def test_a_deleted_experiment_is_told_with_the_cure(experiment: Experiment) -> None:
    Tracker(experiment)
    client = client_of(experiment)
    client.delete_experiment(client.get_experiment_by_name(experiment.name).experiment_id)
    with pytest.raises(TrackingError, match="mlflow experiments restore --experiment-id 1"):
        Tracker(experiment)


def test_an_unknown_run_is_told(store: tuple[Tracker, Experiment]) -> None:
    _, experiment = store
    uri = tracking.store_uri(experiment)
    with pytest.raises(TrackingError, match="no run and no recorded trial is called 'nope'"):
        tracking.load_run(uri, "nope")
    with pytest.raises(TrackingError, match=r"run '0{32}' cannot be read: .*not found"):
        tracking.load_run(uri, "0" * 32)


def test_a_run_that_holds_no_result_is_told(store: tuple[Tracker, Experiment]) -> None:
    tracker, experiment = store
    with pytest.raises(TrackingError, match=r"result\.json of run .* cannot be read"):
        tracking.load_run(tracking.store_uri(experiment), tracker.campaign_id)


def test_a_trial_is_found_by_its_name(experiment: Experiment, tmp_path: Path) -> None:
    uri = tracking.store_uri(experiment)
    other = replace(experiment, name="other")
    first = sweep_result(experiment, 6, 270.0, tmp_path / "1")
    again = sweep_result(experiment, 6, 275.9, tmp_path / "2", started_at="2026-11-29T16:00:00+00:00")
    elsewhere = sweep_result(other, 6, 100.0, tmp_path / "3", started_at="2026-11-29T17:00:00+00:00")
    for owner, results in ((experiment, [first, again]), (other, [elsewhere])):
        tracker = Tracker(owner)
        tracker.start_campaign("")
        for result in results:
            tracker.record(result)
        tracker.end_campaign("FINISHED", results, results[0])
    assert tracking.load_run(uri, "k=6").result == elsewhere
    assert tracking.load_run(uri, f"{experiment.name}/k=6").result == again


def test_artifacts_stay_under_the_tracking_folder_whatever_the_working_directory(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relative = replace(experiment, tracking=Tracking(folder="mlruns"))
    monkeypatch.chdir(tmp_path)
    uri = tracking.store_uri(relative)
    result = sweep_result(relative, 5, 268.2, tmp_path / "trials")
    recorded_campaign(relative, [result], result)
    run_id = tracking.last_campaign(relative)[0].run_id
    monkeypatch.chdir("/")
    assert tracking.load_run(uri, run_id).result == result
    assert uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert list((tmp_path / "mlruns" / "artifacts").glob(f"{run_id}/artifacts/result.json"))


def test_the_ui_command_names_the_store_and_loopback(experiment: Experiment) -> None:
    command = tracking.ui_command(experiment, 5123)
    assert command[command.index("--backend-store-uri") + 1] == tracking.store_uri(experiment)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "5123"
    with pytest.raises(TrackingError, match="open it in a browser"):
        tracking.ui_command(replace(experiment, tracking=Tracking(uri="http://127.0.0.1:5000")), 5123)
