"""This node's GPUs: their memory and who uses it, links, and those that must not be used again. Changes no setting."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from orchestrator.node import claims

GIB = 1024**3
# A process-free GPU still shows a little memory in use (driver, other users' contexts being torn down).
FREE_SLACK_GIB = 0.75
# Below this much in use without a process there is nothing to wait for.
IDLE_GIB = 1.5
POLL_S = 0.25
# As in nvml.h; pynvml's own constant for reading is a tuple by mistake.
P2P_READ = 0
P2P_STATUS = {
    0: "ok",
    1: "not supported by the chipset",
    2: "not supported by the GPU",
    3: "not supported by the topology",
    4: "disabled",
    5: "not supported",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUser:
    """A process that holds memory on a GPU. used_gib is None where the driver does not report it.

    name is None for a process that this node does not show (another container's, or one that has just ended).
    """

    pid: int
    name: str | None
    used_gib: float | None
    state: str | None = None

    def __str__(self) -> str:
        known = f"{self.name}{f', {self.state}' if self.state else ''}" if self.name else "not visible from here"
        return f"pid {self.pid} ({known})" + ("" if self.used_gib is None else f" {self.used_gib:.1f} GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or a MIG slice of it, as NVML sees it.

    used_gib and total_gib are None where the driver does not report them; used_gib is then the sum over the
    processes, if their memory is reported. used_source names which. fault: why NVML cannot use this GPU; None for a
    healthy one.
    """

    index: int
    uuid: str
    name: str
    total_gib: float | None
    used_gib: float | None
    used_source: str | None = None
    users: tuple[GpuUser, ...] = ()
    fault: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.total_gib:.0f} GiB" if self.total_gib else self.name


@contextlib.contextmanager
def nvml() -> Iterator[bool]:
    """Whether NVML can be used; without a driver every GPU fact is unknown. Nested uses cost nothing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def read_gpus(ids: tuple[str, ...] | None = None) -> list[Gpu]:
    """The GPUs of this node, or those named by index, by UUID (or its beginning) or as a MIG slice.

    Empty where there is no NVIDIA driver; a name that NVML does not know is left out.
    """
    with nvml() as available:
        if not available:
            return []
        indexes = range(_supported(pynvml.nvmlDeviceGetCount) or 0)
        if ids is None:
            return [_gpu(index) for index in indexes]
        return [gpu for gpu_id in ids if (gpu := _named(gpu_id, indexes)) is not None]


def _named(gpu_id: str, indexes: range) -> Gpu | None:
    if gpu_id.startswith("MIG-"):
        handle = _supported(pynvml.nvmlDeviceGetHandleByUUID, gpu_id)
        parent = _supported(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        index = _supported(pynvml.nvmlDeviceGetIndex, parent)
        return None if handle is None or index is None else _read(handle, index, gpu_id)
    if gpu_id.isdecimal():
        return _gpu(int(gpu_id)) if int(gpu_id) in indexes else None
    return next((gpu for gpu in map(_gpu, indexes) if gpu.uuid.startswith(gpu_id)), None)


def _gpu(index: int) -> Gpu:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError as error:
        return Gpu(
            index=index, uuid=f"index-{index}", name="unusable GPU", total_gib=None, used_gib=None, fault=str(error)
        )
    return _read(handle, index, uuid)


def _read(handle: Any, index: int, uuid: str) -> Gpu:
    memory = _supported(pynvml.nvmlDeviceGetMemoryInfo, handle)
    processes = _supported(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    users = tuple(_user(process.pid, process.usedGpuMemory) for process in processes)
    used = memory.used / GIB if memory else _sum_over(users)
    source = "NVML" if memory else "NVML, sum over the processes" if used is not None else None
    return Gpu(
        index=index,
        uuid=uuid,
        name=_text(_supported(pynvml.nvmlDeviceGetName, handle) or "unknown GPU"),
        total_gib=memory.total / GIB if memory else None,
        used_gib=used,
        used_source=source,
        users=users,
    )


def _sum_over(users: tuple[GpuUser, ...]) -> float | None:
    """None unless every process is reported: a part of the sum would be a wrong number."""
    known = [user.used_gib for user in users if user.used_gib is not None]
    return sum(known) if users and len(known) == len(users) else None


def _user(pid: int, used_bytes: int | None) -> GpuUser:
    name = state = None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        name, status = process.name(), process.status()
        state = None if status in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING) else str(status)
    return GpuUser(pid=pid, name=name, used_gib=used_bytes / GIB if used_bytes else None, state=state)


def _supported(query: Callable[..., Any], *arguments: object) -> Any:
    """The answer, or None where this GPU or driver does not support the query."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def find_foreign_users(ids: tuple[str, ...], own_pids: frozenset[int]) -> tuple[str, ...]:
    """Who else is on these GPUs, as `GPU 1: pid 4242 (python) 2.0 GiB`."""
    return tuple(f"GPU {gpu.index}: {user}" for gpu in read_gpus(ids) for user in gpu.users if user.pid not in own_pids)


def wait_until_unused(ids: tuple[str, ...], timeout_s: float) -> tuple[str, ...]:
    """Wait until no process is on these GPUs. Returns who still is, as `find_foreign_users` does."""
    deadline = time.monotonic() + timeout_s
    while (users := find_foreign_users(ids, frozenset())) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return users


def find_hidden_users(ids: tuple[str, ...]) -> frozenset[int]:
    """Pids on these GPUs that this node does not show: in a container NVML may report the host's pids, also of ours."""
    return frozenset(user.pid for gpu in read_gpus(ids) for user in gpu.users if user.name is None)


def wait_until_settled(ids: tuple[str, ...], timeout_s: float) -> dict[str, float | None]:
    """Memory in use per UUID, GiB, once it no longer falls: an engine's memory is freed later than its process dies."""
    deadline = time.monotonic() + timeout_s
    before = read_gpus(ids)
    while any(not gpu.users and (gpu.used_gib or 0.0) > IDLE_GIB for gpu in before) and time.monotonic() < deadline:
        time.sleep(4 * POLL_S)
        now = read_gpus(ids)
        falling = [
            b for a, b in zip(before, now, strict=True) if a.used_gib and b.used_gib and b.used_gib < a.used_gib - 0.1
        ]
        before = now
        if not falling:
            break
    return {gpu.uuid: gpu.used_gib for gpu in before}


def wait_until_free(
    ids: tuple[str, ...], baseline_gib: Mapping[str, float | None], timeout_s: float
) -> tuple[str, ...]:
    """Wait until each GPU is back at its baseline. Returns a sentence per GPU that is not, empty when all are.

    Such a GPU is quarantined: `find_quarantined` names it until it is free again.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        held = [gpu for gpu in read_gpus(ids) if not _is_free(gpu, baseline_gib.get(gpu.uuid))]
        if not held:
            return ()
        if time.monotonic() > deadline:
            return tuple(_quarantine(gpu, baseline_gib.get(gpu.uuid)) for gpu in held)
        time.sleep(POLL_S)


def _is_free(gpu: Gpu, baseline_gib: float | None) -> bool:
    if gpu.used_gib is None or baseline_gib is None:
        return not gpu.users
    return gpu.used_gib <= baseline_gib + FREE_SLACK_GIB


def _quarantine(gpu: Gpu, baseline_gib: float | None) -> str:
    used = "memory" if gpu.used_gib is None else f"{gpu.used_gib:.1f} GiB"
    before = "" if baseline_gib is None else f", {baseline_gib:.1f} GiB before the trial"
    holders = ", ".join(map(str, gpu.users)) or "no process that NVML shows"
    sentence = f"GPU {gpu.index} still holds {used}{before}; held by {holders}"
    document = {"sentence": sentence, "baseline_gib": baseline_gib}
    _quarantine_file(gpu).write_text(json.dumps(document), encoding="utf-8")
    return sentence


def find_quarantined(ids: tuple[str, ...]) -> tuple[str, ...]:
    """Why these GPUs must not be used: a sentence for each that an earlier trial left occupied and that still is."""
    sentences = []
    for gpu in read_gpus(ids):
        with contextlib.suppress(FileNotFoundError):
            document = json.loads(_quarantine_file(gpu).read_text(encoding="utf-8"))
            if _is_free(gpu, document["baseline_gib"]):
                _quarantine_file(gpu).unlink()
            else:
                sentences.append(f"in quarantine: {document['sentence']}")
    return tuple(sentences)


def _quarantine_file(gpu: Gpu) -> Path:
    return claims.node_folder() / f"quarantine-{gpu.uuid.replace('/', '_')}.json"


def topology() -> list[dict[str, object]]:
    """Every pair of GPUs: how near they are and whether one can read the other's memory."""
    with nvml() as available:
        if not available:
            return []
        count = _supported(pynvml.nvmlDeviceGetCount) or 0
        handles = [_supported(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        return [
            {
                "pair": [a, b],
                "common_ancestor_level": _supported(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b]),
                "p2p_read": _p2p(handles[a], handles[b]),
            }
            for a in range(count)
            for b in range(a + 1, count)
            if handles[a] is not None and handles[b] is not None
        ]


def _p2p(a: object, b: object) -> str | None:
    status = _supported(pynvml.nvmlDeviceGetP2PStatus, a, b, P2P_READ)
    return None if status is None else P2P_STATUS.get(status, f"unknown (status {status})")


def driver_version() -> str | None:
    with nvml() as available:
        version = _supported(pynvml.nvmlSystemGetDriverVersion) if available else None
    return _text(version) if version else None
