"""The Ray cluster: joined or embedded, which of its nodes can hold a trial, and which of them may still be used."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

# Ray reads these when it is imported: no usage reports, no output of its own, trials keep our working directory.
for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's workers, and with them our engines, would run at niceness 15 and yield to everybody while being measured.
    "RAY_worker_niceness": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_MAX_PENDING_TRIALS_PG": "64",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "0",
}.items():
    os.environ.setdefault(_name, _value)

import psutil  # noqa: E402
import ray  # noqa: E402

from orchestrator.config import Placement  # noqa: E402
from orchestrator.errors import MachineError  # noqa: E402
from orchestrator.node import gpus  # noqa: E402

REFRESH_S = 1.0
CONNECT_TIMEOUT_S = 10.0
ESSENTIAL = ("gcs_server", "raylet")


@contextlib.contextmanager
def connected(address: str | None, on_lost: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """A Ray cluster: the one at `address`, else one embedded in this process, on loopback, gone when it is left.

    on_lost is called in another thread when a process of the embedded Ray dies: Ray may abort this process soon after.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    if address is None:
        options |= {"object_store_memory": 128 << 20, "_node_ip_address": "127.0.0.1"}
    elif not _is_listening(address):
        raise MachineError(f"the Ray cluster at {address} cannot be reached: nothing listens there")
    left = threading.Event()
    try:
        with _children_in_own_groups(), _sigterm_kept():
            # "local", because without an address Ray would join whatever cluster runs on this machine.
            ray.init(address=address or "local", **options)
        logging.getLogger("ray").setLevel(logging.ERROR)
        if address is None:
            threading.Thread(target=_watch, args=(left, on_lost), name="ray-watch", daemon=True).start()
        yield
    except (ConnectionError, RuntimeError, ValueError) as error:
        if ray.is_initialized():
            raise
        where = f"the Ray cluster at {address}" if address else "a local Ray"
        raise MachineError(f"{where} cannot be reached: {' '.join(str(error).split())[:300]}") from None
    finally:
        left.set()
        ray.shutdown()


def _is_listening(address: str) -> bool:
    """Asked first, because Ray tries a dead address for minutes. True where there is no HOST:PORT to ask."""
    host_name, _, port = address.rpartition("://")[2].rpartition(":")
    if not host_name or not port.isdigit():
        return True
    try:
        with socket.create_connection((host_name.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


_grouping = threading.Event()


def _leave_group() -> None:
    if _grouping.is_set():
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)


@contextlib.contextmanager
def _children_in_own_groups() -> Iterator[None]:
    """A signal for our whole group (a terminal's, `timeout`'s) must not end Ray under us: we end it, in order."""
    _grouping.set()
    try:
        yield
    finally:
        _grouping.clear()


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray sets handlers of its own for SIGTERM while it starts; what came to them is given to ours afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = signal.getsignal(signal.SIGTERM)
    seen, told = os.pipe()
    for end in (seen, told):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        with contextlib.suppress(SystemExit):
            yield
    finally:
        signal.set_wakeup_fd(before)
        meant_for_ours = signal.getsignal(signal.SIGTERM) is ours
        signal.signal(signal.SIGTERM, ours)
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(seen, 64) and not meant_for_ours:
                os.kill(os.getpid(), signal.SIGTERM)
        os.close(seen)
        os.close(told)


def _watch(left: threading.Event, on_lost: Callable[[str], None]) -> None:
    parts = [child for child in psutil.Process().children() if _name_of(child) in ESSENTIAL]
    names = {part.pid: _name_of(part) for part in parts}
    while not left.wait(0.2):
        dead = [names[part.pid] for part in parts if not part.is_running() or _is_zombie(part)]
        # Ending Ray ends its processes too; that is no loss.
        if dead and not left.wait(0.1):
            for part in parts:
                # Its agents would linger for a minute. Engines are not in this group: their keepers end them.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(part.pid, signal.SIGKILL)
            on_lost(f"Ray's process {dead[0]} ended unexpectedly")
            return


def _name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def check_local_placement(placement: Placement) -> None:
    """Whether this machine alone could hold one trial; asked before Ray is started. Raises MachineError."""
    num_gpus, num_cpus = len(gpus.gpus()), os.cpu_count() or 1
    if placement.gpus > num_gpus:
        seen = ", ".join(gpu.name for gpu in gpus.gpus()) or "none"
        raise MachineError(
            f"placement.gpus: a trial needs {placement.gpus} GPUs on one node, this machine has {num_gpus} ({seen}); "
            "join a cluster that has such a node with --address, or look at the command lines with --dry-run"
        )
    if placement.cpus > num_cpus:
        raise MachineError(
            f"placement.cpus: a trial needs {placement.cpus} CPUs on one node, this machine has {num_cpus}"
        )


class Nodes:
    """The nodes that can hold one trial. Each holds one at a time: two engines side by side would measure each other.

    Raises MachineError at once when no node can ever hold one.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._fitting: dict[str, str] = {}
        self._taken: set[str] = set()
        self._barred: dict[str, str] = {}
        self._failures: Counter[str] = Counter()
        self._read_s = 0.0
        self.refresh()
        if not self._fitting:
            raise MachineError(self._nothing_fits())

    def refresh(self) -> None:
        """Look again who is there; at most once in REFRESH_S."""
        if time.monotonic() - self._read_s < REFRESH_S:
            return
        self._read_s = time.monotonic()
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        self._fitting = {n["NodeID"]: n["NodeManagerAddress"] for n in alive if _fits(n, self._placement)}

    def take(self) -> str | None:
        """The id of a free node, now taken; None when all are busy, gone or barred."""
        self.refresh()
        free = [node for node in self._fitting if node not in self._taken and node not in self._barred]
        if not free:
            return None
        node = min(free, key=self._failures.__getitem__)
        self._taken.add(node)
        return node

    def give_back(self, node: str, *, failed: bool = False) -> None:
        """failed: the machine was at fault; other nodes are taken first from now on."""
        self._taken.discard(node)
        self._failures[node] += failed

    def bar(self, node: str, why: str) -> None:
        """Never use this node again in this campaign: what it holds was not released."""
        self._barred[node] = f"{self.address(node)}: {why}"

    def is_there(self, node: str) -> bool:
        self.refresh()
        return node in self._fitting

    def address(self, node: str) -> str:
        return self._fitting.get(node, node)

    def none_left(self) -> str | None:
        """Why no node can be used any more; None as long as one can, be it busy now."""
        self.refresh()
        if any(node not in self._barred for node in self._fitting):
            return None
        barred = "; ".join(self._barred.values())
        return f"not to be used again: {barred}" if barred else self._nothing_fits()

    def _nothing_fits(self) -> str:
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        shapes = "; ".join(
            f"{node['NodeManagerAddress']}: {node['Resources'].get('GPU', 0):g} GPUs, "
            f"{node['Resources'].get('CPU', 0):g} CPUs"
            for node in alive
        )
        label = f" with label {self._placement.node_label}" if self._placement.node_label else ""
        return (
            f"no node of this Ray cluster can hold a trial: it needs {self._placement.gpus} GPUs and "
            f"{self._placement.cpus} CPUs on ONE node{label}; the nodes have: {shapes or 'none alive'}"
        )


def _fits(node: dict[str, Any], placement: Placement) -> bool:
    labelled = placement.node_label is None or placement.node_label in (
        *node["Resources"],
        *(f"{k}={v}" for k, v in node.get("Labels", {}).items()),
    )
    return (
        labelled
        and node["Resources"].get("GPU", 0) >= placement.gpus
        and node["Resources"].get("CPU", 0) >= placement.cpus
    )
