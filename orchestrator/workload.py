"""Workload -> prompts: seeded, with a nonce in front, the same for every trial of a campaign."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to be sent. Exactly one of text (chat or completion) and token_ids is given.

    shape names the bucket of (prompt length, output length) that must be warmed before it is measured.
    """

    index: int
    shape: str
    max_tokens: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
