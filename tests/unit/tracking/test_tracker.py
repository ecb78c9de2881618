"""What a campaign writes into a real SQLite store: its runs, their results, params, metrics and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import tracking
from orchestrator.config import Experiment, to_yaml
from orchestrator.measure.metrics import Quantity
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.tracking import Tracker
from tests.support.builders import WORKLOAD, K, make_spec, with_verdict
from tests.support.mlflow_store import client_of, recorded_campaign, runs_of
from tests.support.recorded_sweep import MEMORY_SERIES, sweep_measurement, sweep_result

pytestmark = pytest.mark.slow


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
    # Over several campaigns their passes are not the same.
    assert [r.result for r in tracking.last_campaign(experiment, all=True)] == [replace(new, pass_number=2), old]


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
