"""SIGKILL of the driver at random moments, then resume: same table, nothing lost, nothing run twice, no engine alive.

A few moments here; experiments/kill-anywhere has thirty, with the same code.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from drivers import Driver, wait_until

pytestmark = pytest.mark.ray
NO_ENGINE_AFTER_S = 15.0
# A quarter of the moments lie in the start of the program and of Ray, the others in the trials.
SHARE_AT_START, START_S, TRIALS_S = 0.25, 8.0, 16.0
EXPECTED = [("no-spec", "complete"), ("k=2", "complete"), ("k=4", "complete")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One SIGKILL: how long after `since` (start, first trial), what was last said, how many trials were finished."""

    since: str
    after_s: float
    said: str
    num_finished: int
    no_engine_after_s: float


def killed_until_done(folder: Path, chance: random.Random, most: int) -> Iterator[Kill]:
    """Run one campaign, kill its driver up to `most` times, resume each time, and check what must hold at the end."""
    driver = Driver(folder, behaviour={"curve": {"0": 200, "2": 400, "4": 900}})
    finished: dict[str, float] = {}
    starts_of_finished: Counter[str] = Counter()
    try:
        for _ in range(most):
            at_start = chance.random() < SHARE_AT_START
            kill = _killed(driver, at_start, chance.uniform(0.0, START_S if at_start else TRIALS_S))
            if kill is None:
                break
            yield kill
            assert finished.items() <= driver.finished().items(), "a finished result was lost or written again"
            assert not starts_of_finished - _starts(driver, set(starts_of_finished))
            assert starts_of_finished == _starts(driver, set(starts_of_finished)), "a finished trial ran again"
            finished = driver.finished()
            starts_of_finished = _starts(driver, {_signature_of(driver, launch) for launch in finished})
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


def _killed(driver: Driver, at_start: bool, after_s: float) -> Kill | None:
    """None when the campaign was done before its time had come."""
    process = driver.start("--resume")
    if not at_start:
        wait_until(lambda: "waiting for its place" in driver.said or process.poll() is not None, 90, "a trial")
    began_s = time.monotonic()
    while time.monotonic() - began_s < after_s:
        if process.poll() is not None:
            assert process.returncode == 0, driver.said
            return None
        time.sleep(0.01)
    process.kill()
    process.wait()
    killed_s = time.monotonic()
    wait_until(lambda: not driver.engines_alive(), NO_ENGINE_AFTER_S, "no engine alive")
    gone_s = time.monotonic() - killed_s
    return Kill(
        since="start" if at_start else "first trial",
        after_s=round(after_s, 2),
        said=(driver.said.splitlines() or [""])[-1].partition(";")[0].partition(" (")[0],
        num_finished=len(driver.finished()),
        no_engine_after_s=round(gone_s, 1),
    )


def _signature(argv: list[str]) -> str:
    """What tells the points apart in a command line."""
    return next((word for word in argv if "num_speculative_tokens" in word), "no-spec")


def _signature_of(driver: Driver, launch_id: str) -> str:
    path = next(driver.folder.glob(f"mlruns/campaigns/fake/*/trials/{launch_id}/result.json"))
    document: dict[str, Any] = json.loads(path.read_text())
    return _signature(document["launch"]["argv"])


def _starts(driver: Driver, signatures: set[str]) -> Counter[str]:
    return Counter(s for start in driver.starts if (s := _signature(start["argv"])) in signatures)


@pytest.mark.timeout(280)
def test_killed_anywhere_and_resumed(tmp_path: Path) -> None:
    kills = list(killed_until_done(tmp_path, random.Random(2), most=4))
    assert kills
