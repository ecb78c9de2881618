"""The checks of `doctor`: what would stop this experiment on this machine."""

from __future__ import annotations

import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator import search
from orchestrator.cli import dry_run
from orchestrator.config import Experiment, TrialSpec
from orchestrator.engines import find_engine
from orchestrator.engines.flags import check_flags
from orchestrator.environments import install
from orchestrator.errors import OrchestratorError
from orchestrator.measure.workload import load_texts
from orchestrator.node import claims, gpus, leftovers, memory
from orchestrator.node.keeper import SHM
from orchestrator.node.program import check_program
from orchestrator.tracking import Tracker

# A campaign writes logs and traces, engines write compile caches.
WANTED_DISK_GIB = 5.0
WANTED_OPEN_FILES = 4096
# The workers of one engine exchange data there; a container's default of 64 MiB is too little for two.
WANTED_SHM_GIB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The answer to one question about this machine. ok is None for a note: it stops nothing, or is not known."""

    name: str
    ok: bool | None
    detail: str


def check_machine(experiment: Experiment) -> list[Check]:
    """Every check, in the order in which a campaign would meet them.

    Raises ConfigError on an unknown engine.kind. A check that meets an error of ours or an OSError fails with its
    message.
    """
    search.check_engines(experiment)
    questions: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("configuration", lambda: _check_configuration(experiment)),
        ("prompts", lambda: _check_prompts(experiment)),
        ("CPUs", lambda: _check_cpus(experiment)),
        ("GPUs", lambda: _check_gpus(experiment)),
        ("engine", lambda: _check_engines(experiment)),
        ("model", lambda: _check_models(experiment)),
        ("leftovers", _check_leftovers),
        ("ports", lambda: _check_ports(experiment)),
        ("disk", lambda: _check_disks(experiment)),
        ("limits", lambda: _check_limits(experiment)),
        ("Ray", lambda: iter([Check(name="Ray", ok=True, detail=metadata.version("ray"))])),
        ("MLflow", lambda: _check_mlflow(experiment)),
    )
    return [check for name, ask in questions for check in _collect(name, ask)]


def document(checks: list[Check]) -> dict[str, Any]:
    """The JSON document of the verb."""
    return {"checks": [asdict(check) for check in checks]}


def _collect(name: str, ask: Callable[[], Iterator[Check]]) -> list[Check]:
    try:
        return list(ask())
    except (OrchestratorError, OSError) as error:
        return [Check(name=name, ok=False, detail=str(error))]


def _check_configuration(experiment: Experiment) -> Iterator[Check]:
    search.check(experiment)
    specs, skipped = search.points(experiment)
    starts = dry_run.describe_range(*dry_run.count_starts(experiment, len(specs)))
    left_out = f", {len(skipped)} skipped: {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
    yield Check(
        name="configuration",
        ok=bool(specs),
        detail=f"{len(specs)} points, {starts} engine starts{left_out}; "
        f"workloads: {', '.join(experiment.workloads) or 'none'}",
    )


def _check_prompts(experiment: Experiment) -> Iterator[Check]:
    texts = {name: load_texts(workload) for name, workload in experiment.workloads.items()}
    written = [f"{name}: {len(found)}" for name, found in texts.items() if found]
    yield Check(
        name="prompts", ok=True, detail="texts of " + ", ".join(written) if written else "made of random tokens"
    )


def _check_cpus(experiment: Experiment) -> Iterator[Check]:
    here, wanted = os.cpu_count() or 1, max(spec.placement.cpus for spec in dry_run.known_points(experiment))
    detail = f"{wanted} needed, {here} here; {memory.host_available_gib():.0f} GiB of host memory free"
    yield Check(name="CPUs", ok=here >= wanted, detail=detail)


def _check_gpus(experiment: Experiment) -> Iterator[Check]:
    seen, wanted = gpus.read_gpus(), max(spec.placement.gpus for spec in dry_run.known_points(experiment))
    kinds = ", ".join(f"{count} x {name}" for name, count in Counter(map(str, seen)).items())
    driver = gpus.driver_version()
    here = f"{kinds}; driver {driver}" if seen else "none here" + ("" if driver else ", no NVIDIA driver")
    yield Check(name="GPUs", ok=len(seen) >= wanted, detail=f"{wanted} needed on one node: {here}")
    if not wanted or not seen:
        return
    busy = [(gpu, why) for gpu in seen for why in _find_users(gpu)]
    num_free = len(seen) - len({gpu.uuid for gpu, _ in busy})
    yield Check(
        name="GPUs free",
        ok=False if num_free < wanted else None if busy else True,
        detail="; ".join(why for _, why in busy) or "nobody is on them",
    )
    if wanted > 1:
        yield _check_links()


def _find_users(gpu: gpus.Gpu) -> tuple[str, ...]:
    if gpu.fault:
        return (f"GPU {gpu.index}: {gpu.fault}",)
    found = gpus.find_quarantined((gpu.uuid,)) or tuple(f"GPU {gpu.index}: {user}" for user in gpu.users)
    with claims.claim_gpus([gpu.uuid]) as claimed:
        return found or tuple(f"GPU {gpu.index}: claimed by an engine of ours that is starting" for _ in claimed)


def _check_links() -> Check:
    """Peer access in one line: a machine of eight GPUs has 28 pairs."""
    by_status: dict[str, list[str]] = {}
    for link in gpus.topology():
        pair = "-".join(map(str, link["pair"])) if isinstance(link["pair"], list) else str(link["pair"])
        by_status.setdefault(str(link["p2p_read"] or "unknown"), []).append(pair)
    words = [
        f"{status} ({', '.join(pairs) if len(pairs) <= 4 else f'{len(pairs)} pairs'})"
        for status, pairs in by_status.items()
    ]
    slow = "" if set(by_status) == {"ok"} else "; transfers go through the host's memory"
    return Check(name="GPU links", ok=True if not slow else None, detail="peer access " + ", ".join(words) + slow)


def _check_engines(experiment: Experiment) -> Iterator[Check]:
    """Each engine is asked for its flags: it has to be there, and to come up as far as its own imports."""
    for name, specs in _group_by_engine(experiment).items():
        yield from _collect(f"engine {name}", lambda specs=specs, name=name: _check_engine(name, specs))  # type: ignore[misc]


def _group_by_engine(experiment: Experiment) -> dict[str, list[TrialSpec]]:
    engines: dict[str, list[TrialSpec]] = {}
    for spec in search.points(experiment)[0]:
        environment = f" ({spec.engine.environment})" if spec.engine.environment else ""
        engines.setdefault(spec.engine.kind + environment, []).append(spec)
    return engines


def _check_engine(name: str, specs: list[TrialSpec]) -> Iterator[Check]:
    launches = [(spec, dry_run.plan_launch(spec)) for spec in specs]
    spec, plan = launches[0]
    check_program(plan)
    version = install.engine_version(spec.engine)
    answer = dry_run.ask_help(spec.engine, plan)
    if answer is None:
        detail = f"version {version or 'unknown'}; it does not answer --help, its flags were not checked"
        yield Check(name=f"engine {name}", ok=None, detail=detail)
        return
    if answer.exit_code:
        why = find_engine(spec.engine.kind).diagnose(answer.text, answer.exit_code)
        yield Check(name=f"engine {name}", ok=False, detail=f"it does not start: {why.summary}; {why.lever}")
        return
    unknown = dict.fromkeys(line for _, each in launches for line in check_flags(each.argv, answer.text))
    flags = "; ".join(unknown) or "every flag is one of its own"
    yield Check(name=f"engine {name}", ok=None if unknown else True, detail=f"version {version or 'unknown'}; {flags}")


def _check_models(experiment: Experiment) -> Iterator[Check]:
    models = {spec.engine.model: spec.engine for spec in search.points(experiment)[0]}
    for name, engine in models.items():
        dry_run.check_model(engine)
        path = Path(engine.root) / name
        if not path.exists():
            yield Check(name="model", ok=None, detail=f"{name} is no local folder; the engine fetches or finds it")
            continue
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        size_gib = sum(file.stat().st_size for file in files) / gpus.GIB
        yield Check(name="model", ok=bool(files), detail=f"{name}: {len(files)} files, {size_gib:.1f} GiB")


def _check_leftovers() -> Iterator[Check]:
    left = leftovers.find_abandoned()
    pids = ", ".join(str(process.pid) for process in left)
    detail = f"pids {pids} of engines whose owner was killed; the next start ends them" if left else "none"
    yield Check(name="leftovers", ok=None if left else True, detail=detail)


def _check_ports(experiment: Experiment) -> Iterator[Check]:
    first, last = experiment.placement.ports
    with claims.reserve_port((first, last)) as port:
        yield Check(name="ports", ok=True, detail=f"{port} is free, range {first} to {last}")


def _check_disks(experiment: Experiment) -> Iterator[Check]:
    yield _check_disk("results", Path(experiment.tracking.folder).absolute())
    yield _check_disk("caches", Path(experiment.engine.root).absolute() / ".engines" / ".cache")


def _check_disk(name: str, folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    free_gib = shutil.disk_usage(existing).free / gpus.GIB
    words = "" if writable else ", not writable"
    words += f", {WANTED_DISK_GIB:.0f} GiB wanted" if free_gib < WANTED_DISK_GIB else ""
    return Check(name=name, ok=not words, detail=f"{folder}: {free_gib:.0f} GiB free{words}")


def _check_limits(experiment: Experiment) -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = "" if soft >= WANTED_OPEN_FILES else f"; many streams at once need {WANTED_OPEN_FILES}: ulimit -n"
    yield Check(name="open files", ok=None if wanted else True, detail=f"limit {soft}{wanted}")
    if max(spec.placement.gpus for spec in dry_run.known_points(experiment)) > 1:
        free_gib = shutil.disk_usage(SHM).free / gpus.GIB
        enough = free_gib >= WANTED_SHM_GIB
        more = "" if enough else f"; the workers of an engine need {WANTED_SHM_GIB:.0f} GiB (docker: --shm-size)"
        yield Check(name="shared memory", ok=enough, detail=f"{SHM}: {free_gib:.1f} GiB free{more}")


def _check_mlflow(experiment: Experiment) -> Iterator[Check]:
    Tracker(experiment)
    yield Check(name="MLflow", ok=True, detail=f"{metadata.version('mlflow')}, store {experiment.tracking_uri}")
