"""The local Ray head that a service lives in when no cluster is named: started and ended by us.

The local head outlives the command that started it. Its processes are remembered by pid and start in
head.json, so that `--stop` ends exactly that head and never another Ray of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.cluster import alive_nodes, describe_need, num_that_fit
from orchestrator.config import Placement
from orchestrator.errors import MachineError
from orchestrator.node.process import ProcessId, identify, is_alive
from orchestrator.trial.result import write_text

START_TIMEOUT_S, STOP_GRACE_S = 60.0, 4.0
OBJECT_STORE_BYTES = 96 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A local Ray head of ours. processes[0] is `ray start` itself, which stays."""

    address: str
    temp_dir: str
    processes: tuple[ProcessId, ...]

    def alive(self) -> bool:
        return all(map(is_alive, self.processes))


def local_head(folder: Path) -> Head | None:
    """The head that was started for this folder, None when there is none or it is not whole any more."""
    try:
        document = json.loads((folder / "head.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise MachineError(f"{folder / 'head.json'}: cannot be read: {error}") from None
    head = _head(document, folder / "head.json")
    return head if head.alive() else None


def start_head(folder: Path, *, num_gpus: int | None = None, dashboard_port: int | None = None) -> Head:
    """Start a Ray head that outlives this process. Raises MachineError with the end of its log.

    num_gpus: as Ray detects them when None. dashboard_port: Ray's HTTP API on loopback, off when None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stop_head(folder)
    parent = Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    # A folder of its own: the default one would make every ray.init() of this machine join this head.
    temp_dir = tempfile.mkdtemp(prefix="ray-", dir=parent)
    _make_token()
    address = f"127.0.0.1:{_free_port()}"
    log_path = folder / "head.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            _start_command(address, temp_dir, num_gpus, dashboard_port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while b"Ray runtime started" not in log_path.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise MachineError(
                f"a local Ray did not start; {log_path} ends with: {log_path.read_text()[-500:].strip()}"
            )
        time.sleep(0.05)
    members = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    servers = [p for p in members if p.pid == process.pid or p.name() in ("gcs_server", "raylet")]
    head = Head(
        address=address,
        temp_dir=temp_dir,
        processes=tuple(known for p in servers if (known := identify(p.pid)) is not None),
    )
    write_text(folder / "head.json", json.dumps(asdict(head), indent=1))
    return head


def stop_head(folder: Path) -> bool:
    """End the head of this folder with everything below it, and forget it. False when there was none."""
    path = folder / "head.json"
    if not path.exists():
        return False
    head = _head(json.loads(path.read_text(encoding="utf-8")), path)
    roots = [psutil.Process(known.pid) for known in head.processes if is_alive(known)]
    family = {p for root in roots for p in (root, *_children(root))}
    for signal_of in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                signal_of(process)
        deadline = time.monotonic() + STOP_GRACE_S
        while family and time.monotonic() < deadline:
            family = {process for process in family if _is_running(process)}
            time.sleep(0.05)
    shutil.rmtree(head.temp_dir, ignore_errors=True)
    path.unlink()
    return True


def require_room(placement: Placement, replicas: int) -> None:
    """Whether the cluster's nodes can hold `replicas` engines, each whole on ONE node. Raises MachineError.

    Looks at what the nodes have, not at what is free: what stands there now may be what is replaced.
    """
    room = sum(num_that_fit(node, placement) for node in alive_nodes())
    if room < replicas:
        raise MachineError(
            f"this Ray cluster can hold {room} of {replicas} engines: each needs {describe_need(placement)}"
        )


def _start_command(address: str, temp_dir: str, num_gpus: int | None, dashboard_port: int | None) -> list[str]:
    host, port = address.split(":")
    options = {
        "node-ip-address": host,
        "port": port,
        "include-dashboard": "false" if dashboard_port is None else "true",
        "object-store-memory": str(OBJECT_STORE_BYTES),
        "temp-dir": temp_dir,
        "ray-client-server-port": str(_free_port()),
        **({} if num_gpus is None else {"num-gpus": str(num_gpus)}),
        **({} if dashboard_port is None else {"dashboard-host": host, "dashboard-port": str(dashboard_port)}),
    }
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *(f"--{name}={value}" for name, value in options.items()),
    ]


# A head is a cluster that others join: settings for the Ray of this process do not hold for it.
NOT_A_HEADS = ("RAY_ADDRESS", "RAY_JOB_ID", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")


def _environment() -> dict[str, str]:
    """Ours, with this package importable in every worker however it was found here."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_A_HEADS}
    package_root = str(Path(__file__).resolve().parents[2])
    # Ray listens on every interface whatever address it is given: nobody without the user's token may give it work.
    env["RAY_AUTH_MODE"] = "token"
    # As where it was measured (cluster.py): a served engine does not yield to everybody else on the machine.
    env.setdefault("RAY_worker_niceness", "0")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    return env


def _make_token() -> None:
    """The user's Ray token, where Ray looks for it; made when there is none."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") or path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as token:
        token.write(secrets.token_hex(32))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _head(document: dict[str, Any], path: Path) -> Head:
    try:
        processes = tuple(ProcessId(**each) for each in document["processes"])
        return Head(address=document["address"], temp_dir=document["temp_dir"], processes=processes)
    except (KeyError, TypeError):
        raise MachineError(
            f"{path}: written by another version of this program; end its `ray start` by hand and remove the file"
        ) from None


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(process: psutil.Process) -> Sequence[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []
