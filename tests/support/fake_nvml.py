"""GPUs for tests: builds fake_nvml.c once and tells it, in a text file, what it has. The real pynvml runs over it."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import pynvml
import pytest

SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def library() -> Path:
    """The shared library, in a folder that can lead LD_LIBRARY_PATH."""
    path = Path(tempfile.mkdtemp(prefix="fake-nvml-")) / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE)], check=True)
    return path


class FakeNvml:
    """The GPUs of a node. Changes reach every process that looks at them, from its next query on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "nvml.txt"
        self._folder = folder
        self._lines = ["driver 580.159.03"]

    @property
    def env(self) -> dict[str, str]:
        """For a process that is to find these GPUs."""
        return {"FAKE_NVML": str(self._path), "LD_LIBRARY_PATH": str(library().parent)}

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Into this process. The loader reads LD_LIBRARY_PATH only at its start, so pynvml gets the library itself."""
        monkeypatch.setenv("FAKE_NVML", str(self._path))
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library())))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def gpu(self, uuid: str, *, used_mib: int = 500, decay_s: float = 0.0, flags: str = "-") -> FakeNvml:
        return self._add(f"gpu {uuid} NVIDIA_H200 143771 {used_mib} {decay_s} {flags}")

    def mig(self, uuid: str, parent: int) -> FakeNvml:
        return self._add(f"mig {uuid} {parent} 20000 100")

    def peers(self, a: int, b: int, status: int) -> FakeNvml:
        return self._add(f"p2p {a} {b} {status}")

    def holder(self, gpu: int, pid_file: Path, mib: int) -> FakeNvml:
        """The processes whose pids stand in the file, each with so much memory. The file may come later."""
        return self._add(f"holder {gpu} {pid_file} {mib}")

    def pid(self, gpu: int, pid: int, mib: int) -> FakeNvml:
        path = self._folder / f"pid-{gpu}-{pid}"
        path.write_text(f"{pid}\n")
        return self.holder(gpu, path, mib)

    def _add(self, line: str) -> FakeNvml:
        self._lines.append(line)
        aside = self._path.with_suffix(f".{os.getpid()}")
        aside.write_text("\n".join(self._lines) + "\n")
        aside.replace(self._path)
        return self
