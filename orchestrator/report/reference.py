"""Published numbers beside ours: a CSV of experiments/reference, matched row by row with the results of a campaign.

A column that names a metric (`decode_tok_s`, `tpot_ms`, or `sglang_decode_tok_s` for one engine) is a number to be
held against ours; a column that names a parameter, `workload` or `proposals` finds the trial.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.config import Experiment, flatten
from orchestrator.engines import ENGINES, find_engine
from orchestrator.measure.metrics import METRICS, Quantity, metric_names
from orchestrator.measure.quantity import quantity_document
from orchestrator.report.cells import brief, interval
from orchestrator.report.tables import plain_table
from orchestrator.search.arms import pool_points
from orchestrator.search.objective import objective_metrics, value_or_maximum
from orchestrator.trial import TrialResult

if TYPE_CHECKING:
    from orchestrator.tracking import Recorded


def _proposals_columns() -> set[str]:
    """Columns that state draft tokens per step: our own word for them, and those of the engines."""
    arguments = {engine.proposals_argument for engine in ENGINES.values() if engine.proposals_argument}
    return {"proposals", *(argument.replace("-", "_") for argument in arguments)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One published table. source: its comment lines; rows: column -> text, as the file has it."""

    path: Path
    source: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One published number and ours; a point that yielded none has a status in place of it (metric `status`).

    trial is None when no trial of ours is that point. remark: what `ours` is, where it is not the metric itself.
    """

    row: Mapping[str, str]
    metric: str
    published: float | str
    trial: str | None
    ours: Quantity | str | None
    remark: str | None = None

    @property
    def ratio(self) -> float | None:
        """Ours over the published number."""
        if isinstance(self.published, str) or not isinstance(self.ours, Quantity) or not self.published > 0:
            return None
        return self.ours.value / self.published


def find_reference(experiment: Experiment) -> Reference | None:
    """The published table that has the experiment's name (`-` and `_` alike), under experiments/reference."""
    wanted = experiment.name.replace("-", "_")
    for path in sorted((Path(experiment.engine.root) / "experiments" / "reference").glob("*.csv")):
        if path.stem.replace("-", "_") == wanted:
            return read_reference(path)
    return None


def read_reference(path: Path) -> Reference:
    """Read a CSV whose first lines, beginning with #, name the source of the numbers."""
    lines = path.read_text(encoding="utf-8").splitlines()
    source = tuple(line.lstrip("# ") for line in lines if line.startswith("#"))
    rows = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    return Reference(path=path, source=source, rows=tuple(rows))


def reference_document(experiment: Experiment, results: Sequence[Recorded]) -> dict[str, Any] | None:
    """{source, rows: [{...columns, metric, published, trial, ours, ratio, remark}]}; None without published numbers."""
    reference = find_reference(experiment)
    if reference is None:
        return None
    rows = [
        {
            **_labels(match.row),
            "metric": match.metric,
            "published": match.published,
            "trial": match.trial,
            "ours": match.ours if isinstance(match.ours, str) else quantity_document(match.ours),
            "ratio": match.ratio,
            "remark": match.remark,
        }
        for match in _matches(experiment, reference, pool_points(experiment, [r.result for r in results]))
    ]
    return {"source": list(reference.source), "rows": rows}


def reference_table(experiment: Experiment, results: Sequence[Recorded]) -> RenderableType:
    """The published numbers, ours, and ours over theirs; below them what a maximum stands for."""
    reference = find_reference(experiment)
    if reference is None:
        return Text(f"experiments/reference holds no published numbers named {experiment.name}")
    matches = list(_matches(experiment, reference, pool_points(experiment, [r.result for r in results])))
    labels = list(dict.fromkeys(key for match in matches for key in _labels(match.row)))
    rows = [
        [
            *(match.row[key] or "-" for key in labels),
            match.metric,
            match.published if isinstance(match.published, str) else f"{match.published:g}",
            _ours(match),
            f"{match.ratio:.2f}x" if match.ratio is not None else "-",
        ]
        for match in matches
    ]
    table = plain_table([*labels, "metric", "published", "ours (95% interval)", "ours / published"], rows)
    remarks = dict.fromkeys(f"{m.trial}: {m.remark}" for m in matches if m.remark)
    return Group(table, *map(Text, remarks), *(Text(line, style="dim") for line in reference.source))


def _ours(match: Match) -> str:
    if match.trial is None:
        return "not run"
    return match.ours if isinstance(match.ours, str) else interval(match.ours, ".4g")


def _matches(experiment: Experiment, reference: Reference, results: Sequence[TrialResult]) -> Iterator[Match]:
    default = next(iter(objective_metrics(experiment.objective, experiment.workloads)), "/").rpartition("/")[0]
    for row in reference.rows:
        workload = row.get("workload") or default
        keys = {key: text for key, text in row.items() if key != "workload" and text and _column(key, None) is None}
        trial = next((r for r in results if workload in r.spec.workloads and _is_point(r, workload, keys)), None)
        name = trial.spec.name if trial else None
        if row.get("status", "complete") != "complete":
            yield Match(
                row=row,
                metric="status",
                published=row["status"],
                trial=name,
                ours=trial.status.value if trial else None,
            )
        for column, text in row.items():
            found = _column(column, experiment.engine.kind)
            if found is not None and text:
                ours, remark = value_or_maximum(trial, f"{workload}/{found[0]}") if trial else (None, None)
                number = float(text) * found[1]
                yield Match(row=row, metric=found[0], published=number, trial=name, ours=ours, remark=remark)


def _column(name: str, kind: str | None) -> tuple[str, float] | None:
    """(metric, factor to its unit) of a column of numbers; None for any other column, other engines' included."""
    bare = name.removeprefix(f"{kind}_") if kind else name
    for engine in ENGINES if kind is None else ():
        bare = bare.removeprefix(f"{engine}_")
    seconds = bare.removesuffix("_ms") + "_s"
    known = metric_names(METRICS)
    if bare.endswith("_ms") and seconds in known:
        return seconds, 1e-3
    return (bare, 1.0) if bare in known else None


def _labels(row: Mapping[str, str]) -> dict[str, str]:
    """The columns that identify the point of a row: neither its numbers nor its remarks."""
    return {key: text for key, text in row.items() if _column(key, None) is None and key not in ("note", "status")}


def _is_point(result: TrialResult, workload: str, keys: Mapping[str, str]) -> bool:
    """Whether a trial is the point of a row: all columns that name a parameter of the trial have its value."""
    spec = result.spec
    settings = flatten({"args": spec.engine.args, "workload": asdict(spec.workloads[workload])})
    by_last = {key.rpartition(".")[2].replace("-", "_"): brief(found) for key, found in settings.items()}
    argument = (find_engine(spec.engine.kind).proposals_argument or "").replace("-", "_")
    checked = 0
    for key, text in keys.items():
        if key in _proposals_columns():
            known = result.speculation.proposals if result.speculation else None
            ours = by_last.get(argument, 0) if known is None else known
        elif key in by_last:
            ours = by_last[key]
        else:
            continue
        checked += 1
        if str(ours) != text:
            return False
    return checked > 0
