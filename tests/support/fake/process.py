"""Mischief of a process: children that will not go, locks, traces it leaves, and ways to die."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.support.fake.behaviour import Behaviour
from tests.support.fake.flags import Launch

# A child that nobody ends goes by itself, so that a broken test leaves no process for long.
CHILD_LIFE_S = 120.0
CACHE_ROOTS = ("VLLM_CACHE_ROOT", "SGLANG_CACHE_DIR", "LLAMA_CACHE", "TRITON_CACHE_DIR")


def record_start(behaviour: Behaviour, argv: list[str]) -> int:
    """Append this start (argv, pid, the wished part of the environment) to the record; its number from 1 on."""
    if behaviour.record is None:
        return 1
    path = Path(behaviour.record)
    environ = {name: os.environ.get(name) for name in behaviour.record_env}
    entry = {"argv": argv, "pid": os.getpid(), "ppid": os.getppid(), "env": environ, "time_s": time.time()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    return len(path.read_text(encoding="utf-8").splitlines())


def hold_cache(dialect: str) -> int | None:
    """Lock the compile cache for as long as this process lives. None: another live instance holds it."""
    root = Path(next((os.environ[name] for name in CACHE_ROOTS if os.environ.get(name)), f"/tmp/fake_{dialect}_cache"))
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root / "fake_engine.lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def leave_file() -> Path:
    """A shared-memory file that outlives the process."""
    path = Path(f"/dev/shm/fake_engine_{os.getpid()}")
    path.write_bytes(b"\0" * 4096)
    return path


def fork_children(pid_file: str) -> None:
    """A child, and a grandchild in a session of its own whose parent is gone. Both ignore SIGTERM and SIGINT.

    Their pids go to `pid_file`, one per line. To be called before anything has made a thread.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _linger()
    between = os.fork()
    if between == 0:
        os.setsid()
        grandchild = os.fork()
        if grandchild == 0:
            _linger()
        os.write(writer, str(grandchild).encode())
        os._exit(0)
    os.close(writer)
    grandchild = int(os.read(reader, 32))
    os.close(reader)
    os.waitpid(between, 0)
    Path(pid_file).write_text(f"{child}\n{grandchild}\n", encoding="utf-8")


def _linger() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + CHILD_LIFE_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
    os._exit(0)


def die_by(name: str) -> None:
    """End as if another had sent the signal, SIGKILL (the kernel's out-of-memory killer) included."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.Signals[name])


def refused_start(launch: Launch, behaviour: Behaviour) -> str | None:
    """The recorded log of the first rule of `fail_when` that this command line meets ("--flag" or "--flag=value")."""
    for rule, log in behaviour.fail_when.items():
        flag, equals, value = rule.partition("=")
        if flag in launch.args and (not equals or str(launch.args[flag]) == value):
            return log
    return None
