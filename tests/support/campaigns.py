"""Campaigns on real folders and real MLflow stores, without Ray: the results of the trials are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from orchestrator.campaign.campaign import Campaign, open_campaign
from orchestrator.campaign.launches import Launch
from orchestrator.config import Experiment
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from tests.support.builders import CONFIG, K, make_experiment, make_result

NO_SPEC = {"no-spec": {CONFIG: None}}


def k_sweep(folder: Path, **arguments: Any) -> Experiment:
    """Three points, unless the arguments of make_experiment name others."""
    return make_experiment(folder, **{"name": "swept", "grid": {K: [2, 4, 6]}, **arguments})


def answer(launch: Launch, rate: float = 100.0, **fields: Any) -> TrialResult:
    """What a trial of a launch returns that ran well, at a decode rate."""
    known = {"phases_s": {"starting": 1.0}, "started_at": "2026-01-01T00:00:00+00:00"}
    return make_result(launch.spec, rate * 0.999, rate, rate * 1.001, **{**known, **fields})


def fault(launch: Launch, status: TrialStatus, cause: str, reason: str = "as it said") -> TrialResult:
    return make_result(launch.spec, status=status, cause=cause, reason=reason)


def by_k(launch: Launch, noise: float = 0.0, **fields: Any) -> TrialResult:
    """noise: relative difference between the launches of one point."""
    rate = {None: 50.0, 2: 100.0, 4: 140.0, 6: 120.0}[launch.spec.params.get(K)]
    return answer(launch, rate * (1 + noise * random.Random(f"{launch.spec.name}").uniform(-1, 1)), **fields)


def drive(running: Campaign, respond: Callable[[Launch], TrialResult], most: int = 100) -> list[str]:
    """Run a campaign as tuning/tune.py does, one trial at a time. Returns the names in the order of their starts."""
    started: list[str] = []
    while len(started) < most and (launch := running.next_launch()) is not None:
        running.mark_started(str(len(started)), launch)
        started.append(launch.spec.name)
        running.take_result(launch, respond(launch))
    return started


@contextmanager
def open_checked(made_of: Experiment, *, resume: bool = False, **arguments: Any) -> Iterator[Campaign]:
    with open_campaign(made_of, resume=resume, **arguments) as running:
        yield running
        assert_adds_up(running)


def assert_adds_up(running: Campaign) -> None:
    account = running.account()
    assert account.planned == account.earlier + account.started + account.skipped + len(account.not_run)
    assert account.planned >= len(running.launches)


def runs(made_of: Experiment) -> list[tuple[str, str, str | None]]:
    """(name, status, cause) of every trial's run in MLflow, oldest first."""
    client = MlflowClient(f"sqlite:///{made_of.tracking.folder}/mlflow.db")
    found = client.get_experiment_by_name(made_of.name)
    assert found is not None
    trials = client.search_runs([found.experiment_id], "tags.kind = 'trial'", order_by=["attributes.start_time ASC"])
    return [(str(run.info.run_name), run.info.status, run.data.tags.get("cause")) for run in trials]
