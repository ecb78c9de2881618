"""The key of a point: a hash of everything that decides its number. Equal keys, equal trials."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import EngineSpec, TrialSpec, Workload
from orchestrator.engines.base import resolve_command
from orchestrator.environments import install
from orchestrator.errors import ConfigError
from orchestrator.measure.workload import load_texts

# A larger file is known by its size and time: reading it would take seconds of every plan.
MOST_READ_BYTES = 16 << 20
# Arguments that name what an engine writes: it changes with every start and decides nothing.
_WRITTEN = re.compile(r"(^|[-_.])(log[-_](file|dir|path)|output|cache|save)")

Parts = Mapping[str, str | None]


@dataclass(slots=True, kw_only=True)
class Keys:
    """Makes keys. Every engine, file and prompt is looked at once: a plan may have a thousand points.

    machine: what the trials run on, None where that is not known in advance (a cluster). parts: key -> what it was made
    of besides the configuration, each a version, a name or a digest; None where unknown.
    """

    machine: str | None = None
    parts: dict[str, Parts] = field(default_factory=dict)
    _known: dict[tuple[object, ...], str | None] = field(default_factory=dict)

    def add(self, specs: Iterable[TrialSpec]) -> list[TrialSpec]:
        """The points with their keys."""
        keyed = []
        for spec in specs:
            parts = self._parts(spec)
            spec = spec.with_key(parts)
            self.parts[spec.key] = parts
            keyed.append(spec)
        return keyed

    def _parts(self, spec: TrialSpec) -> Parts:
        engine = spec.engine
        path = engine.env.get("PYTHONPATH")
        program = (engine.kind, tuple(engine.command or ()), engine.environment, engine.root, path)
        root = Path(engine.root)
        return {
            "machine": self.machine,
            "engine": self._once(("engine", *program), lambda: install.engine_version(engine)),
            "packages": self._once(("packages", *program), lambda: install.digest_packages(engine)),
            "model": self._once(("model", engine.root, engine.model), lambda: fingerprint_model(root, engine.model)),
            "files": _digest([self._file(path) for path in _named_files(engine)]),
            "prompts": _digest([self._prompts(workload) for workload in spec.workloads.values()]),
        }

    def _file(self, path: Path) -> list[str | None]:
        return [path.name, self._once(("file", path), lambda: fingerprint_file(path))]

    def _prompts(self, workload: Workload) -> str | None:
        return self._once(("prompts", workload.kind, workload.prompts), lambda: _digest_prompts(workload))

    def _once(self, what: tuple[object, ...], look: Any) -> str | None:
        if what not in self._known:
            self._known[what] = look()
        return self._known[what]


def explain_change(before: Parts, now: Parts) -> str:
    """What is no longer the same, for a person: `machine: A -> B, prompts`. Empty when all known parts are."""
    found = []
    for name, value in now.items():
        old = before.get(name)
        if old is not None and value is not None and old != value:
            found.append(f"{name}: {old} -> {value}" if name in ("machine", "engine") else name)
    return ", ".join(found)


def fingerprint_model(root: str | Path, model: str) -> str | None:
    """A hash of the names, sizes and times of the model's files. None for a model that is not on this machine."""
    path = Path(root) / model
    if not path.exists():
        return None
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return _digest([[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files])


def fingerprint_file(path: Path) -> str | None:
    """A hash of the content, of a large file of its size and time. None for a file that cannot be read."""
    try:
        state = path.stat()
        if state.st_size > MOST_READ_BYTES:
            return _digest([state.st_size, state.st_mtime_ns])
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def _named_files(engine: EngineSpec) -> list[Path]:
    """The files that the command line names: the program, its script, a chat template, a file of settings."""
    words = list(resolve_command(engine, ["python"])[0])
    words += [text for name, text in _texts(engine.args) if not _WRITTEN.search(name)]
    found: dict[Path, None] = {}
    for word in words:
        # Longer texts are JSON or prompts, and the system refuses to look for them.
        for place in (engine.root, "."):
            path = Path(place) / word
            if word and len(word) < 1000 and "\0" not in word and path.is_file():
                found.setdefault(path.resolve())
                break
    return list(found)


def _texts(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every text in nested arguments, list items included."""
    for name, value in tree.items():
        members = value if isinstance(value, list) else [value]
        for member in members:
            if isinstance(member, Mapping):
                yield from _texts(member, f"{prefix}{name}.")
            elif isinstance(member, str):
                yield f"{prefix}{name}", member


def _digest_prompts(workload: Workload) -> str | None:
    # What is wrong with prompts is said where they are checked.
    with contextlib.suppress(ConfigError, OSError):
        return _digest(load_texts(workload))
    return None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode("utf-8", "surrogatepass")).hexdigest()[:12]
