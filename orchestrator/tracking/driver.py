"""Which process wrote a run, to distinguish a run whose driver is gone from one that is still written."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from orchestrator.node.process import ProcessId, identify, is_alive


def tags() -> dict[str, str]:
    """This process as tags: host, pid and start."""
    driver = identify(os.getpid())
    assert driver is not None
    return {"driver_pid": str(driver.pid), "driver_host": socket.gethostname(), "driver_start": driver.started}


def is_gone(written: Mapping[str, str]) -> bool:
    """Whether the process of these tags ran on this host and is gone. False when nobody can know."""
    if "driver_pid" not in written or written.get("driver_host") != socket.gethostname():
        return False
    return not is_alive(ProcessId(pid=int(written["driver_pid"]), started=written.get("driver_start", "")))
