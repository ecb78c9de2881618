"""Experiments and trial results made by hand, for tests of search, selection and pruning."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config import EngineSpec, Experiment, Objective, Placement, Search, TrialSpec, Workload
from orchestrator.engines.base import Speculation
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.measure.verdict import Level, Reason, Verdict
from orchestrator.outcome import Fact, TrialStatus
from orchestrator.trial import TrialResult

CODE = "code-review-8k"
CONFIG = "engine.args.speculative-config"
K = f"{CONFIG}.num_speculative_tokens"


def experiment(*, objective: Objective | None = None, workloads: Sequence[str] = (CODE,), **search: Any) -> Experiment:
    """A k sweep on one engine; keyword arguments are those of the search section."""
    return Experiment(
        name="made",
        engine=EngineSpec(
            kind="vllm",
            model="a-model",
            args={"max-model-len": 4096, "speculative-config": {"method": "ngram", "num_speculative_tokens": 2}},
        ),
        workloads={name: Workload() for name in workloads},
        search=Search(**search),
        objective=objective or Objective(metric=f"{CODE}/decode_tok_s"),
    )


def spec(name: str, *, args: Mapping[str, Any] | None = None, workloads: Sequence[str] = (CODE,)) -> TrialSpec:
    """A point; its arguments are what tells it apart from others."""
    engine = EngineSpec(kind="vllm", model="a-model", args=dict(args if args is not None else {"point": name}))
    return TrialSpec(
        name=name,
        params={},
        engine=engine,
        placement=Placement(gpus=1),
        workloads={workload: Workload() for workload in workloads},
    )


def measurement(**repeats: Sequence[float]) -> Measurement:
    """Metrics from their repeats; the headline is the median."""
    return Measurement(
        metrics={n: Quantity(value=statistics.median(v), n=len(v)) for n, v in repeats.items()},
        repeats={name: tuple(values) for name, values in repeats.items()},
    )


def result(
    name: str,
    *rates: float,
    level: Level = Level.VALID,
    codes: Sequence[str] = (),
    status: TrialStatus = TrialStatus.COMPLETE,
    k: int | None = None,
    args: Mapping[str, Any] | None = None,
    measurements: Mapping[str, Measurement] | None = None,
    memory: Mapping[str, float] | None = None,
    **other: Any,
) -> TrialResult:
    """A result whose decode rate per repeat is `rates` (or with `measurements` as given)."""
    if args is None and k is not None:
        args = {"speculative-config": {"num_speculative_tokens": k}}
    if measurements is None:
        measurements = {CODE: measurement(decode_tok_s=rates)} if rates else {}
    verdict = Verdict(level=level, reasons=tuple(Reason(code=code, detail=code) for code in codes))
    return TrialResult(
        spec=spec(name, args=args, workloads=tuple(measurements) or (CODE,)),
        status=status,
        measurements=measurements,
        verdicts=dict.fromkeys(measurements, verdict),
        verdict=verdict if measurements else None,
        memory={key: Fact(value=value, source="made") for key, value in (memory or {}).items()},
        speculation=Speculation(proposals=k) if k else None,
        **other,
    )
