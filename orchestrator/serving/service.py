"""Ray Serve: promote, status, rollback, stop. The verbs of `python -m orchestrator promote`.

Without an address the service lives in a local Ray head on loopback, which is started when none of ours runs and
ended by `stop`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import cluster, tracking
from orchestrator.config import Experiment, Placement
from orchestrator.errors import ConfigError, MachineError, PromotionError
from orchestrator.node import claims
from orchestrator.serving import export as files
from orchestrator.serving import gate, head
from orchestrator.serving.deployment import Deployment, other_applications
from orchestrator.serving.gateway import gateway, is_loopback
from orchestrator.serving.promotion import Promotion, PromotionReport
from orchestrator.serving.replica import engines

__all__ = [
    "Deployment",
    "PromotionReport",
    "StatusReport",
    "engines",
    "export",
    "gateway",
    "promote",
    "rollback",
    "status",
    "stop",
]

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """What runs. status: Serve's word, None when no application runs. state: the gateway's own document."""

    application: str
    url: str
    address: str | None
    status: str | None
    state: dict[str, Any] | None
    champion_run_id: str | None
    previous_run_id: str | None

    def document(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return {
            "application": self.application,
            "url": self.url,
            "address": self.address,
            "status": self.status,
            "state": self.state,
            "champion_run_id": self.champion_run_id,
            "previous_run_id": self.previous_run_id,
        }


def promote(
    experiment: Experiment,
    *,
    run_id: str | None = None,
    address: str | None = None,
    force: bool = False,
    say: Say = lambda _: None,
) -> PromotionReport:
    """Serve the best result (or `run_id`): gate, deploy, verify, keep or roll back.

    Raises ConfigError, MachineError (no room, no cluster), PromotionError (nothing may be promoted). A challenger that
    fails is no exception but a report with exit code 1, because the champion was started again.
    """
    key = _api_key(experiment)
    challenger = gate.find_candidate(experiment, run_id)
    gate.require_complete(challenger.result)
    champion = tracking.champion(experiment)
    with promotion_lock(experiment), _joined_cluster(experiment, address, challenger.result.spec.placement, say):
        deployment = Deployment(experiment=experiment, key=key)
        return Promotion(experiment=experiment, deployment=deployment, say=say).challenge(
            challenger, champion, force=force
        )


def rollback(experiment: Experiment, *, address: str | None = None, say: Say = lambda _: None) -> PromotionReport:
    """Serve the previous champion again. Raises PromotionError when there was none."""
    key = _api_key(experiment)
    before = tracking.previous(experiment)
    if before is None:
        raise PromotionError(f"{experiment.tracking_name}: there is no previous champion to roll back to")
    champion = tracking.champion(experiment)
    with promotion_lock(experiment), _joined_cluster(experiment, address, before.result.spec.placement, say):
        deployment = Deployment(experiment=experiment, key=key)
        return Promotion(experiment=experiment, deployment=deployment, say=say).roll_back(before, champion)


def status(experiment: Experiment, *, address: str | None = None) -> StatusReport:
    """What is served now. Starts nothing."""
    deployment = Deployment(experiment=experiment)
    champion, previous = tracking.champion(experiment), tracking.previous(experiment)
    word, state = None, None
    where = address or _local_address(experiment)
    if where is not None:
        with cluster.join(where, with_token=address is None):
            word, state = deployment.status(), deployment.state()
    return StatusReport(
        application=deployment.name,
        url=deployment.url,
        address=where,
        status=word,
        state=state,
        champion_run_id=champion.run_id if champion else None,
        previous_run_id=previous.run_id if previous else None,
    )


def stop(experiment: Experiment, *, address: str | None = None, say: Say = lambda _: None) -> bool:
    """End the application, and the local head when it was the last one in it. False when nothing ran."""
    where = address or _local_address(experiment)
    if where is None:
        return head.stop_head(_folder(experiment))
    with promotion_lock(experiment):
        with cluster.join(where, with_token=address is None):
            deployment = Deployment(experiment=experiment)
            ran = deployment.exists()
            if ran:
                deployment.delete()
                say(f"{deployment.name} is stopped")
            others = other_applications(deployment.name)
        if address is None and not others:
            head.stop_head(_folder(experiment))
            say("the local Ray head is stopped")
        elif address is None:
            say(f"the local Ray head stays for {', '.join(others)}")
    return ran or address is None


def export(experiment: Experiment, *, run_id: str | None = None, folder: Path) -> list[Path]:
    """Write what starts this run elsewhere: serve.sh, serve.yaml and, for vLLM, serve-llm.yaml. Returns the files.

    Without run_id it is the champion, else the best of the last campaign.
    """
    recorded = tracking.champion(experiment) if run_id is None else None
    recorded = recorded or gate.find_candidate(experiment, run_id)
    gate.require_complete(recorded.result)
    return files.export(experiment, recorded, folder)


@contextlib.contextmanager
def _joined_cluster(experiment: Experiment, address: str | None, placement: Placement, say: Say) -> Iterator[None]:
    """Connected to the cluster that the service lives in, started if it is ours to start and can hold the engine."""
    ours, started = address is None, False
    if address is None:
        address = _local_address(experiment)
    if address is None:
        say("starting a local Ray head")
        address, started = head.start_head(_folder(experiment)).address, True
    try:
        with cluster.join(address, with_token=ours):
            head.require_room(placement, experiment.serving.replicas)
            started = False
            yield
    finally:
        if started:
            # It holds nothing: what it was started for does not fit on this machine.
            head.stop_head(_folder(experiment))


def _folder(experiment: Experiment) -> Path:
    return Path(experiment.tracking.folder).absolute() / "serving"


def _local_address(experiment: Experiment) -> str | None:
    found = head.local_head(_folder(experiment))
    return found.address if found else None


@contextlib.contextmanager
def promotion_lock(experiment: Experiment) -> Iterator[None]:
    """One promotion at a time: two would replace each other's engines."""
    folder = _folder(experiment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror}") from None
    with claims.try_lock(folder / "lock") as free:
        if not free:
            raise ConfigError(f"{folder}: another promotion is under way; wait for it to end")
        yield


def _api_key(experiment: Experiment) -> str | None:
    """The key that clients must show. Raises ConfigError when one is needed and there is none."""
    serving = experiment.serving
    key = os.environ.get(serving.api_key_env) if serving.api_key_env else None
    if serving.api_key_env and not key:
        raise ConfigError(f"serving.api_key_env: the environment variable {serving.api_key_env} is not set or empty")
    if key is None and not is_loopback(serving.host):
        raise ConfigError(
            f"serving.host: {serving.host} can be reached by others and no key is asked for; set serving.api_key_env "
            "to the name of an environment variable that holds one, or serve on 127.0.0.1"
        )
    return key
