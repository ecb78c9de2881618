"""RequestTraces and EngineStats -> Measurement. Pure arithmetic; every formula of the project lives here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One request as the client saw it. Times are seconds on the client's monotonic clock.

    sent_s: request sent; scheduled_s: when the open-loop schedule wanted it sent (None in a closed loop).
    chunk_times_s: arrival of each chunk that carries text (content, reasoning or tool call), stamped before parsing.
    chunk_tokens: tokens in each of those chunks, from continuous usage; None when the server does not tell.
    first_content_s: first chunk of content proper (None when there was only reasoning, or nothing).
    prompt_tokens, completion_tokens, cached_tokens: the server's usage; None when it did not tell.
    error: the first error as one line; a request with an error never enters a latency.
    sent: what was sent besides the prompt (temperature, top_p, seed, max_tokens, ignore_eos, ...).
    """

    index: int
    repeat: int
    shape: str
    sent_s: float
    scheduled_s: float | None = None
    chunk_times_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] | None = None
    first_content_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    asked_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    text: str = ""
    sent: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number with its 95% interval (None when there is nothing to resample) and its number of samples."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload on one trial. `metrics` has the names of design.md section 6; absent is None.

    repeats[name][r] is the value of metric `name` in repeat r. cold: first touch of each shape, never in `metrics`.
    """

    metrics: Mapping[str, Quantity | None]
    repeats: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    acceptance_by_position: tuple[float, ...] | None = None
    cold: Mapping[str, float | None] = field(default_factory=dict)
    num_requests: int = 0
    num_failed: int = 0
    first_error: str | None = None
