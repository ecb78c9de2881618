"""Which process wrote a run, so that a run whose driver is gone can be told from one that is still written."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path


def tags() -> dict[str, str]:
    """This process, as tags: host, pid, and start."""
    return {"driver_pid": str(os.getpid()), "driver_host": socket.gethostname(), "driver_start": _start(os.getpid())}


def is_gone(written: Mapping[str, str], alive: Callable[[int], bool]) -> bool:
    """Whether the process of these tags ran on this host and is gone. False when nobody can know."""
    if "driver_pid" not in written or written.get("driver_host") != socket.gethostname():
        return False
    pid = int(written["driver_pid"])
    return not alive(pid) or _start(pid) != written.get("driver_start")


def _start(pid: int) -> str:
    """Boot and start time of a process: a pid alone is soon used again, in a container at once."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        ticks = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return "unknown"
    return f"{boot}/{ticks}"
