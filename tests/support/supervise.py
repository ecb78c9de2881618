"""Run a command and leave no process of it behind: `python -m tests.support.supervise COMMAND...`.

Tests start engines and Ray heads that leave the session on purpose. All of them inherit a mark in their environment, by
which this process finds and ends what is left when the command has ended or was interrupted. It is no subreaper: Ray's
workers know that their raylet has died by their parent being process 1.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "TEST_RUN_ID"
# Tests that are interrupted end their own processes in order; then patience ends.
GRACE_S = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(command: list[str]) -> int:
    """Returns the exit code of the command, 128 + the signal where one ended it."""
    run_id = secrets.token_hex(8)
    # In a group of its own: a terminal's Ctrl-C would reach it twice, and the second one cuts an orderly end short.
    child = subprocess.Popen(command, process_group=0, env={**os.environ, MARK: run_id})

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        signal.alarm(int(GRACE_S))

    for number in SIGNALS:
        signal.signal(number, pass_on)
    signal.signal(signal.SIGALRM, lambda *_: child.kill())
    code = child.wait()
    signal.alarm(0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while left := list(find_marked(run_id)):
        # Again and again: a process may fork while its parent dies.
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)
    return code if code >= 0 else 128 - code


def find_marked(run_id: str) -> Iterator[psutil.Process]:
    """Every living process whose environment has this mark."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            marked = f"{MARK}={run_id}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                yield process


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
