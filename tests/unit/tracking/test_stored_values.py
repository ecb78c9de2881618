"""What a real store makes of odd names and numbers, long params and long series."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

from orchestrator import tracking, trial
from orchestrator.config import Experiment
from orchestrator.measure.metrics import Quantity
from orchestrator.tracking import Tracker
from tests.support.builders import WORKLOAD, K, make_spec
from tests.support.mlflow_store import client_of, recorded_campaign, runs_of
from tests.support.recorded_sweep import sweep_measurement, sweep_result


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
