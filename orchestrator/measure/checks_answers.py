"""Checks of what came back: errors, length and text of the answers, the prefix cache, the pace of the chunks.

Each function is `find` of the row of its name in checks.CHECKS: the detail sentence of what it found, or None.
"""

from __future__ import annotations

from orchestrator.measure.evidence import Case
from orchestrator.measure.formulas import RequestTrace, chunk_gaps_s, ttft_s
from orchestrator.measure.looping import is_looping
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.quantity import differs, median, over

# Prompt tokens per request that may come from the cache when nobody could count the template's: its fixed beginning.
UNKNOWN_TEMPLATE_TOKENS = 64
CACHE_SLACK_TOKENS = 4
FIRST_TOUCH_FACTOR = 3.0
FIRST_TOUCH_EXCESS_S = 0.25
MAX_LOOPING_SHARE = 0.1
MAX_LENGTH_DIFFERENCE = 0.05
BUNCHED_SHARE = 0.1


def prefix_cache_hits(case: Case) -> str | None:
    hits = [x for x in case.measurement.repeats.get("prefix_hit_tokens", ()) if x is not None]
    if not hits:
        return None
    allowed = sum(_allowed_hits(trace, case) for trace in case.answered)
    if sum(hits) <= allowed:
        return None
    return (
        f"{sum(hits):.0f} prompt tokens came from the prefix cache, where the chat template explains at most "
        f"{allowed:.0f}: their prefill was not measured (is `nonce` off?)"
    )


def _allowed_hits(trace: RequestTrace, case: Case) -> float:
    """Tokens in front of the nonce that all prompts share: at most what is not the prompt's own text."""
    counted = case.evidence.text_tokens
    tokens = counted[trace.index] if trace.index < len(counted) else None
    if tokens is None or trace.prompt_tokens is None:
        return UNKNOWN_TEMPLATE_TOKENS
    return max(0, trace.prompt_tokens - tokens) + CACHE_SLACK_TOKENS


def stream_errors(case: Case) -> str | None:
    failed, requests = case.measurement.num_failed, case.measurement.num_requests
    if not failed or failed <= case.workload.max_error_rate * requests:
        return None
    return f"{failed} of {requests} requests failed, the first with: {case.measurement.first_error}"


def short_output(case: Case) -> str | None:
    stops = () if case.workload.ignore_eos else ("stop", "tool_calls", "function_call")
    short = [
        t
        for t in case.answered
        if t.completion_tokens is not None and t.completion_tokens < t.asked_tokens and t.finish_reason not in stops
    ]
    if not short:
        return None
    shortest = min(short, key=lambda t: t.completion_tokens or 0)
    return (
        f"{len(short)} of {len(case.answered)} answers are shorter than asked without a stop, for example "
        f"{shortest.completion_tokens} of {shortest.asked_tokens} tokens (finish_reason {shortest.finish_reason})"
    )


def first_touch_outlier(case: Case) -> str | None:
    """Compare the TTFT of each prompt's first repeat with that of its later ones."""
    for index in sorted({t.index for t in case.answered}):
        first, *later = [ttft_s(t) for t in case.answered if t.index == index]
        usual = median(later)
        if first is None or usual is None or len(later) < 2:
            continue
        if first > max(FIRST_TOUCH_FACTOR * usual, usual + FIRST_TOUCH_EXCESS_S):
            return (
                f"prompt {index} took {first:.3f} s to its first token in the first repeat and "
                f"{usual:.3f} s later: the engine still prepared something for it (more `warmup` may help)"
            )
    return None


def degenerate_output(case: Case) -> str | None:
    # What a model makes of random token ids is no text to begin with.
    if case.workload.kind == "tokens":
        return None
    looping = [trace for trace in case.answered if is_looping(trace.text)]
    if len(looping) <= MAX_LOOPING_SHARE * len(case.answered):
        return None
    ending = " ".join(looping[0].text.split())[-32:]
    return (
        f"{len(looping)} of {len(case.answered)} answers repeat themselves, which is easy to draft and flatters "
        f"speculation; one ends with …{ending}"
    )


def length_differs(case: Case) -> str | None:
    """Compare the length of the answers with the median peer's, beyond tolerance and noise."""
    mine, peers = case.measurement, [peer for peer in case.peers if _length(peer) is not None]
    length = _length(mine)
    others = [peer for peer in peers if peer is not mine]
    if length is None or not others:
        return None
    # Of two trials neither is the usual one: each is held against the other.
    ordered = sorted(peers if len(peers) > 2 else others, key=lambda peer: _length(peer) or 0.0)
    usual = ordered[(len(ordered) - 1) // 2]
    usual_length = _length(usual) or 0.0
    repeats = [m.repeats.get("completion_tokens", ()) for m in (mine, usual)]
    is_noise = min(map(len, repeats)) > 1 and not differs(*repeats)
    if usual is mine or abs(length - usual_length) <= MAX_LENGTH_DIFFERENCE * usual_length or is_noise:
        return None
    return f"{length:.0f} tokens per answer where {usual_length:.0f} are usual in this campaign"


def _length(measurement: Measurement) -> float | None:
    quantity = measurement.metrics.get("completion_tokens")
    return quantity.value if quantity else None


def bunched_chunks(case: Case) -> str | None:
    gaps_s = chunk_gaps_s(case.answered)
    usual_s, mean_s = median(gaps_s), over(sum(gaps_s), len(gaps_s))
    if usual_s is None or mean_s is None or usual_s >= BUNCHED_SHARE * mean_s:
        return None
    return (
        f"chunks arrive in bunches (median gap {usual_s * 1e3:.2f} ms, mean {mean_s * 1e3:.2f} ms): "
        "their gaps say nothing, tpot_s holds"
    )


def first_chunk_assumed(case: Case) -> str | None:
    if not any(t.chunk_tokens is None and (t.completion_tokens or 0) > 1 for t in case.answered):
        return None
    return "the server does not report the tokens of each chunk: the first is taken to hold one token"
