"""TrialResults -> matplotlib figures for a run, a campaign and a record. Needs no display."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from orchestrator.measure import formulas
from orchestrator.measure.formulas import RequestTrace
from orchestrator.measure.metrics import Quantity
from orchestrator.search import comparison
from orchestrator.search.objective import value
from orchestrator.trial import TrialResult


def trial(result: TrialResult) -> dict[str, Figure]:
    """The figures of one trial by name. A figure without data is left out."""
    found: dict[str, Figure] = {}
    if any(result.memory_series.values()):
        found["memory"] = memory_over_time(result)
    if any(m.acceptance_by_position for m in result.measurements.values()):
        found["acceptance_by_position"] = acceptance_by_position([result])
    if result.workdir and (values := ttft_values(Path(result.workdir) / "traces.jsonl")):
        found["ttft"] = ttft_distribution(result.spec.name, values)
    return found


def campaign(results: Sequence[TrialResult], workload: str | None) -> dict[str, Figure]:
    """The figures of one campaign by name, of `workload` or, when it was not measured, of each that was."""
    found: dict[str, Figure] = {}
    measured = list(dict.fromkeys(name for r in results for name in r.measurements))
    for name in [workload] if workload in measured else measured:
        assert name is not None
        if any(value(r, f"{name}/decode_tok_s") for r in results):
            found[f"decode_tok_s.{name}"] = sweep(results, f"{name}/decode_tok_s")
        latency, rate = f"{name}/ttft_s", f"{name}/decode_tok_s"
        if len(front := comparison.pareto(results, rate, latency)) > 1:
            found[f"pareto.{name}"] = pareto(results, front, latency, rate)
    accepting = [r for r in results if any(m.acceptance_by_position for m in r.measurements.values())]
    if accepting:
        found["acceptance_by_position"] = acceptance_by_position(accepting)
    return found


def sweep(results: Sequence[TrialResult], metric: str) -> Figure:
    """`workload/name` over the swept parameter, with 95% intervals. Trials without the parameter are level lines.

    A trial without a number is a cross at zero, labelled with its status.
    """
    figure, axes = _figure()
    key = swept_parameter(results)
    on_axis, level = _split(results, key)
    shown = [(x, q) for x, r in on_axis if (q := value(r, metric)) is not None]
    marker = "o-" if key else "o"
    if shown:
        axes.errorbar([x for x, _ in shown], [q.value for _, q in shown], yerr=_bars(shown), fmt=marker, capsize=4)
    for number, result in enumerate(level):
        if (quantity := value(result, metric)) is not None:
            axes.axhline(quantity.value, color=f"C{number + 1}", linestyle="--", label=result.spec.name)
    missing = [(x, r) for x, r in on_axis if value(r, metric) is None]
    axes.set_ylim(bottom=0)
    for x, result in missing:
        axes.plot([x], [0], "x", color="tab:red", clip_on=False)
        axes.annotate(str(result.status), (x, 0), (0, 6), textcoords="offset points", ha="center", color="tab:red")
    if key and (ticks := sorted({x for x, _ in on_axis})):
        axes.set_xticks(ticks)
    axes.set(title=metric, xlabel=key.rsplit(".", 1)[-1] if key else "trial", ylabel=metric.rpartition("/")[2])
    axes.tick_params(axis="x", rotation=0 if key else 30)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return figure


def swept_parameter(results: Sequence[TrialResult]) -> str | None:
    """The one numeric parameter that differs between the results; None when none or several do."""
    keys = dict.fromkeys(key for r in results for key in r.spec.params)
    varying = [k for k in keys if len({x for r in results if (x := _number(r.spec.params.get(k))) is not None}) > 1]
    return varying[0] if len(varying) == 1 else None


def _split(results: Sequence[TrialResult], key: str | None) -> tuple[list[tuple[Any, TrialResult]], list[TrialResult]]:
    """(position on the axis, result) in ascending order, and the results without a position."""
    if key is None:
        return [(r.spec.name, r) for r in results], []
    placed = [(x, r) for r in results if (x := _number(r.spec.params.get(key))) is not None]
    return sorted(placed, key=lambda pair: pair[0]), [r for r in results if _number(r.spec.params.get(key)) is None]


def _number(x: object) -> float | None:
    return float(x) if isinstance(x, int | float) and not isinstance(x, bool) else None


def _bars(shown: Sequence[tuple[Any, Quantity]]) -> list[list[float]]:
    below = [q.value - q.low if q.low is not None else 0.0 for _, q in shown]
    above = [q.high - q.value if q.high is not None else 0.0 for _, q in shown]
    return [[max(0.0, x) for x in below], [max(0.0, x) for x in above]]


def acceptance_by_position(results: Sequence[TrialResult]) -> Figure:
    """Share of drafts whose token at each position (from 1) was accepted, one line per trial and workload."""
    figure, axes = _figure()
    for result in results:
        for workload, measurement in result.measurements.items():
            rates = measurement.acceptance_by_position or ()
            if rates:
                axes.plot(range(1, len(rates) + 1), rates, "o-", label=f"{result.spec.name}, {workload}")
    axes.set(title="acceptance by draft position", xlabel="position in the draft", ylabel="accepted / drafts")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small")
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


def ttft_values(traces: Path) -> dict[str, list[float]]:
    """TTFT in seconds of every answered request in a traces.jsonl, per workload; empty when the file is missing."""
    values: dict[str, list[float]] = {}
    for trace in _lines(traces):
        workload = trace.pop("workload")
        ttft = formulas.ttft_s(RequestTrace(**trace))
        if ttft is not None and trace.get("error") is None:
            values.setdefault(workload, []).append(ttft)
    return values


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The documents of a JSON-lines file. A last line that was cut short by a kill is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                return


def ttft_distribution(title: str, values: Mapping[str, Sequence[float]]) -> Figure:
    """The cumulative distribution of TTFT, one step line per workload."""
    figure, axes = _figure()
    for workload, times in values.items():
        axes.ecdf(times, label=f"{workload} (n = {len(times)})")
    axes.set(title=f"{title}: TTFT", xlabel="seconds until the first token", ylabel="share of requests")
    axes.legend()
    return figure


def pareto(results: Sequence[TrialResult], front: Sequence[TrialResult], x: str, y: str) -> Figure:
    """Metric y over metric x (`workload/name` or `memory/name`); a line joins the results of `front`."""
    figure, axes = _figure()
    points = _both(results, x, y)
    axes.plot([p for p, _, _ in points], [q for _, q, _ in points], "o", color="tab:gray")
    best = sorted((p, q) for p, q, _ in _both(front, x, y))
    axes.plot([p for p, _ in best], [q for _, q in best], "o-", color="tab:green", label="not beaten in both")
    for p, q, name in points:
        axes.annotate(name, (p, q), (4, 4), textcoords="offset points", fontsize="small")
    axes.set(title=f"{y} against {x}", xlabel=x, ylabel=y)
    axes.legend()
    return figure


def _both(results: Sequence[TrialResult], x: str, y: str) -> list[tuple[float, float, str]]:
    pairs = [(value(r, x), value(r, y), r.spec.name) for r in results]
    return [(p.value, q.value, name) for p, q, name in pairs if p is not None and q is not None]


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    return figure, figure.add_subplot()
