"""An engine's log and exit code -> Diagnosis. The same for every engine: what each says is data (rules.py, causes.py).

The last line of a log is rarely the cause: several processes end one after the other and the parent speaks last.
The first sentence that a rule knows is taken, specific rules before weak ones; nothing known stays `unknown`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.engines.diagnosis.causes import CAUSES
from orchestrator.engines.diagnosis.facts import FactPattern, number, read_facts
from orchestrator.engines.diagnosis.levers import computed_lever, shortfall, with_numbers
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
# Exceptions that only report another process's end.
_DERIVED = re.compile(
    r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed|KeyboardInterrupt|SystemExit"
    r"|CancelledError|BrokenPipeError|ConnectionResetError|EOFError$|Engine core process \S+ died"
)
# A front end that still lives while its engine is dead says one of these.
_DEAD_INSIDE = re.compile(
    r"EngineCore encountered a fatal error|EngineDeadError|hit an exception|EngineCore failed to start"
    r"|while attempting to bind on address"
)
_READY = re.compile(r"Application startup complete|fired up and ready|server is listening|listening on http")
_LOADING = re.compile(r"Loading model from|Starting to load model|Load weight begin|load_model: loading model")
_LOADED = re.compile(r"Model loading took|Load weight end|model loaded")
_CAPTURING = re.compile(r"Capturing |Capture \S+ .*CUDA graph begin|Capture cuda graph")
_CAPTURED = re.compile(r"Graph capturing finished|CUDA graph end")
_SERVED = re.compile(r'"POST /v1/\S+ HTTP/[\d.]+" 200')
_OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_NOT_RUN = {126, 127}

_COMPILING = re.compile(
    r"JIT compilation during inference|begins to compile kernel|Compiling a graph for|torch\.compile (?:took|takes)"
    r"|saved AOT compiled function|Dynamo bytecode transform|Captur(?:ing|e) .*CUDA graph|Capturing num tokens"
    r"|DeepGEMM warmup|DeepGEMM JIT|Autotuning process starts|ompiling (?:pipeline|shaders)"
)
_OVERRIDE = re.compile(r"[Dd]efault (?:vLLM )?sampling parameters have been overridden|generation_config.*overrid")


def explain(log_text: str, exit_code: int | None, patterns: Iterable[FactPattern]) -> Diagnosis:
    """Why an engine ended (exit_code; negative: by that signal), or what it tells while it lives (None)."""
    patterns = tuple(patterns)
    lines = read_lines(log_text)
    facts = read_facts(streams(lines), patterns)
    found = _find(lines)
    if found is None and (rejoined := rejoined_lines(log_text)):
        facts = {**read_facts(streams(rejoined), patterns), **facts}
        found = _find(rejoined)
        lines = rejoined if found else lines
    if exit_code is None:
        return _living(lines, found, facts)
    if found is None or (found[0].code == "killed" and _failed_before(found, lines)):
        return _without_rule(lines, exit_code, facts)
    return _told(*found, lines=lines, facts=facts)


def compile_lines(log_text: str) -> list[str]:
    """The lines of a log that tell that something was compiled or captured: inside a measured window they cost time."""
    return [line.text.strip() for line in read_lines(log_text) if _COMPILING.search(line.text)]


def override_lines(log_text: str) -> list[str]:
    """The lines in which an engine says that it changes sampling parameters by itself."""
    return [line.text.strip() for line in read_lines(log_text) if _OVERRIDE.search(line.text)]


def _find(lines: Sequence[Line]) -> tuple[Rule, re.Match[str], Block] | None:
    """The first match of a specific rule, else of a weak one; source lines of tracebacks count last of all."""
    best: tuple[tuple[bool, int, int], tuple[Rule, re.Match[str], Block]] | None = None
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


def _failed_before(found: tuple[Rule, re.Match[str], Block], lines: Sequence[Line]) -> bool:
    """Whether an error came first: an engine that ends on it kills its other processes."""
    place = found[2].index_at(found[1].start())
    return first_traceback([line for line in lines if line.index < place], _DERIVED) is not None


def _living(
    lines: Sequence[Line], found: tuple[Rule, re.Match[str], Block] | None, facts: Mapping[str, Fact]
) -> Diagnosis:
    dead_inside = any(line.loud and _DEAD_INSIDE.search(line.text) for line in lines)
    if found and dead_inside and not found[0].weak:
        return _told(*found, lines=lines, facts=facts)
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


def _told(
    rule: Rule, match: re.Match[str], block: Block, *, lines: Sequence[Line], facts: Mapping[str, Fact]
) -> Diagnosis:
    evidence = sentence_around(block.text, *match.span())[:_EVIDENCE_CHARS]
    place = block.index_at(match.start())
    before = [line for line in lines if line.index < place]
    words = {name: text.rstrip(".") for name, text in match.groupdict().items() if text is not None}
    code = _refined(rule.code, words, before)
    cause = CAUSES[code]
    own = rule if rule.code == code else None
    told = {**facts, **_numbers(words, evidence)}
    if code == "module_missing":
        top = words["module"].split(".")[0]
        words["package"] = PACKAGES.get(top, top.replace("_", "-"))
    if code == "kv_cache_too_small":
        told |= shortfall(told)
    if code == "out_of_memory_load":
        served = sum(1 for line in before if _SERVED.search(line.text))
        told["requests_served"] = Fact(value=float(served), source="answers in the log before the error")
    summary = (own and own.summary) or cause.summary
    lever = computed_lever(code, words, told, lines) or (own and own.lever) or cause.lever
    return Diagnosis(
        status=cause.status,
        cause=code,
        summary=_filled(with_numbers(code, summary, told), words),
        lever=_filled(lever, words),
        evidence=evidence,
        facts=told,
    )


def _refined(code: str, words: dict[str, str], before: Sequence[Line]) -> str:
    """The cause behind a rule that several causes share."""
    if code == "out_of_memory":
        return _phase_of_memory(before)
    if code == "killed" and "died" in words:
        ended_by = signal.Signals(-int(words["died"]))
        words["signal"] = f"{ended_by.name} to {words['who']}"
        return "killed" if ended_by in _OUTSIDE_SIGNALS else "crashed"
    return code


def _phase_of_memory(before: Sequence[Line]) -> str:
    """What the engine was doing when memory ran out: the last of its own announcements."""
    phase = "out_of_memory_start"
    for line in before:
        if _READY.search(line.text):
            return "out_of_memory_load"
        if _LOADING.search(line.text):
            phase = "weights_too_large"
        elif _CAPTURING.search(line.text):
            phase = "graphs_too_large"
        elif _LOADED.search(line.text) or _CAPTURED.search(line.text):
            phase = "out_of_memory_start"
    return phase


def _without_rule(lines: Sequence[Line], exit_code: int, facts: Mapping[str, Fact]) -> Diagnosis:
    """No sentence is known: what the exit code says for sure, else unknown with the first traceback."""
    number_ = -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code < 160 else 0
    name = signal.Signals(number_).name if number_ in {int(s) for s in signal.Signals} else ""
    traceback = first_traceback(lines, _DERIVED)
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


def _numbers(words: Mapping[str, str], evidence: str) -> dict[str, Fact]:
    """The groups of a rule whose names carry a unit, as facts."""
    units = ("_gib", "_tokens", "_utilization", "_static")
    told = {name: number(text) for name, text in words.items() if name.endswith(units)}
    if "oom_tried" in words:
        told["oom_tried_gib"] = number(words["oom_tried"]) * _UNITS_GIB[words["oom_unit"]]
    return {name: Fact(value=value, source=evidence) for name, value in told.items()}


def _filled(template: str, words: Mapping[str, str]) -> str:
    """The words of the log in the braces of a sentence; what the log did not say is "a value"."""
    plain = {name: re.sub(r"^(\d+)\.0+$", r"\1", " ".join(text.split())) for name, text in words.items()}
    plain = {name: text if len(text) <= _WORD_CHARS else f"{text[:_WORD_CHARS]}..." for name, text in plain.items()}
    return re.sub(r"\{(\w+)\}", lambda hole: plain.get(hole[1], "a value"), template)
