"""The folder of a campaign, which is its memory: results, samples, and the lock of its one driver.

trials/ID/result.json exists exactly when that launch finished. samples.jsonl holds the draws of a sampler, one a line:
a resumed search continues from them. Both survive a driver that is killed at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Collection, Iterator
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
    """One campaign's folder. token is written into the folder too: a trial that reads it there sees the same folder."""

    folder: Path
    token: str

    def workdir(self, launch_id: str) -> Path:
        """The folder of one launch."""
        return self.folder / "trials" / launch_id

    def read_result(self, launch_id: str) -> TrialResult | None:
        """The result of a launch that finished. None for one that must run (again): no file, a torn file, or a fault
        of the machine.
        """
        try:
            result = trial.read_result(self.workdir(launch_id))
        except (OSError, ValueError):
            return None
        return None if result.status is TrialStatus.INFRASTRUCTURE else result

    def read_others(self, keys: Collection[str]) -> Iterator[TrialResult]:
        """The finished results in this folder whose points have none of these keys."""
        for workdir in sorted((self.folder / "trials").glob("*")):
            if workdir.name.partition("-")[0] not in keys:
                result = self.read_result(workdir.name)
                if result is not None:
                    yield result

    def write_result(self, launch_id: str, result: TrialResult) -> None:
        """Keep the result of a launch. Raises OSError, for example on a full disk; an earlier result stays whole."""
        workdir = self.workdir(launch_id)
        workdir.mkdir(parents=True, exist_ok=True)
        trial.write_result(result, workdir)

    def read_samples(self) -> list[dict[str, Any]]:
        """What a sampler drew so far, oldest first. A torn line is left out: its point was never started."""
        try:
            lines = (self.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        drawn: list[dict[str, Any]] = []
        for line in lines:
            with contextlib.suppress(ValueError):
                drawn.append(json.loads(line))
        return drawn

    def append_sample(self, sample: dict[str, Any]) -> None:
        """Keep one more draw of the sampler, on a line of its own also behind a torn one. Raises OSError."""
        path = self.folder / "samples.jsonl"
        with path.open("a+b") as ledger:
            ends_torn = ledger.tell() > 0 and not _ends_with_newline(path)
            ledger.write(b"\n" * ends_torn + json.dumps(sample).encode() + b"\n")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def campaigns_folder(experiment: Experiment) -> Path:
    """The folder that holds the campaigns of an experiment, one folder each."""
    return Path(experiment.tracking.folder).absolute() / "campaigns" / experiment.name


@contextlib.contextmanager
def claim_folder(experiment: Experiment, *, resume: bool) -> Iterator[Ledger]:
    """Hold the experiment's lock, and yield the folder of the last campaign (with `resume`) or of a new one.

    Raises ConfigError with the pid of the driver that holds the lock, MachineError when the folder cannot be written.
    """
    home = campaigns_folder(experiment)
    with _as_machine_error(home):
        home.mkdir(parents=True, exist_ok=True)
        (home / "lock").touch()
        owner = (home / "lock").read_text().strip()
    with claims.try_lock(home / "lock") as free:
        if not free:
            raise ConfigError(
                f"{home}: another campaign of this experiment is running (pid {owner}); wait, or give name="
            )
        with _as_machine_error(home):
            (home / "lock").write_text(str(os.getpid()))
            ledger = Ledger(folder=_choose_folder(home, resume), token=secrets.token_hex(8))
            (ledger.folder / "trials").mkdir(parents=True, exist_ok=True)
            (ledger.folder / TOKEN_FILE).write_text(ledger.token)
        yield ledger


def _choose_folder(home: Path, resume: bool) -> Path:
    earlier = sorted(path.parent for path in home.glob("*/trials") if path.is_dir())
    if resume and earlier:
        return earlier[-1]
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    # Two campaigns may follow each other within a second; the later one still sorts last.
    return next(path for n in range(1000) if not (path := home / (f"{stamp}.{n:03}" if n else stamp)).exists())


@contextlib.contextmanager
def _as_machine_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(f"{folder}: results cannot be written here: {error.strerror}") from None
