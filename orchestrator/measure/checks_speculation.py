"""Checks of speculation: whether the draft works, and whether its acceptance is that of real text seen once.

Each function is `find` of the row of its name in checks.CHECKS: the detail sentence of what it found, or None.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.measure.evidence import Case
from orchestrator.measure.formulas import counter_delta
from orchestrator.measure.quantity import median

LOW_FIRST_POSITION = 0.3
LOW_SECOND_SHARE = 0.25
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


def acceptance_collapse(case: Case) -> str | None:
    """A draft model that drafts nothing, that only gets its first position right, or whose rate is below its method's.

    An n-gram drafter may find nothing; a draft model that drafts nothing does not run.
    """
    speculation = case.evidence.speculation
    if speculation is None or not speculation.proposals:
        return None
    lowest = LOWEST_ACCEPTANCE.get(speculation.family or "")
    if lowest is not None and _drafted_nothing(case):
        return (
            "not one token was drafted: this is the engine without speculation, "
            "likely a draft model that was not loaded"
        )
    if speculation.is_synthetic:
        return None
    positions = case.measurement.acceptance_by_position or ()
    if len(positions) > 1 and positions[0] >= LOW_FIRST_POSITION and positions[1] < LOW_SECOND_SHARE * positions[0]:
        return (
            f"position 0 is accepted at {positions[0]:.0%}, position 1 at {positions[1]:.0%}: "
            "likely draft weights that were not loaded, or more proposals than the draft was trained for"
        )
    rate = case.measurement.metrics.get("acceptance_rate")
    if rate is None or lowest is None or rate.value >= lowest:
        return None
    return (
        f"{rate.value:.1%} of the drafted tokens are accepted, {speculation.method} should reach {lowest:.0%}: "
        "likely draft weights that were not loaded, or proposals that do not fit the draft's block size"
    )


def nothing_drafted(case: Case) -> str | None:
    """The same of a drafter without weights; with a draft model it is acceptance_collapse."""
    speculation = case.evidence.speculation
    if speculation is None or not speculation.proposals or speculation.family in LOWEST_ACCEPTANCE:
        return None
    return "not one token was drafted: this is the engine without speculation" if _drafted_nothing(case) else None


def _drafted_nothing(case: Case) -> bool:
    """Whether the counters report no draft although an answer was long enough for one; False when they are unknown."""
    if {counter_delta(window, "drafts") for window in case.windows} != {0}:
        return False
    return any((trace.completion_tokens or 0) >= DRAFTED_FROM_TOKENS for trace in case.answered)


def drafter_remembers(case: Case) -> str | None:
    """Every repeat asks for the same answers: a drafter that learns from answers knows them from the second on."""
    first, *rest = case.measurement.repeats.get("acceptance_rate") or (None,)
    later = median(rest)
    if first is None or later is None:
        return None
    if not any(later >= least and first < factor * later for least, factor in REMEMBERED):
        return None
    return (
        f"{first:.0%} of the drafted tokens are accepted in the first repeat and {later:.0%} later: the drafter "
        "knows the answers from earlier repeats; what nobody asked before gets the first"
    )


def synthetic_acceptance(case: Case) -> str | None:
    if case.evidence.speculation is None or not case.evidence.speculation.is_synthetic:
        return None
    return "acceptance is simulated: compare only with the like of it"


def random_prompts(case: Case) -> str | None:
    speculation = case.evidence.speculation
    if case.workload.kind != "tokens" or speculation is None or not speculation.proposals or speculation.is_synthetic:
        return None
    return "the prompts are random token ids: acceptance on real text will be another"
