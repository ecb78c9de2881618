"""This node's facts: GPUs and who uses them, memory over time, topology, provenance. Never changes a setting."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pynvml

from orchestrator.engines.base import Fact

GIB = 1024**3
# A process-free GPU still shows a little memory in use (driver, other users' contexts being torn down).
FREE_SLACK_GIB = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUser:
    """A process that holds memory on a GPU. used_gib is None where the driver does not tell."""

    pid: int
    name: str
    used_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML sees it. Memory is None where the driver answers "not supported"."""

    index: int
    uuid: str
    name: str
    total_gib: float | None
    used_gib: float | None
    users: tuple[GpuUser, ...] = ()


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    """Whether NVML can be used; without a driver every GPU fact is unknown."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def gpus(ids: tuple[str, ...] | None = None) -> list[Gpu]:
    """The GPUs of this node, or those named by index or UUID. Empty where there is no NVIDIA driver."""
    with _nvml() as available:
        if not available:
            return []
        seen = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if ids is None:
        return seen
    return [gpu for gpu in seen if str(gpu.index) in ids or gpu.uuid in ids]


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _supported(pynvml.nvmlDeviceGetMemoryInfo, handle)
    processes = _supported(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    users = tuple(
        GpuUser(
            pid=process.pid,
            name=_process_name(process.pid),
            used_gib=process.usedGpuMemory / GIB if process.usedGpuMemory else None,
        )
        for process in processes
    )
    used = memory.used / GIB if memory else None
    if used is None and users and all(user.used_gib is not None for user in users):
        used = sum(user.used_gib or 0.0 for user in users)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_gib=memory.total / GIB if memory else None,
        used_gib=used,
        users=users,
    )


def _supported(query: Callable[..., Any], *arguments: object) -> Any:
    """The answer, or None where this GPU or driver does not support the query."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "unknown"


def foreign_users(ids: tuple[str, ...], own_pids: frozenset[int]) -> tuple[str, ...]:
    """Who else is on these GPUs, as `GPU 1: pid 4242 (python) 2.0 GiB`."""
    return tuple(
        f"GPU {gpu.index}: pid {user.pid} ({user.name})"
        + (f" {user.used_gib:.1f} GiB" if user.used_gib is not None else "")
        for gpu in gpus(ids)
        for user in gpu.users
        if user.pid not in own_pids
    )


def wait_until_free(ids: tuple[str, ...], baseline_gib: dict[str, float | None], timeout_s: float) -> tuple[str, ...]:
    """Wait until each GPU is back at its baseline. Returns a sentence per GPU that is not, empty when all are."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = [
            gpu
            for gpu in gpus(ids)
            if gpu.used_gib is not None
            and (before := baseline_gib.get(gpu.uuid)) is not None
            and gpu.used_gib > before + FREE_SLACK_GIB
        ]
        if not held:
            return ()
        if time.monotonic() > deadline:
            return tuple(
                f"GPU {gpu.index} still holds {gpu.used_gib:.1f} GiB, {baseline_gib[gpu.uuid]:.1f} GiB before the trial"
                + "".join(f"; pid {user.pid} ({user.name})" for user in gpu.users)
                for gpu in held
            )
        time.sleep(0.25)


def tree_pids(pid: int) -> frozenset[int]:
    """A process and all its descendants; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return frozenset({pid, *(child.pid for child in process.children(recursive=True))})
    except psutil.NoSuchProcess:
        return frozenset()


def _tree_rss_gib(pid: int) -> float | None:
    total, seen = 0.0, False
    for member in tree_pids(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(member).memory_info().rss / GIB
            seen = True
    return total if seen else None


@dataclass(slots=True, kw_only=True)
class MemorySampler:
    """Samples GPU memory and the engine tree's resident memory in a thread between start and stop.

    series[name] is [(seconds since the start, GiB)]; names are gpuN_used_gib and host_rss_gib.
    """

    pid: int
    gpu_ids: tuple[str, ...]
    interval_s: float = 0.5
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        started = time.monotonic()
        while True:
            self._sample(time.monotonic() - started)
            if self._stop.wait(self.interval_s):
                return

    def _sample(self, at_s: float) -> None:
        values = {f"gpu{gpu.index}_used_gib": gpu.used_gib for gpu in gpus(self.gpu_ids)} if self.gpu_ids else {}
        values["host_rss_gib"] = _tree_rss_gib(self.pid)
        for name, value in values.items():
            if value is not None:
                self.series.setdefault(name, []).append((round(at_s, 3), round(value, 4)))

    def peaks(self) -> dict[str, Fact]:
        """The largest sample of each series, named gpuN_peak_gib and host_rss_peak_gib."""
        return {
            name.replace("_used_gib", "_peak_gib").replace("rss_gib", "rss_peak_gib"): Fact(
                value=max(value for _, value in samples),
                source=f"{'NVML' if name.startswith('gpu') else 'psutil, resident memory of the process tree'}, "
                f"largest of {len(samples)} samples",
            )
            for name, samples in self.series.items()
        }


def topology() -> list[dict[str, object]]:
    """Every pair of GPUs: how near they are and whether one can read the other's memory."""
    with _nvml() as available:
        if not available:
            return []
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            {
                "pair": [a, b],
                "common_ancestor_level": _supported(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b]),
                "p2p_read": _p2p(handles[a], handles[b]),
            }
            for a in range(len(handles))
            for b in range(a + 1, len(handles))
        ]


def _p2p(a: object, b: object) -> str | None:
    status = _supported(pynvml.nvmlDeviceGetP2PStatus, a, b, pynvml.NVML_P2P_CAPS_INDEX_READ)
    if status is None:
        return None
    return "ok" if status == pynvml.NVML_P2P_STATUS_OK else f"not supported (status {status})"


def driver_version() -> str | None:
    with _nvml() as available:
        return _text(pynvml.nvmlSystemGetDriverVersion()) if available else None


def provenance(engine_version: str | None) -> dict[str, Any]:
    """What a reader needs to judge or repeat a number: machine, GPUs, driver, versions, commit."""
    versions = {name: _version(name) for name in ("orchestrator", "ray", "mlflow", "omegaconf", "aiohttp", "numpy")}
    return {
        "hostname": platform.node(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": [f"{gpu.name} {gpu.total_gib:.0f} GiB" if gpu.total_gib else gpu.name for gpu in gpus()],
        "driver": driver_version(),
        "topology": topology(),
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
