"""Memory of one running engine over time: its GPUs' and its process tree's, and their peaks."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

import psutil

from orchestrator.node import gpus
from orchestrator.outcome import Fact

# Finding the descendants reads the whole process table: too much to do beside a measurement at every sample. While an
# engine starts its processes, nothing is measured.
STARTING_S, TREE_PERIOD_S = 10.0, 2.0


def tree_pids(pid: int) -> frozenset[int]:
    """A process and all its descendants; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return frozenset({pid, *(child.pid for child in process.children(recursive=True))})
    except psutil.NoSuchProcess:
        return frozenset()


def host_available_gib() -> float:
    """Host memory that can be had without swapping."""
    return float(psutil.virtual_memory().available) / gpus.GIB


def _rss_gib(pids: frozenset[int]) -> float | None:
    total, seen = 0.0, False
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss / gpus.GIB
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
    _sources: dict[str, str] = field(default_factory=dict)
    _tree: frozenset[int] = frozenset()
    _tree_seen_s: float = -TREE_PERIOD_S
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
        # Held open: initialising NVML anew for every sample costs more than the sample.
        with gpus.nvml():
            while True:
                self._sample(time.monotonic() - started)
                if self._stop.wait(self.interval_s):
                    return

    def _sample(self, at_s: float) -> None:
        for gpu in gpus.read_gpus(self.gpu_ids) if self.gpu_ids else []:
            self._keep(f"gpu{gpu.index}_used_gib", at_s, gpu.used_gib, gpu.used_source or "")
        if at_s < STARTING_S or at_s - self._tree_seen_s >= TREE_PERIOD_S:
            self._tree, self._tree_seen_s = tree_pids(self.pid), at_s
        self._keep("host_rss_gib", at_s, _rss_gib(self._tree), "psutil, resident memory of the process tree")

    def _keep(self, name: str, at_s: float, value_gib: float | None, source: str) -> None:
        if value_gib is not None:
            self.series.setdefault(name, []).append((round(at_s, 3), round(value_gib, 4)))
            self._sources[name] = source

    def peaks(self) -> dict[str, Fact]:
        """The largest sample of each series, named gpuN_peak_gib and host_rss_peak_gib."""
        return {
            name.replace("_used_gib", "_peak_gib").replace("rss_gib", "rss_peak_gib"): Fact(
                value=max(value for _, value in samples),
                source=f"{self._sources[name]}, largest of {len(samples)} samples",
            )
            for name, samples in self.series.items()
        }
