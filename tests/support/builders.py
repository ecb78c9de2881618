"""The one place where tests build experiments, points, measurements and results; no process and no file is involved."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.config import EngineSpec, Experiment, Objective, Search, Tracking, TrialSpec, Workload
from orchestrator.engines.base import Speculation
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.measure.verdict import Level, Reason, Verdict
from orchestrator.outcome import Fact, TrialStatus
from orchestrator.trial import TrialResult

WORKLOAD = "code-review-8k"
CONFIG = "engine.args.speculative-config"
K = f"{CONFIG}.num_speculative_tokens"
SPECULATION = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 2}}


def make_experiment(
    folder: Path | None = None,
    *,
    name: str = "made",
    engine: EngineSpec | None = None,
    workloads: Mapping[str, Workload] | Sequence[str] = (WORKLOAD,),
    objective: Objective | None = None,
    **search: Any,
) -> Experiment:
    """An experiment on one engine that drafts; further arguments are those of its search (one launch of each point).

    folder: where its store and its trials are; without one, the defaults of the configuration.
    workloads: by name where their defaults do.
    """
    named = dict(workloads) if isinstance(workloads, Mapping) else {workload: Workload() for workload in workloads}
    paths = {} if folder is None else {"root": str(folder)}
    return Experiment(
        name=name,
        engine=engine or EngineSpec(kind="vllm", model="org/model", args=SPECULATION, **paths),
        workloads=named,
        search=Search(**{"launches": 1, **search}),
        objective=objective or Objective(metric=f"{next(iter(named))}/decode_tok_s"),
        tracking=Tracking() if folder is None else Tracking(folder=str(folder / "mlruns")),
    )


def make_spec(
    name: str | None = None,
    *,
    k: int | None = None,
    args: Mapping[str, Any] | None = None,
    workloads: Mapping[str, Workload] | Sequence[str] = (WORKLOAD,),
    experiment: Experiment | None = None,
    **fields: Any,
) -> TrialSpec:
    """A point: with k drafted tokens, without a drafter, or, where it only has a name, with an argument of its own.

    experiment: whose engine, placement and workloads it has. `fields` are those of TrialSpec, as they are.
    """
    owner = experiment or make_experiment(workloads=workloads)
    drafter = {"speculative-config": {"method": "dspark", "num_speculative_tokens": k}} if k else {}
    own = {"point": name} if name and not k else {}
    if args is None:
        args = {"max-num-seqs": 1, **drafter, **own}
    name = name or (f"k={k}" if k else "no-spec")
    made = TrialSpec(
        name=name,
        params={K: k} if k else {} if own else {CONFIG: None},
        engine=replace(owner.engine, args=dict(args)),
        placement=owner.placement,
        workloads=owner.workloads,
        key=f"key of {name}",
    )
    return replace(made, **fields)


def make_measurement(**metrics: Sequence[float | None] | Quantity | None) -> Measurement:
    """Each metric from its repeats, with their median as the headline, or as the Quantity that it is."""
    repeats = {name: tuple(values) for name, values in metrics.items() if isinstance(values, Sequence)}
    others = {name: value for name, value in metrics.items() if not isinstance(value, Sequence)}
    return Measurement(metrics={**{n: _headline(v) for n, v in repeats.items()}, **others}, repeats=repeats)


def _headline(repeats: Sequence[float | None]) -> Quantity:
    known = [value for value in repeats if value is not None]
    return Quantity(value=statistics.median(known), n=len(known))


def make_result(
    spec: TrialSpec | str,
    *rates: float,
    level: Level = Level.VALID,
    codes: Sequence[str] = (),
    k: int | None = None,
    args: Mapping[str, Any] | None = None,
    measurements: Mapping[str, Measurement] | None = None,
    memory: Mapping[str, float] | None = None,
    **fields: Any,
) -> TrialResult:
    """A complete trial whose decode rates per repeat are `rates`, on each of its workloads, or with `measurements`.

    spec: a point, or the name of one that is made from k and args. `fields` are those of TrialResult, as they are.
    """
    if isinstance(spec, str):
        spec = make_spec(spec, k=k, args=args, workloads=tuple(measurements or (WORKLOAD,)))
    if measurements is None:
        measurements = {name: make_measurement(decode_tok_s=rates) for name in spec.workloads} if rates else {}
    verdict = Verdict(level=level, reasons=tuple(Reason(code=code, detail=f"{code} was seen") for code in codes))
    made = TrialResult(
        spec=spec,
        status=TrialStatus.COMPLETE,
        measurements=measurements,
        verdicts=dict.fromkeys(measurements, verdict),
        verdict=verdict if measurements else None,
        memory={key: Fact(value=value, source="made") for key, value in (memory or {}).items()},
        speculation=Speculation(method="dspark", proposals=k) if k else None,
    )
    return replace(made, **fields)


def make_launches(name: str, *rates: float | Sequence[float], **fields: Any) -> list[TrialResult]:
    """One result per pass, whose decode rates are those given for the pass; fields as of `make_result`."""
    return [
        make_result(name, *(rate if isinstance(rate, Sequence) else (rate,)), pass_number=number, **fields)
        for number, rate in enumerate(rates, start=1)
    ]


def with_verdict(result: TrialResult, level: Level, code: str) -> TrialResult:
    """The same result, judged otherwise for one reason."""
    verdict = Verdict(level=level, reasons=(Reason(code=code, detail=f"{code} was seen"),))
    return replace(result, verdicts=dict.fromkeys(result.spec.workloads, verdict), verdict=verdict)
