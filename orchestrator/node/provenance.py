"""Where a number comes from: machine, GPUs, driver, versions, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from orchestrator.node import gpus


def provenance(engine_version: str | None) -> dict[str, Any]:
    """What a reader needs to judge or repeat a number. Unknown is None."""
    versions = {name: _version(name) for name in ("orchestrator", "ray", "mlflow", "omegaconf", "aiohttp", "numpy")}
    return {
        "hostname": platform.node(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / gpus.GIB, 1),
        "gpus": [str(gpu) for gpu in gpus.read_gpus()],
        "driver": gpus.driver_version(),
        "topology": gpus.topology(),
        "engine_version": engine_version,
        "versions": versions,
        "git_commit": _git_commit(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
