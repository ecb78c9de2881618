"""The data of a campaign: its launches, its events, the account of them; and the protocol of a sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.config import TrialSpec


class Sampler(Protocol):
    """Draws points, and learns from their values."""

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        """(id, params) of the next point; None when no more are wanted."""

    def tell(self, sample_id: str, value: float | None) -> None:
        """Report the objective of a point; None when the point is infeasible (refused, unfit, invalid)."""

    def shortfall(self) -> tuple[str, str] | None:
        """(name, reason) of samples that the space does not have; None when every sample was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of one point. launch numbers the point's measurements, attempt the tries of this one; both from 1.

    pass_number: the pass of the campaign that starts it, from 1.
    """

    spec: TrialSpec
    launch: int = 1
    attempt: int = 1
    pass_number: int = 1

    @property
    def id(self) -> str:
        """The name of the launch on disk: the key of the point, with the launch's number from the second on."""
        return self.spec.key if self.launch == 1 else f"{self.spec.key}-{self.launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of a campaign, for whoever shows progress. number counts trials from 1; phase is None when one ended.

    note: a sentence about the whole campaign; the other fields then have their defaults.
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
    """What became of every planned launch; the parts add up to `planned`. not_run: what `--resume` would run."""

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
