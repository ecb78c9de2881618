"""`tune` end to end on real Ray and real MLflow over the stand-in engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import psutil
import pytest

from tests.support.drivers import SPECULATION, Driver, wait_until

pytestmark = pytest.mark.ray
K = f"{SPECULATION}.num_speculative_tokens"


def _listening_beyond_loopback(pid: int) -> list[str]:
    pids = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    sockets = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in pids]
    assert sockets
    return [
        f"{c.laddr.ip}:{c.laddr.port}" for c in sockets if c.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
    ]


def test_sweep_with_a_refused_a_pruned_and_a_baseline_point(driver: Callable[..., Driver]) -> None:
    campaign = driver(
        behaviour={"curve": {"0": 150, "2": 300, "4": 900, "6": 820}, "refuse_k": [7]},
        workloads={"chat": {"repeats": 5, "output_tokens": 48}},
        search={
            "variants": {"no-spec": {SPECULATION: None}},
            "grid": {K: [2, 4, 6, 7]},
            "baseline": "no-spec",
            "stop_early": True,
            "launches": 2,
            # In the random order of this seed the best comes first.
            "seed": 7,
        },
    )
    process = campaign.start("--json")
    campaign.wait_said("starting the engine")
    beyond = _listening_beyond_loopback(process.pid)
    document = json.loads(process.communicate(timeout=200)[0])
    assert process.returncode == 0, campaign.said
    assert beyond == []
    trials = {trial["name"]: trial for trial in document["trials"]}
    assert trials["k=7"]["status"] == "refused"
    assert trials["k=2"]["status"] == "pruned"
    assert trials["k=2"]["cause"] == "clearly_worse"
    # The baseline is slower still; what was measured of it is enough to report speed-ups against.
    assert trials["no-spec"]["status"] == "pruned"
    assert trials["k=4"]["measurements"]["chat"]["speedup"]["value"] == pytest.approx(6.0, rel=0.05)
    assert document["best"]["name"] == "k=4"
    # What may still win has a second launch, and the baseline beside it.
    assert {name for name, trial in trials.items() if trial["pass"] == 2} == {"k=4#2", "k=6#2", "no-spec#2"}
    assert {point["name"]: point["launches"] for point in document["points"]} == {
        "no-spec": 1,
        "k=2": 0,
        "k=4": 2,
        "k=6": 2,
        "k=7": 0,
    }
    assert document["account"] == {"planned": 8, "earlier": 0, "started": 8, "skipped": 0, "not_run": []}
    assert len(campaign.starts) == 8
    statuses = dict(campaign.runs())
    assert "RUNNING" not in statuses.values()
    assert statuses["k=7"] == "FAILED"
    wait_until(lambda: not campaign.engines_alive(), 15, "no engine alive")
    # `results` reads the same table back from MLflow.
    code, again = campaign.run(verb="results")
    assert code == 0
    assert again["best"] == document["best"]
    assert sorted(trial["name"] for trial in again["trials"]) == sorted(trials)


def test_environment_that_is_broken_stops_after_three_starts(driver: Callable[..., Driver]) -> None:
    campaign = driver(
        behaviour={"fail": "ModuleNotFoundError: No module named 'torchvision'", "load_s": 0.0},
        search={"grid": {K: [2, 3, 4, 5, 6]}, "launches": 1},
    )
    code, document = campaign.run()
    assert code == 3, campaign.said
    assert len(campaign.starts) == 3
    assert "torchvision" in document["stopped"]
    assert len(document["skipped"]) + len(document["trials"]) == 5
    assert document["account"]["planned"] == 5
    assert document["best"] is None


def test_model_that_is_not_there_is_told_before_any_start(driver: Callable[..., Driver]) -> None:
    campaign = driver(engine={"model": "./no/such/model"})
    code, document = campaign.run()
    assert code == 2
    assert document == {}
    assert "./no/such/model" in campaign.said
    assert campaign.starts == []


def test_cluster_that_is_not_there_is_told_at_once(driver: Callable[..., Driver], free_port: Callable[[], int]) -> None:
    campaign = driver()
    code, _ = campaign.run("--address", f"127.0.0.1:{free_port()}", timeout_s=60)
    assert code == 3
    assert "cannot be reached" in campaign.said
    assert campaign.starts == []
    assert {status for _, status in campaign.runs()} == {"KILLED"}


def test_more_gpus_than_there_are_is_told_at_once(driver: Callable[..., Driver]) -> None:
    campaign = driver(placement={"gpus": 64})
    code, _ = campaign.run(timeout_s=60)
    assert code == 3
    assert "placement.gpus" in campaign.said
    assert campaign.starts == []
    assert not os.path.exists(campaign.folder / "mlruns" / "campaigns")
