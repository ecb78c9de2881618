"""Prompts -> RequestTraces over the streaming OpenAI API. The only room that talks to an engine's /v1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server: base_url without /v1, the model id it lists, and its key."""

    base_url: str
    model: str
    api_key: str | None = None
