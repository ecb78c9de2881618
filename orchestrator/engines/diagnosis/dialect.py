"""How one program writes its log, as data: where a line's prefix ends, and which phrases mean what.

An engine's module describes its own phrases. What several engines get from the libraries they load is described here
once, and `log_dialect` adds it to every dialect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NEVER = r"(?!)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePrefix:
    """What a logger writes in front of a message. The pattern may have the groups `level` and `process`.

    level: the level of every line with this prefix, where the prefix does not name one.
    errors: messages that report an error although their level is quiet.
    opens_message: the prefix stands once per message; following lines without any prefix belong to the same message.
    """

    pattern: re.Pattern[str]
    level: str | None = None
    errors: re.Pattern[str] | None = None
    opens_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDialect:
    """The phrases of one program's log. Each field is searched for in a line, after its prefix.

    process: the prefix that names the process, in front of any other; its group `process` is the name.
    prefixes: the prefixes of the engine's logger and of its libraries' loggers.
    loading, loaded, capturing, captured, ready: the phases of a start, in the order in which they are announced.
    served: a request was answered. compiling: something is compiled or captured, which costs time when it happens
    during a measurement. overridden: the engine replaces sampling parameters by its own.
    dead_inside: the engine behind a front end that still runs has failed.
    derived: an exception that only reports the end of another process.
    """

    process: re.Pattern[str]
    prefixes: tuple[LinePrefix, ...]
    loading: re.Pattern[str]
    loaded: re.Pattern[str]
    capturing: re.Pattern[str]
    captured: re.Pattern[str]
    ready: re.Pattern[str]
    served: re.Pattern[str]
    compiling: re.Pattern[str]
    overridden: re.Pattern[str]
    dead_inside: re.Pattern[str]
    derived: re.Pattern[str]


LIBRARY_PREFIXES = (
    # vLLM, which other engines load for its kernels: `WARNING 11-29 14:14:11 [file.py:12] text`.
    LinePrefix(
        pattern=re.compile(
            r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]+\]|\S+\]) ?"
        )
    ),
    # uvicorn: `INFO:     text`.
    LinePrefix(pattern=re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL): {2,}")),
    # FlashInfer and the like: `2026-11-29 14:14:55,832 - INFO - text`.
    LinePrefix(pattern=re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ - (?P<level>[A-Z]+) - ")),
    # glog, as torch uses it: `[W1129 14:14:30.63 socket.cpp:207] text`, `W1129 13:59:22.59 11637 torch/x.py:53] text`.
    LinePrefix(pattern=re.compile(r"^\[?(?P<level>[DIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ [^\]]*\] ?")),
    # A Python warning, whose whole line is the message: `/path/file.py:24: DeprecationWarning: text`.
    LinePrefix(pattern=re.compile(r"^(?=\S+\.pyx?:\d+: \w*Warning: )"), level="WARNING"),
)


def log_dialect(
    *,
    process: str | None = None,
    prefixes: tuple[LinePrefix, ...] = (),
    loading: str | None = None,
    loaded: str | None = None,
    capturing: str | None = None,
    captured: str | None = None,
    ready: str | None = None,
    served: str | None = None,
    compiling: str | None = None,
    overridden: str | None = None,
    dead_inside: str | None = None,
    derived: str | None = None,
) -> LogDialect:
    """A LogDialect from an engine's own expressions, with those of the libraries added. None: it has no such phrase."""
    return LogDialect(
        process=_any_of(process),
        prefixes=(*prefixes, *LIBRARY_PREFIXES),
        loading=_any_of(loading),
        loaded=_any_of(loaded),
        capturing=_any_of(capturing),
        captured=_any_of(captured),
        # uvicorn.
        ready=_any_of(ready, r"Application startup complete"),
        served=_any_of(served, r'"POST /v1/\S+ HTTP/[\d.]+" 200'),
        # TileLang, DeepGEMM, FlashInfer.
        compiling=_any_of(
            compiling, r"begins to compile kernel|DeepGEMM warmup|DeepGEMM JIT|Autotuning process starts"
        ),
        # Transformers.
        overridden=_any_of(overridden, r"generation_config.*overrid"),
        # asyncio, whose server could not listen.
        dead_inside=_any_of(dead_inside, r"while attempting to bind on address"),
        # Python.
        derived=_any_of(
            derived,
            r"KeyboardInterrupt|SystemExit|CancelledError|BrokenPipeError|ConnectionResetError|EOFError$",
        ),
    )


def _any_of(*expressions: str | None) -> re.Pattern[str]:
    return re.compile("|".join(filter(None, expressions)) or _NEVER)


# Of an engine about which nothing is known.
LIBRARIES_ONLY = log_dialect()
