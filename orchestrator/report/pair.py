"""Two runs side by side: what differs in what they were, and whether the difference in what they yielded is real."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.config import flatten
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.measure.quantity import differs, quantity_document, ratio
from orchestrator.measure.verdict import Level
from orchestrator.report.cells import interval
from orchestrator.report.documents import verdict_document
from orchestrator.report.tables import plain_table
from orchestrator.tracking.entries import params
from orchestrator.trial import TrialResult

if TYPE_CHECKING:
    from orchestrator.tracking import Recorded

# Facts about the software; the rest of a provenance is the machine.
_VERSIONS = ("engine_version", "python", "git_commit", "driver", "versions.")
_WORDS = {True: "yes", False: "no", None: "unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """One metric of one workload in both runs. ratio: b over a; differs: None where repeats are too few to tell."""

    workload: str
    metric: str
    a: Quantity | None
    b: Quantity | None
    ratio: Quantity | None
    differs: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs. The document and the table are made from the same contrasts."""

    a: Recorded
    b: Recorded

    def contrasts(self) -> Iterator[Contrast]:
        """Every metric that either run has, workload by workload."""
        left, right = self.a.result.measurements, self.b.result.measurements
        for workload in dict.fromkeys([*left, *right]):
            first, second = left.get(workload), right.get(workload)
            names = dict.fromkeys([*(first.metrics if first else ()), *(second.metrics if second else ())])
            for name in names:
                yield _contrast(workload, name, first, second)

    def notes(self) -> list[str]:
        """What a reader must know before the numbers are held against each other."""
        found = []
        for side in (self.a.result, self.b.result):
            if side.verdict and side.verdict.level is not Level.VALID:
                codes = ", ".join(dict.fromkeys(reason.code for reason in side.verdict.reasons))
                found.append(f"{side.spec.name} is {side.verdict.level}: {codes}")
        if _is_synthetic(self.a.result) != _is_synthetic(self.b.result):
            found.append("one of the two has synthetic acceptance, which is comparable only with its like")
        for workload in self.a.result.measurements.keys() & self.b.result.measurements.keys():
            if self.a.result.spec.workloads.get(workload) != self.b.result.spec.workloads.get(workload):
                found.append(f"{workload} was not the same work in both; see the parameters")
        return found

    def document(self) -> dict[str, Any]:
        """{a, b, params, versions, environment, memory, measurements, notes}; of the first four only what differs."""
        measurements: dict[str, dict[str, Any]] = {}
        for c in self.contrasts():
            measurements.setdefault(c.workload, {})[c.metric] = {
                "a": quantity_document(c.a),
                "b": quantity_document(c.b),
                "ratio": quantity_document(c.ratio),
                "differs": c.differs,
            }
        return {
            "a": _side(self.a),
            "b": _side(self.b),
            "params": _differing(*(params(side.result.spec)[0] for side in (self.a, self.b))),
            "versions": _differing(*(_provenance(side.result, versions=True) for side in (self.a, self.b))),
            "environment": _differing(*(_provenance(side.result, versions=False) for side in (self.a, self.b))),
            "memory": self._memory(),
            "measurements": measurements,
            "notes": self.notes(),
        }

    def _memory(self) -> dict[str, dict[str, float | None]]:
        left, right = self.a.result.memory, self.b.result.memory
        return {
            name: {key: facts[name].value if name in facts else None for key, facts in (("a", left), ("b", right))}
            for name in dict.fromkeys([*left, *right])
        }

    def table(self) -> RenderableType:
        """The same for people: what differs first, then the numbers."""
        document = self.document()
        names = [_label(side, letter) for side, letter in ((self.a, "A"), (self.b, "B"))]
        parts: list[RenderableType] = []
        for title in ("params", "versions", "environment"):
            rows = [[key, _text(found["a"]), _text(found["b"])] for key, found in document[title].items()]
            parts += [plain_table([title, *names], rows) if rows else Text(f"{title}: no difference"), Text("")]
        rows = [
            [c.workload, c.metric, interval(c.a, ".4g"), interval(c.b, ".4g"), interval(c.ratio, ".3f"), _word(c)]
            for c in self.contrasts()
            if c.a or c.b
        ]
        parts.append(plain_table(["workload", "metric", *names, "B / A", "real?"], rows))
        memory = [["memory", name, _text(m["a"]), _text(m["b"])] for name, m in document["memory"].items()]
        if memory:
            parts += [Text(""), plain_table(["", "GiB, or as named", *names], memory)]
        parts += [Text(note) for note in document["notes"]]
        parts.append(Text("real?: whether the 95% interval of the ratio over repeats excludes 1", style="dim"))
        return Group(*parts)


def compare(a: Recorded, b: Recorded) -> Pair:
    """Two runs side by side; its document() and table() hold the same."""
    return Pair(a=a, b=b)


def _contrast(workload: str, name: str, a: Measurement | None, b: Measurement | None) -> Contrast:
    left, right = (m.repeats.get(name, ()) if m else () for m in (a, b))
    gain = ratio(right, left)
    known = gain is not None and gain.low is not None
    return Contrast(
        workload=workload,
        metric=name,
        a=a.metrics.get(name) if a else None,
        b=b.metrics.get(name) if b else None,
        ratio=gain,
        differs=differs(right, left) if known else None,
    )


def _is_synthetic(result: TrialResult) -> bool:
    return result.speculation is not None and result.speculation.is_synthetic


def _side(recorded: Recorded) -> dict[str, Any]:
    result = recorded.result
    return {
        "name": result.spec.name,
        "run_id": recorded.run_id,
        "status": str(result.status),
        "cause": result.cause,
        "verdict": verdict_document(result.verdict),
    }


def _provenance(result: TrialResult, *, versions: bool) -> dict[str, Any]:
    flat = flatten(result.provenance)
    return {key: value for key, value in flat.items() if key.startswith(_VERSIONS) == versions}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    keys = dict.fromkeys([*a, *b])
    return {key: {"a": a.get(key), "b": b.get(key)} for key in keys if a.get(key) != b.get(key)}


def _label(side: Recorded, letter: str) -> str:
    return f"{letter}: {side.result.spec.name}"


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _word(contrast: Contrast) -> str:
    return _WORDS[contrast.differs] if contrast.a and contrast.b else ""
