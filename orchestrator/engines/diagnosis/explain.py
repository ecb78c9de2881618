"""An engine's log and exit code -> Diagnosis, the same way for every engine. Causes and sentences are data.

The last line of a log is rarely the cause: several processes end one after the other, and the parent writes last.
The first sentence that matches a rule is the cause, specific rules before weak ones. Without a match it is `unknown`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.engines.diagnosis.causes import CAUSES
from orchestrator.engines.diagnosis.dialect import LogDialect
from orchestrator.engines.diagnosis.facts import FactPattern, number, read_facts
from orchestrator.engines.diagnosis.levers import add_numbers, compute_lever, compute_shortfall
from orchestrator.engines.diagnosis.logs import (
    Block,
    Line,
    error_blocks,
    first_traceback,
    read_lines,
    rejoined_lines,
    sentence_around,
    streams,
)
from orchestrator.engines.diagnosis.rules import DRAFT_WEIGHTS, PACKAGES, RULES, Rule
from orchestrator.outcome import Diagnosis, Fact, TrialStatus

_EVIDENCE_CHARS = 4000
_WORD_CHARS = 160
_UNITS_GIB = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
_OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_NOT_RUN = {126, 127}


# The first match of a rule, and the lines that it was found in.
_Found = tuple[Rule, re.Match[str], Block]


def explain(
    log_text: str, exit_code: int | None, dialect: LogDialect, patterns: Iterable[FactPattern] = ()
) -> Diagnosis:
    """Why an engine ended (exit_code; negative: by that signal), or what its log reports while it runs (None)."""
    patterns = tuple(patterns)
    lines = read_lines(log_text, dialect)
    facts = read_facts(streams(lines), patterns)
    found = _find(lines)
    if found is None and (rejoined := rejoined_lines(log_text, dialect)):
        facts = {**read_facts(streams(rejoined), patterns), **facts}
        found = _find(rejoined)
        lines = rejoined if found else lines
    if exit_code is None:
        return _diagnose_running(lines, found, facts, dialect)
    if found is None or (found[0].code == "killed" and _has_earlier_error(found, lines, dialect)):
        return _diagnose_without_rule(lines, exit_code, facts, dialect)
    return _diagnose_by_rule(found, lines, facts, dialect)


def compile_lines(log_text: str, dialect: LogDialect) -> list[str]:
    """The lines that report that something was compiled or captured: during a measurement that costs time."""
    return [line.text.strip() for line in read_lines(log_text, dialect) if dialect.compiling.search(line.text)]


def override_lines(log_text: str, dialect: LogDialect) -> list[str]:
    """The lines that report that the engine replaces sampling parameters by its own."""
    return [line.text.strip() for line in read_lines(log_text, dialect) if dialect.overridden.search(line.text)]


def _find(lines: Sequence[Line]) -> _Found | None:
    """The first match of a specific rule, else of a weak one. Source lines of tracebacks are searched only then."""
    best: tuple[tuple[bool, int, int], _Found] | None = None
    for quoted in (False, True):
        rules = [rule for rule in RULES if rule.quoted == quoted]
        for block in error_blocks(lines, source=quoted):
            for rule in rules:
                if match := rule.pattern.search(block.text):
                    place = (rule.weak, block.index_at(match.start()), match.start())
                    if best is None or place < best[0]:
                        best = place, (rule, match, block)
        if best:
            return best[1]
    return None


def _has_earlier_error(found: _Found, lines: Sequence[Line], dialect: LogDialect) -> bool:
    """Whether an error stands before the match: an engine that ends on an error kills its other processes."""
    place = found[2].index_at(found[1].start())
    return first_traceback([line for line in lines if line.index < place], dialect.derived) is not None


def _diagnose_running(
    lines: Sequence[Line], found: _Found | None, facts: Mapping[str, Fact], dialect: LogDialect
) -> Diagnosis:
    dead_inside = any(line.loud and dialect.dead_inside.search(line.text) for line in lines)
    if found and dead_inside and not found[0].weak:
        return _diagnose_by_rule(found, lines, facts, dialect)
    lost = [line.text.strip() for line in lines if DRAFT_WEIGHTS.search(line.text)]
    if not lost:
        return Diagnosis(status=TrialStatus.COMPLETE, facts=facts)
    cause = CAUSES["draft_weights_missing"]
    count = {"draft_weights_lost": Fact(value=float(len(lost)), source=lost[0])}
    return Diagnosis(
        status=cause.status,
        cause=cause.code,
        summary=f"{cause.summary} ({len(lost)} lines say so)",
        lever=cause.lever,
        evidence=lost[0],
        facts={**facts, **count},
    )


def _diagnose_by_rule(
    found: _Found, lines: Sequence[Line], start_facts: Mapping[str, Fact], dialect: LogDialect
) -> Diagnosis:
    rule, match, block = found
    evidence = sentence_around(block.text, *match.span())[:_EVIDENCE_CHARS]
    place = block.index_at(match.start())
    before = [line for line in lines if line.index < place]
    words = {name: text.rstrip(".") for name, text in match.groupdict().items() if text is not None}
    code = _refine_cause(rule.code, words, before, dialect)
    cause = CAUSES[code]
    own = rule if rule.code == code else None
    facts = {**start_facts, **_read_numbers(words, evidence)}
    if code == "module_missing":
        top = words["module"].split(".")[0]
        words["package"] = PACKAGES.get(top, top.replace("_", "-"))
    if code == "kv_cache_too_small":
        facts |= compute_shortfall(facts)
    if code == "out_of_memory_load":
        served = sum(1 for line in before if dialect.served.search(line.text))
        facts["requests_served"] = Fact(value=float(served), source="answers in the log before the error")
    summary = (own and own.summary) or cause.summary
    lever = compute_lever(code, words, facts, lines) or (own and own.lever) or cause.lever
    return Diagnosis(
        status=cause.status,
        cause=code,
        summary=_fill(add_numbers(code, summary, facts), words),
        lever=_fill(lever, words),
        evidence=evidence,
        facts=facts,
    )


def _refine_cause(code: str, words: dict[str, str], before: Sequence[Line], dialect: LogDialect) -> str:
    """The cause behind a rule that several causes share."""
    if code == "out_of_memory":
        return _memory_cause(before, dialect)
    if code == "killed" and "died" in words:
        ended_by = signal.Signals(-int(words["died"]))
        words["signal"] = f"{ended_by.name} to {words['who']}"
        return "killed" if ended_by in _OUTSIDE_SIGNALS else "crashed"
    return code


def _memory_cause(before: Sequence[Line], dialect: LogDialect) -> str:
    """What the engine was doing when memory ran out, by the last phase that it announced."""
    cause = "out_of_memory_start"
    for line in before:
        if dialect.ready.search(line.text):
            return "out_of_memory_load"
        if dialect.loading.search(line.text):
            cause = "weights_too_large"
        elif dialect.capturing.search(line.text):
            cause = "graphs_too_large"
        elif dialect.loaded.search(line.text) or dialect.captured.search(line.text):
            cause = "out_of_memory_start"
    return cause


def _diagnose_without_rule(
    lines: Sequence[Line], exit_code: int, facts: Mapping[str, Fact], dialect: LogDialect
) -> Diagnosis:
    """No rule matches: the cause that the exit code proves, else unknown with the first traceback."""
    number_ = -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code < 160 else 0
    name = signal.Signals(number_).name if number_ in {int(s) for s in signal.Signals} else ""
    traceback = first_traceback(lines, dialect.derived)
    last = "\n".join([line.text for line in lines if line.text.strip()][-10:])
    evidence = (traceback[1] if traceback else last)[:_EVIDENCE_CHARS] or None
    if name and (traceback is None or signal.Signals(number_) not in _OUTSIDE_SIGNALS):
        code = "killed" if signal.Signals(number_) in _OUTSIDE_SIGNALS else "crashed"
    else:
        code = "command_missing" if exit_code in _NOT_RUN and traceback is None else "unknown"
    cause = CAUSES[code]
    summary = cause.summary.format(signal=name)
    if code == "unknown":
        summary = (
            f"{summary}: {traceback[0]}"
            if traceback
            else f"the engine ended and its log names no cause (exit code {exit_code})"
        )
    return Diagnosis(
        status=cause.status, cause=code, summary=summary, lever=cause.lever, evidence=evidence, facts=facts
    )


def _read_numbers(words: Mapping[str, str], evidence: str) -> dict[str, Fact]:
    """The groups of a rule whose names carry a unit, as facts."""
    units = ("_gib", "_tokens", "_utilization", "_static")
    values = {name: number(text) for name, text in words.items() if name.endswith(units)}
    if "oom_tried" in words:
        values["oom_tried_gib"] = number(words["oom_tried"]) * _UNITS_GIB[words["oom_unit"]]
    return {name: Fact(value=value, source=evidence) for name, value in values.items()}


def _fill(template: str, words: Mapping[str, str]) -> str:
    """Put the words of the log into the braces of a sentence; "a value" where the log does not have the word."""
    plain = {name: re.sub(r"^(\d+)\.0+$", r"\1", " ".join(text.split())) for name, text in words.items()}
    plain = {name: text if len(text) <= _WORD_CHARS else f"{text[:_WORD_CHARS]}..." for name, text in plain.items()}
    return re.sub(r"\{(\w+)\}", lambda hole: plain.get(hole[1], "a value"), template)
