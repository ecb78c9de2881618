"""A Prometheus page as numbers: sums over labels, by position, by label; built on prometheus_client's parser."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Page:
    """Samples of one page by sample name: (labels, value). Timestamps (`_created`) and non-finite values are left out.

    declared: names of the counters that the page describes, also those without a sample yet.
    """

    samples: Mapping[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    declared: frozenset[str] = frozenset()

    def total(self, *names: str) -> float | None:
        """Sum over all labels of the first of `names` on the page. A described but unused counter is 0."""
        for name in names:
            if name in self.samples:
                return sum(value for _, value in self.samples[name])
        return 0.0 if self.declared.intersection(names) else None

    def largest(self, *names: str) -> float | None:
        """The largest sample of the first of `names` on the page, for gauges that every process repeats."""
        for name in names:
            if name in self.samples:
                return max(value for _, value in self.samples[name])
        return None

    def by_position(self, name: str) -> tuple[float, ...] | None:
        """Sums per label `position`, 0 upwards; None when there is none. A position without a sample is unused: 0."""
        sums: dict[int, float] = defaultdict(float)
        for labels, value in self.samples.get(name, []):
            if labels.get("position", "").isdecimal():
                sums[int(labels["position"])] += value
        return tuple(sums.get(position, 0.0) for position in range(max(sums) + 1)) if sums else None

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """The label sets of an info metric."""
        return [labels for labels, _ in self.samples.get(name, [])]


def read_page(text: str | None) -> Page:
    """Parse a metrics page. One that is missing, torn or not in the format is an empty Page."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    declared: set[str] = set()
    try:
        for family in text_string_to_metric_families(text or ""):
            if family.type == "counter":
                # The parser strips _total from a counter's family name and its samples keep it.
                declared.add(f"{family.name}_total")
            for sample in family.samples:
                if not sample.name.endswith("_created") and math.isfinite(sample.value):
                    samples[sample.name].append((sample.labels, float(sample.value)))
    except (ValueError, KeyError, IndexError):
        return Page()
    return Page(dict(samples), frozenset(declared))
