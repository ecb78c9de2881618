"""What a check is shown: one workload of one trial, with everything that was recorded beside its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.config import Workload
from orchestrator.engines.base import Speculation
from orchestrator.engines.diagnosis.dialect import LIBRARIES_ONLY, LogDialect
from orchestrator.measure.formulas import RequestTrace, Window
from orchestrator.measure.metrics import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was recorded beside the requests; the defaults mean unknown or none.

    log: what the engine's log gained while measuring; log_before: what it held until then. dialect: how that log is
    written. foreign_gpu_users: who
    else used the GPUs, one text each. text_tokens[i]: tokens of the own text of prompt i, so that the rest of its
    prompt_tokens is template and nonce; None where the server could not count them. speculation: None where nothing
    is drafted.
    """

    log: str = ""
    log_before: str = ""
    dialect: LogDialect = LIBRARIES_ONLY
    foreign_gpu_users: tuple[str, ...] = ()
    text_tokens: tuple[int | None, ...] = ()
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured workload, as a check sees it.

    answered: the requests of all windows that have no error. peers: the believed measurements of the same workload in
    the campaign, this one included when it is believed. A check that looks at peers has them and the measurement, but
    neither windows nor evidence: it may run long after the trial.
    """

    workload: Workload
    measurement: Measurement
    windows: tuple[Window, ...] = ()
    answered: tuple[RequestTrace, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    peers: tuple[Measurement, ...] = ()
