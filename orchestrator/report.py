"""Results -> tables for people and JSON documents for programs, from the same objects. Figures are in figures.py."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.config import Experiment
from orchestrator.engines.base import TrialStatus
from orchestrator.metrics import Measurement, Quantity
from orchestrator.trial import TrialResult
from orchestrator.verdict import Level, Verdict

if TYPE_CHECKING:
    from orchestrator.tracking import Recorded

_FOOTNOTES = {
    "decode tok/s": "median over repeats of 1 / TPOT, prefill not in it (95% interval)",
    "TTFT s": "request sent until the first chunk that carries text, median",
    "acc. rate": "accepted / drafted tokens",
    "acc. len": "tokens per step: 1 + accepted / drafts",
    "GPU GiB": "highest use of one GPU during the trial",
    "RSS GiB": "highest host memory of the engine's processes",
    "speed-up": "decode tok/s over the baseline's",
    "verdict": "only a valid number can win",
    "n": "repeats behind the decode figure",
}


def same_trial(a: TrialResult | None, b: TrialResult | None) -> bool:
    """Whether both are the same execution, even when one of them got campaign metrics added."""
    if a is None or b is None:
        return False
    return (a.spec.name, a.spec.key, a.started_at, a.workdir) == (b.spec.name, b.spec.key, b.started_at, b.workdir)


def document(experiment: Experiment, results: Sequence[Recorded], best: TrialResult | None) -> dict[str, Any]:
    """The JSON document of `tune` and `results`: strict, absent is null."""
    chosen = next((r for r in results if same_trial(r.result, best)), None)
    return {
        "experiment": experiment.name,
        "trials": [_trial_document(recorded) for recorded in results],
        "best": {"name": chosen.result.spec.name, "run_id": chosen.run_id} if chosen else None,
    }


def _trial_document(recorded: Recorded) -> dict[str, Any]:
    result = recorded.result
    return {
        "name": result.spec.name,
        "key": result.spec.key,
        "run_id": recorded.run_id,
        "status": str(result.status),
        "cause": result.cause,
        "reason": result.reason,
        "params": dict(result.spec.params),
        "measurements": measurements_document(result.measurements, result.verdicts),
        "verdict": verdict_document(result.verdict),
    }


def measurements_document(
    measurements: Mapping[str, Measurement], verdicts: Mapping[str, Verdict]
) -> dict[str, dict[str, Any]]:
    """{workload: {metric: {value, low, high, n} | null, acceptance_by_position: [...], verdict: {...}}}."""
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


def quantity_document(quantity: Quantity | None) -> dict[str, Any] | None:
    """{value, low, high, n}, or None for what is absent or not finite."""
    if quantity is None or not math.isfinite(quantity.value):
        return None
    low, high = (x if x is not None and math.isfinite(x) else None for x in (quantity.low, quantity.high))
    return {"value": quantity.value, "low": low, "high": high, "n": quantity.n}


def verdict_document(verdict: Verdict | None) -> dict[str, Any] | None:
    """{level, reasons: [{code, detail}]}, or None where nothing was judged."""
    if verdict is None:
        return None
    return {
        "level": str(verdict.level),
        "reasons": [{"code": reason.code, "detail": reason.detail} for reason in verdict.reasons],
    }


def people_console(stream: IO[str]) -> Console:
    """A console that cuts nothing: as wide as the terminal, or as wide as wanted when it is a pipe or a file."""
    width = None if stream.isatty() else int(os.environ.get("COLUMNS") or 160)
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def campaign_table(experiment: Experiment, results: Sequence[Recorded], best: TrialResult | None) -> RenderableType:
    """One table per workload, the best marked; below them the failures with their levers, and the footnotes."""
    trials = [recorded.result for recorded in results]
    parts: list[RenderableType] = []
    for number, workload in enumerate(_workloads(experiment, trials)):
        rows = [t for t in trials if workload in t.measurements or (number == 0 and not t.measurements)]
        parts.append(_workload_table(workload, rows, best))
    parts += [_explanations(trials), _footnotes(trials)]
    return Group(*parts)


def _workloads(experiment: Experiment, trials: Sequence[TrialResult]) -> list[str]:
    """Every workload, the objective's first."""
    first = (experiment.objective.metric or "").rpartition("/")[0]
    names = dict.fromkeys([*experiment.workloads, *(name for t in trials for name in t.measurements)])
    return sorted(names, key=lambda name: name != first) or [""]


def _workload_table(workload: str, rows: Sequence[TrialResult], best: TrialResult | None) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), title=workload or None, title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("trial", overflow="fold", min_width=8)
    varying = varying_params(rows)
    for key in varying:
        table.add_column(_short(key, varying), justify="right", overflow="fold")
    memory = _memory_column(rows)
    for name in ("status", "decode tok/s", "TTFT s", "acc. rate", "acc. len", memory, "speed-up", "verdict", "n"):
        left = name in ("status", "verdict")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for result in rows:
        is_best = same_trial(result, best)
        params = [_brief(result.spec.params.get(key)) for key in varying]
        cells = ["*" if is_best else "", result.spec.name, *params, *_cells(result, workload)]
        table.add_row(*map(Text, cells), style="bold green" if is_best else _style(result, workload))
    return table


def _cells(result: TrialResult, workload: str) -> list[str]:
    measurement = result.measurements.get(workload)
    found = measurement.metrics if measurement else {}
    decode = found.get("decode_tok_s")
    verdict = result.verdicts.get(workload)
    return [
        str(result.status),
        _interval(decode, ".1f"),
        _number(found.get("ttft_s") or found.get("ttft_p50_s"), ".3f"),
        _number(found.get("acceptance_rate"), ".2f"),
        _number(found.get("acceptance_length"), ".2f"),
        _memory(result),
        _number(found.get("speedup"), ".2f", "x"),
        str(verdict.level) if verdict else "-",
        str(decode.n) if decode else "-",
    ]


def _style(result: TrialResult, workload: str) -> str:
    if result.status not in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
        return "red"
    verdict = result.verdicts.get(workload)
    return "yellow" if verdict and verdict.level != Level.VALID else ""


def varying_params(results: Iterable[TrialResult]) -> list[str]:
    """Keys of the params that differ between the results and that the trials' names do not say already."""
    listed = list(results)
    keys = dict.fromkeys(key for result in listed for key in result.spec.params)
    return [
        key
        for key in keys
        if len({_brief(r.spec.params.get(key)) for r in listed}) > 1
        and not all(_brief(r.spec.params[key]) in r.spec.name for r in listed if r.spec.params.get(key) is not None)
    ]


def _short(key: str, among: Sequence[str]) -> str:
    """The last part of a dotted key, or more of it where two keys would look alike."""
    parts = key.split(".")
    for count in range(1, len(parts) + 1):
        tail = ".".join(parts[-count:])
        if sum(other == tail or other.endswith("." + tail) for other in among) == 1:
            return tail
    return key


def _brief(value: object) -> str:
    return "-" if value is None else str(value)


def _memory_column(results: Iterable[TrialResult]) -> str:
    return "GPU GiB" if any(_gpu_peaks(result) for result in results) else "RSS GiB"


def _gpu_peaks(result: TrialResult) -> list[float]:
    return [f.value for name, f in result.memory.items() if name.startswith("gpu") and name.endswith("_peak_gib")]


def _memory(result: TrialResult) -> str:
    if peaks := _gpu_peaks(result):
        return f"{max(peaks):.1f}"
    rss = result.memory.get("host_rss_peak_gib")
    return f"{rss.value:.2f}" if rss else "-"


def _number(quantity: Quantity | None, form: str, unit: str = "") -> str:
    if quantity is None or not math.isfinite(quantity.value):
        return "-"
    return f"{quantity.value:{form}}{unit}"


def _interval(quantity: Quantity | None, form: str) -> str:
    text = _number(quantity, form)
    if quantity is None or quantity.low is None or quantity.high is None or text == "-":
        return text
    return f"{text} ({quantity.low:{form}}-{quantity.high:{form}})"


def _explanations(trials: Sequence[TrialResult]) -> RenderableType:
    """Why a trial has no number, and what helps; why a number may not be believed."""
    lines: list[Text] = []
    for result in trials:
        if result.status not in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
            cause = f" ({result.cause})" if result.cause else ""
            lines.append(Text(f"{result.spec.name}: {result.status}{cause}: {result.reason or 'no reason recorded'}"))
            if result.lever:
                lines.append(Text(f"    what helps: {result.lever}"))
        for workload, verdict in result.verdicts.items():
            for reason in verdict.reasons:
                lines.append(Text(f"{result.spec.name}: {workload}: {verdict.level}: {reason.code}: {reason.detail}"))
    return Padding(Group(*lines), (1, 0, 0, 0)) if lines else Text("")


def _footnotes(trials: Sequence[TrialResult]) -> RenderableType:
    unused = {"GPU GiB", "RSS GiB"} - {_memory_column(trials)}
    notes = [f"{name}: {text}" for name, text in _FOOTNOTES.items() if name not in unused]
    return Padding(Text("* best.  " + ".  ".join(notes) + ".", style="dim"), (1, 0, 0, 0))
