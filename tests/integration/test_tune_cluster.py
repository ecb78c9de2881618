"""Campaigns on a Ray cluster of several nodes (all on this machine): where trials run, and nodes that go away."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from orchestrator import trial
from orchestrator.campaign.campaign import Campaign, open_campaign
from orchestrator.campaign.launches import Event
from orchestrator.campaign.ledger import TOKEN_FILE
from orchestrator.cluster import join as join_cluster
from orchestrator.config import EngineSpec, Experiment, Objective, Placement, Search, Stop, Tracking, Workload
from orchestrator.errors import MachineError
from orchestrator.outcome import TrialStatus
from orchestrator.tuning import nodes, tune
from tests.support.drivers import FAKE_ENGINE, wait_until

pytestmark = pytest.mark.ray
SEQS = "engine.args.max-num-seqs"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without GPUs and two nodes of two; more may be added."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=2, num_gpus=2)
    yield made
    ray.shutdown()
    made.shutdown()


def experiment(folder: Path, *, points: int = 2, timeout_s: float = 60.0, load_s: float = 0.1) -> Experiment:
    """Trials of two GPUs each; every start is recorded with the GPUs it sees."""
    settings = {"load_s": load_s, "tokens_per_s": 2000, "record": str(folder / "starts.jsonl")}
    return Experiment(
        name="spread",
        engine=EngineSpec(
            kind="vllm",
            model="org/model",
            command=[sys.executable, str(FAKE_ENGINE), "vllm"],
            args={"tensor-parallel-size": 2},
            env={"FAKE_ENGINE": json.dumps({**settings, "record_env": ["CUDA_VISIBLE_DEVICES"]})},
            root=str(folder),
            stop=Stop(grace_s=2.0),
        ),
        placement=Placement(gpus=2, cpus=1, timeout_s=timeout_s),
        workloads={"chat": Workload(output_tokens=24, num_prompts=1)},
        search=Search(grid={SEQS: list(range(1, points + 1))}, launches=1),
        objective=Objective(metric="chat/decode_tok_s"),
        tracking=Tracking(folder=str(folder / "mlruns")),
    )


@contextmanager
def opened(swept: Experiment, cluster: Any, on_event: Callable[[Event], None] = lambda _: None) -> Iterator[Campaign]:
    with open_campaign(swept, resume=False, on_event=on_event) as running, join_cluster(cluster.address):
        yield running
    account = running.account()
    assert account.planned == account.earlier + account.started + account.skipped + len(account.not_run)


def starts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def statuses(running: Campaign) -> list[str]:
    return [result.status.value for result in running.ordered_results()]


def test_a_trial_per_node_at_once_and_files_come_back(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=2, num_gpus=1)
    at_once: list[int] = []
    active: set[str] = set()

    def watch(event: Event) -> None:
        if event.phase:
            active.add(event.name)
        else:
            active.discard(event.name)
        at_once.append(len(active))

    with opened(experiment(tmp_path, points=3, load_s=3.0), cluster, watch) as running:
        # As on nodes that see another folder under the same path.
        (running.folder / TOKEN_FILE).write_text("another folder")
        began_s = time.monotonic()
        with pytest.raises(MachineError, match=r"3 GPUs and 1 CPUs on ONE node.*: 1 GPUs, 2 CPUs"):
            nodes.Nodes().require([Placement(gpus=1), Placement(gpus=3)])
        assert time.monotonic() - began_s < 5
        tune.run_trials(running)
    assert statuses(running) == ["complete"] * 3
    assert max(at_once) == 2
    # A trial that straddled nodes would see the first GPU of each.
    assert [start["env"]["CUDA_VISIBLE_DEVICES"] for start in starts(tmp_path)] == ["0,1"] * 3
    for launch in running.launches:
        names = {path.name for path in running.workdir(launch).iterdir()}
        assert {"result.json", "memory.csv", "plan.json", "traces.jsonl"} <= names
        series = running.results[launch.id].memory_series
        assert series
        assert series == trial.read_memory(running.workdir(launch) / "memory.csv")
        assert any(name.endswith(".log") for name in names)
        assert running.results[launch.id].workdir == str(running.workdir(launch))


def test_every_trial_gets_a_bundle_of_its_own_size(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU, two GPUs, and more than any node has: the first two run, the third is left out with its reason."""
    monkeypatch.setattr(tune, "NO_NODE_S", 1.0)
    sizes = {
        f"tp{number}": {"placement.gpus": number, "engine.args.tensor-parallel-size": number} for number in (1, 2, 3)
    }
    swept = replace(experiment(tmp_path), search=Search(variants=sizes, launches=1))
    with opened(swept, cluster) as running:
        with pytest.raises(MachineError, match="3 GPUs and 1 CPUs on ONE node"):
            tune.run_trials(running)
        # A node that had room for it may leave before its turn.
        monkeypatch.setattr(nodes.Nodes, "require", lambda _self, _placements: None)
        tune.run_trials(running)
        seen = [start["env"]["CUDA_VISIBLE_DEVICES"].count(",") + 1 for start in starts(tmp_path)]
    results = {result.spec.name: result for result in running.ordered_results()}
    assert {name: str(result.status) for name, result in results.items()} == {"tp1": "complete", "tp2": "complete"}
    assert sorted(seen) == [1, 2]
    assert [name for name, _ in running.skipped] == ["tp3"]
    assert "3 GPUs" in running.skipped[0][1]


def test_node_that_dies_in_mid_trial(cluster: Any, tmp_path: Path) -> None:
    with opened(experiment(tmp_path, points=1, load_s=8.0), cluster) as running:

        def kill_its_node() -> None:
            wait_until(lambda: bool(starts(tmp_path)), 60, "the first start")
            raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
            above = {process.pid for process in psutil.Process(starts(tmp_path)[0]["pid"]).parents()}
            cluster.remove_node(next(node for pid, node in raylets.items() if pid in above), allow_graceful=False)

        killer = threading.Thread(target=kill_its_node)
        killer.start()
        tune.run_trials(running)
        killer.join()
    assert statuses(running) == ["complete"]
    first, second = starts(tmp_path)
    assert not psutil.pid_exists(first["pid"])
    assert second["time_s"] > first["time_s"]


def test_place_held_by_others_then_node_that_dies_before_the_start(cluster: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    with opened(experiment(tmp_path, points=1, timeout_s=6.0), cluster, events.append) as running:
        held = ray.util.placement_group([{"GPU": 1}] * 2, strategy="STRICT_SPREAD")
        ray.get(held.ready(), timeout=30)

        # In the main thread only may nodes be added.
        tuning = threading.Thread(target=tune.run_trials, args=[running])
        tuning.start()
        wait_until(lambda: any(event.status for event in events), 60, "the first attempt's end")
        wait_until(lambda: events[-1].phase == "placing", 60, "the second attempt's wait")
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=2, num_gpus=2)
        ray.util.remove_placement_group(held)
        tuning.join()
    ended = [event for event in events if event.status]
    assert "placement.timeout_s=6" in (ended[0].reason or "")
    assert ended[1].status == TrialStatus.INFRASTRUCTURE.value
    assert ended[-1].status == TrialStatus.COMPLETE.value
    assert len(starts(tmp_path)) == 1


def test_node_that_was_not_released_is_not_used_again(cluster: Any) -> None:
    with join_cluster(cluster.address):
        known, two = nodes.Nodes(), Placement(gpus=2)
        first = known.take(two)
        assert first is not None
        known.bar(first, "GPU 0 still holds 20.0 GiB; pid 4242 (python)")
        known.give_back(first, failed=True)
        second = known.take(two)
        assert second is not None
        assert second != first
        assert known.take(two) is None
        assert known.none_left(two) is None
        known.bar(second, "GPU 1 still holds 1.0 GiB")
        known.give_back(second)
        assert known.take(two) is None
        assert "pid 4242" in (known.none_left(two) or "")
