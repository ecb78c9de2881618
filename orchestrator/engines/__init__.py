"""The engines: one module each, behind the Protocol of base.py. This is their registry."""

from __future__ import annotations

from orchestrator.engines.base import Engine, EngineStats, LaunchPlan
from orchestrator.engines.diagnosis.explain import compile_lines, override_lines
from orchestrator.engines.llamacpp import LlamaCpp
from orchestrator.engines.sglang import SGLang
from orchestrator.engines.vllm import VLLM

ENGINES: dict[str, Engine] = {engine.kind: engine for engine in (VLLM(), SGLang(), LlamaCpp())}

__all__ = ["ENGINES", "Engine", "EngineStats", "LaunchPlan", "compile_lines", "override_lines"]
