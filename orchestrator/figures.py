"""TrialResults -> matplotlib figures: the pictures that go with a run, a campaign and a report. Needs no display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from orchestrator.trial import TrialResult


def trial(result: TrialResult) -> dict[str, Figure]:
    """The figures of one trial by name; one that has nothing to show is left out."""
    found: dict[str, Figure] = {}
    if result.memory_series:
        found["memory"] = memory_over_time(result)
    return found


def campaign(results: Sequence[TrialResult], workload: str | None) -> dict[str, Figure]:
    """The figures of one campaign by name; one that has nothing to show is left out."""
    found: dict[str, Figure] = {}
    names = [workload] if workload else list(dict.fromkeys(name for r in results for name in r.measurements))
    for name in names:
        if any(name in r.measurements for r in results):
            found[f"decode_tok_s.{name}"] = metric_by_trial(results, name, "decode_tok_s")
    return found


def metric_by_trial(results: Sequence[TrialResult], workload: str, metric: str) -> Figure:
    """One metric with its 95% interval, a bar per trial that has it."""
    figure, axes = _figure()
    shown = [(r.spec.name, q) for r in results if (m := r.measurements.get(workload)) and (q := m.metrics.get(metric))]
    below = [q.value - q.low if q.low is not None else 0.0 for _, q in shown]
    above = [q.high - q.value if q.high is not None else 0.0 for _, q in shown]
    axes.bar([name for name, _ in shown], [q.value for _, q in shown], yerr=[below, above], capsize=4)
    axes.set(title=workload, ylabel=metric)
    return figure


def memory_over_time(result: TrialResult) -> Figure:
    """GiB over the seconds since the trial began, one line per GPU or process tree."""
    figure, axes = _figure()
    for name, points in result.memory_series.items():
        axes.plot([t for t, _ in points], [v for _, v in points], label=name)
    axes.set(title=f"{result.spec.name}: memory", xlabel="seconds since the start", ylabel="GiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    return figure, figure.add_subplot()
