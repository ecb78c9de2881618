"""The keeper alone: whatever happens to the engine, the owner or the keeper, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.paths import ROOT

KEEPER = ROOT / "orchestrator" / "node" / "keeper.py"
# Ignores TERM, has a child that does too, and a grandchild that left the session: the worst case of a real engine.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
    time.sleep(120)
    os._exit(0)
print("up", flush=True)
time.sleep(120)
"""


class Kept:
    """A keeper with a stubborn engine below it; processes are told apart by a mark in their environment."""

    def __init__(self, tmp_path: Path, *, grace_s: float = 0.5, command: list[str] | None = None) -> None:
        self.mark = f"{tmp_path.name}-{os.getpid()}-{time.monotonic_ns()}"
        self.owner_end, keepers = socket.socketpair()
        with keepers:
            self.process = subprocess.Popen(
                [sys.executable, str(KEEPER), str(keepers.fileno()), str(grace_s), "--"]
                + (command or [sys.executable, "-c", STUBBORN]),
                pass_fds=(keepers.fileno(),),
                env={**os.environ, "TEST_MARK": self.mark},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    def wait_up(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        deadline = time.monotonic() + 5
        while len(self.alive()) < 4:
            assert time.monotonic() < deadline, "keeper, engine, child and grandchild are expected"
            time.sleep(0.02)

    def alive(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def messages(self) -> dict[str, object]:
        self.owner_end.settimeout(5)
        text = b""
        while part := self.owner_end.recv(4096):
            text += part
        return {k: v for line in text.splitlines() for k, v in json.loads(line).items()}


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    keeper = Kept(tmp_path)
    yield keeper
    for pid in keeper.alive():
        os.kill(pid, signal.SIGKILL)
    keeper.process.wait(10)
    keeper.owner_end.close()


def test_a_stop_ends_the_whole_tree(kept: Kept) -> None:
    kept.wait_up()
    kept.owner_end.send(b"T")
    assert kept.process.wait(10) == 0
    assert kept.alive() == []
    assert kept.messages()["exit"] == -signal.SIGKILL


def test_the_owner_disappears(kept: Kept) -> None:
    kept.wait_up()
    kept.owner_end.close()
    kept.process.wait(10)
    assert kept.alive() == []


@pytest.mark.slow
def test_an_owner_that_is_gone_gets_a_short_grace(tmp_path: Path) -> None:
    keeper = Kept(tmp_path, grace_s=300)
    keeper.wait_up()
    began = time.monotonic()
    keeper.owner_end.close()
    keeper.process.wait(15)
    assert time.monotonic() - began < 10
    assert keeper.alive() == []


def test_sigterm_to_the_keeper_ends_the_tree(kept: Kept) -> None:
    kept.wait_up()
    kept.process.terminate()
    kept.process.wait(10)
    assert kept.alive() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_of_a_terminal_do_not_end_it(kept: Kept, number: signal.Signals) -> None:
    kept.wait_up()
    kept.process.send_signal(number)
    time.sleep(0.2)
    assert len(kept.alive()) == 4


def test_a_killed_keeper_takes_the_engine_itself_along(kept: Kept) -> None:
    kept.wait_up()
    engine = json.loads(kept.owner_end.recv(4096))["pid"]
    kept.process.kill()
    kept.process.wait(10)
    deadline = time.monotonic() + 2
    while engine in kept.alive():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_engines_exit_code_is_told(tmp_path: Path) -> None:
    keeper = Kept(tmp_path, command=["/bin/sh", "-c", "exit 7"])
    assert keeper.process.wait(10) == 0
    told = keeper.messages()
    assert told["exit"] == 7
    assert told["left"] == []


def test_the_death_of_an_engine_takes_its_orphans(tmp_path: Path) -> None:
    script = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(120)\nos._exit(3)"
    keeper = Kept(tmp_path, command=[sys.executable, "-c", script])
    assert keeper.process.wait(10) == 0
    assert keeper.messages()["exit"] == 3
    assert keeper.alive() == []


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    keeper = Kept(tmp_path, command=["/nowhere/at/all"])
    assert keeper.process.wait(10) == 127
    assert keeper.messages()["exit"] == 127
    assert b"/nowhere/at/all" in (keeper.process.stderr.read() if keeper.process.stderr else b"")


@pytest.mark.slow
def test_an_owner_that_vanishes_during_an_orderly_end_shortens_it(tmp_path: Path) -> None:
    keeper = Kept(tmp_path, grace_s=300)
    keeper.wait_up()
    keeper.owner_end.send(b"T")
    time.sleep(0.5)
    assert len(keeper.alive()) == 4
    began = time.monotonic()
    keeper.owner_end.close()
    keeper.process.wait(15)
    assert time.monotonic() - began < 10
    assert keeper.alive() == []


@pytest.mark.slow
def test_an_owner_in_a_hurry_is_not_kept_waiting(tmp_path: Path) -> None:
    keeper = Kept(tmp_path, grace_s=300)
    keeper.wait_up()
    began = time.monotonic()
    keeper.owner_end.send(b"Q")
    assert keeper.process.wait(15) == 0
    assert time.monotonic() - began < 10
    assert keeper.messages()["left"] == []
    assert keeper.alive() == []


MAPPED = """
import time
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
time.sleep(120)
"""


def test_shared_memory_goes_though_owner_and_engine_were_killed(tmp_path: Path) -> None:
    keeper = Kept(tmp_path, command=[sys.executable, "-c", MAPPED])
    assert keeper.process.stdout is not None
    path = Path("/dev/shm") / keeper.process.stdout.readline().decode().strip()
    assert path.is_file()
    keeper.owner_end.close()
    keeper.process.wait(15)
    assert not path.exists()
