"""A conclusion in words: what is proven, what is not, and how many launches would tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from orchestrator.measure.metrics import Quantity
from orchestrator.search.decision import Decision, find_drift
from orchestrator.search.objective import objective_metrics
from orchestrator.search.order import Conclusion

# More names make no sentence.
_MOST_NAMED = 6


def reason(known: Conclusion) -> str:
    """One sentence or two about the choice. `known` has a decision."""
    decision, number, objective = known.decision, known.number, known.experiment.objective
    assert decision is not None
    assert number is not None
    name = decision.arms[decision.choice].name
    metric = " + ".join(objective_metrics(objective, known.experiment.workloads))
    head = f"{name}: {metric} {_number(known, number)}"
    if len(decision.arms) == 1:
        return f"{name}: the only result that competes, {metric} {_number(known, number)}"
    if len(known.passes) < 2:
        return (
            f"{head} is the best estimate of one launch each. Two starts of one configuration differ, so that one "
            f"launch proves no difference to {_names(decision, _others(decision))}: --launches 3 or more would"
        )
    if decision.ahead:
        return f"{head}, ahead of {_against(decision)}"
    if decision.decided:
        equals = [i for i in _others(decision) if i not in decision.lost]
        return (
            f"{head}, as good as {_names(decision, equals)} (it loses less than {objective.tie:.0%}) and "
            "preferred to them"
        )
    return f"{_undecided(decision)} {head}"


def notes(known: Conclusion) -> Iterator[str]:
    """What a reader of the choice should know about the machine and about the number."""
    decision = known.decision
    assert decision is not None
    drift = find_drift(decision)
    if drift:
        yield drift
    for arm, (sd, _) in decision.fit.noisy.items():
        typical = decision.fit.launch_sd or 0.0
        yield (
            f"noisy_launches: the launches of {decision.arms[arm].name} differ by {_sd(decision, sd)}, those of the "
            f"others by {_sd(decision, typical)}; it is compared with its own noise"
        )
    if len(known.passes) > 1 and known.singled_out_after is None and len(decision.arms) > 1:
        yield (
            "luckiest_of_many: no launch came after the choice, so that its number is that of the best of "
            f"{len(decision.arms)} and may be too good; one more launch would tell"
        )
    far = sorted(decision.dropped)
    if far and len(known.passes) > 1 and not decision.decided:
        yield f"not started again, being too far behind to win: {_names(decision, far)}"


def _undecided(decision: Decision) -> str:
    names = [decision.arms[i].name for i in (decision.choice, *decision.rivals)]
    listed = names if len(names) <= _MOST_NAMED else [*names[: _MOST_NAMED - 1], f"{len(names) - _MOST_NAMED + 1} more"]
    bound = max((_bound(decision, rival) for rival in decision.rivals), default=math.inf)
    size = f"the difference is below {bound:.0%}; " if bound < 1 else ""
    needed = decision.launches_needed
    more = f"about {needed} more launches of each would decide" if needed else "more launches would tell"
    return f"{' or '.join(listed)}: undecided, {size}{more}. The best estimate is marked:"


def _bound(decision: Decision, rival: int) -> float:
    """The largest difference between the choice and a rival that the interval allows, as a share."""
    ratio = decision.ratio(rival, decision.choice)
    if ratio is None or ratio.low is None or ratio.high is None:
        return math.inf
    # Rounded up to a whole percent, so that the sentence holds.
    return math.ceil(100 * max(ratio.high - 1, 1 - ratio.low)) / 100


def _against(decision: Decision) -> str:
    others = _others(decision)
    second = others[0]
    ratio = decision.ratio(decision.choice, second)
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"{decision.arms[second].name}{f' by {ratio}' if ratio else ''}{more}"


def _others(decision: Decision) -> list[int]:
    """Every arm but the choice, best estimate first."""
    return [i for i in decision.order if i != decision.choice]


def _names(decision: Decision, arms: Sequence[int]) -> str:
    names = [decision.arms[i].name for i in arms]
    if len(names) > _MOST_NAMED:
        names = [*names[: _MOST_NAMED - 1], f"{len(names) - _MOST_NAMED + 1} more"]
    return ", ".join(names)


def _number(known: Conclusion, number: Quantity) -> str:
    text = f"{number.value:.4g}"
    if number.low is not None and number.high is not None:
        text += f" ({number.low:.4g}-{number.high:.4g})"
    if known.singled_out_after is not None:
        launches = "launch" if number.n == 1 else "launches"
        text += f" in {number.n} {launches} after it was singled out"
    return text


def _sd(decision: Decision, sd: float) -> str:
    return f"{sd:.1%}" if decision.is_log else f"{sd:.3g}"
