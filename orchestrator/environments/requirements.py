"""The requirements file of an engine environment: what pip installs, and what pip has no words for.

`conf/engine/environments/NAME.txt` is an ordinary requirements file. Comments that begin with `#:` at its head hold
the rest:

    #: engine DISTRIBUTION        whose version is the engine's
    #: import MODULE ...          what must import for the environment to count as finished
    #: python 3.11 3.12           the interpreters that will do; without it, the one that runs this program
    #: no-deps REQUIREMENT ...    installed afterwards, without what they depend on
    #: remove PACKAGE ...         uninstalled at the end
    #: program PATH ...           a program below site-packages that is to be found in the environment's bin
    #: pack-without PACKAGE ...   not needed where a packed environment goes (tools/airgap/pack.py)
    #: pack-without-file GLOB ... likewise, below site-packages
    #: pack-from-host PACKAGE ... taken from the host there even when its version is another one
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigError

REQUIREMENTS_FOLDER = Path("conf/engine/environments")
_DIRECTIVES = {
    "engine": "engine",
    "import": "imports",
    "python": "pythons",
    "no-deps": "no_deps",
    "remove": "remove",
    "program": "programs",
    "pack-without": "pack_without",
    "pack-without-file": "pack_without_files",
    "pack-from-host": "pack_from_host",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """One requirements file, read: its directives and the hash of everything that decides what gets installed."""

    name: str
    path: Path
    engine: str
    imports: tuple[str, ...] = ()
    pythons: tuple[str, ...] = ()
    no_deps: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    pack_without: tuple[str, ...] = ()
    pack_without_files: tuple[str, ...] = ()
    pack_from_host: tuple[str, ...] = ()
    digest: str = ""


def read_requirements(name: str, root: Path) -> Requirements:
    """Read `conf/engine/environments/NAME.txt` below `root`, or the file itself when `name` is the path of one.

    Raises ConfigError: unknown name, unknown directive.
    """
    path = Path(name) if name.endswith(".txt") else root / REQUIREMENTS_FOLDER / f"{name}.txt"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.txt"))
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"engine environment {name!r}: no {path}{hint} Known: {', '.join(known) or 'none'}")
    text = path.read_text(encoding="utf-8")
    directives: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#:"):
            continue
        key, *values = line[2:].split() or [""]
        if key not in _DIRECTIVES or not values:
            raise ConfigError(f"{path}:{number}: {line!r}: allowed are {', '.join(_DIRECTIVES)}, each with values")
        directives[key] = directives.get(key, ()) + tuple(values)
    if "engine" not in directives:
        raise ConfigError(f"{path}: the line '#: engine DISTRIBUTION' is missing")
    return Requirements(
        name=path.stem,
        path=path,
        engine=directives.pop("engine")[0],
        **{_DIRECTIVES[key]: values for key, values in directives.items()},
        digest=_digest(text),
    )


def _digest(text: str) -> str:
    """The same for files that install the same: comments and what only packing reads do not count."""
    lines = [line.strip() for line in text.splitlines()]
    decisive = [s for s in lines if s and (s[0] != "#" or (s.startswith("#:") and not s.startswith("#: pack-")))]
    return hashlib.sha256("\n".join(decisive).encode()).hexdigest()
