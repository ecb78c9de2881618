"""Ray Tune around trial.run: where each trial runs, in which order, what is retried, and what is kept.

One trial takes one bundle {CPU, GPU} of one node (STRICT_PACK), and one node runs one trial at a time. Only the driver
writes: results reach it through Tune's reports.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orchestrator.cluster  # isort: skip  # noqa: F401 (it sets what Ray reads when it is imported)
from ray import cloudpickle, tune
from ray.exceptions import RayActorError, RayError
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from orchestrator import trial
from orchestrator.campaign.campaign import Campaign
from orchestrator.campaign.launches import Launch
from orchestrator.config import Placement
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from orchestrator.tuning.interrupt import Interrupts
from orchestrator.tuning.nodes import Nodes
from orchestrator.tuning.remote import Task, trainable, unpack_files

# How long the last usable node may be gone before the campaign gives up waiting for one.
NO_NODE_S = 30.0


def run_trials(campaign: Campaign, interrupts: Interrupts | None = None) -> None:
    """Run everything the campaign still wants, until it is done, stopped or interrupted."""
    interrupts = interrupts or Interrupts()
    nodes = Nodes()
    nodes.require([launch.spec.placement for launch in campaign.launches] or [campaign.experiment.placement])
    feed = _Feed(campaign, nodes, interrupts)
    try:
        with interrupts.defer(), tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True) as storage:
            _fit(campaign, feed, storage)
    except KeyboardInterrupt:
        campaign.interrupted = interrupts.signal or "SIGINT"
    except OSError as error:
        campaign.stop(f"Ray Tune cannot write: {error}")
    except (RayError, tune.TuneError) as error:
        campaign.stop(f"Ray failed: {' '.join(str(error).split())[:300]}")


def _fit(campaign: Campaign, feed: _Feed, storage: str) -> None:
    overseer = _Overseer(feed)
    tuner = tune.Tuner(
        tune.with_resources(trainable, lambda config: _bundle(config["task"].spec.placement, config["node"])),
        tune_config=tune.TuneConfig(
            search_alg=feed,
            scheduler=overseer,
            num_samples=-1,
            max_concurrent_trials=None,
            reuse_actors=False,
            trial_dirname_creator=lambda t: f"trial_{t.trial_id}",
        ),
        run_config=tune.RunConfig(
            name="campaign",
            storage_path=storage,
            verbose=0,
            callbacks=[_Listen(feed, overseer)],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )
    tuner.fit()


def _bundle(placement: Placement, node: str) -> tune.PlacementGroupFactory:
    bundle = {"CPU": placement.cpus, "GPU": placement.gpus}
    return tune.PlacementGroupFactory(
        [{name: number for name, number in bundle.items() if number}],
        strategy="STRICT_PACK",
        bundle_label_selector=[{"ray.io/node-id": node}],
    )


@dataclass(slots=True, kw_only=True)
class _Placed:
    """A launch that Tune was handed, and the node it is for. lost: why its process gave no result, when known."""

    launch: Launch
    node: str
    since_s: float = field(default_factory=time.monotonic)
    lost: tuple[str, str] = (
        "trial_process_lost",
        "the trial's process ended without a result (killed, out of memory, or its node was lost)",
    )


class _Feed(Searcher):
    """Hands Tune the campaign's next launch and takes back what came of it."""

    def __init__(self, campaign: Campaign, nodes: Nodes, interrupts: Interrupts) -> None:
        super().__init__()
        self.campaign = campaign
        self._nodes = nodes
        self._interrupts = interrupts
        self._placed: dict[str, _Placed] = {}
        self._no_node_since_s: float | None = None

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        self.check_interrupts()
        launch = self.campaign.next_launch()
        if launch is None:
            return None if self._placed else Searcher.FINISHED
        node = self._nodes.take(launch.spec.placement)
        if node is None:
            self._wait_for_node(launch)
            return None
        self._no_node_since_s = None
        self._placed[trial_id] = _Placed(launch=launch, node=node)
        self.campaign.mark_started(trial_id, launch)
        task = Task(
            spec=launch.spec,
            workdir=self.campaign.workdir(launch),
            token=self.campaign.ledger.token,
            objective=self.campaign.experiment.objective,
            incumbent=self.campaign.incumbent(launch),
        )
        return {"task": task, "node": node}

    def check_interrupts(self) -> None:
        """Raises KeyboardInterrupt where nothing is half done; leaving Ray then ends the trials' processes."""
        if self._interrupts.signal is not None:
            raise KeyboardInterrupt

    def _wait_for_node(self, launch: Launch) -> None:
        """Keep the launch for later. Without any hope it is skipped, or the campaign ends where no node is left."""
        why = None if self._placed else self._nodes.none_left(launch.spec.placement)
        if why is None:
            self._no_node_since_s = None
            self.campaign.put_back(launch)
            return
        self._no_node_since_s = self._no_node_since_s or time.monotonic()
        if not why.startswith("not to be used") and time.monotonic() - self._no_node_since_s <= NO_NODE_S:
            self.campaign.put_back(launch)
        elif self._nodes.any_left():
            self._no_node_since_s = None
            self.campaign.skip(launch, why)
        else:
            self.campaign.put_back(launch)
            self.campaign.stop(why)

    def is_misplaced(self, trial_id: str) -> bool:
        """Whether a trial that waits for its place waits in vain: its node is gone, or somebody else holds it."""
        placed = self._placed.get(trial_id)
        if placed is None:
            return False
        timeout_s = placed.launch.spec.placement.timeout_s
        if not self._nodes.is_there(placed.node):
            placed.lost = ("node_lost", "the node was gone before the trial had started on it")
        elif time.monotonic() - placed.since_s > timeout_s:
            where = self._nodes.address(placed.node)
            reason = f"{where} had no room for the trial within placement.timeout_s={timeout_s:g}: others hold it"
            placed.lost = ("not_placed", reason)
        else:
            return False
        return True

    def keep_error(self, trial_id: str, error_path: str | None) -> None:
        """Keep Tune's error of a trial that ended without a result; called before the trial is taken back."""
        error = cloudpickle.loads(Path(error_path).read_bytes()) if error_path else None
        if trial_id in self._placed and error is not None and not isinstance(error, RayActorError):
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            self._placed[trial_id].lost = ("internal_error", f"the trial's process failed: {last}")

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        placed = self._placed.pop(trial_id)
        ended = _result_of(placed, result, self.campaign.workdir(placed.launch))
        self._nodes.give_back(placed.node, failed=ended.status is TrialStatus.INFRASTRUCTURE)
        if ended.cause == "not_released":
            self._nodes.bar(placed.node, ended.reason or "an engine was not released")
        self.campaign.take_result(placed.launch, ended)

    # The campaign's own folder is the memory of what was tried; Tune's copies of a searcher's state are not used.
    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).touch()


def _result_of(placed: _Placed, result: dict[str, Any] | None, workdir: Path) -> TrialResult:
    """The TrialResult a trial reported; a trial whose process died is infrastructure."""
    if result and "document" in result:
        unpack_files(result.get("files") or (), workdir)
        return trial.with_memory(trial.from_json(result["document"]), workdir)
    cause, reason = placed.lost
    status = TrialStatus.FAILED if cause == "internal_error" else TrialStatus.INFRASTRUCTURE
    return TrialResult(spec=placed.launch.spec, status=status, cause=cause, reason=reason, workdir=str(workdir))


class _Overseer(FIFOScheduler):
    """Tune's first-in-first-out, which can also take back a trial that waits for its place in vain."""

    def __init__(self, feed: _Feed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._feed = feed
        self._controller: Any = None

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        self._controller = tune_controller

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._feed.keep_error(trial.trial_id, trial.pickled_error_file)

    def take_back_misplaced(self, trials: list[Any]) -> None:
        for waiting in [known for known in trials if known.status == "PENDING"]:
            if self._feed.is_misplaced(waiting.trial_id):
                self._controller.stop_trial(waiting)


class _Listen(tune.Callback):
    """Looks around between Tune's steps, and passes phases on to whoever shows progress."""

    def __init__(self, feed: _Feed, overseer: _Overseer) -> None:
        self._feed, self._overseer = feed, overseer

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._feed.check_interrupts()
        self._overseer.take_back_misplaced(trials)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "phase" in result:
            self._feed.campaign.report_phase(trial.trial_id, result["phase"])
