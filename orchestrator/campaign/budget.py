"""The time budget of a campaign: whether another trial fits into it, and which trials it will not reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence

from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult


class TimeBudget:
    """search.time_budget_s, counted from when this object is made. None: no limit."""

    def __init__(self, budget_s: float | None) -> None:
        self._budget_s = budget_s
        self._opened_s = time.monotonic()
        self._has_forecast = False

    def refusal(self, results: Iterable[TrialResult]) -> str | None:
        """Why no further trial may start: the longest so far would not fit into what is left. None when it may."""
        if self._budget_s is None:
            return None
        spent_s = time.monotonic() - self._opened_s
        needed_s = max(_durations_s(results), default=0.0)
        if spent_s + needed_s <= self._budget_s:
            return None
        return (
            f"time budget: {spent_s:.0f} of {self._budget_s:.0f} s are spent and a trial takes up to {needed_s:.0f} s"
        )

    def forecast(self, results: Iterable[TrialResult], queued: Sequence[str]) -> str | None:
        """Once, after the first complete trial: a sentence with the queued trials that the budget will not reach.

        None when it reaches all of them, when nothing is complete yet, and ever after the first forecast.
        """
        durations_s = _durations_s(result for result in results if result.status is TrialStatus.COMPLETE)
        if self._has_forecast or self._budget_s is None or not durations_s:
            return None
        self._has_forecast = True
        each_s = statistics.median(durations_s)
        left_s = self._budget_s - (time.monotonic() - self._opened_s)
        num_reached = max(0, int(left_s // each_s)) if each_s else len(queued)
        beyond = queued[num_reached:]
        if not beyond:
            return None
        return (
            f"a trial takes about {each_s:.0f} s, so search.time_budget_s={self._budget_s:g} will not reach "
            f"{len(beyond)} of {len(queued)} trials still to start: {', '.join(beyond)}"
        )


def _durations_s(results: Iterable[TrialResult]) -> list[float]:
    """Seconds of every trial that was timed."""
    return [sum(result.phases_s.values()) for result in results if result.phases_s]
