"""Where a number comes from: machine, GPUs, driver, versions, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping
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
        **_cpu(),
        "memory_gib": round(psutil.virtual_memory().total / gpus.GIB, 1),
        "gpus": [str(gpu) for gpu in gpus.read_gpus()],
        "driver": gpus.driver_version(),
        "topology": gpus.topology(),
        "engine_version": engine_version,
        "versions": versions,
        "git_commit": _git_commit(),
    }


def describe_machine() -> str | None:
    """This machine, as `machine_of` writes it: GPU models, their number and driver; without GPUs the CPU."""
    return machine_of({"gpus": [str(g) for g in gpus.read_gpus()], "driver": gpus.driver_version(), **_cpu()})


def machine_of(known: Mapping[str, Any]) -> str | None:
    """The machine of a provenance in one line; None where it is not recorded. Alike machines are one: the host's name,
    which decides nothing, is not in it.
    """
    if known.get("gpus"):
        models = " + ".join(f"{number} x {name}" for name, number in Counter(known["gpus"]).items())
        return f"{models}, driver {known.get('driver') or 'unknown'}"
    return f"{known['num_cpus']} x {known['cpu']}" if known.get("cpu") else None


def _cpu() -> dict[str, Any]:
    return {"cpu": _cpu_name(), "num_cpus": os.cpu_count()}


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
