"""TrialResult -> the params, metrics, series, tags and texts that a tracking store can hold. Pure; knows no store.

All values are finite, short enough and named in a safe character set: a store that refuses one would refuse the batch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from orchestrator.config import TrialSpec, flatten
from orchestrator.masking import MASK, is_secret_argument, is_secret_variable
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.quantity import finite_quantity
from orchestrator.trial import MEMORY_FILE, RESULT_FILE, TrialResult, memory_csv, to_json

# A longer param is unreadable in a table. An artifact keeps the whole value.
MAX_PARAM_CHARS = 500
MAX_TAG_CHARS = 1000
MAX_NAME_CHARS = 200
# A chart needs no more. The artifact memory.csv keeps the whole series.
MAX_SAMPLES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a stepped series. time_s: seconds since the start of the trial, None when it has no own time."""

    name: str
    value: float
    step: int
    time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is recorded of one result besides its params and the files of its folder.

    texts: artifacts by name, result.json and, where there are series, memory.csv. They are written from the result,
    because a folder of an earlier version holds the series inside result.json.
    """

    metrics: dict[str, float]
    samples: list[Sample]
    tags: dict[str, str]
    texts: dict[str, str]


def entry(result: TrialResult, workload: str | None) -> Entry:
    """What is recorded of `result`. The metrics of `workload`, the objective's, are recorded under bare names too.

    MLflow's filter takes a bare name unquoted (`metrics.decode_tok_s > 200`); a slash or a hyphen needs backticks.
    """
    strict = finite(result)
    series_text = {MEMORY_FILE: memory_csv(strict.memory_series)} if any(strict.memory_series.values()) else {}
    return Entry(
        metrics=headline(result.measurements, workload) | metrics(result),
        samples=series(result),
        tags=result_tags(result),
        texts={RESULT_FILE: to_json(strict), **series_text},
    )


def identity(result: TrialResult) -> str:
    """A digest that differs between any two executions, two launches of one point included."""
    text = json.dumps([result.spec.name, result.spec.key, result.started_at, result.workdir])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def epoch_ms(timestamp: str) -> int | None:
    """An ISO 8601 time as milliseconds since the epoch; None when there is none."""
    if not timestamp:
        return None
    return int(datetime.fromisoformat(timestamp).timestamp() * 1000)


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """Each name -> a name of letters, digits, `_`, `-`, `.` and `/`. Different names get different ones."""
    wanted = list(dict.fromkeys(names))
    safe = {name: _safe(name) for name in wanted}
    unchanged = {name for name in wanted if safe[name] == name}
    counts: dict[str, int] = {}
    for name in wanted:
        counts[safe[name]] = counts.get(safe[name], 0) + 1
    return {
        name: new if name in unchanged or counts[new] == 1 else f"{new}.{_digest(name)}" for name, new in safe.items()
    }


def _safe(name: str) -> str:
    parts = [re.sub(r"[^A-Za-z0-9_.\-]", "_", part) for part in name.split("/")]
    parts = ["_" * len(part) if set(part) <= {"."} else part for part in parts if part]
    text = "/".join(parts) or "_"
    return text if len(text) <= MAX_NAME_CHARS else f"{text[:MAX_NAME_CHARS]}.{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def params(spec: TrialSpec) -> tuple[dict[str, str], dict[str, str]]:
    """The flattened engine, placement and workloads: (params, whole texts of the values too long for a param).

    Absent values are left out. Secrets are masked. Both use the same keys.
    """
    tree = {"engine": asdict(spec.engine), "placement": asdict(spec.placement)}
    tree["workloads"] = {name: asdict(workload) for name, workload in spec.workloads.items()}
    flat = {key: value for key, value in flatten(tree).items() if value is not None and value != {}}
    names = safe_names(flat)
    short: dict[str, str] = {}
    whole: dict[str, str] = {}
    for key, value in flat.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if _is_secret(key):
            text = MASK
        if len(text) > MAX_PARAM_CHARS:
            whole[names[key]] = text
            text = f"{text[:80]}... ({len(text)} characters, sha256 {_digest(text)}, see params/{names[key]}.txt)"
        short[names[key]] = text
    return short, whole


def _is_secret(key: str) -> bool:
    if key.startswith("engine.env."):
        return is_secret_variable(key.removeprefix("engine.env."))
    return key.startswith("engine.args.") and is_secret_argument(key.removeprefix("engine.args."))


def metrics(result: TrialResult) -> dict[str, float]:
    """`workload/name` with `.low` and `.high`, `memory/name`, `log/name`, `phases/name`. Finite values only."""
    found: dict[str, float | None] = {}
    for workload, measurement in result.measurements.items():
        for name, quantity in measurement.metrics.items():
            if quantity is not None and math.isfinite(quantity.value):
                found[f"{workload}/{name}"] = quantity.value
                found[f"{workload}/{name}.low"] = quantity.low
                found[f"{workload}/{name}.high"] = quantity.high
        found.update({f"{workload}/cold/{name}": value for name, value in measurement.cold.items()})
    found.update({f"memory/{name}": fact.value for name, fact in result.memory.items()})
    found.update({f"log/{name}": fact.value for name, fact in result.facts.items()})
    found.update({f"phases/{name}_s": value for name, value in result.phases_s.items()})
    finite = {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}
    names = safe_names(finite)
    return {names[name]: value for name, value in finite.items()}


def series(result: TrialResult) -> list[Sample]:
    """Repeats over their index, acceptance over the draft position (from 0), memory over time, thinned."""
    samples: list[Sample] = []
    for workload, measurement in result.measurements.items():
        for name, values in measurement.repeats.items():
            samples += [Sample(name=f"{workload}/{name}.by_repeat", value=v, step=r) for r, v in _finite(values)]
        by_position = measurement.acceptance_by_position or ()
        samples += [Sample(name=f"{workload}/acceptance_by_position", value=v, step=i) for i, v in _finite(by_position)]
    for name, points in result.memory_series.items():
        kept = enumerate(_thin(_finite_points(points)))
        samples += [Sample(name=f"memory/{name}.over_time", value=v, step=i, time_s=t) for i, (t, v) in kept]
    names = safe_names(s.name for s in samples)
    return [replace(s, name=names[s.name]) for s in samples]


def _finite(values: Iterable[float | None]) -> Iterator[tuple[int, float]]:
    return ((i, float(v)) for i, v in enumerate(values) if v is not None and math.isfinite(v))


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_SAMPLES points: the largest of each stretch, so that no peak is lost."""
    width = math.ceil(len(points) / MAX_SAMPLES) or 1
    return [max(points[i : i + width], key=lambda point: point[1]) for i in range(0, len(points), width)]


def nonfinite(result: TrialResult) -> list[str]:
    """Names of the metrics whose value is not finite. They are recorded as absent."""
    return sorted(
        f"{workload}/{name}"
        for workload, measurement in result.measurements.items()
        for name, quantity in measurement.metrics.items()
        if quantity is not None and not math.isfinite(quantity.value)
    )


def spec_tags(spec: TrialSpec) -> dict[str, str]:
    """Tags that are known before the trial runs. `point` holds the swept parameters."""
    point = ", ".join(f"{key.rsplit('.', 1)[-1]}={_brief(value)}" for key, value in spec.params.items())
    return {"kind": "trial", "key": spec.key, "engine": spec.engine.kind, "point": point[:MAX_TAG_CHARS]}


def result_tags(result: TrialResult) -> dict[str, str]:
    """Tags about the end of the trial. Absent ones are left out."""
    found = {
        "result": identity(result),
        "status": str(result.status),
        "cause": result.cause,
        "reason": result.reason,
        "lever": result.lever,
        "nonfinite": ", ".join(nonfinite(result)),
        "synthetic_acceptance": "true" if result.speculation and result.speculation.is_synthetic else None,
        "mlflow.note.content": note(result),
    }
    return {key: value[:MAX_TAG_CHARS] for key, value in found.items() if value} | verdict_tags(result)


def verdict_tags(result: TrialResult) -> dict[str, str]:
    """The worst verdict and the codes of its reasons; empty when nothing was judged."""
    if result.verdict is None:
        return {}
    codes = ", ".join(dict.fromkeys(reason.code for reason in result.verdict.reasons))
    return {"verdict": str(result.verdict.level), **({"verdict_reasons": codes[:MAX_TAG_CHARS]} if codes else {})}


def note(result: TrialResult) -> str:
    """The description of a run in MLflow's UI: its status, cause, lever, verdict reasons and command line."""
    lines = [f"**{result.spec.name}**: {result.status}" + (f", {result.cause}" if result.cause else "")]
    lines += [text for text in (result.reason, result.lever and f"What helps: {result.lever}") if text]
    if result.verdict:
        lines += [f"{reason.code}: {reason.detail}" for reason in result.verdict.reasons]
    if argv := result.launch.get("argv"):
        lines.append("`" + " ".join(str(word) for word in argv) + "`")
    return "\n\n".join(lines)


def finite(result: TrialResult) -> TrialResult:
    """The result with every number that is not finite made absent: strict JSON has no others."""
    return replace(
        result,
        measurements={name: _finite_measurement(m) for name, m in result.measurements.items()},
        memory={name: fact for name, fact in result.memory.items() if math.isfinite(fact.value)},
        facts={name: fact for name, fact in result.facts.items() if math.isfinite(fact.value)},
        phases_s={name: seconds for name, seconds in result.phases_s.items() if math.isfinite(seconds)},
        memory_series={name: _finite_points(points) for name, points in result.memory_series.items()},
    )


def _finite_points(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(t, v) for t, v in points if math.isfinite(t) and math.isfinite(v)]


def _finite_measurement(measurement: Measurement) -> Measurement:
    rates = measurement.acceptance_by_position
    return replace(
        measurement,
        metrics={name: finite_quantity(quantity) for name, quantity in measurement.metrics.items()},
        repeats={name: tuple(map(_finite_or_none, values)) for name, values in measurement.repeats.items()},
        acceptance_by_position=rates if rates is None or all(map(math.isfinite, rates)) else None,
        cold={name: _finite_or_none(value) for name, value in measurement.cold.items()},
    )


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def headline(measurements: Mapping[str, Measurement], workload: str | None) -> dict[str, float]:
    """The metrics of one workload under bare names; of the first workload when that one was not measured."""
    measurement = measurements.get(workload or "") or next(iter(measurements.values()), None)
    if measurement is None:
        return {}
    quantities = {name: q for name, q in measurement.metrics.items() if q is not None and math.isfinite(q.value)}
    names = safe_names(quantities)
    return {names[name]: quantity.value for name, quantity in quantities.items()}
