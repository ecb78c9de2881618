"""Results -> the JSON documents of design.md section 3: strict, absent is null."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from orchestrator.config import Experiment
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.quantity import quantity_document
from orchestrator.measure.verdict import Verdict
from orchestrator.outcome import TrialStatus
from orchestrator.search.arms import pool_points
from orchestrator.search.selection import Selection
from orchestrator.search.space import configuration_id
from orchestrator.trial import TrialResult

if TYPE_CHECKING:
    from orchestrator.tracking import Recorded


def same_trial(a: TrialResult | None, b: TrialResult | None) -> bool:
    """Whether both are the same execution, even when one of them got campaign metrics added."""
    if a is None or b is None:
        return False
    return (a.spec.name, a.spec.key, a.started_at, a.workdir) == (b.spec.name, b.spec.key, b.started_at, b.workdir)


def document(experiment: Experiment, results: Sequence[Recorded], best: TrialResult | None) -> dict[str, Any]:
    """The JSON document of `tune` and `results`: strict, absent is null.

    best: the name of the point, and the run of its last launch.
    """
    chosen = next((r for r in results if same_trial(r.result, best)), None)
    identity = configuration_id(best.spec) if best else None
    first = next((r.result.spec.name for r in results if configuration_id(r.result.spec) == identity), None)
    return {
        "experiment": experiment.name,
        "trials": [_trial_document(recorded) for recorded in results],
        "points": points_document(experiment, results),
        "best": {"name": first, "run_id": chosen.run_id} if chosen else None,
    }


def choice_document(selection: Selection) -> dict[str, Any]:
    """{decided, value, rivals, reason, excluded, notes, passes}: why the best is the best, and what is not proven."""
    return {
        "decided": selection.decided,
        "value": quantity_document(selection.number),
        "rivals": list(selection.rivals),
        "reason": selection.reason,
        "excluded": dict(selection.excluded),
        "notes": list(selection.notes),
        "passes": selection.passes,
    }


def points_document(experiment: Experiment, results: Sequence[Recorded]) -> list[dict[str, Any]]:
    """[{name, launches, measurements, verdict}]: every point with what its launches yielded together."""
    launches = Counter(configuration_id(r.result.spec) for r in results if r.result.status is TrialStatus.COMPLETE)
    return [
        {
            "name": point.spec.name,
            "launches": launches[configuration_id(point.spec)],
            "measurements": measurements_document(point.measurements, point.verdicts),
            "verdict": verdict_document(point.verdict),
        }
        for point in pool_points(experiment, [r.result for r in results])
    ]


CSV_COLUMNS = (
    "trial",
    "status",
    "cause",
    "workload",
    "metric",
    "value",
    "low",
    "high",
    "n",
    "over",
    "verdict",
    "key",
    "run_id",
)


def write_csv(stream: IO[str], results: Sequence[Recorded]) -> None:
    """One row per trial, workload and metric, memory included; a trial without numbers is one row. Absent is empty."""
    writer = csv.DictWriter(stream, CSV_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for recorded in results:
        result = recorded.result
        trial = {
            "trial": result.spec.name,
            "status": str(result.status),
            "cause": result.cause,
            "key": result.spec.key,
            "run_id": recorded.run_id,
        }
        rows = list(_csv_rows(result))
        for row in rows or [{}]:
            writer.writerow(trial | row)


def _csv_rows(result: TrialResult) -> Iterator[dict[str, Any]]:
    for workload, measurement in result.measurements.items():
        verdict = result.verdicts.get(workload)
        for name, quantity in measurement.metrics.items():
            found = quantity_document(quantity)
            if found is not None:
                yield {"workload": workload, "metric": name, **found, "verdict": verdict and str(verdict.level)}
        for position, rate in enumerate(_by_position(measurement) or []):
            yield {"workload": workload, "metric": f"acceptance_at_position_{position}", "value": rate}
        for name, value in measurement.cold.items():
            if value is not None and math.isfinite(value):
                yield {"workload": workload, "metric": f"cold_{name}", "value": value}
    for name, fact in result.memory.items():
        if math.isfinite(fact.value):
            yield {"workload": "memory", "metric": name, "value": fact.value}


def _trial_document(recorded: Recorded) -> dict[str, Any]:
    result = recorded.result
    return {
        "name": result.spec.name,
        "key": result.spec.key,
        "run_id": recorded.run_id,
        "status": str(result.status),
        "cause": result.cause,
        "reason": result.reason,
        "pass": result.pass_number,
        "params": dict(result.spec.params),
        "measurements": measurements_document(result.measurements, result.verdicts),
        "verdict": verdict_document(result.verdict),
    }


def measurements_document(
    measurements: Mapping[str, Measurement], verdicts: Mapping[str, Verdict]
) -> dict[str, dict[str, Any]]:
    """{workload: {metric: {value, low, high, n, over} | null, acceptance_by_position: [...], verdict: {...}}}."""
    return {
        workload: {
            **{name: quantity_document(quantity) for name, quantity in measurement.metrics.items()},
            "acceptance_by_position": _by_position(measurement),
            "verdict": verdict_document(verdicts.get(workload)),
        }
        for workload, measurement in measurements.items()
    }


def _by_position(measurement: Measurement) -> list[float] | None:
    rates = measurement.acceptance_by_position
    return list(rates) if rates is not None and all(map(math.isfinite, rates)) else None


def verdict_document(verdict: Verdict | None) -> dict[str, Any] | None:
    """{level, reasons: [{code, detail}]}, or None where nothing was judged."""
    if verdict is None:
        return None
    return {
        "level": str(verdict.level),
        "reasons": [{"code": reason.code, "detail": reason.detail} for reason in verdict.reasons],
    }
