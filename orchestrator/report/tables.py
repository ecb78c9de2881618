"""Results -> tables for people. Nothing is cut: a cell that does not fit is folded, and a pipe gets the full width."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.config import Experiment
from orchestrator.measure.checks import LEVELS
from orchestrator.measure.metrics import MEMORY_METRICS, METRICS, Measurement, find_metric
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.report.cells import brief, interval, number, short, varying_params
from orchestrator.report.documents import same_trial
from orchestrator.search.arms import pool_points
from orchestrator.search.comparison import pareto
from orchestrator.search.space import configuration_id
from orchestrator.trial import TrialResult

if TYPE_CHECKING:
    from orchestrator.tracking import Recorded

# Column -> the metric in it, whose text in the table of metrics is the column's footnote.
_METRIC_OF = {
    "decode tok/s": "decode_tok_s",
    "TTFT s": "ttft_s",
    "acc. rate": "acceptance_rate",
    "acc. len": "acceptance_length",
    "GPU GiB": "gpu_peak_gib",
    "RSS GiB": "host_rss_peak_gib",
    "speed-up": "speedup",
}
_OTHER_FOOTNOTES = {"verdict": "only a valid number can win", "n": "samples behind the decode figure"}
_COLUMNS = (
    "status",
    "decode tok/s",
    "prefill tok/s",
    "TTFT s",
    "acc. rate",
    "acc. len",
    "memory",
    "speed-up",
    "verdict",
    "n",
)
_ALWAYS = ("status", "verdict")
_MEASURED = (TrialStatus.COMPLETE, TrialStatus.PRUNED)
# A parameter with a longer value (a list of rates) has no column; the trial's name identifies it.
_WIDEST_PARAM = 24
_MOST_PARAMS = 4


def people_console(stream: IO[str]) -> Console:
    """A console that cuts nothing: as wide as the terminal, or as wide as wanted when it is a pipe or a file."""
    width = None if stream.isatty() else int(os.environ.get("COLUMNS") or 160)
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def plain_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain text; the last column takes what room is left."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def measurements_table(measurements: Mapping[str, Measurement]) -> Table:
    """Every metric of every workload that has a value, with its interval and number of samples."""
    rows = [
        [workload, name, interval(quantity, ".4g"), str(quantity.n)]
        for workload, measurement in measurements.items()
        for name, quantity in measurement.metrics.items()
        if quantity is not None
    ]
    return plain_table(["workload", "metric", "value (95% interval)", "n"], rows)


def campaign_table(experiment: Experiment, results: Sequence[Recorded], best: TrialResult | None) -> RenderableType:
    """One table per workload, a row per point, the best marked; below them the failures with their levers, and the
    footnotes.
    """
    launches = [recorded.result for recorded in results]
    trials = pool_points(experiment, launches)
    counts = Counter(configuration_id(r.spec) for r in launches if r.status is TrialStatus.COMPLETE)
    parts: list[RenderableType] = []
    for i, workload in enumerate(_workloads(experiment, trials)):
        rows = [t for t in trials if workload in t.measurements or (i == 0 and not t.measurements)]
        parts.append(_workload_table(workload, rows, best, counts))
    failed = [r for r in launches if r.status not in _MEASURED and not any(r is trial for trial in trials)]
    parts += [_explanations([*trials, *failed]), _footnotes(trials, max(counts.values(), default=1))]
    return Group(*parts)


def _workloads(experiment: Experiment, trials: Sequence[TrialResult]) -> list[str]:
    """Every workload, the objective's first."""
    first = (experiment.objective.metric or "").rpartition("/")[0]
    names = dict.fromkeys([*experiment.workloads, *(name for t in trials for name in t.measurements)])
    return sorted(names, key=lambda name: name != first) or [""]


def _workload_table(
    workload: str, rows: Sequence[TrialResult], best: TrialResult | None, counts: Mapping[str, int]
) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), title=workload or None, title_justify="left", pad_edge=False)
    table.add_column("", width=1)
    table.add_column("trial", overflow="fold", min_width=8)
    varying = [key for key in varying_params(rows) if all(len(_param(row, key)) <= _WIDEST_PARAM for row in rows)]
    # More columns would fold all others; the names of the trials identify them.
    varying = varying if len(varying) <= _MOST_PARAMS else []
    for key in varying:
        table.add_column(short(key, varying), justify="right", overflow="fold")
    cells = {id(row): _cells(row, workload) for row in rows}
    # A column in which no trial has anything (acceptance without speculation, decode of one token) is left out.
    shown = [name for name in _COLUMNS if name in _ALWAYS or any(cells[id(row)][name] != "-" for row in rows)]
    for name in shown:
        left = name in ("status", "verdict")
        title = _memory_column(rows) if name == "memory" else name
        table.add_column(title, justify="left" if left else "right", overflow="fold")
    if max(counts.values(), default=1) > 1:
        table.add_column("launches", justify="right")
    front = pareto(rows, f"{workload}/decode_tok_s", f"{workload}/ttft_s")
    for result in rows:
        identity = configuration_id(result.spec)
        is_best = best is not None and identity == configuration_id(best.spec)
        on_front = len(front) > 1 and any(same_trial(result, other) for other in front)
        mark = "*" if is_best else "+" if on_front else ""
        params = [_param(result, key) for key in varying]
        words = [mark, result.spec.name, *params, *(cells[id(result)][name] for name in shown)]
        words += [str(counts.get(identity, 0))] if max(counts.values(), default=1) > 1 else []
        table.add_row(*map(Text, words), style="bold green" if is_best else _style(result, workload))
    return table


def _param(result: TrialResult, key: str) -> str:
    return brief(result.spec.params.get(key))


def _cells(result: TrialResult, workload: str) -> dict[str, str]:
    measurement = result.measurements.get(workload)
    found = measurement.metrics if measurement else {}
    decode, prefill = found.get("decode_tok_s"), found.get("prefill_tok_s")
    # With text to decode, the prefill rate would only repeat the TTFT.
    headline = decode or prefill
    verdict = result.verdicts.get(workload)
    return {
        "status": str(result.status),
        "decode tok/s": interval(decode, ".1f"),
        "prefill tok/s": "-" if decode else interval(prefill, ".0f"),
        "TTFT s": number(found.get("ttft_s") or found.get("ttft_p50_s"), ".3f"),
        "acc. rate": number(found.get("acceptance_rate"), ".2f"),
        "acc. len": number(found.get("acceptance_length"), ".2f"),
        "memory": _memory(result),
        "speed-up": number(found.get("speedup"), ".2f", "x"),
        "verdict": str(verdict.level) if verdict else "-",
        "n": str(headline.n) if headline else "-",
    }


def _style(result: TrialResult, workload: str) -> str:
    if result.status not in _MEASURED:
        return "red"
    verdict = result.verdicts.get(workload)
    return "yellow" if verdict and verdict.level != Level.VALID else ""


def _memory_column(results: Iterable[TrialResult]) -> str:
    return "GPU GiB" if any(_gpu_peaks(result) for result in results) else "RSS GiB"


def _gpu_peaks(result: TrialResult) -> list[float]:
    return [f.value for name, f in result.memory.items() if name.startswith("gpu") and name.endswith("_peak_gib")]


def _memory(result: TrialResult) -> str:
    if peaks := _gpu_peaks(result):
        return f"{max(peaks):.1f}"
    rss = result.memory.get("host_rss_peak_gib")
    return f"{rss.value:.2f}" if rss else "-"


def _explanations(trials: Sequence[TrialResult]) -> RenderableType:
    """Per trial: why it has no number and what helps, or why its numbers are doubted. Notes come last, by code."""
    lines: list[str] = []
    notes: dict[str, list[str]] = {}
    for result in trials:
        if result.status not in _MEASURED:
            cause = f" ({result.cause})" if result.cause else ""
            lines.append(f"{result.spec.name}: {result.status}{cause}: {result.reason or 'no reason recorded'}")
            lines += [f"    what helps: {result.lever}"] if result.lever else []
        found: dict[str, list[tuple[str, str]]] = {}
        for workload, verdict in result.verdicts.items():
            for reason in verdict.reasons:
                found.setdefault(reason.code, []).append((workload, reason.detail))
        for code, seen in found.items():
            if LEVELS.get(code) is Level.VALID:
                notes.setdefault(code, []).append(result.spec.name)
                continue
            where = ", ".join(workload for workload, _ in seen)
            lines.append(f"{result.spec.name}: {where}: {LEVELS.get(code, Level.SUSPECT)}: {code}: {seen[0][1]}")
    lines += [f"note: {code} in {', '.join(names)} (see docs/definitions.md)" for code, names in notes.items()]
    return Group(Text(""), *map(Text, lines)) if lines else Group()


def _footnotes(trials: Sequence[TrialResult], most_launches: int) -> RenderableType:
    unused = {"GPU GiB", "RSS GiB"} - {_memory_column(trials)}
    texts = {column: _metric_text(name) for column, name in _METRIC_OF.items() if column not in unused}
    notes = [f"{column}: {text}" for column, text in (texts | _OTHER_FOOTNOTES).items()]
    return Text(
        f"\n* the best.  + no other has both a higher decode rate and a lower TTFT.  {_about_launches(most_launches)}"
        + ".  ".join(notes)
        + ".",
        style="dim",
    )


def _about_launches(most: int) -> str:
    """What the intervals are taken over, and so what they cannot say."""
    if most > 1:
        return (
            "Rates and times are means over launches, each launch the median over its repeats.  Behind the decode rate "
            "stands its 95% interval: over launches, or in a row with one launch over its repeats, which says nothing "
            "about the next start.  "
        )
    return (
        "Rates and times are medians over the repeats of one launch.  Behind the decode rate stands its 95% interval "
        "over these repeats, which says nothing about the next start.  "
    )


def _metric_text(name: str) -> str:
    metric = find_metric((*METRICS, *MEMORY_METRICS), name)
    assert metric is not None, name
    return metric.doc
