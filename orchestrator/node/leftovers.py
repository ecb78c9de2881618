"""What can outlive an engine: processes whose keeper and owner were killed, and files in /dev/shm.

Every process of an engine carries a mark in its environment: who owns it, and which launch it belongs to. Nothing is
ever found by its name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from orchestrator.node.keeper import SHM, shared_memory
from orchestrator.node.process import ProcessId, identify, is_alive

# Value: NAMESPACE:PID:START:LAUNCH of the owner.
MARKER = "ORCHESTRATOR_OWNER"
KILL_WAIT_S = 10.0


def new_mark() -> str:
    """A mark that names this process, also after its pid was given to another, and one launch."""
    owner = identify(os.getpid())
    assert owner is not None
    return f"{_namespace()}:{owner.pid}:{_ticks(owner)}:{secrets.token_hex(4)}"


def sweep() -> tuple[int, ...]:
    """Kill what is left of engines whose owner is gone. Returns the pids that could not be killed."""
    return _kill(lambda mark: not _owner_lives(mark))


def kill_marked(mark: str) -> tuple[int, ...]:
    """Kill every process of one launch. Returns the pids that could not be killed."""
    return _kill(lambda found: found == mark)


def find_abandoned() -> list[psutil.Process]:
    """Processes of engines whose owner is gone."""
    return [process for process, mark in _marked() if not _owner_lives(mark)]


def _kill(wanted: Callable[[str], bool]) -> tuple[int, ...]:
    victims = [process for process, mark in _marked() if wanted(mark)]
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(victims, timeout=KILL_WAIT_S)
    return tuple(process.pid for process in alive)


def _marked() -> Iterator[tuple[psutil.Process, str]]:
    """Every process with a mark that may be looked into, of our pid namespace only."""
    ours = _namespace()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            # As bytes first: nearly every process is not ours, and parsing every environment takes a second.
            if MARKER.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                mark = process.environ().get(MARKER, "")
                if mark.count(":") == 3 and mark.startswith(f"{ours}:"):
                    yield process, mark


def _owner_lives(mark: str) -> bool:
    _, pid, start, _ = mark.split(":")
    owner = identify(int(pid)) if pid.isdecimal() else None
    return owner is not None and is_alive(owner) and _ticks(owner) == start


def _ticks(owner: ProcessId) -> str:
    """The start without the boot: a mark is read from a living process, which is of this boot.

    Every version of this program writes it so: one that did not would take the engines of another for abandoned.
    """
    return owner.started.rpartition("/")[2]


def _namespace() -> str:
    """Pids of another container mean other processes, even where its processes are visible here."""
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def remove_shared_memory(known: frozenset[Path], pids: frozenset[int], since_s: float) -> tuple[Path, ...]:
    """Remove what a launch left in /dev/shm, where it counts as memory. Returns what was removed.

    known: the files that its processes were seen to use; pids: those processes, since a file's name may hold one.
    Only files of this user, made after since_s (epoch), that no living process has open or mapped.
    """
    orphans = [path for path in _made_since(since_s) if path in known or _names_one_of(path.name, pids)]
    if not orphans:
        return ()
    in_use = shared_memory(frozenset(psutil.pids()))
    removed = [path for path in orphans if path not in in_use]
    for path in removed:
        path.unlink(missing_ok=True)
    return tuple(removed)


def _made_since(since_s: float) -> Iterator[Path]:
    for path in SHM.iterdir() if SHM.is_dir() else ():
        with contextlib.suppress(OSError):
            status = path.lstat()
            if path.is_file() and status.st_uid == os.getuid() and status.st_ctime >= since_s:
                yield path


def _names_one_of(name: str, pids: frozenset[int]) -> bool:
    return any(part.isdecimal() and int(part) in pids for part in re.split(r"[^0-9A-Za-z]", name))
