"""The live view of a campaign on a terminal; plain lines where stderr is a file or a pipe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from orchestrator.campaign.launches import Event
from orchestrator.outcome import TrialStatus

PHASES = {
    "placing": "waiting for its place",
    "starting": "starting the engine",
    "warming": "warming up",
    "measuring": "measuring",
    "stopping": "stopping the engine",
}


@contextlib.contextmanager
def live_view(console: Console) -> Iterator[Callable[[Event], None]]:
    """Yield the function that shows a campaign's events on the console."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=console) as progress:
        yield _Bar(progress)


class _Clock:
    """Elapsed time of each trial, and an estimate of the time left from the trials that completed."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self._took_s: list[float] = []
        self._at_once = 1
        self.finished = 0

    def measure(self, event: Event) -> float:
        """Seconds since the first event of the trial."""
        began = self._began.setdefault(event.number, time.monotonic())
        elapsed_s = time.monotonic() - began
        self._at_once = max(self._at_once, len(self._began))
        if event.phase is None:
            if event.status == TrialStatus.COMPLETE:
                self._took_s.append(elapsed_s)
            self._began.pop(event.number)
            self.finished += 1
        return elapsed_s

    def estimate_left(self, total: int) -> str:
        if not self._took_s:
            return ""
        seconds = (total - self.finished) * sum(self._took_s) / len(self._took_s) / self._at_once
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = _Clock()

    def __call__(self, event: Event) -> None:
        if event.note:
            self._console.print(event.note, markup=False, highlight=False, soft_wrap=True)
            return
        elapsed_s = self._clock.measure(event)
        what = PHASES.get(event.phase, event.phase) if event.phase else _describe_end(event)
        left = (
            self._clock.estimate_left(event.total) if event.phase is None and self._clock.finished < event.total else ""
        )
        self._console.print(
            f"trial {event.number} of {event.total} {event.name}: {what} ({elapsed_s:.0f} s{left and f'; {left}'})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._clock = _Clock()
        self._task = progress.add_task("starting", total=None, left="")

    def __call__(self, event: Event) -> None:
        if event.note:
            self._progress.console.print(event.note, markup=False, highlight=False)
            return
        elapsed_s = self._clock.measure(event)
        if event.phase is None:
            text = f"trial {event.number} of {event.total} {event.name}: {_describe_end(event)} ({elapsed_s:.0f} s)"
            self._progress.console.print(text, markup=False, highlight=False)
        phase = PHASES.get(event.phase, event.phase) if event.phase else _describe_end(event)
        self._progress.update(
            self._task,
            total=event.total,
            completed=self._clock.finished,
            description=f"{event.name}: {phase}",
            left=self._clock.estimate_left(event.total),
        )


def _describe_end(event: Event) -> str:
    return f"{event.status}{f', {event.reason}' if event.reason else ''}"
