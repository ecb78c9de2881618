"""An interrupted run of the tests leaves no process, whatever its tests had started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launches import gone, written_pids
from tests.support.paths import ROOT

# A grandchild that left the session, ignores TERM, and writes its pid.
COMMAND = """
import subprocess, sys, time
stubborn = ("import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(300)")
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", stubborn, sys.argv[1]], start_new_session=True)
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""


def supervised(pids: Path, seconds: float) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.support.supervise", sys.executable, "-c", COMMAND, str(pids), str(seconds)]
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    process = supervised(tmp_path / "pids", 300)
    pids = written_pids(tmp_path / "pids", 2)
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    assert gone(pids, 1.0)


@pytest.mark.slow
def test_an_ordinary_end_leaves_nothing_and_keeps_the_exit_code(tmp_path: Path) -> None:
    process = supervised(tmp_path / "pids", 3)
    pids = written_pids(tmp_path / "pids", 2)
    assert process.wait(20) == 3
    assert gone(pids, 1.0)
