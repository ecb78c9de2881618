"""What "best" means, as arithmetic on one TrialResult: metric values, mixes of workloads, constraints.

A metric is written WORKLOAD/NAME or memory/NAME; the names, units and directions are those of measure.metrics.
An absent or non-finite value is None and never compares.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.config import Experiment, Mode, Objective, TrialSpec, Workload, flatten
from orchestrator.errors import ConfigError
from orchestrator.measure import metrics
from orchestrator.measure.metrics import Metric, Quantity
from orchestrator.measure.quantity import TAILS, Tail, finite_quantity, harmonic_mix, samples_needed
from orchestrator.trial import TrialResult

MEMORY = "memory"
_GPU_PEAK = re.compile(r"gpu\d+_peak_gib")
_CONSTRAINT = re.compile(r"^\s*(?P<metric>\S+?)\s*(?P<op><=|>=|<|>)\s*(?P<bound>\S+)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """`METRIC OP BOUND`, for example `tail-100/ttft_p99_s <= 3`; the bound has the metric's own unit."""

    metric: str
    op: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric} {self.op} {self.bound:g}"

    def holds(self, value: float) -> bool:
        """Whether `value` keeps the bound."""
        return {
            "<=": value <= self.bound,
            ">=": value >= self.bound,
            "<": value < self.bound,
            ">": value > self.bound,
        }[self.op]


def parse_constraint(text: str) -> Constraint:
    """Read one constraint. Raises ConfigError on anything but METRIC OP NUMBER."""
    found = _CONSTRAINT.match(text)
    bound = _number(found["bound"]) if found else None
    if found is None or bound is None:
        raise ConfigError(
            f"objective.constraints: found {text!r}, allowed is METRIC OP NUMBER with OP one of <=, >=, <, >, "
            "for example 'tail-100/ttft_p99_s <= 3'"
        )
    return Constraint(metric=found["metric"], op=found["op"], bound=bound)


def value(result: TrialResult, metric: str) -> Quantity | None:
    """The metric of one result, or None when it is absent, not finite, or the workload was not measured."""
    place, _, name = metric.partition("/")
    if place == MEMORY:
        return _memory(result, name)
    measurement = result.measurements.get(place)
    return finite_quantity(measurement.metrics.get(name)) if measurement else None


def value_or_maximum(result: TrialResult, metric: str) -> tuple[Quantity | None, str | None]:
    """(value, note): for a p90, p95 or p99 of too few requests the value is their maximum, and the note says so."""
    quantity, which = value(result, metric), _tail_of(metric)
    if quantity is not None or which is None:
        return quantity, None
    most = value(result, _with_tail(metric, which, "max"))
    if most is None:
        return None, None
    return most, f"{metric} stands for the maximum of {most.n}: {_why_absent(which, most.n)}"


def with_known_tails(experiment: Experiment, results: Sequence[TrialResult]) -> tuple[Experiment, str | None]:
    """(the experiment with an objective that its samples can tell, note): a p99 of too few requests becomes the p95, or
    the maximum, which is the bound that holds. It is the same for every result, so that like is compared with like.
    """
    weights = objective_metrics(experiment.objective, experiment.workloads)
    which = _tail_of(next(iter(weights), ""))
    if which is None:
        return experiment, None
    measured = [r for r in results if any(metric.partition("/")[0] in r.measurements for metric in weights)]
    for known in (which, *(lower for lower in ("p95", "p90") if lower < which), "max"):
        metrics_of_tail = [_with_tail(metric, which, known) for metric in weights]
        if all(value(result, metric) is not None for result in measured for metric in metrics_of_tail):
            break
    else:
        return experiment, None
    if known == which:
        return experiment, None
    name = metrics_of_tail[0] if experiment.objective.mix is None else metrics_of_tail[0].partition("/")[2]
    note = (
        f"{' + '.join(weights)} is given as {' + '.join(metrics_of_tail)}: a {which} needs {samples_needed(which)} "
        "requests in one launch"
    )
    return replace(experiment, objective=replace(experiment.objective, metric=name)), note


def _tail_of(metric: str) -> Tail | None:
    """The quantile that a metric is and that needs its sample (p90, p95, p99); None for any other metric."""
    name = metric.rpartition("/")[2]
    return next((which for which in TAILS if samples_needed(which) > 1 and f"_{which}" in name), None)


def _why_absent(which: Tail, n: int) -> str:
    needed = samples_needed(which)
    return f"a {which} needs {needed} requests in one launch" if n < needed else f"no launch has a {which}"


def _with_tail(metric: str, which: str, other: str) -> str:
    place, slash, name = metric.rpartition("/")
    return f"{place}{slash}{name.replace(f'_{which}', f'_{other}')}"


def objective_metrics(objective: Objective, workloads: Mapping[str, Workload]) -> dict[str, float]:
    """The metrics that make up the objective with their weights (sum 1): one metric, or one per workload of a mix.

    Without metric and mix it is the first workload's decode rate (prefill rate for a prefill workload).
    """
    if objective.mix:
        name = objective.metric or "decode_tok_s"
        total = sum(objective.mix.values())
        return {f"{workload}/{name}": weight / total for workload, weight in objective.mix.items()}
    if objective.metric:
        return {objective.metric: 1.0}
    for workload, spec in workloads.items():
        return {f"{workload}/{'prefill_tok_s' if spec.kind == 'prefill' else 'decode_tok_s'}": 1.0}
    return {}


def score(experiment: Experiment, result: TrialResult) -> Quantity | None:
    """The objective's value, None as soon as a part of it is unknown.

    A mix weighs by tokens: rates (tokens per second) combine harmonically, all else as a weighted mean. The interval
    combines the bounds of the parts, which is at least as wide as that of the mix itself.
    """
    weights = objective_metrics(experiment.objective, experiment.workloads)
    parts = {metric: value(result, metric) for metric in weights}
    return _combine({m: q for m, q in parts.items() if q is not None}, weights)


def samples(experiment: Experiment, result: TrialResult) -> tuple[float, ...]:
    """The objective of each repeat, in order; empty when the metric has no repeats (memory, or nothing measured)."""
    weights = objective_metrics(experiment.objective, experiment.workloads)
    series: dict[str, tuple[float | None, ...]] = {}
    for metric in weights:
        workload, _, name = metric.partition("/")
        measurement = result.measurements.get(workload)
        series[metric] = measurement.repeats.get(name, ()) if measurement else ()
    found: list[float] = []
    for repeat in zip(*series.values(), strict=False):
        numbers = {m: x for m, x in zip(series, repeat, strict=True) if x is not None and math.isfinite(x)}
        mean = weighted_mean(numbers, weights) if len(numbers) == len(weights) else None
        if mean is not None:
            found.append(mean)
    return tuple(found)


def _combine(parts: Mapping[str, Quantity], weights: Mapping[str, float]) -> Quantity | None:
    """Weighted combination of `parts` (metric -> value); None unless every weighted metric is there."""
    if not weights or any(metric not in parts for metric in weights):
        return None
    if len(weights) == 1:
        return parts[next(iter(weights))]
    ends: list[float | None] = []
    for end in ("value", "low", "high"):
        numbers = {metric: getattr(parts[metric], end) for metric in weights}
        known = {m: float(x) for m, x in numbers.items() if x is not None}
        ends.append(weighted_mean(known, weights) if len(known) == len(weights) else None)
    if ends[0] is None:
        return None
    return Quantity(value=ends[0], low=ends[1], high=ends[2], n=min(parts[m].n for m in weights))


def find_misses(experiment: Experiment, result: TrialResult) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(constraints the result does not keep, notes): one sentence each. An unknown value keeps no constraint."""
    missed: list[str] = []
    notes: list[str] = []
    for constraint in map(parse_constraint, experiment.objective.constraints):
        quantity, note = value_or_maximum(result, constraint.metric)
        if note:
            notes.append(note)
        if quantity is None:
            missed.append(f"{constraint}: not measured")
        elif not constraint.holds(quantity.value):
            missed.append(f"{constraint}: is {quantity.value:.4g}")
    return tuple(missed), tuple(notes)


def preference(objective: Objective, spec: TrialSpec) -> tuple[float, ...]:
    """Sort key under objective.prefer, the preferred point first. An unset key is first with min, last with max."""
    flat = settings(spec)
    ranks: list[float] = []
    for key, mode in objective.prefer.items():
        found = flat.get(key)
        sign = 1.0 if mode == "min" else -1.0
        if isinstance(found, int | float):
            ranks.append(sign * found)
        else:
            ranks.append(-math.inf if mode == "min" and found is None else math.inf)
    return tuple(ranks)


def settings(spec: TrialSpec) -> dict[str, Any]:
    """Every setting in which two trials may differ: dotted key -> value, as in the configuration file."""
    workloads = {name: asdict(workload) for name, workload in spec.workloads.items()}
    return flatten({"engine": asdict(spec.engine), "placement": asdict(spec.placement), "workloads": workloads})


def direction(metric: str) -> Mode:
    """Whether the larger ("max") or the smaller ("min") value is better. Raises ConfigError on an unknown metric."""
    return _row(metric, repr(metric)).better


def is_rate(metric: str) -> bool:
    """Whether a metric is in tokens per second. Raises ConfigError on an unknown metric."""
    return _row(metric, repr(metric)).unit == metrics.RATE_UNIT


def check_metric(experiment: Experiment, metric: str, key: str) -> None:
    """Raise ConfigError, naming the nearest valid name, unless `metric` is WORKLOAD/NAME or memory/NAME."""
    place, slash, _ = metric.partition("/")
    if not slash:
        raise ConfigError(f"{key}: found {metric!r}, allowed is WORKLOAD/NAME, for example {_example(experiment)!r}")
    require_name(place, {*experiment.workloads, MEMORY}, f"{key}: {metric!r}: workload")
    _row(metric, f"{key}: {metric!r}")


def require_name(found: str, allowed: Iterable[str], what: str) -> None:
    """Raise ConfigError with the nearest of `allowed` unless `found` is one of them."""
    names = sorted(set(allowed))
    if found not in names:
        raise _unknown(found, names, what)


def _unknown(found: str, names: Sequence[str], what: str) -> ConfigError:
    near = difflib.get_close_matches(found, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{what} {found!r} is unknown, allowed are {', '.join(names) or 'none'}{hint}")


def _row(metric: str, where: str) -> Metric:
    """The row of a metric in its table. Raises ConfigError, which begins with `where`, when there is none."""
    place, _, name = metric.partition("/")
    table, what = (metrics.MEMORY_METRICS, "memory value") if place == MEMORY else (metrics.METRICS, "metric")
    row = metrics.find_metric(table, name)
    if row is None:
        raise _unknown(name, sorted(metrics.metric_names(table)), f"{where}: {what}")
    return row


def _memory(result: TrialResult, name: str) -> Quantity | None:
    if name == "gpu_peak_gib":
        peaks = [fact.value for key, fact in result.memory.items() if _GPU_PEAK.fullmatch(key)]
        return finite_quantity(Quantity(value=max(peaks), n=len(peaks))) if peaks else None
    fact = result.memory.get(name)
    return finite_quantity(Quantity(value=fact.value)) if fact else None


def weighted_mean(numbers: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """Harmonic for rates (tokens per second), arithmetic for all else; weights sum to 1."""
    if all(is_rate(metric) for metric in numbers):
        return harmonic_mix(numbers, {metric: weights[metric] for metric in numbers})
    return sum(weights[metric] * number for metric, number in numbers.items())


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _example(experiment: Experiment) -> str:
    return f"{next(iter(experiment.workloads), 'code-review-8k')}/decode_tok_s"
