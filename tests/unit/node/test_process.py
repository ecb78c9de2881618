"""A process is known by its pid and its start, so that a pid which was given to another is not taken for it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from orchestrator.node.leftovers import new_mark
from orchestrator.node.process import identify, is_alive


def test_this_process_is_alive_and_another_start_of_its_pid_is_not() -> None:
    here = identify(os.getpid())
    assert here is not None
    assert is_alive(here)
    boot, _, ticks = here.started.partition("/")
    assert not is_alive(replace(here, started=f"{boot}/{int(ticks) + 1}"))
    assert not is_alive(replace(here, started=f"another boot/{ticks}"))


def test_a_process_that_ended_is_not_alive_though_nobody_collected_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        known = identify(child.pid)
        assert known is not None
        assert is_alive(known)
        child.kill()
        # Its output ends with it; it is collected only below.
        assert child.stdout is not None
        assert child.stdout.read() == b""
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert identify(child.pid) == known
        assert not is_alive(known)
    assert identify(child.pid) is None
    assert not is_alive(known)


def test_the_mark_of_an_engine_is_read_by_every_version() -> None:
    """Pid and clock ticks, as 0.1.0 wrote it: with another format two versions would kill each other's engines."""
    namespace, pid, ticks, launch = new_mark().split(":")
    stat = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    assert (pid, ticks) == (str(os.getpid()), stat[19])
    assert namespace.isdecimal()
    assert launch
