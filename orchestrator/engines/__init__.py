"""The engines: one module each, behind the Protocol of base.py. This is their registry."""

from __future__ import annotations

import difflib

from orchestrator.engines.base import Engine, EngineStats, LaunchPlan
from orchestrator.engines.llamacpp import LlamaCpp
from orchestrator.engines.sglang import SGLang
from orchestrator.engines.vllm import VLLM
from orchestrator.errors import ConfigError

ENGINES: dict[str, Engine] = {engine.kind: engine for engine in (VLLM(), SGLang(), LlamaCpp())}

__all__ = ["ENGINES", "Engine", "EngineStats", "LaunchPlan", "find_engine"]


def find_engine(kind: str) -> Engine:
    """The engine of `engine.kind`. Raises ConfigError, naming the nearest kind, where there is none."""
    engine = ENGINES.get(kind)
    if engine is None:
        near = difflib.get_close_matches(kind, ENGINES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"engine.kind: found {kind!r}, allowed are {', '.join(ENGINES)}{hint}")
    return engine
