"""Measurement and evidence -> Verdict: whether a number may be believed, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.config import Workload
from orchestrator.engines.base import Speculation
from orchestrator.engines.diagnosis.dialect import LIBRARIES_ONLY, LogDialect
from orchestrator.engines.diagnosis.explain import compile_lines, override_lines
from orchestrator.measure.looping import is_looping
from orchestrator.measure.metrics import (
    Measurement,
    RequestTrace,
    Window,
    chunk_gaps_s,
    counter_delta,
    counters_reset,
    ttft_s,
)
from orchestrator.measure.quantity import median, over


class Level(StrEnum):
    """Only a valid number can win; a suspect one wins only when nothing valid is there."""

    VALID = "valid"
    SUSPECT = "suspect"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A stable code (design.md section 7) and one sentence for a person."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How far a measurement can be believed."""

    level: Level
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the verdict needs besides the requests.

    log: what the engine's log gained while measuring; log_before: what it held until then.
    dialect: how that log is written. text_tokens[i]: tokens of prompt i's own text, so that the rest of its prompt is
    template and nonce.
    """

    log: str = ""
    log_before: str = ""
    dialect: LogDialect = LIBRARIES_ONLY
    foreign_gpu_users: tuple[str, ...] = ()
    text_tokens: tuple[int | None, ...] = ()
    speculation: Speculation | None = None


# Code -> level. A note tells how to read a number and takes nothing from it.
LEVELS: Mapping[str, Level] = {
    "prefix_cache_hits": Level.INVALID,
    "stream_errors": Level.INVALID,
    "short_output": Level.INVALID,
    "counter_reset": Level.INVALID,
    "gpu_shared": Level.INVALID,
    "client_late": Level.INVALID,
    "compile_in_window": Level.SUSPECT,
    "first_touch_outlier": Level.SUSPECT,
    "length_differs": Level.SUSPECT,
    "degenerate_output": Level.SUSPECT,
    "acceptance_collapse": Level.SUSPECT,
    "drafter_remembers": Level.SUSPECT,
    "few_repeats": Level.SUSPECT,
    "synthetic_acceptance": Level.SUSPECT,
    "random_prompts": Level.SUSPECT,
    "ramp_and_drain": Level.SUSPECT,
    "client_jitter": Level.VALID,
    "bunched_chunks": Level.VALID,
    "first_chunk_assumed": Level.VALID,
    "nothing_drafted": Level.VALID,
    "sampling_overridden": Level.VALID,
}
_ORDER = (Level.VALID, Level.SUSPECT, Level.INVALID)

MAX_LOOP_LAG_S = 0.005
MIN_LAG_SAMPLES = 20
MAX_CLIENT_CPU = 0.9
MIN_REPEATS = 3
MAX_LENGTH_DIFFERENCE = 0.05
# Prompt tokens per request that may come from the cache when nobody could count the template's: its fixed beginning.
UNKNOWN_TEMPLATE_TOKENS = 64
CACHE_SLACK_TOKENS = 4
MIN_FULL_CONCURRENCY = 0.6
LOW_SECOND_SHARE = 0.25
FIRST_TOUCH_FACTOR = 3.0
FIRST_TOUCH_EXCESS_S = 0.25
BUNCHED_SHARE = 0.1
LOW_FIRST_POSITION = 0.3
# A short answer may end before anything is drafted for it.
DRAFTED_FROM_TOKENS = 16
# Acceptance of the first repeat over that of the later ones: 0.69 to 1.02 in recorded runs of drafters without a
# memory, 0.14 to 0.21 with one. What is remembered is accepted nearly always: a low rate varies for other reasons.
# (acceptance of the later repeats from which on a factor holds, factor)
REMEMBERED = ((0.85, 0.8), (0.4, 0.5))
# Accepted / drafted below which a trained draft of that method is more likely broken than unlucky. From public
# reports: sound drafts 0.35-0.9, drafts with missing weights or a wrong block size 0.04-0.14.
LOWEST_ACCEPTANCE: Mapping[str, float] = {
    "mtp": 0.25,
    "dspark": 0.2,
    "dflash": 0.15,
    "eagle": 0.15,
    "eagle3": 0.15,
    "draft_model": 0.15,
}


def judge(workload: Workload, measurement: Measurement, windows: Sequence[Window], evidence: Evidence) -> Verdict:
    """The verdict on one workload of one trial; what only shows between trials is added by cross_check."""
    answered = [t for window in windows for t in window.traces if t.error is None]
    found = [
        _prefix_cache_hits(measurement, answered, evidence),
        _stream_errors(workload, measurement),
        _short_output(workload, answered),
        _counter_reset(windows),
        _gpu_shared(evidence),
        _client_late(measurement),
        _client_jitter(measurement),
        _compile_in_window(evidence),
        _first_touch_outlier(answered),
        _degenerate_output(workload, answered),
        _acceptance_collapse(measurement, evidence),
        _drafter_remembers(measurement),
        _nothing_drafted(windows, answered, evidence),
        _few_repeats(windows),
        _synthetic_acceptance(evidence),
        _random_prompts(workload, evidence),
        _ramp_and_drain(workload, measurement),
        _sampling_overridden(evidence),
        *_notes(answered),
    ]
    return verdict_of(reason for reason in found if reason is not None)


def verdict_of(reasons: Iterable[Reason]) -> Verdict:
    """The reasons under the worst of their levels."""
    found = tuple(reasons)
    return Verdict(level=max((LEVELS[r.code] for r in found), key=_ORDER.index, default=Level.VALID), reasons=found)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for several workloads: the worst level, each reason once."""
    every = list(verdicts)
    level = max((verdict.level for verdict in every), key=_ORDER.index, default=Level.VALID)
    return Verdict(level=level, reasons=tuple(dict.fromkeys(r for verdict in every for r in verdict.reasons)))


def _prefix_cache_hits(measurement: Measurement, answered: Sequence[RequestTrace], evidence: Evidence) -> Reason | None:
    hits = [x for x in measurement.repeats.get("prefix_hit_tokens", ()) if x is not None]
    if not hits:
        return None
    allowed = sum(_allowed_hits(trace, evidence) for trace in answered)
    if sum(hits) <= allowed:
        return None
    return Reason(
        code="prefix_cache_hits",
        detail=f"{sum(hits):.0f} prompt tokens came from the prefix cache, where the chat template explains at most "
        f"{allowed:.0f}: their prefill was not measured (is `nonce` off?)",
    )


def _allowed_hits(trace: RequestTrace, evidence: Evidence) -> float:
    """Tokens in front of the nonce that all prompts share: at most what is not the prompt's own text."""
    tokens = evidence.text_tokens[trace.index] if trace.index < len(evidence.text_tokens) else None
    if tokens is None or trace.prompt_tokens is None:
        return UNKNOWN_TEMPLATE_TOKENS
    return max(0, trace.prompt_tokens - tokens) + CACHE_SLACK_TOKENS


def _stream_errors(workload: Workload, measurement: Measurement) -> Reason | None:
    if not measurement.num_failed or measurement.num_failed <= workload.max_error_rate * measurement.num_requests:
        return None
    return Reason(
        code="stream_errors",
        detail=f"{measurement.num_failed} of {measurement.num_requests} requests failed, the first with: "
        f"{measurement.first_error}",
    )


def _short_output(workload: Workload, answered: Sequence[RequestTrace]) -> Reason | None:
    stops = () if workload.ignore_eos else ("stop", "tool_calls", "function_call")
    short = [
        t
        for t in answered
        if t.completion_tokens is not None and t.completion_tokens < t.asked_tokens and t.finish_reason not in stops
    ]
    if not short:
        return None
    worst_one = min(short, key=lambda t: t.completion_tokens or 0)
    return Reason(
        code="short_output",
        detail=f"{len(short)} of {len(answered)} answers are shorter than asked without a stop, for example "
        f"{worst_one.completion_tokens} of {worst_one.asked_tokens} tokens (finish_reason {worst_one.finish_reason})",
    )


def _counter_reset(windows: Sequence[Window]) -> Reason | None:
    if not any(counters_reset(window) for window in windows):
        return None
    return Reason(
        code="counter_reset",
        detail="the engine's counters went back while measuring: it restarted, and is cold or not the same",
    )


def _gpu_shared(evidence: Evidence) -> Reason | None:
    if not evidence.foreign_gpu_users:
        return None
    return Reason(code="gpu_shared", detail=f"others used the GPUs meanwhile: {', '.join(evidence.foreign_gpu_users)}")


def _client_late(measurement: Measurement) -> Reason | None:
    """Late as a rule (one wake-up in ten) or out of CPU: every stamp is in doubt, not only the rare late one."""
    lag = measurement.metrics.get("client_lag_p90_s")
    lag_s = lag.value if lag is not None and lag.n >= MIN_LAG_SAMPLES else 0.0
    cpu = max((x for x in measurement.repeats.get("client_cpu_share", ()) if x is not None), default=0.0)
    if lag_s <= MAX_LOOP_LAG_S and cpu <= MAX_CLIENT_CPU:
        return None
    found = (
        f"one wake-up in ten came {lag_s * 1e3:.1f} ms late or more, so the machine is too busy to measure on"
        if lag_s > MAX_LOOP_LAG_S
        else f"it used {cpu:.0%} of its core, so there are more streams than it can read"
    )
    return Reason(code="client_late", detail=f"the client could not keep up and every time is in doubt: {found}")


def _client_jitter(measurement: Measurement) -> Reason | None:
    lag = measurement.metrics.get("client_lag_p99_s")
    if lag is None or lag.value <= MAX_LOOP_LAG_S:
        return None
    return Reason(
        code="client_jitter",
        detail=f"one time in a hundred was taken {lag.value * 1e3:.1f} ms late or more, as on a busy machine: "
        "medians hold, p99 and maximum may not",
    )


def _compile_in_window(evidence: Evidence) -> Reason | None:
    lines = compile_lines(evidence.log, evidence.dialect)
    if not lines:
        return None
    return Reason(
        code="compile_in_window",
        detail=f"the engine compiled while it was measured ({len(lines)} log lines; more `warmup` may help): "
        f"{lines[0][:200]}",
    )


def _sampling_overridden(evidence: Evidence) -> Reason | None:
    lines = override_lines(f"{evidence.log_before}\n{evidence.log}", evidence.dialect)
    if not lines:
        return None
    return Reason(
        code="sampling_overridden",
        detail="temperature, top_p and seed are sent with every request; for what is not sent the engine has its own "
        f"defaults: {lines[0][:300]}",
    )


def _first_touch_outlier(answered: Sequence[RequestTrace]) -> Reason | None:
    """A prompt that was far slower to start in its first repeat than in the later ones: something was made for it."""
    for index in sorted({t.index for t in answered}):
        first, *later = [ttft_s(t) for t in answered if t.index == index]
        usual = median(later)
        if first is None or usual is None or len(later) < 2:
            continue
        if first > max(FIRST_TOUCH_FACTOR * usual, usual + FIRST_TOUCH_EXCESS_S):
            return Reason(
                code="first_touch_outlier",
                detail=f"prompt {index} took {first:.3f} s to its first token in the first repeat and "
                f"{usual:.3f} s later: the engine still prepared something for it (more `warmup` may help)",
            )
    return None


def _degenerate_output(workload: Workload, answered: Sequence[RequestTrace]) -> Reason | None:
    if workload.kind == "tokens":
        return None
    looping = [trace for trace in answered if is_looping(trace.text)]
    if len(looping) * 10 <= len(answered):
        return None
    tail = " ".join(looping[0].text.split())[-32:]
    return Reason(
        code="degenerate_output",
        detail=f"{len(looping)} of {len(answered)} answers repeat themselves, which is easy to draft and flatters "
        f"speculation; one ends with …{tail}",
    )


def _acceptance_collapse(measurement: Measurement, evidence: Evidence) -> Reason | None:
    speculation = evidence.speculation
    if speculation is None or speculation.is_synthetic or not speculation.proposals:
        return None
    positions = measurement.acceptance_by_position or ()
    if len(positions) > 1 and positions[0] >= LOW_FIRST_POSITION and positions[1] < LOW_SECOND_SHARE * positions[0]:
        return Reason(
            code="acceptance_collapse",
            detail=f"position 0 is accepted at {positions[0]:.0%}, position 1 at {positions[1]:.0%}: "
            "likely draft weights that were not loaded, or more proposals than the draft was trained for",
        )
    rate = measurement.metrics.get("acceptance_rate")
    lowest = LOWEST_ACCEPTANCE.get(speculation.family or "")
    if rate is None or lowest is None or rate.value >= lowest:
        return None
    return Reason(
        code="acceptance_collapse",
        detail=f"{rate.value:.1%} of the drafted tokens are accepted, {speculation.method} should reach {lowest:.0%}: "
        "likely draft weights that were not loaded, or proposals that do not fit the draft's block size",
    )


def _drafter_remembers(measurement: Measurement) -> Reason | None:
    """Every repeat asks for the same answers: a drafter that learns from answers knows them from the second on."""
    first, *rest = measurement.repeats.get("acceptance_rate") or (None,)
    later = median(rest)
    if first is None or later is None:
        return None
    if not any(later >= least and first < factor * later for least, factor in REMEMBERED):
        return None
    return Reason(
        code="drafter_remembers",
        detail=f"{first:.0%} of the drafted tokens are accepted in the first repeat and {later:.0%} later: the drafter "
        "knows the answers from earlier repeats; what nobody asked before gets the first",
    )


def _nothing_drafted(windows: Sequence[Window], answered: Sequence[RequestTrace], evidence: Evidence) -> Reason | None:
    """An n-gram may find nothing; a model that drafts nothing does not run."""
    speculation = evidence.speculation
    if (
        speculation is None
        or not speculation.proposals
        or {counter_delta(window, "drafts") for window in windows} != {0}
    ):
        return None
    if not any((trace.completion_tokens or 0) >= DRAFTED_FROM_TOKENS for trace in answered):
        return None
    trained = speculation.family in LOWEST_ACCEPTANCE
    return Reason(
        code="acceptance_collapse" if trained else "nothing_drafted",
        detail="not one token was drafted: this is the engine without speculation"
        + (", likely a draft model that was not loaded" if trained else ""),
    )


def _few_repeats(windows: Sequence[Window]) -> Reason | None:
    if len(windows) >= MIN_REPEATS:
        return None
    return Reason(
        code="few_repeats",
        detail=f"{len(windows)} of at least {MIN_REPEATS} repeats: a difference cannot be told from noise",
    )


def _synthetic_acceptance(evidence: Evidence) -> Reason | None:
    if evidence.speculation is None or not evidence.speculation.is_synthetic:
        return None
    return Reason(code="synthetic_acceptance", detail="acceptance is simulated: compare only with the like of it")


def _random_prompts(workload: Workload, evidence: Evidence) -> Reason | None:
    speculation = evidence.speculation
    if workload.kind != "tokens" or speculation is None or not speculation.proposals or speculation.is_synthetic:
        return None
    return Reason(
        code="random_prompts", detail="the prompts are random token ids: acceptance on real text will be another"
    )


def _ramp_and_drain(workload: Workload, measurement: Measurement) -> Reason | None:
    share = measurement.metrics.get("full_concurrency_share")
    if workload.concurrency == 1 or share is None or share.value >= MIN_FULL_CONCURRENCY:
        return None
    return Reason(
        code="ramp_and_drain",
        detail=f"all {workload.concurrency} streams were busy only {share.value:.0%} of the time, the rest is "
        "start and end: raise `num_prompts`",
    )


def _notes(answered: Sequence[RequestTrace]) -> Iterator[Reason]:
    gaps_s = chunk_gaps_s(answered)
    usual_s, mean_s = median(gaps_s), over(sum(gaps_s), len(gaps_s))
    if usual_s is not None and mean_s is not None and usual_s < BUNCHED_SHARE * mean_s:
        yield Reason(
            code="bunched_chunks",
            detail=f"chunks arrive in bunches (median gap {usual_s * 1e3:.2f} ms, mean {mean_s * 1e3:.2f} ms): "
            "their gaps say nothing, tpot_s holds",
        )
    if any(t.chunk_tokens is None and (t.completion_tokens or 0) > 1 for t in answered):
        yield Reason(
            code="first_chunk_assumed",
            detail="the server does not tell the tokens of each chunk: the first is taken to hold one token",
        )
