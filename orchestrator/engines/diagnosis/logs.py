"""An engine's log as streams of lines, one stream per process, without prefixes, colours and progress bars.

An engine, its libraries and several processes write into one file. The lines of one process are put together here, so
that one expression finds a message that a terminal broke in two or that another process interrupted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from orchestrator.engines.diagnosis.dialect import LogDialect

# Facts of the start stand at the beginning and the cause of a failure at the end. What is cut out lies between them.
HEAD_CHARS = 1_000_000
TAIL_CHARS = 1_000_000
_LONGEST_LINE = 20_000
_WIDEST_TERMINAL = 240
_LONGEST_WORD = 25
_LONGEST_SENTENCE = 300

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# torch, in front of the traceback of one process of a group.
_RANK = re.compile(r"^\[(?P<process>rank\d+)\]: ?")
_QUIET = {"DEBUG", "INFO", "WARNING", "D", "I", "W"}

TRACEBACK = "Traceback (most recent call last):"
_CHAINED = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line: the process that wrote it ("" unknown), whether it may report an error, its text, its line number."""

    process: str
    loud: bool
    text: str
    index: int


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of one process joined by line breaks, and the number of each in the log."""

    text: str
    indices: tuple[int, ...]

    def index_at(self, offset: int) -> int:
        """The number in the log of the line that holds text[offset]."""
        return self.indices[self.text.count("\n", 0, offset)]


def bounded(log_text: str) -> str:
    """Head and tail of a long log, cut at line ends; a short log as it is."""
    if len(log_text) <= HEAD_CHARS + TAIL_CHARS:
        return log_text
    head = log_text[: log_text.rfind("\n", 0, HEAD_CHARS) + 1]
    tail = log_text[log_text.find("\n", len(log_text) - TAIL_CHARS) + 1 :]
    return head + tail


def read_lines(log_text: str, dialect: LogDialect) -> list[Line]:
    """The lines of a log; of a progress bar only its last state."""
    return _parse_lines(_raw_lines(log_text), dialect)


def rejoined_lines(log_text: str, dialect: LogDialect) -> list[Line]:
    """The same, with lines joined that a terminal of fixed width broke (anywhere, or at spaces).

    Guessed from the widths of the lines: used where the lines as they stand match no rule.
    """
    raws = _raw_lines(log_text)
    width = max(map(len, raws), default=0)
    if width > _WIDEST_TERMINAL:
        return []
    joined: list[str] = []
    piece = 0
    for raw in raws:
        plain = _parse_line(0, raw, dialect)
        own_prefix = dialect.process.match(raw)
        hard, soft = piece == width, width - _LONGEST_WORD <= piece < width and not raw[:1].isspace()
        open_end = bool(joined and raw) and TRACEBACK not in raw and len(joined[-1]) < _LONGEST_LINE
        if open_end and plain.text == raw and (hard or soft):
            joined[-1] += raw if hard or joined[-1].endswith(" ") else f" {raw}"
        elif open_end and hard and own_prefix and joined[-1].startswith(own_prefix[0]):
            joined[-1] += plain.text
        else:
            joined.append(raw)
        piece = len(raw)
    return _parse_lines(joined, dialect)


def streams(lines: Iterable[Line]) -> list[Block]:
    """All lines of each process as one block."""
    by_process: dict[str, list[Line]] = {}
    for line in lines:
        by_process.setdefault(line.process, []).append(line)
    return [_block(own) for own in by_process.values()]


def error_blocks(lines: Iterable[Line], *, source: bool = False) -> list[Block]:
    """Runs of lines that may report an error, per process.

    A quiet line (information, warning) ends the run of its process. Source lines inside a traceback quote code and
    do not say what happened: they are left out unless `source`.
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
            # `RuntimeError: ` alone: its message stands in the lines below, up to the next empty one.
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
    """A pattern in which every space also matches a line break, or nothing where a line break replaced it."""
    return re.compile(pattern.replace(" ", r"\s*"))


def _raw_lines(log_text: str) -> list[str]:
    text = _ANSI.sub("", bounded(log_text))
    return [raw.rstrip("\r").rsplit("\r", 1)[-1][:_LONGEST_LINE] for raw in text.split("\n")]


def _parse_lines(raws: list[str], dialect: LogDialect) -> list[Line]:
    lines: list[Line] = []
    speaker = ""
    for index, raw in enumerate(raws):
        line = _parse_line(index, raw, dialect)
        if any(prefix.opens_message and prefix.pattern.match(raw) for prefix in dialect.prefixes):
            speaker = line.process
        elif line.text == raw:
            # A line without any prefix continues the message of the process that wrote last.
            line = replace(line, process=speaker)
        else:
            speaker = ""
        lines.append(line)
    return lines


def _parse_line(index: int, raw: str, dialect: LogDialect) -> Line:
    process, loud = "", True
    text = raw
    if match := dialect.process.match(text) or _RANK.match(text):
        process = match["process"]
        text = text[match.end() :]
    for prefix in dialect.prefixes:
        if match := prefix.pattern.match(text):
            groups = match.groupdict()
            process = process or (groups.get("process") or "").strip()
            text = text[match.end() :]
            is_quiet = (prefix.level or groups["level"]) in _QUIET
            loud = not is_quiet or (prefix.errors is not None and prefix.errors.search(text) is not None)
            break
    return Line(process, loud, text, index)


def _block(lines: list[Line]) -> Block:
    return Block("\n".join(line.text for line in lines), tuple(line.index for line in lines))


def _exception_line(texts: list[str]) -> str:
    """The first exception of a chain. Where its own line has no message, the paragraph below it is added."""
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
