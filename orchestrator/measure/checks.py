"""The one table of checks, and a measured workload -> Verdict.

A new check is one row of CHECKS and its function in the file of its theme. Verdicts, reports and the table of
docs/definitions.md (a test holds it equal) have what they know about a check from its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.config import Workload
from orchestrator.measure import checks_answers as answers
from orchestrator.measure import checks_conditions as conditions
from orchestrator.measure import checks_speculation as speculation
from orchestrator.measure.evidence import Case, Evidence
from orchestrator.measure.formulas import Window
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.verdict import Level, Reason, Verdict, worst_level


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the table.

    code: stable name in results and documents. level: how far a number can be believed when this is found; VALID
    makes it a note, which takes nothing from the number. find: one line for a person with what was found, else None.
    doc: when it is found and what that means, for docs/definitions.md. among_peers: looks at the campaign's other
    trials, so it is asked by `judge_among_peers` and not by `judge`.
    """

    code: str
    level: Level
    find: Callable[[Case], str | None]
    doc: str
    among_peers: bool = False


# In the order in which a verdict lists its reasons.
CHECKS: tuple[Check, ...] = (
    Check(
        code="prefix_cache_hits",
        level=Level.INVALID,
        find=answers.prefix_cache_hits,
        doc="more prompt tokens from the cache than template and nonce can explain (reported prompt tokens - the "
        f"text's own + {answers.CACHE_SLACK_TOKENS} per request, or {answers.UNKNOWN_TEMPLATE_TOKENS} where nobody "
        "could count): their prefill was not measured",
    ),
    Check(
        code="stream_errors",
        level=Level.INVALID,
        find=answers.stream_errors,
        doc="failed requests above max_error_rate: the rest is not the work that was asked for",
    ),
    Check(
        code="short_output",
        level=Level.INVALID,
        find=answers.short_output,
        doc="fewer tokens than asked without stop or tool_calls; with ignore_eos, fewer tokens at all: the answers "
        "were cut",
    ),
    Check(
        code="counter_reset",
        level=Level.INVALID,
        find=conditions.counter_reset,
        doc="a counter went back, or the server's start time changed: the engine restarted in the window",
    ),
    Check(
        code="gpu_shared",
        level=Level.INVALID,
        find=conditions.gpu_shared,
        doc="another process on the GPUs while measuring",
    ),
    Check(
        code="client_late",
        level=Level.INVALID,
        find=conditions.client_late,
        doc=f"the client's event loop is late by more than {conditions.MAX_LOOP_LAG_S * 1e3:g} ms as a rule (p90), or "
        f"its thread uses more than {conditions.MAX_CLIENT_CPU:.0%} of a core: every time is in doubt",
    ),
    Check(
        code="client_jitter",
        level=Level.VALID,
        find=conditions.client_jitter,
        doc=f"one stamp in a hundred is late by more than {conditions.MAX_LOOP_LAG_S * 1e3:g} ms: medians hold, tails "
        "may not",
    ),
    Check(
        code="compile_in_window",
        level=Level.SUSPECT,
        find=conditions.compile_in_window,
        doc="compile, JIT, autotune or graph-capture lines in the engine's log while measuring: some requests waited "
        "for that; more warmup may help",
    ),
    Check(
        code="first_touch_outlier",
        level=Level.SUSPECT,
        find=answers.first_touch_outlier,
        doc=f"a prompt's first repeat took {answers.FIRST_TOUCH_FACTOR:g} times (and {answers.FIRST_TOUCH_EXCESS_S:g} "
        "s) longer to its first token than its later ones: the engine still prepared something for it",
    ),
    Check(
        code="degenerate_output",
        level=Level.SUSPECT,
        find=answers.degenerate_output,
        doc=f"more than {answers.MAX_LOOPING_SHARE:.0%} of the answers repeat themselves (a fourth of their 1 KiB "
        "pieces, or the whole, compresses like a loop): easy to draft, which flatters speculation",
    ),
    Check(
        code="acceptance_collapse",
        level=Level.SUSPECT,
        find=speculation.acceptance_collapse,
        doc=f"position 1 accepted at less than {speculation.LOW_SECOND_SHARE:.0%} of position 0, or the rate below "
        "what the method reaches when its draft is loaded (mtp 25%, dspark 20%, others 15%, n-gram none), or nothing "
        "drafted by a trained draft: likely draft weights that were not loaded, or too many proposals",
    ),
    Check(
        code="drafter_remembers",
        level=Level.SUSPECT,
        find=speculation.drafter_remembers,
        doc="the first repeat accepts less than half of what the later ones do, where those accept 40% or more, or "
        "less than four fifths, where those accept 85% or more: the drafter learnt the answers",
    ),
    Check(
        code="nothing_drafted",
        level=Level.VALID,
        find=speculation.nothing_drafted,
        doc=f"not one token was drafted in an answer of {speculation.DRAFTED_FROM_TOKENS} tokens or more: this is the "
        "engine without speculation; with a trained draft (mtp, dspark, eagle, a draft model) it is "
        "acceptance_collapse",
    ),
    Check(
        code="few_repeats",
        level=Level.SUSPECT,
        find=conditions.few_repeats,
        doc=f"fewer than {conditions.MIN_REPEATS} repeats: a difference cannot be told from noise",
    ),
    Check(
        code="synthetic_acceptance",
        level=Level.SUSPECT,
        find=speculation.synthetic_acceptance,
        doc="acceptance set by hand; comparable only with its like",
    ),
    Check(
        code="random_prompts",
        level=Level.SUSPECT,
        find=speculation.random_prompts,
        doc="speculation measured on random token ids: acceptance on real text will be another",
    ),
    Check(
        code="ramp_and_drain",
        level=Level.SUSPECT,
        find=conditions.ramp_and_drain,
        doc=f"all streams were busy in less than {conditions.MIN_FULL_CONCURRENCY:.0%} of the time: more prompts per "
        "stream are needed",
    ),
    Check(
        code="sampling_overridden",
        level=Level.VALID,
        find=conditions.sampling_overridden,
        doc="the engine's log reports that a model's generation config replaces its sampling defaults; what is sent "
        "with every request (temperature, top_p, seed) stays",
    ),
    Check(
        code="bunched_chunks",
        level=Level.VALID,
        find=answers.bunched_chunks,
        doc=f"the median gap between chunks is under {answers.BUNCHED_SHARE:.0%} of the mean: buffering; tpot_s holds, "
        "gaps do not",
    ),
    Check(
        code="first_chunk_assumed",
        level=Level.VALID,
        find=answers.first_chunk_assumed,
        doc="no running usage: the first chunk is taken to hold one token",
    ),
    Check(
        code="length_differs",
        level=Level.SUSPECT,
        find=answers.length_differs,
        doc=f"the answers are longer or shorter than the median trial's of the campaign by more than "
        f"{answers.MAX_LENGTH_DIFFERENCE:.0%} and by more than noise: not the same work",
        among_peers=True,
    ),
)
LEVELS: Mapping[str, Level] = {check.code: check.level for check in CHECKS}


def judge(workload: Workload, measurement: Measurement, windows: Sequence[Window], evidence: Evidence) -> Verdict:
    """The verdict on one workload of one trial by itself; `judge_among_peers` adds what only a campaign shows."""
    case = Case(
        workload=workload,
        measurement=measurement,
        windows=tuple(windows),
        answered=tuple(t for window in windows for t in window.traces if t.error is None),
        evidence=evidence,
    )
    checks = [check for check in CHECKS if not check.among_peers]
    return _extend(Verdict(level=Level.VALID), checks, case)


def judge_among_peers(verdict: Verdict, case: Case) -> Verdict:
    """The verdict with what shows beside case.peers; what it has already is not added again."""
    known = {reason.code for reason in verdict.reasons}
    checks = [check for check in CHECKS if check.among_peers and check.code not in known]
    return _extend(verdict, checks, case)


def _extend(verdict: Verdict, checks: Sequence[Check], case: Case) -> Verdict:
    found = [(check, detail) for check in checks if (detail := check.find(case)) is not None]
    reasons = [Reason(code=check.code, detail=detail) for check, detail in found]
    level = worst_level([verdict.level, *(check.level for check, _ in found)])
    return Verdict(level=level, reasons=(*verdict.reasons, *reasons))
