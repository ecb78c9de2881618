"""What one trial yielded: TrialResult, and result.json. Data only: no process, no network, no Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from orchestrator.config import TrialSpec
from orchestrator.engines.base import Speculation
from orchestrator.masking import mask_env
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.verdict import Verdict
from orchestrator.outcome import Fact, TrialStatus

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What one trial yielded; result.json is exactly this, as strict JSON.

    memory: per name a Fact with unit in the name: gpu0_peak_gib, model_gib, kv_available_gib, kv_tokens, graph_gib,
    host_rss_peak_gib. phases_s: seconds spent in starting, warming, measuring, stopping.
    launch: argv, env added (secrets masked), log path. provenance: host, GPUs, driver, versions, git commit.
    verdicts: per workload; verdict: the worst of them, None when nothing was measured.
    """

    spec: TrialSpec
    status: TrialStatus
    cause: str | None = None
    reason: str | None = None
    lever: str | None = None
    evidence: str | None = None
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    verdict: Verdict | None = None
    memory: Mapping[str, Fact] = field(default_factory=dict)
    memory_series: Mapping[str, list[tuple[float, float]]] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)
    speculation: Speculation | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    started_at: str = ""
    ended_at: str = ""
    launch: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    workdir: str = ""


_RESULT = TypeAdapter(TrialResult)


def to_json(result: TrialResult) -> str:
    """The result as strict JSON: no NaN, absent is null, the values of secrets in engine.env masked."""
    engine = replace(result.spec.engine, env=mask_env(result.spec.engine.env))
    public = replace(result, spec=replace(result.spec, engine=engine))
    document = {"schema_version": SCHEMA_VERSION, **_RESULT.dump_python(public, mode="json")}
    return json.dumps(document, allow_nan=False, indent=1, ensure_ascii=False)


def from_json(text: str | bytes) -> TrialResult:
    """Read what `to_json` wrote, or its version 1. Raises ValueError on another schema version or a torn file."""
    document = json.loads(text)
    version = document.pop("schema_version", None)
    if version == 1:
        document = _from_version_1(document)
    elif version != SCHEMA_VERSION:
        raise ValueError(f"result.json has schema_version {version}, this program reads 1 and {SCHEMA_VERSION}")
    return _RESULT.validate_python(document)


def _from_version_1(document: dict[str, Any]) -> dict[str, Any]:
    """Version 1 kept two facts about speculation apart, and the method not at all."""
    proposals, is_synthetic = document.pop("proposals", None), document.pop("synthetic_acceptance", False)
    known = {"proposals": proposals, "is_synthetic": is_synthetic}
    return {**document, "speculation": known if proposals is not None or is_synthetic else None}


def write_result(result: TrialResult, workdir: Path) -> None:
    """result.json, written aside and renamed: a watcher never sees half of it."""
    write_text(workdir / "result.json", to_json(result))


def write_text(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
