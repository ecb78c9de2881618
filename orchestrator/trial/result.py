"""What one trial yielded: TrialResult, result.json and memory.csv. Data only: no process, no network, no Ray."""

from __future__ import annotations

import csv
import io
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
RESULT_FILE, MEMORY_FILE = "result.json", "memory.csv"

# Name of a series -> its (seconds since the start of the trial, GiB), ascending in time.
MemorySeries = Mapping[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What one trial yielded. result.json holds all of it but memory_series, which memory.csv beside it holds.

    memory: per name a Fact with its unit in the name: gpu0_peak_gib, model_gib, kv_available_gib, kv_tokens,
    graph_gib, host_rss_peak_gib. phases_s: seconds spent in starting, warming, measuring, stopping.
    launch: argv, env added (secrets masked), log path. provenance: host, GPUs, driver, versions, git commit.
    verdicts: per workload; verdict: the worst of them, None when nothing was measured.
    memory_series: empty on a result that was read without its folder. pass_number: the pass of the campaign that
    started it, from 1.
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
    memory_series: MemorySeries = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)
    speculation: Speculation | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    started_at: str = ""
    ended_at: str = ""
    launch: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    workdir: str = ""
    pass_number: int = 1


_RESULT = TypeAdapter(TrialResult)


def to_json(result: TrialResult) -> str:
    """The text of result.json: strict JSON, absent is null, the values of secrets in engine.env masked.

    Raises ValueError on a number that is not finite. The memory series are left out; `memory_csv` writes them.
    """
    engine = replace(result.spec.engine, env=mask_env(result.spec.engine.env))
    public = replace(result, spec=replace(result.spec, engine=engine))
    document = _RESULT.dump_python(public, mode="json", exclude={"memory_series"})
    text = _format_json({"schema_version": SCHEMA_VERSION, **document}, "\n")
    # UTF-8 has no lone surrogates, which undecodable bytes of a file name become. Python escapes them as JSON does.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _format_json(value: Any, line_break: str) -> str:
    """A list or an object of single values is one line; every other has one member a line."""
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(member and isinstance(member, list | dict) for member in members):
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    inner = f"{line_break} "
    lines = [_format_json(member, inner) for member in members]
    if isinstance(value, dict):
        keys = (json.dumps(key, ensure_ascii=False) for key in value)
        lines = [f"{key}: {line}" for key, line in zip(keys, lines, strict=True)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}{inner}{f',{inner}'.join(lines)}{line_break}{last}"


def from_json(text: str | bytes) -> TrialResult:
    """Read what `to_json` wrote, or its version 1. Raises ValueError on another schema version or a torn file.

    The memory series are empty unless the text holds them, as version 1 does.
    """
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


def memory_csv(series: MemorySeries) -> str:
    """The text of memory.csv: one row a time, one column a series, an empty field where a series has no value."""
    rows: dict[float, dict[str, float]] = {}
    for name, points in series.items():
        for time_s, gib in points:
            rows.setdefault(time_s, {})[name] = gib
    text = io.StringIO()
    writer = csv.DictWriter(text, ["time_s", *series], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"time_s": time_s, **rows[time_s]} for time_s in sorted(rows))
    return text.getvalue()


def read_memory(path: Path) -> dict[str, list[tuple[float, float]]]:
    """The series in a memory.csv; none when it is missing or damaged."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
        return {
            name: [(float(row[0]), float(row[column])) for row in rows if row[column]]
            for column, name in enumerate(header[1:], start=1)
        }
    except (OSError, ValueError, IndexError, csv.Error):
        # Only figures are made of the series: a measured result is not given up for want of them.
        return {}


def with_memory(result: TrialResult, workdir: Path) -> TrialResult:
    """The result with the series of its folder; one that holds series already keeps them."""
    return result if result.memory_series else replace(result, memory_series=read_memory(workdir / MEMORY_FILE))


def read_result(workdir: Path) -> TrialResult:
    """The result in a trial's folder, memory series included. Raises OSError, and ValueError like `from_json`."""
    return with_memory(from_json((workdir / RESULT_FILE).read_bytes()), workdir)


def write_result(result: TrialResult, workdir: Path) -> None:
    """Write memory.csv, then result.json, whose presence means that the trial is finished."""
    if result.memory_series:
        write_text(workdir / MEMORY_FILE, memory_csv(result.memory_series))
    write_text(workdir / RESULT_FILE, to_json(result))


def write_text(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that a reader never sees half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
