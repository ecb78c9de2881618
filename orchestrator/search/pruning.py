"""What need not be measured: points an earlier trial proves hopeless, and trials that can no longer win.

Every cut names its reason; none may change the winner (experiments/search-efficiency holds that by simulation).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.config import Experiment, Objective, TrialSpec, flatten
from orchestrator.engines import Engine, find_engine
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.search.objective import is_rate, objective_metrics, prefers, weighted_mean
from orchestrator.trial import TrialResult

# Relative spread of one repeat that is assumed before anything is known, and how many observations that counts as.
PRIOR_NOISE = 0.03
PRIOR_WEIGHT = 4
# Standard deviations that the repeats still to come may move a result by, before it is given up.
GIVEN_UP = 1.6
# A median of few repeats spreads more than their mean does.
MEDIAN_OVER_MEAN = 1.25
# Two-sided 95% points of Student's t by degrees of freedom: how far apart two results of few repeats can be a tie.
TIE_T95 = {0: 12.71, 1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
TIE_T95_MORE = 2.57
# To win against a preferred incumbent a result must end this many standard errors above it, or better.
AHEAD = 2.0


def hopeless(spec: TrialSpec, results: Sequence[TrialResult]) -> str | None:
    """Why `spec` need not be started: a trial that did not fit in memory asked for no more than it does. Else None."""
    for witness in results:
        if witness.status is TrialStatus.UNFIT and _asks_no_less(spec, witness):
            return f"needs at least the memory of {witness.spec.name}, which did not fit ({witness.cause})"
    return None


def in_order(experiment: Experiment, specs: Sequence[TrialSpec]) -> list[TrialSpec]:
    """The order in which to start. As written; with stop_early the middle of the grid first and the baseline last.

    A good result early is what lets the others stop early, and the optimum of a sweep is seldom at its ends.
    """
    search = experiment.search
    if not search.stop_early:
        return list(specs)

    def distance(spec: TrialSpec) -> tuple[int, float]:
        if spec.name == search.baseline:
            return 2, 0.0
        if not search.grid or any(spec.params.get(key) not in values for key, values in search.grid.items()):
            return 1, 0.0
        ranks = [(values.index(spec.params[key]), len(values)) for key, values in search.grid.items()]
        return 0, sum(abs(rank - (count - 1) / 2) / count for rank, count in ranks)

    return sorted(specs, key=distance)


def clearly_worse(
    objective: Objective,
    workload: str,
    so_far: Measurement,
    incumbent: TrialResult | None,
    *,
    spec: TrialSpec | None = None,
    earlier: Mapping[str, Measurement] | None = None,
) -> bool:
    """Whether a trial that measured `so_far` on `workload` can no longer become the best, however its rest turns out.

    The rest may move it by the spread seen in the incumbent's repeats. A tie could still be won, unless `spec` is given
    and the incumbent is preferred to it. Of a mix, workloads still to come count as taking no time at all (`earlier`
    holds those measured before); only a valid incumbent ends anything.
    """
    if incumbent is None or incumbent.verdict is None or incumbent.verdict.level is not Level.VALID:
        return False
    weights = objective_metrics(objective, incumbent.spec.workloads)
    mine = _series(weights, {**(earlier or {}), workload: so_far})
    best = _series(weights, incumbent.measurements)
    if len(best) < len(weights) or not any(metric.startswith(f"{workload}/") for metric in mine):
        return False
    complete = len(mine) == len(weights)
    if not complete and not all(is_rate(metric) for metric in weights):
        return False
    gain = math.log(_combined(mine, weights) / _combined(best, weights))
    if objective.mode == "min":
        gain = -gain
    noise, done = _noise(best), min(map(len, mine.values()))
    planned = max(done, min(incumbent.spec.workloads[metric.partition("/")[0]].repeats for metric in mine))
    may_move = GIVEN_UP * MEDIAN_OVER_MEAN * noise * math.sqrt(1 / done - 1 / planned)
    error = noise * math.sqrt(2 / planned)
    if complete and spec is not None and prefers(objective, incumbent.spec, spec):
        return gain + may_move < (AHEAD * error if objective.tie is None else math.log1p(objective.tie))
    within = TIE_T95.get(planned - 1, TIE_T95_MORE) * error if objective.tie is None else math.log1p(objective.tie)
    return gain + may_move < -within


def _series(weights: Mapping[str, float], measurements: Mapping[str, Measurement]) -> dict[str, tuple[float, ...]]:
    """Per metric of the objective its positive values, one per repeat; metrics without any are left out."""
    found: dict[str, tuple[float, ...]] = {}
    for metric in weights:
        workload, _, name = metric.partition("/")
        measurement = measurements.get(workload)
        values = measurement.repeats.get(name, ()) if measurement else ()
        positive = tuple(x for x in values if x is not None and math.isfinite(x) and x > 0)
        if positive:
            found[metric] = positive
    return found


def _combined(series: Mapping[str, tuple[float, ...]], weights: Mapping[str, float]) -> float:
    """The objective at the medians; a metric that is not there yet adds no time."""
    combined = weighted_mean({metric: statistics.median(values) for metric, values in series.items()}, weights)
    if combined is None:
        raise ValueError(f"nothing to combine in {dict(series)}")
    return combined if len(series) == len(weights) else combined / sum(weights[metric] for metric in series)


def _noise(series: Mapping[str, tuple[float, ...]]) -> float:
    """Relative spread of one repeat, pooled over the metrics and drawn towards PRIOR_NOISE while little is known."""
    squares, freedom = PRIOR_WEIGHT * PRIOR_NOISE**2, float(PRIOR_WEIGHT)
    for values in series.values():
        if len(values) > 1:
            logs = [math.log(x) for x in values]
            squares += statistics.variance(logs) * (len(logs) - 1)
            freedom += len(logs) - 1
    return math.sqrt(squares / freedom)


def _asks_no_less(spec: TrialSpec, witness: TrialResult) -> bool:
    """Whether `spec` differs from the witness only in keys that are known to cost memory, and in none asks for less."""
    for_kv = (witness.cause or "").startswith("kv")
    asked, known = _settings(spec), _settings(witness.spec)
    # What died under load did not fit together with that load.
    if witness.cause == "out_of_memory_load" and spec.workloads != witness.spec.workloads:
        return False
    # A drafter comes on top of what did not fit without one.
    engine = find_engine(spec.engine.kind)
    if not any(_is_speculation(engine, key) for key in known):
        asked = {key: setting for key, setting in asked.items() if not _is_speculation(engine, key)}
    for key in asked.keys() | known.keys():
        mine, theirs = asked.get(key), known.get(key)
        if mine == theirs:
            continue
        name = key.rsplit(".", 1)[-1].replace("_", "-")
        sign = 1 if name in engine.memory_arguments else 0
        if name in engine.kv_memory_arguments:
            sign = -1 if for_kv else 1
        if not sign or not isinstance(mine, int | float) or not isinstance(theirs, int | float):
            return False
        if sign * (mine - theirs) < 0:
            return False
    return True


def _is_speculation(engine: Engine, key: str) -> bool:
    """Whether a key of `_settings` configures speculation."""
    argument = key.removeprefix("args.").replace("_", "-").lstrip("-")
    return engine.speculation_prefix is not None and argument.startswith(engine.speculation_prefix)


def _settings(spec: TrialSpec) -> dict[str, Any]:
    """What decides whether an engine fits, flat; a key that is null is not passed and so not there."""
    engine = asdict(spec.engine)
    kept = {name: engine[name] for name in ("kind", "model", "command", "environment", "args", "env")}
    flat = flatten({**kept, "gpus": spec.placement.gpus})
    return {key: value for key, value in flat.items() if value is not None and value != {}}
