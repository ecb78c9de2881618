"""Numbers that an engine's log tells while it starts: memory, capacity, times. Each keeps the line it was read from.

Where several ranks tell the same, the number is per GPU: the largest of what is used, the smallest of what is left.
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
    """Named groups of `pattern` are fact names. within: what repeats of one process mean (sum or last).

    across: what several processes mean ("max" or "min"). scale: factor to the unit that the name states.
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
    """Every fact that `patterns` find; the first pattern that yields a name wins."""
    facts: dict[str, Fact] = {}
    for pattern in patterns:
        for name in pattern.pattern.groupindex:
            told = [fact for block in blocks if (fact := _within(block, pattern, name))]
            if told and name not in facts:
                facts[name] = _across(told, pattern.across)
    return facts


def number(text: str) -> float:
    """`1,320,868` -> 1320868.0; a full stop at the end belongs to the sentence."""
    return float(text.replace(",", "").rstrip("."))


def _within(block: Block, pattern: FactPattern, name: str) -> Fact | None:
    found = [match for match in pattern.pattern.finditer(block.text) if match[name] is not None]
    if not found:
        return None
    values = [number(match[name]) * pattern.scale for match in found]
    source = sentence_around(block.text, *found[-1].span())
    if pattern.within == "sum" and len(values) > 1:
        return Fact(value=sum(values), source=f"sum of {len(values)} lines: {source}")
    return Fact(value=values[-1], source=source)


def _across(told: list[Fact], how: str) -> Fact:
    value = _ACROSS[how](fact.value for fact in told)
    source = next(fact.source for fact in told if fact.value == value)
    return Fact(value=value, source=source if len(told) == 1 else f"{how} of {len(told)} processes: {source}")
