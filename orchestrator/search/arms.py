"""The points of a campaign with their launches: which launches count, which points compete, and what each yielded."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.config import Experiment, TrialSpec
from orchestrator.measure.inference import student_point
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.measure.verdict import Level, Verdict, worst
from orchestrator.node.provenance import machine_of
from orchestrator.outcome import TrialStatus
from orchestrator.search.objective import MEMORY, find_misses, objective_metrics, parse_constraint, preference, score
from orchestrator.search.space import configuration_id, plan
from orchestrator.trial import TrialResult

# What says nothing about the configuration: such a launch is missing, and the point is judged by its others.
_MISSING = (TrialStatus.INFRASTRUCTURE, TrialStatus.PRUNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One point that competes. launches: those that count, oldest first; values: their objective.

    rank: smaller is preferred (objective.prefer, then fewer proposed tokens); of equal ranks neither is.
    """

    name: str
    launches: tuple[TrialResult, ...]
    values: tuple[float, ...]
    level: Level
    rank: tuple[float, ...]

    @property
    def spec(self) -> TrialSpec:
        return self.launches[0].spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Everything that ran. excluded: name -> why the point does not compete; notes: for whoever reads the choice."""

    arms: tuple[Arm, ...]
    excluded: Mapping[str, str]
    notes: tuple[str, ...]


def line_up(experiment: Experiment, results: Sequence[TrialResult]) -> Field:
    """Group launches by point and keep what may compete.

    A point that the engine refused, that did not fit or that failed in any launch does not compete, nor one that
    misses a constraint. Suspect points compete only when no point is valid, and suspect launches only in a point
    without a valid one. `results` hold the numbers of the campaign (comparison.with_campaign_metrics).
    """
    found: list[Arm] = []
    excluded: dict[str, str] = {}
    notes: list[str] = []
    machine = _most_common_machine(results)
    for launches in group_launches(results):
        name = launches[0].spec.name
        used, why, said = _usable(experiment, launches, machine)
        notes += said
        if used:
            missed, said_of_bounds = find_misses(experiment, pool_launches(used))
            notes += said_of_bounds
            why = missed[0] if missed else None
        if why is not None:
            excluded[name] = why
            continue
        found.append(_to_arm(experiment, name, used))
    valid = [arm for arm in found if arm.level is Level.VALID]
    if valid:
        suspect = [arm for arm in found if arm.level is not Level.VALID]
        excluded |= {arm.name: f"suspect: {_codes(experiment, arm.launches[0])}" for arm in suspect}
    return Field(arms=tuple(valid or found), excluded=excluded, notes=tuple(dict.fromkeys(notes)))


def group_launches(results: Sequence[TrialResult]) -> list[list[TrialResult]]:
    """The launches of each point, points and launches in the order of `results`."""
    groups: dict[str, list[TrialResult]] = {}
    for result in results:
        groups.setdefault(configuration_id(result.spec), []).append(result)
    return list(groups.values())


def judged_verdict(experiment: Experiment, result: TrialResult) -> Verdict | None:
    """The worst verdict among the workloads that the objective or a constraint uses; None when one was not judged."""
    names = [*objective_metrics(experiment.objective, experiment.workloads)]
    names += [parse_constraint(text).metric for text in experiment.objective.constraints]
    used = {name.partition("/")[0] for name in names} - {MEMORY}
    verdicts = [result.verdicts.get(workload) for workload in sorted(used)] or [result.verdict]
    known = [verdict for verdict in verdicts if verdict is not None]
    return worst(known) if known and len(known) == len(verdicts) else None


def judged_level(experiment: Experiment, result: TrialResult) -> Level | None:
    """The level of `judged_verdict`."""
    verdict = judged_verdict(experiment, result)
    return None if verdict is None else verdict.level


def _most_common_machine(results: Sequence[TrialResult]) -> str | None:
    """The machine that most launches were measured on; of equally many the last. Numbers of others say nothing here."""
    names = [machine_of(result.provenance) for result in results if result.measurements]
    return max(reversed(names), key=names.count, default=None)


def _usable(
    experiment: Experiment, launches: Sequence[TrialResult], machine: str | None
) -> tuple[list[TrialResult], str | None, list[str]]:
    """(the launches that count, why none does, a sentence for each launch that is left out of others)."""
    reasons = {id(result): _why_unusable(experiment, result, machine) for result in launches}
    fatal = [r for r in launches if r.status not in (TrialStatus.COMPLETE, *_MISSING)]
    used = [] if fatal else [r for r in launches if reasons[id(r)] is None]
    valid = [r for r in used if judged_level(experiment, r) is Level.VALID]
    if not used:
        first = (fatal or launches)[0]
        later = f" (in launch {launches.index(first) + 1})" if len(launches) > 1 and fatal else ""
        return [], f"{reasons[id(first)]}{later}", []
    kept = valid or used
    notes = []
    for number, result in enumerate(launches, start=1):
        if not any(result is each for each in kept):
            why = reasons[id(result)] or f"suspect: {_codes(experiment, result)}"
            notes.append(f"{launches[0].spec.name}: launch {number} is left out: {why}")
    return kept, None, notes


def _why_unusable(experiment: Experiment, result: TrialResult, machine: str | None) -> str | None:
    if result.status is not TrialStatus.COMPLETE:
        return f"{result.status.value}: {result.cause}" if result.cause else result.status.value
    if machine_of(result.provenance) != machine:
        return f"measured on another machine ({machine_of(result.provenance) or 'unknown'}, not {machine or 'unknown'})"
    level = judged_level(experiment, result)
    if level is None and score(experiment, result) is not None:
        return "without a verdict"
    if level is Level.INVALID:
        return f"invalid: {_codes(experiment, result)}"
    if score(experiment, result) is None:
        return f"{', '.join(objective_metrics(experiment.objective, experiment.workloads))} was not measured"
    return None


def _codes(experiment: Experiment, result: TrialResult) -> str:
    verdict = judged_verdict(experiment, result)
    reasons = verdict.reasons if verdict else ()
    return ", ".join(dict.fromkeys(reason.code for reason in reasons)) or "no reason given"


def _to_arm(experiment: Experiment, name: str, launches: Sequence[TrialResult]) -> Arm:
    values = [score(experiment, result) for result in launches]
    levels = [judged_level(experiment, result) for result in launches]
    first = launches[0]
    proposals = (first.speculation.proposals or 0) if first.speculation else 0
    return Arm(
        name=name,
        launches=tuple(launches),
        values=tuple(quantity.value for quantity in values if quantity is not None),
        level=max((level for level in levels if level), key=list(Level).index),
        rank=(*preference(experiment.objective, first.spec), proposals),
    )


def pool_points(experiment: Experiment, results: Sequence[TrialResult]) -> list[TrialResult]:
    """One result per point, in the order in which the points are written: what its launches yielded together.

    A point with one launch is returned as it is. Of a point with a complete launch only the complete ones count.
    """
    written = {configuration_id(spec): number for number, spec in enumerate(plan(experiment).points)}
    pooled = []
    for launches in group_launches(results):
        complete = [result for result in launches if result.status is TrialStatus.COMPLETE]
        together = pool_launches(complete or launches[-1:])
        pooled.append(replace(together, spec=launches[0].spec) if complete else together)
    return sorted(pooled, key=lambda result: written.get(configuration_id(result.spec), len(written)))


def pool_launches(launches: Sequence[TrialResult]) -> TrialResult:
    """The first launch with the metrics of all: geometric means with Student's t on logarithms over the launches.

    A maximum stays the largest. Its verdict is the worst of them, and its memory the largest.
    """
    if len(launches) == 1:
        return launches[0]
    first = launches[0]
    worst = max(launches, key=lambda r: list(Level).index(r.verdict.level) if r.verdict else -1)
    return replace(
        first,
        measurements={
            workload: _pool_measurements([r.measurements[workload] for r in launches if workload in r.measurements])
            for workload in first.measurements
        },
        verdict=worst.verdict,
        verdicts={name: _worst_of(launches, name) for name in first.verdicts},
        memory={
            name: max((r.memory[name] for r in launches if name in r.memory), key=lambda fact: fact.value)
            for name in first.memory
        },
    )


def _worst_of(launches: Sequence[TrialResult], workload: str) -> Verdict:
    known = [r.verdicts[workload] for r in launches if workload in r.verdicts]
    return max(known, key=lambda verdict: list(Level).index(verdict.level))


def _pool_measurements(measurements: Sequence[Measurement]) -> Measurement:
    first = measurements[0]
    names = dict.fromkeys(name for each in measurements for name in each.metrics)
    repeated = dict.fromkeys(name for each in measurements for name in each.repeats)
    positions = [each.acceptance_by_position for each in measurements if each.acceptance_by_position]
    return replace(
        first,
        metrics={name: pool_quantities(name, [each.metrics.get(name) for each in measurements]) for name in names},
        repeats={name: tuple(x for each in measurements for x in each.repeats.get(name, ())) for name in repeated},
        acceptance_by_position=tuple(statistics.fmean(rates) for rates in zip(*positions, strict=False)) or None,
        num_requests=sum(each.num_requests for each in measurements),
        num_failed=sum(each.num_failed for each in measurements),
        first_error=next((each.first_error for each in measurements if each.first_error), None),
    )


def pool_quantities(name: str, quantities: Sequence[Quantity | None]) -> Quantity | None:
    """One metric over launches; None when no launch has it. n adds up the samples of the launches."""
    known = [quantity for quantity in quantities if quantity is not None and math.isfinite(quantity.value)]
    if not known:
        return None
    if len(known) == 1:
        return known[0]
    n = sum(quantity.n for quantity in known)
    values = [quantity.value for quantity in known]
    if "_max_" in name:
        return Quantity(value=max(values), n=n)
    forth, back = scale_of(values)
    scaled = [forth(value) for value in values]
    centre = statistics.fmean(scaled)
    reach = student_point(len(scaled) - 1) * statistics.stdev(scaled) / math.sqrt(len(scaled))
    return Quantity(value=back(centre), low=back(centre - reach), high=back(centre + reach), n=n, over="launches")


def scale_of(values: Sequence[float]) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """(onto the scale on which values are compared, back): logarithms, or as they are where one is not above 0."""
    if all(value > 0 for value in values):
        return math.log, math.exp
    return float, float
