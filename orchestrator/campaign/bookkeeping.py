"""The MLflow record of a campaign. Results are on disk first, so a store that is down stops no measuring."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config import Experiment, TrialSpec, to_yaml
from orchestrator.errors import TrackingError
from orchestrator.tracking import Recorded, Tracker, last_campaign
from orchestrator.trial import TrialResult


class Bookkeeping:
    """The runs of one campaign. warnings: a sentence for each part of the record that the store did not take."""

    def __init__(self, experiment: Experiment) -> None:
        """Open the store, and end the runs that a dead driver left open. Raises TrackingError."""
        self.warnings: list[str] = []
        self._experiment = experiment
        self._tracker = Tracker(experiment)
        self._tracker.close_dead_runs()
        self._run_ids: dict[str, str] = {}
        self._unrecorded: list[TrialResult] = []
        self._closed = False

    def start(self, folder: Path) -> None:
        """Open the campaign's run, or again the run of the campaign with this folder. Raises TrackingError."""
        self._tracker.start_campaign(to_yaml(self._experiment), {"folder": str(folder)})

    def replay(self, workdirs: Sequence[Path]) -> None:
        """Record what the store missed of an earlier driver's results, and read the run ids of the rest.

        Raises TrackingError.
        """
        self._tracker.replay(workdirs)
        known = last_campaign(self._experiment)
        self._run_ids.update({each.result.spec.name: each.run_id for each in known if each.run_id})

    def start_trial(self, spec: TrialSpec) -> None:
        """Open the run of a trial. Where the store does not answer, `record` opens it."""
        with contextlib.suppress(TrackingError):
            self._tracker.start_trial(spec)

    def record(self, result: TrialResult) -> None:
        """Write a result to the store. Where the store does not answer, `finish` tries again."""
        try:
            self._run_ids[result.spec.name] = self._tracker.record(result)
        except TrackingError:
            self._unrecorded.append(result)

    def finish(self, status: str, results: Sequence[TrialResult], best: TrialResult | None) -> list[Recorded]:
        """Record what is missing, close the campaign, and return the results with their run ids.

        A store that is down costs a warning and the run ids: the results are on disk, and `--resume` records them.
        """
        try:
            unrecorded, self._unrecorded = self._unrecorded, []
            for result in unrecorded:
                self._run_ids[result.spec.name] = self._tracker.record(result)
        except TrackingError as error:
            self.warnings.append(f"{error}; nothing is lost, record it later with --resume")
        self.close(status, results, best)
        return [Recorded(result=result, run_id=self._run_ids.get(result.spec.name)) for result in results]

    def close(self, status: str, results: Sequence[TrialResult] = (), best: TrialResult | None = None) -> None:
        """End the campaign's run, and as KILLED every trial's run that is open. Only the first call does anything.

        status: FINISHED or KILLED. A store that is down costs a warning.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._tracker.end_campaign(status, results, best)
        except TrackingError as error:
            self.warnings.append(f"{error}; the runs are closed by the next campaign")
