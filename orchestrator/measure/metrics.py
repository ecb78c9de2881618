"""RequestTraces and EngineStats -> Measurement. Pure arithmetic; every formula of the project lives here.

docs/definitions.md prints the same formulas for people; intervals and comparisons are in quantity.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.engines.base import EngineStats
from orchestrator.measure.quantity import (
    Quantity,
    differs,
    finite,
    harmonic_mix,
    median,
    over,
    over_repeats,
    ratio,
    tails,
)

__all__ = ["Measurement", "Quantity", "RequestTrace", "Window", "differs", "harmonic_mix", "measure_windows", "ratio"]

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

    sent_s: request sent; scheduled_s: when the open-loop schedule wanted it sent (None in a closed loop).
    chunk_times_s: arrival of each chunk that carries text (content, reasoning or tool call), stamped before parsing.
    chunk_tokens: tokens in each of those chunks, from continuous usage; None when the server does not tell. Tokens
    after the last text (an end-of-text mark) are in completion_tokens and in no chunk.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One repeat as it happened: its requests, its wall time, the engine's counters around it, the client's health.

    concurrency: streams kept busy in a closed loop, None in an open loop. stalled: why the window ended early.
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
    """First chunk with text minus request sent."""
    return trace.chunk_times_s[0] - trace.sent_s if trace.chunk_times_s else None


def e2e_s(trace: RequestTrace) -> float | None:
    """Last chunk with text minus request sent; a late usage chunk does not count."""
    return trace.chunk_times_s[-1] - trace.sent_s if trace.chunk_times_s else None


def tpot_s(trace: RequestTrace) -> float | None:
    """(last text chunk - first text chunk) / (tokens up to the last text chunk - tokens in the first)."""
    if trace.completion_tokens is None or len(trace.chunk_times_s) < 2:
        return None
    decoded = sum(trace.chunk_tokens[1:]) if trace.chunk_tokens else trace.completion_tokens - 1
    return over(trace.chunk_times_s[-1] - trace.chunk_times_s[0], decoded)


def decode_tok_s(trace: RequestTrace) -> float | None:
    """1 / tpot_s."""
    return over(1.0, tpot_s(trace))


def prefill_tok_s(trace: RequestTrace) -> float | None:
    """prompt_tokens / ttft_s."""
    return over(trace.prompt_tokens, ttft_s(trace))


def tokens_per_chunk(trace: RequestTrace) -> float | None:
    """completion_tokens / chunks with text: above 1 when a chunk holds several tokens."""
    return over(trace.completion_tokens, len(trace.chunk_times_s))


def lateness_s(trace: RequestTrace) -> float | None:
    """Request sent minus the time the open-loop schedule wanted it sent."""
    return None if trace.scheduled_s is None else trace.sent_s - trace.scheduled_s


def first_content_s(trace: RequestTrace) -> float | None:
    """First chunk of content proper (after any reasoning) minus request sent."""
    return None if trace.first_content_s is None else trace.first_content_s - trace.sent_s


def _optional(value: int | None) -> float | None:
    return None if value is None else float(value)


PER_REQUEST: Mapping[str, Callable[[RequestTrace], float | None]] = {
    "ttft_s": ttft_s,
    "tpot_s": tpot_s,
    "decode_tok_s": decode_tok_s,
    "prefill_tok_s": prefill_tok_s,
    "e2e_s": e2e_s,
    "first_content_s": first_content_s,
    "tokens_per_chunk": tokens_per_chunk,
    "prompt_tokens": lambda trace: _optional(trace.prompt_tokens),
    "completion_tokens": lambda trace: _optional(trace.completion_tokens),
    "lateness_s": lateness_s,
}
WITH_TAILS = ("ttft_s", "e2e_s", "lateness_s")


def chunk_gaps_s(traces: Iterable[RequestTrace]) -> list[float]:
    """Gaps between text chunks, over all requests. A chunk may hold several tokens: no rate follows from them."""
    return [later - earlier for t in traces for earlier, later in itertools.pairwise(t.chunk_times_s)]


def measure_windows(windows: Sequence[Window], warm_up: Sequence[RequestTrace] = ()) -> Measurement:
    """Everything that is known about one workload from its repeats and, for the cold samples, its warm-up.

    Requests with an error enter the error rate and nothing else. The first request of each shape is its cold sample
    and enters no latency; with a warm-up that request is not in the windows at all.
    """
    everything = [trace for window in windows for trace in window.traces]
    cold = first_touches([*warm_up, *everything])
    first = {id(trace) for trace in cold.values()}
    steady = [[t for t in window.traces if t.error is None and id(t) not in first] for window in windows]
    pooled = [trace for traces in steady for trace in traces]
    quantities: dict[str, Quantity | None] = {}
    repeats: dict[str, tuple[float | None, ...]] = {}
    for name, formula in PER_REQUEST.items():
        repeats[name] = tuple(median(map(formula, traces)) for traces in steady)
        quantities[name] = over_repeats(repeats[name], list(map(formula, pooled)))
        if name in WITH_TAILS:
            quantities.update(tails(name, list(map(formula, pooled))))
    gaps_s = chunk_gaps_s(pooled)
    repeats["chunk_gap_s"] = tuple(median(chunk_gaps_s(traces)) for traces in steady)
    quantities["chunk_gap_s"] = over_repeats(repeats["chunk_gap_s"], gaps_s)
    quantities["chunk_gap_p99_s"] = tails("chunk_gap_s", gaps_s)["chunk_gap_p99_s"]
    lags_s = tails("client_lag_s", [lag for window in windows for lag in window.loop_lags_s])
    quantities.update({name: lags_s[name] for name in ("client_lag_p90_s", "client_lag_p99_s")})
    for name, window_formula in PER_WINDOW.items():
        repeats[name] = tuple(window_formula(window) for window in windows)
        quantities[name] = over_repeats(repeats[name])
    failed = [trace for trace in everything if trace.error is not None]
    return Measurement(
        metrics=quantities,
        repeats=repeats,
        acceptance_by_position=acceptance_by_position(windows),
        cold={shape: ttft_s(trace) for shape, trace in sorted(cold.items())},
        num_requests=len(everything),
        num_failed=len(failed),
        first_error=failed[0].error if failed else None,
    )


def first_touches(traces: Iterable[RequestTrace]) -> dict[str, RequestTrace]:
    """Shape -> the first request of that shape that was sent and answered."""
    cold: dict[str, RequestTrace] = {}
    for trace in sorted(traces, key=lambda t: t.sent_s):
        if trace.error is None:
            cold.setdefault(trace.shape, trace)
    return cold


def counter_delta(window: Window, name: str) -> float | None:
    """How far one engine counter went in the window; None when unknown or when the engine restarted in between."""
    before, after = getattr(window.before, name), getattr(window.after, name)
    if before is None or after is None or after < before or counters_reset(window):
        return None
    return float(after - before)


def counters_reset(window: Window) -> bool:
    """A counter went back, or the engine's start time changed: the window spans a restart."""
    started = (window.before.start_time_s, window.after.start_time_s)
    if None not in started and started[0] != started[1]:
        return True
    pairs = ((getattr(window.before, name), getattr(window.after, name)) for name in COUNTERS)
    return any(b is not None and a is not None and a < b for b, a in pairs)


def output_tok_s(window: Window) -> float | None:
    """Sum of completion_tokens of answered requests / wall time of the repeat, prefill included."""
    tokens = [t.completion_tokens for t in window.traces if t.error is None]
    if not tokens or None in tokens:
        return None
    return over(sum(filter(None, tokens)), window.wall_s)


def acceptance_rate(window: Window) -> float | None:
    """Accepted / drafted tokens."""
    return over(counter_delta(window, "accepted_tokens"), counter_delta(window, "draft_tokens"))


def acceptance_length(window: Window) -> float | None:
    """1 + accepted tokens / drafts; the engine's own gauge where it has no counters."""
    accepted = over(counter_delta(window, "accepted_tokens"), counter_delta(window, "drafts"))
    return window.after.acceptance_length_gauge if accepted is None else 1 + accepted


def acceptance_by_position(windows: Sequence[Window]) -> tuple[float, ...] | None:
    """Accepted at position i / drafts, over all windows; None when any window does not tell."""
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
    """Prompt tokens answered from the prefix cache: the engine's counter or the sum of usage, whichever saw more."""
    told = [float(t.cached_tokens) for t in window.traces if t.cached_tokens is not None]
    counted = counter_delta(window, "prefix_hit_tokens")
    seen = [sum(told)] if told else []
    return max([*seen, counted] if counted is not None else seen, default=None)


def error_rate(window: Window) -> float | None:
    """Failed requests / requests."""
    return over(sum(t.error is not None for t in window.traces), len(window.traces))


def full_concurrency_share(window: Window) -> float | None:
    """Share of the wall time in which every stream of a closed loop was busy; the rest is ramp and drain."""
    if window.concurrency is None or len(window.traces) < window.concurrency:
        return 0.0 if window.concurrency else None
    starts = sorted(t.sent_s for t in window.traces)
    ends = sorted(t.chunk_times_s[-1] if t.chunk_times_s else t.sent_s for t in window.traces)
    full_s = ends[len(ends) - window.concurrency] - starts[window.concurrency - 1]
    return over(max(0.0, full_s), window.wall_s)


PER_WINDOW: Mapping[str, Callable[[Window], float | None]] = {
    "output_tok_s": output_tok_s,
    "acceptance_rate": acceptance_rate,
    "acceptance_length": acceptance_length,
    "error_rate": error_rate,
    "prefix_hit_tokens": prefix_hit_tokens,
    "preemptions": lambda window: counter_delta(window, "preemptions"),
    "full_concurrency_share": full_concurrency_share,
    "client_cpu_share": lambda window: finite(window.client_cpu_share),
}
