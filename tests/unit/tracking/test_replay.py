"""Trials on disk that the store does not have are recorded later, once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orchestrator import tracking, trial
from orchestrator.config import Experiment
from orchestrator.errors import TrackingError
from orchestrator.tracking import Tracker
from tests.support.mlflow_store import client_of, runs_of
from tests.support.recorded_sweep import MEMORY_SERIES, sweep_result


@pytest.mark.slow
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
    written = Tracker(experiment).replay(folders)
    assert written[0] == opened[1]
    assert len(written) == 2
    assert Tracker(experiment).replay(folders) == []
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
    (run_id,) = Tracker(experiment).replay([workdir])
    client = client_of(experiment)
    assert len(client.get_metric_history(run_id, "memory/gpu0_gib.over_time")) == 100
    assert [f.path for f in client.list_artifacts(run_id, "figures") if "memory" in f.path] == ["figures/memory.png"]
    kept = Path(client.download_artifacts(run_id, "memory.csv", str(tmp_path)))
    assert trial.read_memory(kept) == MEMORY_SERIES


def test_replay_into_a_store_that_has_no_campaign_makes_one_and_closes_it(
    experiment: Experiment, tmp_path: Path
) -> None:
    result = sweep_result(experiment, 5, 268.2, tmp_path)
    Tracker(experiment).replay([Path(result.workdir)])
    assert [r.result for r in tracking.last_campaign(experiment)] == [result]
    assert runs_of(experiment, "attributes.status = 'RUNNING'") == []


def test_a_torn_result_is_named(experiment: Experiment, tmp_path: Path) -> None:
    result = sweep_result(experiment, 5, 268.2, tmp_path)
    torn = Path(result.workdir) / "result.json"
    torn.write_text(torn.read_text()[:-20])
    with pytest.raises(TrackingError, match=re.escape(str(torn))):
        Tracker(experiment).replay([Path(result.workdir)])
