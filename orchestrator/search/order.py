"""Which launch when: a campaign is a sequence of passes, each of which starts every point still in question once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.config import Experiment, TrialSpec
from orchestrator.measure.metrics import Quantity
from orchestrator.search.arms import Field, group_launches, line_up
from orchestrator.search.comparison import with_campaign_metrics
from orchestrator.search.decision import Decision, decide
from orchestrator.search.objective import with_known_tails
from orchestrator.search.space import configuration_id
from orchestrator.trial import TrialResult

# Fewer arms in the second pass would leave too few degrees of freedom to know the noise of a launch.
FEWEST_AGAIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What the passes so far say. decision: None when nothing competes.

    experiment: with an objective that the samples can tell. results: with the numbers of the campaign.

    singled_out_after: the pass at whose end the choice was fixed; the launches after it are no reason for it, so that
    the number of the choice comes from them. None where there is no such launch. A proven choice was fixed when it was
    first named (and in every pass since), any other by the last pass but one: the launches in between would be those
    that kept it ahead of its like, and so too good.
    """

    experiment: Experiment
    results: Sequence[TrialResult]
    field: Field
    passes: tuple[int, ...]
    decision: Decision | None = None
    singled_out_after: int | None = None
    number: Quantity | None = None

    @property
    def fresh_passes(self) -> tuple[int, ...]:
        """The passes whose launches had no part in the choice; all of them where there is no such launch."""
        after = self.singled_out_after
        return tuple(p for p in self.passes if after is None or p > after)


def pass_order(experiment: Experiment, specs: Sequence[TrialSpec], pass_number: int) -> list[TrialSpec]:
    """The points in the random order of one pass: the same for the same seed, another in every pass."""
    shuffled = list(specs)
    random.Random(f"{experiment.search.seed}/{pass_number}").shuffle(shuffled)
    return shuffled


def conclude(experiment: Experiment, results: Sequence[TrialResult]) -> Conclusion:
    """Judge everything that was measured so far. `results` are in the order of the campaign, launches of all passes."""
    experiment, note = with_known_tails(experiment, results)
    results = with_campaign_metrics(results, experiment)
    field = line_up(experiment, results)
    field = replace(field, notes=(*field.notes, *([note] if note else [])))
    passes = tuple(sorted({launch.pass_number for arm in field.arms for launch in arm.launches}))
    if not field.arms:
        return Conclusion(experiment=experiment, results=results, field=field, passes=passes)
    decisions = [_decide_after(experiment, results, number) for number in passes[:-1]]
    last = decide(experiment.objective, field.arms, num_looks(experiment))
    last = _keep_choice(last, decisions[-1] if decisions else None)
    name, after = last.arms[last.choice].name, None
    for number, earlier in reversed(list(zip(passes, decisions, strict=False))):
        if earlier is None or earlier.arms[earlier.choice].name != name:
            break
        after = number
        if not last.decided:
            break
    known = Conclusion(
        experiment=experiment, results=results, field=field, passes=passes, decision=last, singled_out_after=after
    )
    return replace(known, number=last.number(known.fresh_passes))


def next_pass(experiment: Experiment, results: Sequence[TrialResult], pass_number: int) -> list[TrialSpec]:
    """The points to start in pass `pass_number` (2 or more) in their order; none when the campaign is at its end."""
    if pass_number > experiment.search.launches:
        return []
    known = conclude(experiment, results)
    decision = known.decision
    if decision is None or len(decision.arms) == 1:
        return []
    if decision.decided and known.singled_out_after is not None:
        return []
    wanted = [decision.choice] if decision.decided else [decision.choice, *decision.rivals]
    # A single arm in a pass would tell nothing about the noise.
    fewest = FEWEST_AGAIN if pass_number == 2 else 1 if decision.decided else 2
    others = [i for i in decision.order if i not in wanted and i not in decision.lost]
    wanted += others[: max(0, fewest - len(wanted))]
    specs = [decision.arms[i].spec for i in wanted]
    baseline = next((s for s in _first_specs(results) if s.name == experiment.search.baseline), None)
    is_measured = any(r.spec == baseline and r.measurements for r in results)
    if baseline is not None and is_measured and baseline not in specs:
        specs.append(baseline)
    return pass_order(experiment, specs, pass_number)


def count_starts(experiment: Experiment, num_points: int) -> tuple[int, int]:
    """(fewest, most) engine starts of a campaign of that many points, retries not counted."""
    if num_points < 2 or experiment.search.launches == 1:
        return num_points, num_points
    return num_points + min(FEWEST_AGAIN, num_points), num_points * experiment.search.launches


def num_looks(experiment: Experiment) -> int:
    """How often a decision is looked for: after every pass but the first, which has no second launch to judge by."""
    return max(1, experiment.search.launches - 1)


def _first_specs(results: Sequence[TrialResult]) -> list[TrialSpec]:
    return [launches[0].spec for launches in group_launches(results)]


def _decide_after(experiment: Experiment, results: Sequence[TrialResult], pass_number: int) -> Decision | None:
    known = [result for result in results if result.pass_number <= pass_number]
    arms = line_up(experiment, known).arms
    return decide(experiment.objective, arms, num_looks(experiment)) if arms else None


def _keep_choice(last: Decision, before: Decision | None) -> Decision:
    """An undecided last pass does not change the choice: its launches then tell the number of what was chosen before.

    The launches of a pass cannot both choose an arm and tell its number, which would be that of the luckiest.
    """
    if before is None or last.decided:
        return last
    identity = configuration_id(before.arms[before.choice].spec)
    same = next((i for i, arm in enumerate(last.arms) if configuration_id(arm.spec) == identity), None)
    if same is None or same == last.choice or same not in last.rivals:
        return last
    rivals = tuple(i for i in (last.choice, *last.rivals) if i != same)
    return replace(last, choice=same, rivals=rivals)
