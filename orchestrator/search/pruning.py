"""What need not be measured: points an earlier trial proves hopeless, and trials that can no longer win.

Every cut names its reason; none may change the winner (experiments/decision-quality holds that by simulation).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.config import Objective, TrialSpec, flatten
from orchestrator.engines import Engine, find_engine
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.search.decision import ASSUMED_LAUNCH_SD
from orchestrator.search.objective import is_rate, objective_metrics, weighted_mean
from orchestrator.trial import TrialResult

# Relative spread of one repeat that is assumed before anything is known, and how many observations that counts as.
PRIOR_NOISE = 0.03
PRIOR_WEIGHT = 4
# Standard deviations that the repeats still to come may move a result by, before it is given up.
GIVEN_UP = 1.6
# A median of few repeats spreads more than their mean does.
MEDIAN_OVER_MEAN = 1.25
# Two launches, each of one configuration, may differ by so much for no reason (three standard deviations): a result
# that is less far behind may still win when both are started again.
LAUNCHES_MAY_DIFFER = 3 * math.sqrt(2) * ASSUMED_LAUNCH_SD


def hopeless(spec: TrialSpec, results: Sequence[TrialResult]) -> str | None:
    """Why `spec` need not be started: a trial that did not fit in memory asked for no more than it does. Else None."""
    for witness in results:
        if witness.status is TrialStatus.UNFIT and _asks_no_less(spec, witness):
            return f"needs at least the memory of {witness.spec.name}, which did not fit ({witness.cause})"
    return None


def clearly_worse(
    objective: Objective,
    workload: str,
    so_far: Measurement,
    incumbent: TrialResult | None,
    *,
    earlier: Mapping[str, Measurement] | None = None,
) -> bool:
    """Whether a trial that measured `so_far` on `workload` can no longer become the best, however its rest turns out.

    It is compared repeat by repeat, because in the same repeat both were sent the same prompts, and a first repeat that
    is slow in every trial then cancels. The rest may move it by the spread of those ratios, and the next launch of
    either by LAUNCHES_MAY_DIFFER. Of a mix, workloads still to come count as taking no time at all (`earlier` holds
    those measured before); only a valid incumbent ends anything.
    """
    if incumbent is None or incumbent.verdict is None or incumbent.verdict.level is not Level.VALID:
        return False
    weights = objective_metrics(objective, incumbent.spec.workloads)
    mine = _series(weights, {**(earlier or {}), workload: so_far})
    best = _series(weights, incumbent.measurements)
    if len(best) < len(weights) or not any(metric.startswith(f"{workload}/") for metric in mine):
        return False
    if len(mine) < len(weights) and not all(is_rate(metric) for metric in weights):
        return False
    gains = _gains(mine, best, weights)
    if not gains:
        return False
    planned = max(len(gains), min(incumbent.spec.workloads[metric.partition("/")[0]].repeats for metric in mine))
    may_move = GIVEN_UP * MEDIAN_OVER_MEAN * _noise(gains) * math.sqrt(1 / len(gains) - 1 / planned)
    gain = statistics.median(gains) if objective.mode == "max" else -statistics.median(gains)
    return gain + may_move < -LAUNCHES_MAY_DIFFER


def _series(
    weights: Mapping[str, float], measurements: Mapping[str, Measurement]
) -> dict[str, tuple[float | None, ...]]:
    """Per metric of the objective its values by repeat, None where there is no positive one; metrics without any are
    left out.
    """
    found: dict[str, tuple[float | None, ...]] = {}
    for metric in weights:
        workload, _, name = metric.partition("/")
        measurement = measurements.get(workload)
        values = measurement.repeats.get(name, ()) if measurement else ()
        positive = tuple(x if x is not None and math.isfinite(x) and x > 0 else None for x in values)
        if any(positive):
            found[metric] = positive
    return found


def _gains(
    mine: Mapping[str, Sequence[float | None]],
    best: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float],
) -> list[float]:
    """log(mine / best) of every repeat that both have in full."""
    gains = []
    for repeat in range(min(map(len, (*mine.values(), *best.values())))):
        ours = {metric: x for metric, values in mine.items() if (x := values[repeat]) is not None}
        theirs = {metric: x for metric, values in best.items() if (x := values[repeat]) is not None}
        if len(ours) == len(mine) and len(theirs) == len(best):
            gains.append(math.log(_combined(ours, weights) / _combined(theirs, weights)))
    return gains


def _combined(numbers: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The objective of one repeat; a metric that is not there yet adds no time."""
    combined = weighted_mean(numbers, weights)
    if combined is None:
        raise ValueError(f"nothing to combine in {dict(numbers)}")
    return combined if len(numbers) == len(weights) else combined / sum(weights[metric] for metric in numbers)


def _noise(gains: Sequence[float]) -> float:
    """Spread of one repeat's ratio, drawn towards that of two repeats of PRIOR_NOISE while little is known."""
    squares, freedom = PRIOR_WEIGHT * 2 * PRIOR_NOISE**2, float(PRIOR_WEIGHT)
    if len(gains) > 1:
        squares += statistics.variance(gains) * (len(gains) - 1)
        freedom += len(gains) - 1
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
