"""The key of a point: a hash of its content, its engine's version and its model's files. Equal keys, equal trials."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from orchestrator.config import EngineSpec, TrialSpec
from orchestrator.environments import install


def add_keys(specs: Iterable[TrialSpec]) -> list[TrialSpec]:
    """The points with their keys. Each engine is asked for its version once, each model's files are read once.

    Both cost a walk through files or a process, and a plan may have a thousand points on one engine and one model.
    """
    versions: dict[tuple[object, ...], str | None] = {}
    fingerprints: dict[tuple[str, str], str | None] = {}
    keyed = []
    for spec in specs:
        program, model = _program(spec.engine), (spec.engine.root, spec.engine.model)
        if program not in versions:
            versions[program] = install.engine_version(spec.engine)
        if model not in fingerprints:
            fingerprints[model] = fingerprint_model(*model)
        keyed.append(spec.with_key(versions[program], fingerprints[model]))
    return keyed


def fingerprint_model(root: str, model: str) -> str | None:
    """A hash of the names, sizes and times of the model's files. None for a model that is not on this machine."""
    path = Path(root) / model
    if not path.exists():
        return None
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    text = json.dumps([[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _program(engine: EngineSpec) -> tuple[object, ...]:
    """What decides which program an engine is, and with it the version."""
    command = tuple(engine.command or ())
    return engine.kind, command, engine.environment, engine.root, engine.env.get("PYTHONPATH")
