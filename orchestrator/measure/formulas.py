"""One request and one repeat as recorded, and the formula of every metric over them. Pure arithmetic.

What a formula computes, and in which unit, stands in its row of metrics.METRICS; intervals are in quantity.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.engines.base import EngineStats
from orchestrator.measure.quantity import over

COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_hit_tokens",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One request as the client saw it. Times are seconds on the client's monotonic clock.

    index: position of the prompt in the workload; repeat: -1 and below in warm-up; shape: bucket of (prompt length,
    output length). sent_s: request sent; scheduled_s: when the open-loop schedule wanted it sent (None in a closed
    loop). chunk_times_s: arrival of each chunk that carries text (content, reasoning or tool call), stamped before
    parsing. chunk_tokens: tokens in each of those chunks, from continuous usage; None when the server does not report
    it. Tokens after the last text (an end-of-text mark) are in completion_tokens and in no chunk.
    first_content_s: first chunk of content proper (None when there was only reasoning, or nothing).
    prompt_tokens, completion_tokens, cached_tokens: the server's usage; None when it did not report it.
    asked_tokens: max_tokens of the request. error: the first error as one line; a request with an error never enters
    a latency. sent: what was sent besides the prompt (temperature, top_p, seed, max_tokens, ignore_eos, ...).
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
class Window:
    """One repeat as recorded: its requests, its wall time, the engine's counters around it, the client's own load.

    concurrency: streams kept busy in a closed loop, None in an open loop. before, after: counters at the start and the
    end. loop_lags_s: how late the client's event loop woke, one value per sample. client_cpu_share: CPU seconds of the
    client's thread per second. stalled: why the window ended early, None when it did not.
    """

    traces: tuple[RequestTrace, ...]
    wall_s: float
    concurrency: int | None = None
    before: EngineStats = field(default_factory=EngineStats)
    after: EngineStats = field(default_factory=EngineStats)
    loop_lags_s: tuple[float, ...] = ()
    client_cpu_share: float | None = None
    stalled: str | None = None


def ttft_s(trace: RequestTrace) -> float | None:
    return trace.chunk_times_s[0] - trace.sent_s if trace.chunk_times_s else None


def e2e_s(trace: RequestTrace) -> float | None:
    return trace.chunk_times_s[-1] - trace.sent_s if trace.chunk_times_s else None


def tpot_s(trace: RequestTrace) -> float | None:
    """Undefined (None) for an answer in one chunk; without continuous usage the first chunk counts as one token."""
    if trace.completion_tokens is None or len(trace.chunk_times_s) < 2:
        return None
    decoded = sum(trace.chunk_tokens[1:]) if trace.chunk_tokens else trace.completion_tokens - 1
    return over(trace.chunk_times_s[-1] - trace.chunk_times_s[0], decoded)


def decode_tok_s(trace: RequestTrace) -> float | None:
    return over(1.0, tpot_s(trace))


def prefill_tok_s(trace: RequestTrace) -> float | None:
    return over(trace.prompt_tokens, ttft_s(trace))


def tokens_per_chunk(trace: RequestTrace) -> float | None:
    return over(trace.completion_tokens, len(trace.chunk_times_s))


def lateness_s(trace: RequestTrace) -> float | None:
    return None if trace.scheduled_s is None else trace.sent_s - trace.scheduled_s


def first_content_s(trace: RequestTrace) -> float | None:
    return None if trace.first_content_s is None else trace.first_content_s - trace.sent_s


def prompt_tokens(trace: RequestTrace) -> float | None:
    return None if trace.prompt_tokens is None else float(trace.prompt_tokens)


def completion_tokens(trace: RequestTrace) -> float | None:
    return None if trace.completion_tokens is None else float(trace.completion_tokens)


def chunk_gaps_s(traces: Iterable[RequestTrace]) -> list[float]:
    """Gaps between text chunks, over all requests. A chunk may hold several tokens: no rate follows from them."""
    return [later - earlier for t in traces for earlier, later in itertools.pairwise(t.chunk_times_s)]


def counter_delta(window: Window, name: str) -> float | None:
    """By how much one engine counter grew in the window; None when it is unknown or a counter was reset."""
    before, after = getattr(window.before, name), getattr(window.after, name)
    if before is None or after is None or after < before or counters_reset(window):
        return None
    return float(after - before)


def counters_reset(window: Window) -> bool:
    """Whether a counter decreased or the engine's start time changed: the window spans a restart."""
    started = (window.before.start_time_s, window.after.start_time_s)
    if None not in started and started[0] != started[1]:
        return True
    pairs = ((getattr(window.before, name), getattr(window.after, name)) for name in COUNTERS)
    return any(b is not None and a is not None and a < b for b, a in pairs)


def output_tok_s(window: Window) -> float | None:
    """None as soon as one answered request has no usage: a sum of the rest would be too small."""
    tokens = [t.completion_tokens for t in window.traces if t.error is None]
    if not tokens or None in tokens:
        return None
    return over(sum(filter(None, tokens)), window.wall_s)


def acceptance_rate(window: Window) -> float | None:
    return over(counter_delta(window, "accepted_tokens"), counter_delta(window, "draft_tokens"))


def acceptance_length(window: Window) -> float | None:
    """From the counters; the engine's own gauge where it has no counters."""
    accepted = over(counter_delta(window, "accepted_tokens"), counter_delta(window, "drafts"))
    return window.after.acceptance_length_gauge if accepted is None else 1 + accepted


def acceptance_by_position(windows: Sequence[Window]) -> tuple[float, ...] | None:
    """Accepted at position i / drafts, over all windows; None when any window does not report it."""
    drafts, accepted = 0.0, np.zeros(0)
    for window in windows:
        before, after = window.before.accepted_by_position, window.after.accepted_by_position
        made = counter_delta(window, "drafts")
        if after is None or made is None:
            return None
        # Before the first draft there are no positions yet.
        earlier = np.array([*(before or ()), *[0.0] * (len(after) - len(before or ()))])
        step = np.array(after) - earlier
        accepted = step if not len(accepted) else accepted + step
        drafts += made
    return tuple(float(x) for x in accepted / drafts) if drafts > 0 else None


def prefix_hit_tokens(window: Window) -> float | None:
    """The larger of the engine's counter and the sum of usage; None when neither is reported."""
    reported = [float(t.cached_tokens) for t in window.traces if t.cached_tokens is not None]
    counted = counter_delta(window, "prefix_hit_tokens")
    seen = [sum(reported)] if reported else []
    return max([*seen, counted] if counted is not None else seen, default=None)


def preemptions(window: Window) -> float | None:
    return counter_delta(window, "preemptions")


def error_rate(window: Window) -> float | None:
    return over(sum(t.error is not None for t in window.traces), len(window.traces))


def full_concurrency_share(window: Window) -> float | None:
    """None in an open loop; 0 when there were fewer requests than streams."""
    if window.concurrency is None or len(window.traces) < window.concurrency:
        return 0.0 if window.concurrency else None
    starts = sorted(t.sent_s for t in window.traces)
    ends = sorted(t.chunk_times_s[-1] if t.chunk_times_s else t.sent_s for t in window.traces)
    full_s = ends[len(ends) - window.concurrency] - starts[window.concurrency - 1]
    return over(max(0.0, full_s), window.wall_s)
