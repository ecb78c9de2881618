"""How far a measurement can be believed, as data: Level, Reason, Verdict. What is checked stands in checks.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """In order of severity. Only a valid number can win; a suspect one wins only when nothing valid is there."""

    VALID = "valid"
    SUSPECT = "suspect"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What one check found: its code (a row of checks.CHECKS) and one line for a person."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The worst level of what was found, and all that was found. A valid number can have reasons, too: notes."""

    level: Level
    reasons: tuple[Reason, ...] = ()


def worst_level(levels: Iterable[Level]) -> Level:
    """The most severe of the levels; VALID of none."""
    return max(levels, key=list(Level).index, default=Level.VALID)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for several workloads: the worst level, each reason once."""
    every = list(verdicts)
    reasons = tuple(dict.fromkeys(reason for verdict in every for reason in verdict.reasons))
    return Verdict(level=worst_level(verdict.level for verdict in every), reasons=reasons)
