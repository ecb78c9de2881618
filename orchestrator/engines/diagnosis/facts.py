"""Numbers that an engine's log reports while it starts: memory, capacity, times. Each keeps its line as the source.

Where several ranks report the same number it is per GPU: the largest of what is used, the smallest of what is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.engines.diagnosis.logs import Block, flexible, sentence_around
from orchestrator.outcome import Fact

NUMBER = r"-?\d[\d,]*\.?\d*"


@dataclass(frozen=True, slots=True)
class FactPattern:
    """Named groups of `pattern` are fact names.

    within: how the repeats of one process become one number ("sum" or "last"). across: how the numbers of several
    processes become one ("max" or "min"). scale: the factor to the unit that the name states.
    """

    pattern: re.Pattern[str]
    within: str = "last"
    across: str = "max"
    scale: float = 1.0


def fact_pattern(pattern: str, *, within: str = "last", across: str = "max", scale: float = 1.0) -> FactPattern:
    """A FactPattern from an `expression`."""
    return FactPattern(expression(pattern), within, across, scale)


def expression(pattern: str) -> re.Pattern[str]:
    """A regular expression in which `<name>` stands for a number of that name and a space for any white space."""
    return flexible(re.sub(r"(?<!\?P)<(\w+)>", lambda hole: f"(?P<{hole[1]}>{NUMBER})", pattern))


_ACROSS: dict[str, Callable[[Iterable[float]], float]] = {"max": max, "min": min}


def read_facts(blocks: Sequence[Block], patterns: Iterable[FactPattern]) -> dict[str, Fact]:
    """Every fact that `patterns` find. Where several patterns find the same name, the first of them counts."""
    facts: dict[str, Fact] = {}
    for pattern in patterns:
        for name in pattern.pattern.groupindex:
            per_process = [fact for block in blocks if (fact := _combine_within(block, pattern, name))]
            if per_process and name not in facts:
                facts[name] = _combine_across(per_process, pattern.across)
    return facts


def number(text: str) -> float:
    """`1,320,868` -> 1320868.0. A full stop at the end belongs to the sentence and not to the number."""
    return float(text.replace(",", "").rstrip("."))


def _combine_within(block: Block, pattern: FactPattern, name: str) -> Fact | None:
    found = [match for match in pattern.pattern.finditer(block.text) if match[name] is not None]
    if not found:
        return None
    values = [number(match[name]) * pattern.scale for match in found]
    source = sentence_around(block.text, *found[-1].span())
    if pattern.within == "sum" and len(values) > 1:
        return Fact(value=sum(values), source=f"sum of {len(values)} lines: {source}")
    return Fact(value=values[-1], source=source)


def _combine_across(per_process: list[Fact], how: str) -> Fact:
    value = _ACROSS[how](fact.value for fact in per_process)
    source = next(fact.source for fact in per_process if fact.value == value)
    several = "" if len(per_process) == 1 else f"{how} of {len(per_process)} processes: "
    return Fact(value=value, source=f"{several}{source}")
