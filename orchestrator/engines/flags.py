"""Engine arguments -> argv, and argv -> complaints. Each engine spells booleans, lists and names in its own way.

`args` of an EngineSpec keep the engine's own names; this module only writes them on a command line.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.errors import ConfigError

# A renderer gets the flag as it is written (--max-model-len) and a value that is neither None nor a dict.
Renderer = Callable[[str, Any], list[str]]


def flag_name(key: str) -> str:
    """`max_model_len` -> `--max-model-len`; `c` -> `-c`; a key that begins with a dash stays as it is.

    Behind a dot stands a key of a JSON value (vLLM: `speculative-config.num_speculative_tokens`), kept unchanged.
    """
    if key.startswith("-"):
        return key
    head, dot, tail = key.partition(".")
    return f"-{head}" if len(head) == 1 and not dot else f"--{head.replace('_', '-')}{dot}{tail}"


def render_args(args: Mapping[str, Any], render: Renderer) -> list[str]:
    """`args` in their order as command-line words: null is left out, a dict becomes one compact JSON word."""
    argv: list[str] = []
    for key, value in args.items():
        if value is None:
            continue
        flag = flag_name(key)
        argv += [flag, compact_json(value)] if isinstance(value, Mapping) else render(flag, value)
    return argv


def scalar(value: Any) -> str:
    """One value as one command-line word; containers as compact JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return compact_json(value) if isinstance(value, Mapping | list | tuple) else str(value)


def compact_json(value: Any) -> str:
    """JSON without spaces, as the published command lines have it; null entries of a dict are left out."""
    return json.dumps(_without_null(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_null(v) for k, v in value.items() if v is not None}
    return [_without_null(v) for v in value] if isinstance(value, list | tuple) else value


def refuse_owned(kind: str, args: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """Raise ConfigError when `args` sets a flag that this program sets itself. owned: flag -> what to use instead."""
    for key in args:
        instead = owned.get(flag_name(key))
        if instead is not None:
            raise ConfigError(f"engine.args.{key}: {kind}'s {flag_name(key)} is set by this program; {instead}")


def argument(args: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of `names` that `args` sets (any spelling of `_` and `-`), else None."""
    spelled = {flag_name(key): value for key, value in args.items() if value is not None}
    return next((spelled[flag_name(name)] for name in names if flag_name(name) in spelled), None)


def whole_number(kind: str, args: Mapping[str, Any], *names: str, default: int | None = None) -> int | None:
    """Like `argument`, as a whole number of 1 or more. Raises ConfigError for anything else."""
    value = argument(args, *names)
    if value is None:
        return default
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", text):
        raise ConfigError(f"engine.args.{names[0]}: found {value!r}, {kind} needs a whole number of 1 or more")
    return int(text)


_FLAG = re.compile(r"(?<![\w/.-])-{1,2}[A-Za-z][\w-]*")
# An option begins on a line of its own: argparse indents it by two, llama.cpp not at all. Its explanation stands
# further right.
_OPTION = re.compile(r"^ {0,6}(?=-\S)", re.MULTILINE)
_USAGE = re.compile(r"^usage:.*?(?=^\s*$|^\S[^\n:]*: error:|\Z)", re.MULTILINE | re.DOTALL)
_REMOVED = re.compile(r"the argument has been removed\.?\s*(.*)", re.DOTALL)


def known_flags(help_text: str) -> set[str]:
    """Every flag that a help text defines, in its usage or its option lists (argparse, llama.cpp)."""
    usage = {flag for text in _USAGE.findall(help_text) for flag in _FLAG.findall(text)}
    return usage | {flag for flag, removed in _options(help_text) if removed is None}


def removed_flags(help_text: str) -> dict[str, str]:
    """Flags that a help text still lists although they end the engine, each with the advice what to use instead."""
    return {flag: removed for flag, removed in _options(help_text) if removed is not None}


def _options(help_text: str) -> list[tuple[str, str | None]]:
    """(flag, None), or (flag, advice) for a removed one, for every spelling in the option lists."""
    found: list[tuple[str, str | None]] = []
    for option in _OPTION.split(help_text)[1:]:
        # Two spaces begin the description, unless they align a list of spellings behind a comma.
        spellings = re.split(r"(?<![,\s])\s{2,}|\n", option)[0]
        removed = _REMOVED.search(option)
        advice = " ".join(removed[1].split()) if removed else None
        found += [(flag, advice) for flag in _FLAG.findall(spellings)]
    return found


def check_flags(argv: Sequence[str], help_text: str) -> list[str]:
    """One sentence for each flag of a command line that `help_text` does not define, with the nearest that it does.

    A flag with a dot is looked up by the part before it. A help text that defines nothing yields no complaint.
    """
    known, removed = known_flags(help_text), removed_flags(help_text)
    complaints = []
    for flag in dict.fromkeys(flags_in(_behind_interpreter(argv))) if known else ():
        name = flag.split("=", 1)[0].split(".", 1)[0]
        if name in removed:
            complaints.append(f"{name} has been removed; {removed[name]}")
        elif name not in known and name.replace("_", "-") not in known:
            near = nearest_flag(name, known)
            complaints.append(f"unknown flag {name}" + (f"; did you mean {near}?" if near else ""))
    return complaints


def nearest_flag(name: str, known: Iterable[str]) -> str | None:
    """The flag most like `name`, None when none is like it."""
    # Compared without the beginning that nearly all flags share.
    bare = {re.sub(r"^-+(?:no-)?", "", flag): flag for flag in sorted(known, reverse=True)}
    near = difflib.get_close_matches(re.sub(r"^-+(?:no-)?", "", name), bare, n=1, cutoff=0.6)
    return bare[near[0]] if near else None


def _behind_interpreter(argv: Sequence[str]) -> Sequence[str]:
    """What follows `python -m MODULE` or `python FILE`: the options of the interpreter are not the engine's."""
    if not argv or not re.match(r"(?:.*/)?python[\d.]*$", argv[0]):
        return argv
    for place, word in enumerate(argv[1:], start=1):
        if word == "-m":
            return argv[place + 2 :]
        if not word.startswith("-") and argv[place - 1] not in ("-X", "-W"):
            return argv[place + 1 :]
    return ()


def flags_in(argv: Iterable[str]) -> list[str]:
    """The words of a command line that are flags, in order; negative numbers and JSON are values."""
    return [word for word in argv if re.match(r"--?[A-Za-z]", word)]
