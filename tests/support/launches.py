"""What the lifecycle's tests share: specs of stand-in engines, and who is still alive."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.config import EngineSpec, Placement, Ready, Stop, TrialSpec, Workload
from orchestrator.engines import ENGINES
from orchestrator.errors import EngineFailure
from orchestrator.node.launch import run_engine
from orchestrator.node.leftovers import MARKER
from orchestrator.node.server import Server
from tests.support.builders import make_spec
from tests.support.paths import FAKE_ENGINE

KINDS = sorted(ENGINES)
PORTS = (23000, 23999)
# A stall that no busy test machine reaches by itself, and a grace that an engine which ignores TERM uses up.
READY, STOP = Ready(timeout_s=60.0, stall_s=20.0), Stop(grace_s=1.0)


def engine_spec(root: Path, kind: str = "vllm", *, ready: Ready = READY, stop: Stop = STOP, **more: Any) -> EngineSpec:
    """An engine whose program is the stand-in. What of `more` is no field of EngineSpec goes into FAKE_ENGINE."""
    fields = {name: more.pop(name) for name in ("args", "command", "served_model_name") if name in more}
    env = more.pop("env", {})
    return EngineSpec(
        kind=kind,
        model="org/model",
        command=fields.pop("command", [sys.executable, str(FAKE_ENGINE), kind]),
        env={"FAKE_ENGINE": json.dumps({"load_s": 0.0, "max_life_s": 120, **more}), **env},
        ready=ready,
        stop=stop,
        root=str(root),
        **fields,
    )


def run_stand_in(
    spec: EngineSpec, folder: Path, gpu_ids: tuple[str, ...] = (), **more: Any
) -> contextlib.AbstractContextManager[Server]:
    """The engine of `spec`, started as a trial starts it; its files are in `folder`/trial."""
    return run_engine(ENGINES[spec.kind], spec, workdir=folder / "trial", ports=PORTS, gpu_ids=gpu_ids, **more)


def failure_of(spec: EngineSpec, folder: Path, **more: object) -> tuple[EngineFailure, float]:
    """How it failed to become ready, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(EngineFailure) as caught, run_stand_in(spec, folder, **more):
        pytest.fail("it became ready")
    assert marked() == []
    return caught.value, time.monotonic() - began


def program(folder: Path, source: str) -> list[str]:
    """A command that runs `source` with Python; vLLM's arguments follow it, the port is in `PORT`."""
    path = folder / "program.py"
    head = "import sys, time\nPORT = int(sys.argv[sys.argv.index('--port') + 1])\n"
    path.write_text(head + source, encoding="utf-8")
    return [sys.executable, str(path)]


def trial_spec(root: Path, kind: str = "vllm", *, gpus: int = 0, **more: Any) -> TrialSpec:
    """One short workload, unless `workloads` says otherwise."""
    workloads = more.pop("workloads", {"chat": Workload(output_tokens=16, num_prompts=2, repeats=3, stall_s=20.0)})
    engine = engine_spec(root, kind, **more)
    return make_spec(
        "point",
        engine=engine,
        placement=Placement(gpus=gpus, ports=list(PORTS)),
        workloads=workloads,
        key="0123456789ab",
    )


def marked(owner_pid: int | None = None) -> list[int]:
    """Living processes of engines that were started by `owner_pid` (this process)."""
    owner, found = f":{owner_pid or os.getpid()}:", []
    for process in psutil.process_iter():
        try:
            if owner in process.environ().get(MARKER, "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def written_pids(path: Path, count: int = 2, timeout_s: float = 15.0) -> list[int]:
    """The pids that a stand-in wrote to its `children` file."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or len(path.read_text().split()) < count:
        assert time.monotonic() < deadline, "the children were not started"
        time.sleep(0.05)
    return [int(word) for word in path.read_text().split()]


def gone(pids: list[int], timeout_s: float = 15.0) -> bool:
    """Whether none of the processes is alive within the time."""
    deadline = time.monotonic() + timeout_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
