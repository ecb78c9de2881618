"""Measurement and evidence -> Verdict: whether a number may be believed, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Only a valid number can win; a suspect one wins only when nothing valid is there."""

    VALID = "valid"
    SUSPECT = "suspect"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A stable code (design.md section 7) and one sentence for a person."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How far a measurement can be believed."""

    level: Level
    reasons: tuple[Reason, ...] = ()
