"""An engine's log as streams of lines, one stream per process, without prefixes, colours and progress bars.

Three engines, their libraries and several processes write into one file. What belongs together is put together here,
so that a message which a terminal broke in two, or another rank cut in half, can be found by one expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

# Start-up facts stand at the beginning, the cause of a death at the end; a flood between them repeats one of the two.
HEAD_CHARS = 1_000_000
TAIL_CHARS = 1_000_000
_LONGEST_LINE = 20_000
_WIDEST_TERMINAL = 240
_LONGEST_WORD = 25
_LONGEST_SENTENCE = 300

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PROCESS = re.compile(r"^\((?P<process>[^()]{1,60} pid=\d+)\) ?|^\[(?P<rank>rank\d+)\]: ?")
_SGLANG_PREFIX = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<process>(?: [A-Z]+\d+)*)\] ?"
_SGLANG = re.compile(_SGLANG_PREFIX)
_LEVELLED = [
    (re.compile(pattern), level)
    for pattern, level in [
        # vLLM: `WARNING 11-29 14:14:11 [file.py:12] text`; uvicorn: `INFO:     text`.
        (r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]+\]|\S+\]) ?", None),
        (r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL): {2,}", None),
        # FlashInfer and the like: `2026-11-29 14:14:55,832 - INFO - text`.
        (r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ - (?P<level>[A-Z]+) - ", None),
        # SGLang tells no level: `[2026-11-29 14:27:05 DP0 TP1] text`.
        (_SGLANG_PREFIX, "INFO"),
        # llama.cpp: `0.00.273.065 I srv    load_model: text`.
        (r"^\d+\.\d\d\.\d{3}\.\d{3} (?P<level>[DIWE]) ", None),
        # glog style of torch: `[W1129 14:14:30.63 socket.cpp:207] text`, `W1129 13:59:22.59 11637 torch/x.py:53] text`.
        (r"^\[?(?P<level>[DIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ [^\]]*\] ?", None),
        # A Python warning: `/path/file.py:24: DeprecationWarning: text`.
        (r"^(?=\S+\.pyx?:\d+: \w*Warning: )", "WARNING"),
    ]
]
_QUIET = {"DEBUG", "INFO", "WARNING", "D", "I", "W"}
# SGLang's own error messages carry no level; these announce a traceback or say what failed.
_SPOKEN_ERROR = re.compile(
    r"hit an exception|Traceback \(most recent|(?:Prefill|Decode) out of memory|already in use|crashed with exit code"
    r"|terminated with -|Watchdog timeout"
)

TRACEBACK = "Traceback (most recent call last):"
_CHAINED = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line: which process wrote it ("" unknown), whether it may tell an error, its text, its place in the log."""

    process: str
    loud: bool
    text: str
    index: int


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of one process joined by line breaks, and the place of each in the log."""

    text: str
    indices: tuple[int, ...]

    def index_at(self, offset: int) -> int:
        """The place in the log of the line that holds text[offset]."""
        return self.indices[self.text.count("\n", 0, offset)]


def bounded(log_text: str) -> str:
    """Head and tail of a long log, cut at line ends; a short log as it is."""
    if len(log_text) <= HEAD_CHARS + TAIL_CHARS:
        return log_text
    head = log_text[: log_text.rfind("\n", 0, HEAD_CHARS) + 1]
    tail = log_text[log_text.find("\n", len(log_text) - TAIL_CHARS) + 1 :]
    return head + tail


def read_lines(log_text: str) -> list[Line]:
    """The lines of a log; of a progress bar only its last state."""
    return _lines(_raw_lines(log_text))


def rejoined_lines(log_text: str) -> list[Line]:
    """The same, with lines put together that a terminal of fixed width broke (hard, or at spaces).

    A guess from widths: used where the lines as they stand tell nothing.
    """
    raws = _raw_lines(log_text)
    width = max(map(len, raws), default=0)
    if width > _WIDEST_TERMINAL:
        return []
    joined: list[str] = []
    piece = 0
    for raw in raws:
        plain = _line(0, raw)
        hard, soft = piece == width, width - _LONGEST_WORD <= piece < width and not raw[:1].isspace()
        open_end = bool(joined and raw) and TRACEBACK not in raw and len(joined[-1]) < _LONGEST_LINE
        if open_end and plain.text == raw and (hard or soft):
            joined[-1] += raw if hard or joined[-1].endswith(" ") else f" {raw}"
        elif open_end and hard and plain.process and joined[-1].startswith(f"({plain.process})"):
            joined[-1] += plain.text
        else:
            joined.append(raw)
        piece = len(raw)
    return _lines(joined)


def streams(lines: Iterable[Line]) -> list[Block]:
    """All lines of each process as one block."""
    by_process: dict[str, list[Line]] = {}
    for line in lines:
        by_process.setdefault(line.process, []).append(line)
    return [_block(own) for own in by_process.values()]


def error_blocks(lines: Iterable[Line], *, source: bool = False) -> list[Block]:
    """Runs of lines that may tell an error, per process.

    Quiet lines (information, warnings) end a run of their process. Source lines inside a traceback quote code, not
    what happened: they are left out unless `source`.
    """
    runs: dict[str, list[Line]] = {}
    inside: set[str] = set()
    blocks: list[Block] = []
    for line in lines:
        process = line.process
        if not line.loud:
            inside.discard(process)
            if own := runs.pop(process, None):
                blocks.append(_block(own))
            continue
        if TRACEBACK in line.text:
            inside.add(process)
        elif process in inside and line.text and not line.text[0].isspace():
            inside.discard(process)
        if source or process not in inside or TRACEBACK in line.text:
            runs.setdefault(process, []).append(line)
    return blocks + [_block(own) for own in runs.values()]


def first_traceback(lines: Iterable[Line], derived: re.Pattern[str]) -> tuple[str, str] | None:
    """The first chain of tracebacks whose first exception does not match `derived`: (exception line, whole text)."""
    chains: list[tuple[str, list[str]]] = []
    current: dict[str, list[str]] = {}
    state: dict[str, str] = {}
    for line in lines:
        process, text = line.process, line.text
        if TRACEBACK in text:
            if state.get(process) not in ("chained",):
                current[process] = []
                chains.append(("", current[process]))
            state[process] = "inside"
        elif process not in state:
            continue
        elif state[process] == "inside" and text and not text[0].isspace():
            # `RuntimeError: ` alone: what it says stands in the lines below, up to the next empty one.
            state[process] = "message" if text.rstrip().endswith(":") else "after"
        elif state[process] == "message":
            if not text.strip() and current[process][-1].strip()[-1:] != ":":
                state[process] = "after"
        elif state[process] == "after" and _CHAINED.match(text):
            state[process] = "chained"
        elif state[process] == "after" and text:
            del state[process]
            continue
        current[process].append(text)
    for _, texts in chains:
        exception = _exception_line(texts)
        if exception and not derived.search(exception):
            return exception, "\n".join(texts).strip()
    return None


def sentence_around(text: str, start: int, end: int) -> str:
    """The whole lines that text[start:end] touches, as one line."""
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", end)
    return " ".join(text[first : last if last >= 0 else len(text)].split())


def flexible(pattern: str) -> re.Pattern[str]:
    """A pattern in which every space stands for any white space, a line break, or none where a break took it."""
    return re.compile(pattern.replace(" ", r"\s*"))


def _raw_lines(log_text: str) -> list[str]:
    text = _ANSI.sub("", bounded(log_text))
    return [raw.rstrip("\r").rsplit("\r", 1)[-1][:_LONGEST_LINE] for raw in text.split("\n")]


def _lines(raws: list[str]) -> list[Line]:
    lines: list[Line] = []
    speaker = ""
    for index, raw in enumerate(raws):
        line = _line(index, raw)
        if _SGLANG.match(raw):
            speaker = line.process
        elif line.text == raw:
            # SGLang writes its prefix once per message: what follows without one is still the same process.
            line = replace(line, process=speaker)
        else:
            speaker = ""
        lines.append(line)
    return lines


def _line(index: int, raw: str) -> Line:
    process, loud = "", True
    text = raw
    if match := _PROCESS.match(text):
        process = match["process"] or match["rank"]
        text = text[match.end() :]
    for pattern, level in _LEVELLED:
        if match := pattern.match(text):
            groups = match.groupdict()
            process = process or (groups.get("process") or "").strip()
            text = text[match.end() :]
            quiet = (level or groups["level"]) in _QUIET
            loud = not quiet or (level == "INFO" and _SPOKEN_ERROR.search(text) is not None)
            break
    return Line(process, loud, text, index)


def _block(lines: list[Line]) -> Block:
    return Block("\n".join(line.text for line in lines), tuple(line.index for line in lines))


def _exception_line(texts: list[str]) -> str:
    """The first exception of a chain; one that says nothing on its own line with the paragraph below it."""
    inside, words = False, ""
    for text in texts:
        if words:
            if (not text.strip() and not words.endswith(":")) or len(words) > _LONGEST_SENTENCE:
                return words
            words = f"{words} {text.strip()}".rstrip()
        elif TRACEBACK in text:
            inside = True
        elif inside and text and not text[0].isspace():
            words = text.rstrip()
            if not words.endswith(":"):
                return text
    return words
