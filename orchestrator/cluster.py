"""The Ray cluster that this process joins, by address or as one embedded in it, and what its nodes can hold."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
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
from ray._raylet import Config  # type: ignore[attr-defined]  # noqa: E402

from orchestrator.config import Placement  # noqa: E402
from orchestrator.errors import MachineError  # noqa: E402

CONNECT_TIMEOUT_S = 10.0
HEAD_RESOURCE = "node:__internal_head__"
ESSENTIAL = ("gcs_server", "raylet")
OBJECT_STORE_BYTES = 128 << 20


@contextlib.contextmanager
def join(
    address: str | None, *, with_token: bool = False, on_lost: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """This process in a Ray cluster: the one at `address`, else one embedded in it, on loopback, gone when it is left.

    with_token: the cluster asks for the user's Ray token, as a head that we started does. on_lost is called in another
    thread when a process of the embedded Ray dies: Ray may abort this process soon after. Raises MachineError when the
    cluster cannot be reached.
    """
    if ray.is_initialized():
        yield
        return
    where = f"the Ray cluster at {address}" if address else "a local Ray"
    if address is not None:
        _require_listener(address, where)
    if with_token:
        os.environ["RAY_AUTH_MODE"] = "token"
        # Ray reads the mode once, at its import; without this the head refuses us.
        Config.initialize("")
    left = threading.Event()
    try:
        with _children_in_own_groups(), _sigterm_kept():
            ray.init(**_options(address))
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        if address is None:
            threading.Thread(target=_watch, args=(left, on_lost), name="ray-watch", daemon=True).start()
        yield
    except (ConnectionError, RuntimeError, ValueError) as error:
        if ray.is_initialized():
            raise
        raise MachineError(f"{where} cannot be reached: {' '.join(str(error).split())[:300]}") from None
    finally:
        left.set()
        ray.shutdown()


def _options(address: str | None) -> dict[str, Any]:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        return {**quiet, "address": address}
    return {
        **quiet,
        # Without an address Ray would join whatever cluster runs on this machine.
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_node_ip_address": "127.0.0.1",
    }


def _require_listener(address: str, where: str) -> None:
    """Raises MachineError where nothing listens: Ray itself would try for five minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise MachineError(f"{where} cannot be reached: {error.strerror or error}") from None


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
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        with contextlib.suppress(SystemExit):
            yield
    finally:
        signal.set_wakeup_fd(before)
        meant_for_ours = signal.getsignal(signal.SIGTERM) is ours
        signal.signal(signal.SIGTERM, ours)
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(reading, 64) and not meant_for_ours:
                os.kill(os.getpid(), signal.SIGTERM)
        os.close(reading)
        os.close(writing)


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


def alive_nodes() -> list[dict[str, Any]]:
    """The living nodes of the joined cluster, as Ray describes them."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def num_that_fit(node: dict[str, Any], placement: Placement) -> int:
    """How many of these placements the node could hold if nothing else ran on it; 0 where its label is missing."""
    labels = (*node["Resources"], *(f"{k}={v}" for k, v in node.get("Labels", {}).items()))
    if placement.node_label is not None and placement.node_label not in labels:
        return 0
    wanted = {"CPU": placement.cpus, "GPU": placement.gpus}
    return min(int(node["Resources"].get(name, 0) // amount) for name, amount in wanted.items() if amount)


def describe_need(placement: Placement) -> str:
    """`2 GPUs and 8 CPUs on ONE node with label X; the nodes have: ...`, for a sentence about too little room."""
    label = f" with label {placement.node_label}" if placement.node_label else ""
    shapes = "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('GPU', 0):g} GPUs, "
        f"{node['Resources'].get('CPU', 0):g} CPUs"
        for node in alive_nodes()
    )
    return (
        f"{placement.gpus} GPUs and {placement.cpus} CPUs on ONE node{label}; the nodes have: {shapes or 'none alive'}"
    )


def is_head_node() -> bool:
    """Whether this worker runs on the cluster's head node."""
    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here and HEAD_RESOURCE in node["Resources"] for node in alive_nodes())
