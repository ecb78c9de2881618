"""What runs on the node of a trial, in a process of its own. It imports neither MLflow nor the campaign: starts count.

Reports reach the driver through Ray Tune: the phase, each repeat of the objective's workloads, and at the end the
result with the trial's files where the driver does not see this node's folder.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from orchestrator import trial
from orchestrator.campaign.ledger import TOKEN_FILE
from orchestrator.config import Objective, TrialSpec
from orchestrator.environments import install
from orchestrator.measure.metrics import Measurement
from orchestrator.search.pruning import clearly_worse
from orchestrator.trial import TrialResult
from orchestrator.trial.run import run

MAX_FETCHED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the process of a trial is handed. incumbent: the best when it starts, None where none ends it early.

    workdir lies in the campaign's folder; token is what its TOKEN_FILE holds where that folder is shared.
    """

    spec: TrialSpec
    workdir: Path
    token: str
    objective: Objective
    incumbent: TrialResult | None


def trainable(config: dict[str, Any]) -> None:
    """Ray Tune's function: one trial, all of it."""
    task: Task = config["task"]
    reporter = _Reporter(task)
    with _place(task) as workdir:
        result = run(
            task.spec,
            workdir,
            gpu_ids=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            engine_version=install.engine_version(task.spec.engine),
            on_progress=reporter.on_progress,
            on_measurement=reporter.on_measurement,
        )
        files = () if workdir == task.workdir else pack_files(workdir)
    tune.report({"document": trial.to_json(replace(result, workdir=str(task.workdir))), "files": files})


class _Reporter:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._phase = ""
        self._earlier: dict[str, Measurement] = {}

    def on_progress(self, phase: str, _done: int, _total: int) -> None:
        # A report costs milliseconds, so only a change of phase is reported, never a request.
        if phase != self._phase:
            self._phase = phase
            tune.report({"phase": phase})

    def on_measurement(self, workload: str, so_far: Measurement) -> bool:
        """Between repeats, when nothing is measured: report the repeat, return whether going on can still pay."""
        task = self._task
        others = {name: measurement for name, measurement in self._earlier.items() if name != workload}
        self._earlier[workload] = so_far
        repeats = max(map(len, so_far.repeats.values()), default=0)
        planned = task.spec.workloads[workload].repeats
        tune.report({"phase": f"{workload}: {repeats} of {planned} repeats"})
        return not clearly_worse(task.objective, workload, so_far, task.incumbent, earlier=others)


@contextlib.contextmanager
def _place(task: Task) -> Iterator[Path]:
    """The trial's folder, emptied of an earlier attempt; a temporary one where the driver's cannot be seen."""
    home = task.workdir.parent.parent
    if _is_shared(home, task.token):
        shutil.rmtree(task.workdir, ignore_errors=True)
        yield task.workdir
        return
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        yield Path(folder)


def _is_shared(home: Path, token: str) -> bool:
    try:
        return (home / TOKEN_FILE).read_text() == token
    except OSError:
        return False


def pack_files(workdir: Path) -> tuple[tuple[str, bytes], ...]:
    """What a remote trial leaves for the driver, compressed; of the largest files their end. Tune flattens mappings."""
    return tuple((path.name, zlib.compress(_end_of(path))) for path in sorted(workdir.iterdir()) if path.is_file())


def unpack_files(files: tuple[tuple[str, bytes], ...], workdir: Path) -> None:
    """Write what `pack_files` gave into the driver's folder of the trial. Raises OSError."""
    workdir.mkdir(parents=True, exist_ok=True)
    for name, content in files:
        (workdir / name).write_bytes(zlib.decompress(content))


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_FETCHED_BYTES))
        return file.read()
