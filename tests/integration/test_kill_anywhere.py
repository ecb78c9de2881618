"""SIGKILL of the driver at random moments, then resume: same table, nothing lost, nothing run twice, no engine alive.

A few moments here; experiments/kill-anywhere has thirty, with the same code.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.drivers import Driver, wait_until

pytestmark = pytest.mark.ray
NO_ENGINE_AFTER_S = 15.0
# The start of the program and of Ray, then what a trial says of itself; the longest wait after each, in seconds.
START = "start"
LONGEST_WAIT_S = {
    START: 8.0,
    "waiting for its place": 3.0,
    "starting the engine": 2.0,
    "warming up": 1.0,
    "measuring": 3.0,
    "stopping the engine": 1.0,
    "complete": 1.0,
}
# An engine slow enough that a moment falls into each phase.
SLOW = {"curve": {"0": 40, "2": 60, "4": 120}, "load_s": 0.5}
EXPECTED = [("no-spec", "complete"), ("k=2", "complete"), ("k=4", "complete")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One SIGKILL: how long after which words of which trial, what was last said, how many trials were finished."""

    trial: str | None
    moment: str
    after_s: float
    said: str
    num_finished: int
    no_engine_after_s: float


def killed_until_done(folder: Path, chance: random.Random, most: int) -> Iterator[Kill]:
    """Run one campaign, kill its driver up to `most` times, resume each time, and check what must hold at the end."""
    driver = Driver(folder, behaviour=SLOW)
    finished: dict[str, float] = {}
    starts_of_finished: Counter[str] = Counter()
    try:
        for _ in range(most):
            done = {_result(driver, launch)["spec"]["name"] for launch in finished}
            yield _killed(driver, chance, [name for name, _ in EXPECTED if name not in done])
            assert finished.items() <= driver.finished().items(), "a finished result was lost or written again"
            assert starts_of_finished == _starts(driver, set(starts_of_finished)), "a finished trial ran again"
            finished = driver.finished()
            starts_of_finished = _starts(
                driver, {_signature(_result(driver, launch)["launch"]["argv"]) for launch in finished}
            )
        code, document = driver.run("--resume")
        assert code == 0, driver.said
        assert [(trial["name"], trial["status"]) for trial in document["trials"]] == EXPECTED
        assert document["best"]["name"] == "k=4"
        assert finished.items() <= driver.finished().items()
        assert starts_of_finished == _starts(driver, set(starts_of_finished))
        account = document["account"]
        assert account["planned"] == account["earlier"] + account["started"] + account["skipped"] == len(EXPECTED)
        runs = Counter(driver.runs())
        assert not [run for run in runs if run[1] == "RUNNING"]
        assert [runs[name, "FINISHED"] for name, _ in EXPECTED] == [1, 1, 1]
        assert not driver.engines_alive()
    finally:
        driver.end()


def _killed(driver: Driver, chance: random.Random, missing: list[str]) -> Kill:
    """Start the driver and kill it a while after a moment of one of the missing trials; after its start if none is."""
    moment = chance.choice(list(LONGEST_WAIT_S)) if missing else START
    trial = chance.choice(missing) if moment != START else None
    after_s = round(chance.uniform(0.0, LONGEST_WAIT_S[moment]), 2)
    process = driver.start("--resume")
    if trial is not None:
        driver.wait_said(f" {trial}: {moment}")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    process.kill()
    assert process.wait() in {0, -signal.SIGKILL}, driver.said
    killed_s = time.monotonic()
    wait_until(lambda: not driver.engines_alive(), NO_ENGINE_AFTER_S, "no engine alive")
    gone_s = time.monotonic() - killed_s
    return Kill(
        trial=trial,
        moment=moment,
        after_s=after_s,
        said=(driver.said.splitlines() or [""])[-1].partition(";")[0].partition(" (")[0],
        num_finished=len(driver.finished()),
        no_engine_after_s=round(gone_s, 1),
    )


def _signature(argv: list[str]) -> str:
    """What tells the points apart in a command line."""
    return next((word for word in argv if "num_speculative_tokens" in word), "no-spec")


def _result(driver: Driver, launch_id: str) -> dict[str, Any]:
    path = next(driver.folder.glob(f"mlruns/campaigns/fake/*/trials/{launch_id}/result.json"))
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def _starts(driver: Driver, signatures: set[str]) -> Counter[str]:
    return Counter(s for start in driver.starts if (s := _signature(start["argv"])) in signatures)


@pytest.mark.timeout(280)
def test_killed_anywhere_and_resumed(tmp_path: Path) -> None:
    kills = list(killed_until_done(tmp_path, random.Random(5), most=2))
    assert len(kills) == 2
