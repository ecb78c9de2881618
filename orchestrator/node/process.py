"""A process by its pid and the moment it began: a pid alone is soon given to another, in a container at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ZOMBIE = "Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process. started: boot and clock ticks since then, which no setting of a clock moves."""

    pid: int
    started: str


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None when there is none."""
    fields = _stat_fields(pid)
    return None if fields is None else ProcessId(pid=pid, started=f"{_boot_id()}/{fields[19]}")


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs; False for one that ended and was not collected by its parent yet."""
    fields = _stat_fields(process.pid)
    return fields is not None and fields[0] != _ZOMBIE and process == identify(process.pid)


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name: [0] is the state, [19] the start in ticks. See proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold any character.
    return stat.rpartition(")")[2].split()


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
