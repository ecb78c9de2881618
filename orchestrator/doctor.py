"""What would stop this experiment on this machine, in one screen, before an hour is spent."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator import campaign, claims, environments, host, plans, search
from orchestrator.config import Experiment
from orchestrator.errors import OrchestratorError
from orchestrator.tracking import Tracker

# A campaign writes logs and traces, engines write compile caches.
WANTED_DISK_GIB = 5.0
WANTED_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question about this machine. ok None: a warning or something that cannot be told here."""

    name: str
    ok: bool | None
    detail: str


def examine(experiment: Experiment) -> list[Check]:
    """Every check, in the order in which a campaign would meet them."""
    questions: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("configuration", lambda: _configuration(experiment)),
        ("GPUs", lambda: _gpus(experiment)),
        ("engine", lambda: _engines(experiment)),
        ("ports", lambda: _ports(experiment)),
        ("disk", lambda: _disk(experiment)),
        ("limits", _limits),
        ("Ray", lambda: _library("Ray", "ray")),
        ("MLflow", lambda: _mlflow(experiment)),
    )
    return [check for name, ask in questions for check in _answered(name, ask)]


def document(checks: list[Check]) -> dict[str, Any]:
    """The JSON document of the verb."""
    return {"checks": [asdict(check) for check in checks]}


def _answered(name: str, ask: Callable[[], Iterator[Check]]) -> list[Check]:
    try:
        return list(ask())
    except (OrchestratorError, OSError) as error:
        return [Check(name=name, ok=False, detail=str(error))]


def _configuration(experiment: Experiment) -> Iterator[Check]:
    search.check(experiment)
    specs, skipped = campaign.keyed_points(experiment)
    yield Check(
        name="configuration",
        ok=bool(specs),
        detail=f"{len(specs)} trials, {len(skipped)} skipped; workloads {', '.join(experiment.workloads) or 'none'}",
    )


def _gpus(experiment: Experiment) -> Iterator[Check]:
    seen, wanted = host.gpus(), experiment.placement.gpus
    names = ", ".join(f"{gpu.name} {gpu.total_gib:.0f} GiB" if gpu.total_gib else gpu.name for gpu in seen)
    yield Check(
        name="GPUs",
        ok=len(seen) >= wanted,
        detail=f"{wanted} needed on one node, {len(seen)} here" + (f": {names}" if names else " (or no NVIDIA driver)"),
    )
    if not wanted:
        return
    users = host.foreign_users(tuple(gpu.uuid for gpu in seen), frozenset())
    yield Check(name="GPUs free", ok=not users, detail="; ".join(users) or "nobody is on them")
    for link in host.topology():
        ok = None if link["p2p_read"] is None else link["p2p_read"] == "ok"
        yield Check(name=f"GPU link {link['pair']}", ok=True if ok else None, detail=f"peer access {link['p2p_read']}")
    yield Check(name="driver", ok=True, detail=host.driver_version() or "unknown")


def _engines(experiment: Experiment) -> Iterator[Check]:
    plans.check_startable(experiment)
    specs, _ = campaign.keyed_points(experiment)
    for name, spec in {f"{s.engine.kind} {s.engine.environment or ''}".strip(): s for s in specs}.items():
        version = environments.engine_version(spec.engine)
        yield Check(name=f"engine {name}", ok=True if version else None, detail=f"version {version or 'unknown'}")
    yield Check(name="model", ok=True, detail=", ".join(sorted({spec.engine.model for spec in specs})))


def _ports(experiment: Experiment) -> Iterator[Check]:
    first, last = experiment.placement.ports
    with claims.reserved_port((first, last)) as port:
        yield Check(name="ports", ok=True, detail=f"{port} is free, range {first} to {last}")


def _disk(experiment: Experiment) -> Iterator[Check]:
    folder = Path(experiment.tracking.folder).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    free_gib = shutil.disk_usage(existing).free / host.GIB
    yield Check(
        name="disk",
        ok=writable and free_gib >= WANTED_DISK_GIB,
        detail=f"{folder}: {free_gib:.0f} GiB free" + ("" if writable else ", not writable"),
    )


def _limits() -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Check(name="open files", ok=True if soft >= WANTED_OPEN_FILES else None, detail=f"limit {soft}")


def _library(name: str, package: str) -> Iterator[Check]:
    yield Check(name=name, ok=True, detail=metadata.version(package))


def _mlflow(experiment: Experiment) -> Iterator[Check]:
    Tracker(experiment)
    yield Check(name="MLflow", ok=True, detail=f"{metadata.version('mlflow')}, store {experiment.tracking_uri}")
