"""Run a command and leave no process of it behind: `python -m tests.support.supervise COMMAND...`.

Tests start engines and Ray heads that leave the session on purpose. This process becomes the parent of every orphan
below it (a subreaper) and ends what is left when the command has ended or was interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36
# Tests that are interrupted end their own processes in order; then patience ends.
GRACE_S = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(command: list[str]) -> int:
    """Returns the exit code of the command, 128 + the signal where one ended it."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # In a group of its own: a terminal's Ctrl-C would reach it twice, and the second one cuts an orderly end short.
    child = subprocess.Popen(command, process_group=0)

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
    end_descendants()
    return code if code >= 0 else 128 - code


def end_descendants() -> None:
    """Kill, again and again, whatever still lives below this process: a process may fork while its parent dies."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
