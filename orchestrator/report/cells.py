"""Numbers and parameters as the short text of a table's cell. Absent is `-`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from orchestrator.measure.metrics import Quantity
from orchestrator.trial import TrialResult


def number(quantity: Quantity | None, form: str, unit: str = "") -> str:
    if quantity is None or not math.isfinite(quantity.value):
        return "-"
    return f"{quantity.value:{form}}{unit}"


def interval(quantity: Quantity | None, form: str) -> str:
    text = number(quantity, form)
    if quantity is None or quantity.low is None or quantity.high is None or text == "-":
        return text
    return f"{text} ({quantity.low:{form}}-{quantity.high:{form}})"


def varying_params(results: Iterable[TrialResult]) -> list[str]:
    """Keys of the params that differ between the results and that the trials' names do not hold already."""
    listed = list(results)
    keys = dict.fromkeys(key for result in listed for key in result.spec.params)
    return [
        key
        for key in keys
        if len({brief(r.spec.params.get(key)) for r in listed}) > 1
        and not all(brief(r.spec.params[key]) in r.spec.name for r in listed if r.spec.params.get(key) is not None)
    ]


def short(key: str, among: Sequence[str]) -> str:
    """The last part of a dotted key, or more of it where two keys would look alike."""
    parts = key.split(".")
    for count in range(1, len(parts) + 1):
        tail = ".".join(parts[-count:])
        if sum(other == tail or other.endswith("." + tail) for other in among) == 1:
            return tail
    return key


def brief(value: object) -> str:
    return "-" if value is None else str(value)
