"""Ray Tune around trial.run: where each trial runs, in which order, what is retried, and what is kept.

One trial takes one bundle {CPU, GPU} of one node (STRICT_PACK), and one node runs one trial at a time, since two
engines side by side would measure each other. Only the driver writes: results reach it through Tune's reports.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ray reads these when it is imported: no usage reports, no output of its own, trials keep our working directory.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray import tune
from ray.tune.search import Searcher

from orchestrator import environments, host, search, trial
from orchestrator.campaign import Campaign, Launch
from orchestrator.config import Objective, Placement, TrialSpec
from orchestrator.engines.base import TrialStatus
from orchestrator.errors import MachineError
from orchestrator.metrics import Measurement
from orchestrator.trial import TrialResult

MAX_FETCHED_BYTES = 64 << 20


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A Ray cluster: the one at `address`, else one embedded in this process, on loopback."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    if address is None:
        options |= {"object_store_memory": 128 << 20, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the Ray cluster at {address}" if address else "a local Ray"
        raise MachineError(f"{where} cannot be reached: {' '.join(str(error).split())[:300]}") from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def check_local_placement(placement: Placement) -> None:
    """Whether this machine alone could hold one trial; asked before Ray is started. Raises MachineError."""
    num_gpus, num_cpus = len(host.gpus()), os.cpu_count() or 1
    if placement.gpus > num_gpus:
        seen = ", ".join(gpu.name for gpu in host.gpus()) or "none"
        raise MachineError(
            f"placement.gpus: a trial needs {placement.gpus} GPUs on one node, this machine has {num_gpus} ({seen}); "
            "join a cluster that has such a node with --address, or look at the command lines with --dry-run"
        )
    if placement.cpus > num_cpus:
        raise MachineError(
            f"placement.cpus: a trial needs {placement.cpus} CPUs on one node, this machine has {num_cpus}"
        )


def nodes_that_fit(placement: Placement) -> list[str]:
    """The node resources (`node:ADDRESS`) of the nodes that can hold one trial. Raises MachineError when none can."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    fitting = [node for node in alive if _fits(node, placement)]
    if not fitting:
        shapes = "; ".join(
            f"{node['NodeManagerAddress']}: {node['Resources'].get('GPU', 0):g} GPUs, "
            f"{node['Resources'].get('CPU', 0):g} CPUs"
            for node in alive
        )
        label = f" with label {placement.node_label}" if placement.node_label else ""
        raise MachineError(
            f"no node of this Ray cluster can hold a trial: it needs {placement.gpus} GPUs and {placement.cpus} CPUs "
            f"on ONE node{label}; the nodes have: {shapes or 'none alive'}"
        )
    return [_node_resource(node) for node in fitting]


def _fits(node: dict[str, Any], placement: Placement) -> bool:
    labelled = placement.node_label is None or placement.node_label in (
        *node["Resources"],
        *(f"{k}={v}" for k, v in node.get("Labels", {}).items()),
    )
    return (
        labelled
        and node["Resources"].get("GPU", 0) >= placement.gpus
        and node["Resources"].get("CPU", 0) >= placement.cpus
    )


def _node_resource(node: dict[str, Any]) -> str:
    own = [name for name in node["Resources"] if name.startswith("node:") and name != "node:__internal_head__"]
    return str(own[0])


def run_trials(campaign: Campaign) -> None:
    """Run everything the campaign still wants, until it is done, stopped or interrupted."""
    with _terminable(campaign):
        while campaign.wants_more():
            nodes = nodes_that_fit(campaign.experiment.placement)
            _fit(campaign, nodes)


def _fit(campaign: Campaign, nodes: list[str]) -> None:
    placement = campaign.experiment.placement
    trainable = tune.with_resources(_trainable, lambda config: _bundle(placement, config["node"]))
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=_Feed(campaign, nodes),
            num_samples=-1,
            max_concurrent_trials=None,
            reuse_actors=False,
            trial_dirname_creator=lambda t: f"trial_{t.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=f"ray-{int(time.time())}",
            storage_path=str(campaign.folder / "ray"),
            verbose=0,
            callbacks=[_Listen(campaign)],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )
    tuner.fit()


def _bundle(placement: Placement, node: str) -> tune.PlacementGroupFactory:
    bundle = {"CPU": placement.cpus, "GPU": placement.gpus, node: 0.001}
    return tune.PlacementGroupFactory([{k: v for k, v in bundle.items() if v}], strategy="STRICT_PACK")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What the process of a trial is handed. incumbent: the best when it starts, None without stop_early."""

    spec: TrialSpec
    workdir: Path
    objective: Objective
    incumbent: TrialResult | None
    driver_host: str


def _trainable(config: dict[str, Any]) -> None:
    """Runs on the node of the trial, in a process of its own."""
    task: _Task = config["task"]
    reported: list[str] = []
    earlier: dict[str, Measurement] = {}

    def on_progress(phase: str, _done: int, _total: int) -> None:
        # A report costs milliseconds, so only a change of phase is told, never a request.
        if reported[-1:] != [phase]:
            reported.append(phase)
            tune.report({"phase": phase})

    def on_measurement(workload: str, so_far: Measurement) -> bool:
        others = {name: measurement for name, measurement in earlier.items() if name != workload}
        earlier[workload] = so_far
        return not search.clearly_worse(
            task.objective, workload, so_far, task.incumbent, spec=task.spec, earlier=others
        )

    result = trial.run(
        task.spec,
        task.workdir,
        gpu_ids=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
        engine_version=environments.engine_version(task.spec.engine),
        on_progress=on_progress,
        on_measurement=on_measurement,
    )
    files = {} if task.driver_host == socket.gethostname() else _files(task.workdir)
    tune.report({"document": trial.to_json(result), "files": files})


def _files(workdir: Path) -> dict[str, bytes]:
    """What a remote trial leaves for the driver, the largest files cut at their end."""
    return {
        path.name: path.read_bytes()[-MAX_FETCHED_BYTES:]
        for path in sorted(workdir.iterdir())
        if path.is_file() and not path.name.startswith(".")
    }


class _Feed(Searcher):
    """Hands Tune the campaign's next launch and takes back what came of it."""

    def __init__(self, campaign: Campaign, nodes: list[str]) -> None:
        super().__init__()
        self._campaign = campaign
        self._free_nodes = list(nodes)
        self._launches: dict[str, tuple[Launch, str]] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        if not self._free_nodes and self._launches:
            return None
        launch = self._campaign.next_launch()
        if launch is None:
            return None if self._launches else Searcher.FINISHED
        node = self._free_nodes.pop(0)
        self._launches[trial_id] = (launch, node)
        self._campaign.started(trial_id, launch)
        experiment = self._campaign.experiment
        task = _Task(
            spec=launch.spec,
            workdir=self._campaign.workdir(launch),
            objective=experiment.objective,
            incumbent=self._campaign.incumbent() if experiment.search.stop_early else None,
            driver_host=socket.gethostname(),
        )
        return {"task": task, "node": node}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        launch, node = self._launches.pop(trial_id)
        self._free_nodes.append(node)
        self._campaign.ended(launch, _result_of(launch, result, self._campaign.workdir(launch)))

    # The campaign's own folder is the memory of what was tried; Tune's copies of a searcher's state are not used.
    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError(f"a campaign resumes from its folder, not from {checkpoint_path}")


def _result_of(launch: Launch, result: dict[str, Any] | None, workdir: Path) -> TrialResult:
    """The TrialResult a trial reported; a trial whose process died is infrastructure."""
    if result and "document" in result:
        workdir.mkdir(parents=True, exist_ok=True)
        for name, content in (result.get("files") or {}).items():
            (workdir / name).write_bytes(content)
        return trial.from_json(result["document"])
    return TrialResult(
        spec=launch.spec,
        status=TrialStatus.INFRASTRUCTURE,
        cause="trial_process_lost",
        reason="the trial's process ended without a result (killed, out of memory, or its node was lost)",
        workdir=str(workdir),
    )


class _Listen(tune.Callback):
    """Passes phases on to whoever shows progress, and ends the run when the campaign was told to stop."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "phase" in result:
            self._campaign.phase(trial.trial_id, result["phase"])


@contextlib.contextmanager
def _terminable(campaign: Campaign) -> Iterator[None]:
    """SIGTERM and SIGHUP end a campaign as Ctrl-C does: engines stopped, runs closed, finished trials kept."""

    def interrupt(number: int, _frame: object) -> None:
        campaign.interrupted = signal.Signals(number).name
        os.kill(os.getpid(), signal.SIGINT)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
