"""The small parent of every engine: it dies with us and takes every descendant along.

Run as a program: keeper.py FD GRACE_S -- COMMAND...  FD is one end of a socket pair whose other end its owner holds.
The keeper writes JSON lines to it ({"pid": n} once the engine runs, {"exit": code} when it ended, {"left": [pids]}
when something could not be killed) and ends everything when the owner writes a byte or disappears: T leaves the engine
GRACE_S to end by itself, Q (in a hurry) and a vanished owner leave it little. As a subreaper it inherits every orphan
below it, also one that left the session. It imports nothing of ours, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_WAIT_S = 10.0
SHM = Path("/dev/shm")
HURRIED_GRACE_S = 3.0
SHORTEST_POLL_S, LONGEST_POLL_S = 0.02, 0.2


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _die_with_keeper() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(engine_pid: int) -> int | None:
    """Collect every ended child; the engine's exit code (negative for a signal) when it is among them."""
    code: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == engine_pid:
            code = os.waitstatus_to_exitcode(status)


def _descendants() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if _alive(p)]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal_all(number: int) -> None:
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _end_all(engine_pid: int, owner: socket.socket, grace_s: float) -> tuple[int | None, list[int]]:
    """TERM, wait, then KILL until nothing is left. Returns the engine's exit code if seen, and what could not die."""
    code: int | None = None
    started = time.monotonic()
    _signal_all(signal.SIGTERM)
    while (waited_s := time.monotonic() - started) < grace_s + KILL_WAIT_S:
        seen = _reap(engine_pid)
        code = seen if seen is not None else code
        if not _descendants():
            return code, []
        if waited_s > grace_s:
            # Again in every round: a process may fork while its parent is being killed.
            _signal_all(signal.SIGKILL)
        if grace_s > HURRIED_GRACE_S and _in_a_hurry(owner):
            # The owner was killed, or lost its patience, while it waited for an orderly end.
            grace_s = min(grace_s, waited_s + HURRIED_GRACE_S)
        # Each look reads the whole process table.
        time.sleep(min(LONGEST_POLL_S, SHORTEST_POLL_S + waited_s / 20))
    return code, [p.pid for p in _descendants()]


def shared_memory(pids: Iterable[int]) -> frozenset[Path]:
    """The files in /dev/shm that these processes have open or mapped."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= {Path(text) for text in re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())}
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = Path(os.readlink(link))
                    found |= {target} if target.parent == SHM else set()
    return frozenset(found)


def _remove_unused(files: frozenset[Path], since_s: float) -> None:
    """Remove what the engine had in shared memory, as far as it made it and nobody has it now: killed, it cannot."""
    for path in files - shared_memory(psutil.pids()) if files else ():
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_ctime >= since_s:
                path.unlink()


def _in_a_hurry(owner: socket.socket) -> bool:
    """Whether the owner vanished or asked for a quick end; with messages of ours unread, its end is a reset."""
    try:
        return owner.recv(1, socket.MSG_DONTWAIT) in (b"", b"Q")
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def main() -> int:
    owner = socket.socket(fileno=int(sys.argv[1]))
    grace_s = float(sys.argv[2])
    command = sys.argv[4:]
    started_s = time.time() - 1.0
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def report(**message: object) -> None:
        with contextlib.suppress(OSError):
            owner.sendall(json.dumps(message).encode() + b"\n")

    try:
        engine = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_keeper
        )
    except OSError as error:
        print(f"keeper: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        report(exit=127)
        return 127
    report(pid=engine.pid)
    code: int | None = None
    stopping = False
    while code is None and not stopping:
        readable, _, _ = select.select([owner.fileno(), wake_read], [], [])
        if wake_read in readable:
            stopping = signal.SIGTERM in os.read(wake_read, 64)
            code = _reap(engine.pid)
        if owner.fileno() in readable:
            stopping = True
            if _in_a_hurry(owner):
                grace_s = min(grace_s, HURRIED_GRACE_S)
    if code is not None:
        report(exit=code)
    files = shared_memory([process.pid for process in _descendants()])
    late, left = _end_all(engine.pid, owner, grace_s)
    if code is None:
        report(exit=late)
    _remove_unused(files, started_s)
    report(left=left)
    return 0


if __name__ == "__main__":
    sys.exit(main())
