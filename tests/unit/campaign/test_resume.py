"""What outlives a driver: results, the lock, the open runs; and what `--resume` makes of them."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import search, trial
from orchestrator.campaign.launches import Launch
from orchestrator.config import EngineSpec
from orchestrator.errors import ConfigError, MachineError
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from tests.support.builders import SPECULATION, WORKLOAD, K
from tests.support.campaigns import answer, by_k, drive, fault, k_sweep, open_checked, runs
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def test_resume_starts_only_what_is_missing(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept) as running:
        drive(running, by_k, most=2)
        folder, first = running.folder, running.ordered_results()
    with open_checked(swept, resume=True) as running:
        assert running.folder == folder
        assert drive(running, by_k) == ["k=6"]
        recorded, selection = running.finish()
    assert [r.result.measurements[WORKLOAD].repeats for r in recorded[:2]] == [
        r.measurements[WORKLOAD].repeats for r in first
    ]
    assert selection.best is not None
    assert selection.best.spec.name == "k=4"
    assert all(r.run_id for r in recorded)
    assert sorted(runs(swept)) == sorted((f"k={k}", "FINISHED", None) for k in (2, 4, 6))
    assert running.account().earlier == 2


def test_resume_of_a_finished_campaign_starts_nothing(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path, launches=3)
    with open_checked(swept) as running:
        assert len(drive(running, by_k)) == 6
        before = running.finish()[1]
    with open_checked(swept, resume=True) as running:
        assert not running.wants_more()
        _, after = running.finish()
    assert (after.best.spec.name, after.reason) == (before.best.spec.name, before.reason)
    assert len(runs(swept)) == 6


def test_resume_repeats_a_torn_result_and_a_fault_of_the_machine(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept) as running:
        drive(running, by_k, most=2)
        drive(running, lambda launch: fault(launch, TrialStatus.INFRASTRUCTURE, "gpu_busy"), most=1)
        torn = running.workdir(running.launches[0]) / "result.json"
        torn.write_text(torn.read_text()[:-200])
    with open_checked(swept, resume=True) as running:
        assert drive(running, by_k) == ["k=2", "k=6"]


def test_resume_repeats_what_changed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("one")
    local = EngineSpec(kind="vllm", model="model", root=str(tmp_path), args=SPECULATION)
    with open_checked(k_sweep(tmp_path, engine=local)) as running:
        drive(running, by_k)
    changed = replace(local, args={**SPECULATION, "max-num-seqs": 2})
    for engine, starts in ((local, 0), (changed, 3), (local, 0)):
        with open_checked(k_sweep(tmp_path, engine=engine), resume=True) as running:
            assert len(drive(running, by_k)) == starts
    (model / "weights").write_text("another")
    with open_checked(k_sweep(tmp_path, engine=local), resume=True) as running:
        assert len(drive(running, by_k)) == 3


def test_without_resume_everything_runs_again(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    for _ in range(2):
        with open_checked(swept) as running:
            assert len(drive(running, by_k)) == 3
    assert len({path.parent for path in Path(swept.tracking.folder).glob("campaigns/swept/*/trials")}) == 2


def test_second_campaign_is_refused_with_the_owners_pid(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept), pytest.raises(ConfigError, match=str(os.getpid())), open_checked(swept):
        pass
    with open_checked(swept, resume=True) as running:
        assert running.wants_more()


DYING_DRIVER = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from orchestrator.campaign.campaign import open_campaign
from tests.support.campaigns import answer, by_k, drive, k_sweep
with open_campaign(k_sweep(Path({folder!r})), resume=False) as running:
    drive(running, by_k, most=1)
    running.mark_started("x", running.next_launch())
    os.kill(os.getpid(), {number})
"""


def test_killed_driver_leaves_a_stale_lock_and_runs_that_the_next_one_closes(tmp_path: Path) -> None:
    script = DYING_DRIVER.format(root=str(ROOT), folder=str(tmp_path), number=int(signal.SIGKILL))
    died = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr
    swept = k_sweep(tmp_path)
    assert [status for _, status, _ in runs(swept)] == ["FINISHED", "RUNNING"]
    with open_checked(swept, resume=True) as running:
        assert [status for _, status, _ in runs(swept)] == ["FINISHED", "KILLED"]
        assert drive(running, by_k) == ["k=4", "k=6"]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlruns").write_text("a file where a folder is needed")
    with (
        pytest.raises(MachineError, match=r"mlruns/campaigns/swept: results cannot be written here"),
        open_checked(k_sweep(tmp_path)),
    ):
        pass


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond this: the kernel's answer to a write is an error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_stops_the_campaign_and_keeps_what_was_written(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept) as running:
        drive(running, by_k, most=1)
        launch = running.next_launch()
        assert launch is not None
        running.mark_started("1", launch)
        with files_end_at(512):
            running.take_result(launch, by_k(launch))
        assert running.stopped is not None
        assert "cannot be written" in running.stopped
        assert running.next_launch() is None
        recorded, _ = running.finish()
        assert [r.result.spec.name for r in recorded] == ["k=2", "k=4"]
    with open_checked(swept, resume=True) as running:
        assert drive(running, by_k) == ["k=4", "k=6"]


def test_results_on_disk_are_what_search_selects_from(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept) as running:
        drive(running, by_k)
        read = [trial.from_json((running.workdir(n) / "result.json").read_text()) for n in running.launches]
    assert search.select(swept, read).best in read


def test_resume_on_another_machine_runs_again_and_says_what_is_left_out(tmp_path: Path) -> None:
    swept, notes = k_sweep(tmp_path), list[str]()
    with open_checked(swept, machine="2 x A, driver 550") as running:
        drive(running, by_k)
    note = lambda event: notes.append(event.note) if event.note else None  # noqa: E731
    with open_checked(swept, resume=True, machine="2 x A, driver 560", on_event=note) as running:
        assert len(drive(running, by_k)) == 3
        _, selection = running.finish()
    (said,) = notes
    assert said.startswith("3 results of this folder are left out (machine: 2 x A, driver 550 -> 2 x A, driver 560)")
    assert said in selection.notes


def test_a_pass_that_was_interrupted_is_resumed_in_its_order(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path, grid={K: [2, 4, 6]}, launches=3)

    def respond(launch: Launch) -> TrialResult:
        return answer(launch, 100 + random.Random(launch.spec.name).uniform(-3, 3))

    with open_checked(swept) as running:
        whole = drive(running, respond)
    assert len(whole) > 6, "nothing is decided, so that there are passes to interrupt"
    for most in (1, 4, 5):
        with open_checked(swept) as running:
            started = drive(running, respond, most=most)
        with open_checked(swept, resume=True) as running:
            assert started + drive(running, respond) == whole
            assert [n.pass_number for n in running.launches] == [1, 1, 1, 2, 2, 2, *[3] * (len(whole) - 6)]
