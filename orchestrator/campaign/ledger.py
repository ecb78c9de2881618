"""The folder of a campaign, which is its memory: results, samples, and the lock of its one driver.

trials/ID/result.json exists exactly when that launch finished. samples.jsonl holds what a sampler drew, one line each,
so that a resumed search goes on where it was. Both survive a driver that was killed at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator import trial
from orchestrator.config import Experiment
from orchestrator.errors import ConfigError, MachineError
from orchestrator.node import claims
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult

TOKEN_FILE = ".driver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One campaign's folder. token: also in the folder, so that a trial can tell whether it sees the same one."""

    folder: Path
    token: str

    def workdir(self, launch_id: str) -> Path:
        return self.folder / "trials" / launch_id

    def finished(self, launch_id: str) -> TrialResult | None:
        """The result of a launch that ended; None for one that must run (again). A torn file counts as not finished."""
        try:
            result = trial.read_result(self.workdir(launch_id))
        except (OSError, ValueError):
            return None
        return None if result.status is TrialStatus.INFRASTRUCTURE else result

    def write(self, launch_id: str, result: TrialResult) -> None:
        """Raises OSError, for example on a full disk; an earlier result is then still whole."""
        workdir = self.workdir(launch_id)
        workdir.mkdir(parents=True, exist_ok=True)
        trial.write_result(result, workdir)

    def samples(self) -> list[dict[str, Any]]:
        """What a sampler drew so far, oldest first. A torn last line was never started and is left out."""
        try:
            lines = (self.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        drawn: list[dict[str, Any]] = []
        for line in lines:
            with contextlib.suppress(ValueError):
                drawn.append(json.loads(line))
        return drawn

    def remember_sample(self, sample: dict[str, Any]) -> None:
        path = self.folder / "samples.jsonl"
        with path.open("a+b") as ledger:
            ends_torn = ledger.tell() > 0 and not _ends_with_newline(path)
            ledger.write(b"\n" * ends_torn + json.dumps(sample).encode() + b"\n")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def home_of(experiment: Experiment) -> Path:
    """Where the campaigns of an experiment keep their folders."""
    return Path(experiment.tracking.folder).absolute() / "campaigns" / experiment.name


def model_fingerprint(root: str, model: str) -> str | None:
    """Changes when the model's files do: their names, sizes and times. None for a model that is not a local folder."""
    path = Path(root) / model
    if not path.exists():
        return None
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    text = json.dumps([[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextlib.contextmanager
def owned(experiment: Experiment, *, resume: bool) -> Iterator[Ledger]:
    """The folder of the last campaign (with `resume`) or of a new one, which nobody else runs meanwhile.

    Raises ConfigError with the pid of a driver that is at it, MachineError when nothing can be written there.
    """
    home = home_of(experiment)
    with _told_as_machine_error(home):
        home.mkdir(parents=True, exist_ok=True)
        (home / "lock").touch()
        owner = (home / "lock").read_text().strip()
    with claims.locked(home / "lock") as free:
        if not free:
            raise ConfigError(
                f"{home}: another campaign of this experiment is running (pid {owner}); wait, or give name="
            )
        with _told_as_machine_error(home):
            (home / "lock").write_text(str(os.getpid()))
            ledger = Ledger(folder=_folder(home, resume), token=secrets.token_hex(8))
            (ledger.folder / "trials").mkdir(parents=True, exist_ok=True)
            (ledger.folder / TOKEN_FILE).write_text(ledger.token)
        yield ledger


def _folder(home: Path, resume: bool) -> Path:
    earlier = sorted(path.parent for path in home.glob("*/trials") if path.is_dir())
    if resume and earlier:
        return earlier[-1]
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    # Two campaigns may follow each other within a second; the later one still sorts last.
    return next(path for n in range(1000) if not (path := home / (f"{stamp}.{n:03}" if n else stamp)).exists())


@contextlib.contextmanager
def _told_as_machine_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(f"{folder}: results cannot be written here: {error.strerror}") from None
