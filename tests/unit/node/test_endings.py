"""Whoever is killed, by whatever signal: no process of an engine is left, and none of others is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import EngineFailure
from orchestrator.measure import client
from orchestrator.node import leftovers
from tests.support.launches import engine_spec, gone, marked, run_stand_in, written_pids
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def test_a_killed_keeper_is_noticed_and_its_engine_ended(tmp_path: Path) -> None:
    children = tmp_path / "children"
    with run_stand_in(engine_spec(tmp_path), tmp_path / "other") as other:
        with run_stand_in(engine_spec(tmp_path, children=str(children)), tmp_path) as running:
            pids = [running.pid, *written_pids(children)]
            running.keeper.send_signal(signal.SIGKILL)
            assert running.wait(10)
            with pytest.raises(EngineFailure) as caught:
                running.check_alive()
        assert caught.value.diagnosis.status == "infrastructure"
        assert gone(pids, 5.0)
        # Only that launch: another engine of the same owner goes on.
        other.check_alive()
        assert client.one_completion(other.target)


def test_an_engine_that_dies_while_it_serves(tmp_path: Path) -> None:
    with run_stand_in(engine_spec(tmp_path, die_after_s=0.5, die_signal="SIGSEGV"), tmp_path) as running:
        assert running.wait(10) or running.exit_code is not None
        with pytest.raises(EngineFailure) as caught:
            running.check_alive()
    assert caught.value.diagnosis.cause == "crashed"
    assert running.exit_code == -signal.SIGSEGV


DRIVER = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from tests.support.launches import Stop, engine_spec
from orchestrator.node.launch import run_engine
from orchestrator.engines import ENGINES
root = Path({root!r})
with run_engine(ENGINES["vllm"], engine_spec(root, children=str(root / "children"), ignore_sigterm=True, {more}),
                    workdir=root / "trial", ports=(23000, 23999),
                    on_start=lambda s: (root / "keeper").write_text(str(s.keeper.pid))) as running:
    (root / "ready").write_text(f"{{running.keeper.pid}} {{running.pid}}")
    time.sleep(100)
"""


@contextlib.contextmanager
def driver(root: Path, awaited: str = "ready", more: str = "") -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A process that holds an engine which ignores TERM, with the pids of all below it."""
    text = DRIVER.format(paths=[str(ROOT)], root=str(root), more=more)
    owner = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    try:
        pids = written_pids(root / awaited, 1 if awaited == "keeper" else 2, 60.0)
        yield owner, [*pids, *written_pids(root / "children")]
    finally:
        owner.kill()
        owner.wait(10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_owner_ends_by_any_signal(tmp_path: Path, number: signal.Signals) -> None:
    with driver(tmp_path) as (owner, pids):
        owner.send_signal(number)
        owner.wait(20)
        assert gone(pids, 15.0)
        assert marked(owner.pid) == []


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_does_not_wait_for_a_long_grace(tmp_path: Path, interrupts: int) -> None:
    with driver(tmp_path, more="stop=Stop(grace_s=300.0)") as (owner, pids):
        for _ in range(interrupts):
            owner.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert gone(pids, 14.0)
        owner.wait(20)


def test_the_owner_is_killed_while_the_engine_loads(tmp_path: Path) -> None:
    with driver(tmp_path, "keeper", "silent_load_s=60.0") as (owner, pids):
        assert not (tmp_path / "ready").exists()
        owner.kill()
        assert gone(pids, 15.0)


def test_owner_and_keeper_are_killed_together(tmp_path: Path) -> None:
    with driver(tmp_path) as (owner, pids):
        keeper, engine, *children = pids
        for pid in (keeper, owner.pid):
            os.kill(pid, signal.SIGKILL)
        owner.wait(10)
        assert gone([keeper, engine], 5.0)
        assert [process.pid for process in leftovers.find_abandoned() if process.pid in children] == sorted(children)
        # The next start on this node, whoever makes it, sweeps first.
        with run_stand_in(engine_spec(tmp_path), tmp_path / "next"):
            assert gone(children, 0.0)


def test_a_process_of_the_same_name_or_another_container_is_left_alone(tmp_path: Path) -> None:
    with driver(tmp_path) as (owner, pids):
        foreign = {leftovers.MARKER: "9:1:1:another-namespace", "FAKE": "engine"}
        bystander = subprocess.Popen(["vllm serve", "60"], executable="/bin/sleep", env=foreign)
        try:
            owner.kill()
            assert gone(pids, 15.0)
            leftovers.sweep()
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait(10)


def test_shared_memory_of_others_stays(tmp_path: Path) -> None:
    mine, in_use = Path(f"/dev/shm/engine-{os.getpid()}"), Path(f"/dev/shm/busy_{os.getpid()}")
    unrelated = Path(f"/dev/shm/build{os.getpid()}cache")
    try:
        for path in (mine, in_use, unrelated):
            path.write_bytes(b"x")
        with in_use.open() as _:
            removed = leftovers.remove_shared_memory(frozenset(), frozenset({os.getpid()}), time.time() - 60)
            assert removed == (mine,)
            assert leftovers.remove_shared_memory(frozenset({mine, unrelated}), frozenset(), time.time() + 60) == ()
        assert (in_use.exists(), unrelated.exists()) == (True, True)
    finally:
        for path in (mine, in_use, unrelated):
            path.unlink(missing_ok=True)
