"""How a trial ends, as data that engines, errors and trials share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class TrialStatus(StrEnum):
    """How a trial ended. Only `infrastructure` is tried again."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    REFUSED = "refused"
    UNFIT = "unfit"
    FAILED = "failed"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number read from a log or page, with where it came from (the raw line or metric name)."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why an engine ended, or what its log reports while it lives.

    status is COMPLETE with cause None for a log without a fault. `facts` keys carry their unit: model_gib,
    kv_available_gib, kv_needed_gib, kv_shortfall_gib, kv_tokens, max_len_estimate_tokens, graph_gib, ...
    `evidence` is the first real error, as the log has it.
    """

    status: TrialStatus
    cause: str | None = None
    summary: str = ""
    lever: str | None = None
    evidence: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
