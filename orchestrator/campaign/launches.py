"""What a campaign plans, counts and tells: launches, the account of them, events, and who may draw more points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.config import TrialSpec


class Sampler(Protocol):
    """Draws points and learns from what came of them."""

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        """(id, params) of the next point; None when no more are wanted."""

    def tell(self, sample_id: str, value: float | None) -> None:
        """What a point yielded; None when it is infeasible (refused, unfit, invalid)."""

    def shortfall(self) -> tuple[str, str] | None:
        """(name, reason) of samples that were asked for and could not be found; None when all were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of one point. launch counts the starts that count (confirmations), attempt the retries; from 1."""

    spec: TrialSpec
    launch: int = 1
    attempt: int = 1

    @property
    def id(self) -> str:
        """Names the launch on disk: the point's key, with the launch's number from the second on."""
        return self.spec.key if self.launch == 1 else f"{self.spec.key}-{self.launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a person who watches is told. number counts trials from 1; phase is None when the trial ended.

    note: a sentence about the whole campaign; then the rest says nothing.
    """

    number: int = 0
    total: int = 0
    name: str = ""
    phase: str | None = None
    status: str | None = None
    reason: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where every planned launch went; the parts add up to `planned`. not_run: names of what `--resume` would run."""

    planned: int
    earlier: int
    started: int
    skipped: int
    not_run: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.started} started", f"{self.skipped} skipped"]
        parts += [f"{self.earlier} finished earlier"] if self.earlier else []
        parts += [f"{len(self.not_run)} not run ({', '.join(self.not_run)})"] if self.not_run else []
        return f"{self.planned} planned: {', '.join(parts)}"
