"""LaunchPlan -> ready process -> gone, with the GPU memory free again.

An engine runs below a keeper (keeper.py) in its own session, on a port and a compile-cache slot that nobody else on
this node uses. Ready means: health answers, the model's id is listed, and one real completion returned a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from orchestrator import client, host
from orchestrator.claims import cache_slot, reserved_port
from orchestrator.client import Target
from orchestrator.config import EngineSpec
from orchestrator.engines.base import Diagnosis, Engine, LaunchPlan, TrialStatus
from orchestrator.errors import EngineFailure, MachineError

KEEPER = Path(__file__).with_name("keeper.py")
POLL_S = 0.1
HEALTH_TIMEOUT_S = 10.0
# In every engine's environment: who started it, so that what outlives both its keeper and its owner can be found.
MARKER = "ORCHESTRATOR_OWNER"
GPU_RELEASE_TIMEOUT_S = 90.0
LOG_HEAD_BYTES, LOG_TAIL_BYTES = 4 << 20, 8 << 20
# What Ray and our own environment put into this process and an engine must not inherit.
NOT_INHERITED = re.compile(
    r"^(RAY_|PYTHONHOME$|PYTHONPATH$|VIRTUAL_ENV$|MLFLOW_|OMP_NUM_THREADS$|CUDA_VISIBLE_DEVICES$)"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Server:
    """A running engine. Everything about it is read here; only `running` starts and ends it."""

    plan: LaunchPlan
    engine: Engine
    target: Target
    keeper: subprocess.Popen[bytes]
    owner_end: socket.socket
    pid: int | None = None
    exit_code: int | None = None
    left: tuple[int, ...] = ()
    # Sentences about GPUs that did not return to their baseline after the end; such a GPU is not to be used again.
    held: tuple[str, ...] = ()
    _unread: bytes = field(default=b"", repr=False)

    def log_text(self) -> str:
        """The engine's log so far; of a very long one the head and the tail, where causes and ends are."""
        with self.plan.log_path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            if size <= LOG_HEAD_BYTES + LOG_TAIL_BYTES:
                return log.read().decode(errors="replace")
            head = log.read(LOG_HEAD_BYTES)
            log.seek(size - LOG_TAIL_BYTES)
            return f"{head.decode(errors='replace')}\n[...]\n{log.read().decode(errors='replace')}"

    def pids(self) -> frozenset[int]:
        """The engine's processes, the keeper included."""
        return host.tree_pids(self.keeper.pid)

    def check_alive(self) -> None:
        """Raises EngineFailure, with the explanation from the log, when the engine has ended."""
        self._listen(0.0)
        if self.exit_code is not None:
            raise EngineFailure(self.engine.diagnose(self.log_text(), self.exit_code))
        if self.keeper.poll() is not None:
            raise EngineFailure(
                Diagnosis(
                    status=TrialStatus.INFRASTRUCTURE,
                    cause="killed",
                    summary=f"the engine's keeper was killed from outside (exit code {self.keeper.returncode})",
                )
            )

    def _listen(self, timeout_s: float) -> None:
        """Take in what the keeper said; its messages are whole JSON lines."""
        self.owner_end.settimeout(timeout_s or 0.000001)
        with contextlib.suppress(TimeoutError, BlockingIOError, ConnectionResetError):
            self._unread += self.owner_end.recv(4096)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.pid = message.get("pid", self.pid)
            self.exit_code = message.get("exit", self.exit_code)
            self.left = tuple(message.get("left", self.left))

    def _wait(self, timeout_s: float) -> bool:
        """Whether the keeper ended within the time, its messages taken in."""
        deadline = time.monotonic() + timeout_s
        while self.keeper.poll() is None and time.monotonic() < deadline:
            self._listen(POLL_S / 4)
        self._listen(0.0)
        return self.keeper.poll() is not None


@contextlib.contextmanager
def running(
    engine: Engine,
    spec: EngineSpec,
    *,
    workdir: Path,
    ports: tuple[int, int],
    gpu_ids: tuple[str, ...] = (),
    extra_env: Mapping[str, str] | None = None,
    on_start: Callable[[Server], None] = lambda _: None,
) -> Iterator[Server]:
    """Start `spec`, yield it once ready, and leave nothing of it behind.

    Raises EngineFailure when it does not become ready, MachineError when this node cannot start it at all.
    What outlived the end all the same is told by the Server that on_start was given: `left` pids, `held` GPUs.
    """
    sweep_leftovers()
    with reserved_port(ports) as port, cache_slot(Path(spec.root) / ".engines" / ".cache") as caches:
        plan = engine.plan(spec, port, workdir)
        check_program(plan)
        _check_gpus(plan, gpu_ids)
        baseline = {gpu.uuid: gpu.used_gib for gpu in host.gpus(gpu_ids)} if gpu_ids else {}
        server = _spawn(engine, plan, spec, gpu_ids, {**caches, **(extra_env or {})})
        try:
            on_start(server)
            _wait_ready(server, spec)
            yield server
        finally:
            _stop(server, spec.stop.grace_s)
            if gpu_ids:
                server.held = host.wait_until_free(gpu_ids, baseline, GPU_RELEASE_TIMEOUT_S)


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """An environment that may be written down: values of *TOKEN*, *KEY*, *SECRET*, *PASSWORD* hidden."""
    return {name: "****" if SECRET.search(name) else value for name, value in env.items()}


def shell_line(plan: LaunchPlan) -> str:
    """The plan as one line for a shell, secrets masked."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in masked(plan.env).items()]
    return " ".join([*variables, shlex.join(plan.argv)])


def check_program(plan: LaunchPlan) -> None:
    """Raises MachineError when the program of the plan is not there."""
    path = os.pathsep.join(filter(None, [plan.path_prefix, os.environ.get("PATH")]))
    program = plan.argv[0]
    found = next((p for p in path.split(os.pathsep) if os.access(Path(p) / program, os.X_OK)), None)
    if found is None and not ("/" in program and os.access(program, os.X_OK)):
        raise MachineError(
            f"{program}: there is no such program; install the engine's environment with "
            "`python -m orchestrator engine install NAME`, or set engine.command"
        )


def _check_gpus(plan: LaunchPlan, gpu_ids: tuple[str, ...]) -> None:
    if gpu_ids and len(gpu_ids) != plan.parallel_size:
        raise MachineError(
            f"the command line asks for {plan.parallel_size} GPUs (tensor x pipeline parallel), "
            f"the trial was given {len(gpu_ids)}: {', '.join(gpu_ids)}"
        )
    users = host.foreign_users(gpu_ids, frozenset()) if gpu_ids else ()
    if users:
        raise EngineFailure(
            Diagnosis(
                status=TrialStatus.INFRASTRUCTURE,
                cause="gpu_busy",
                summary=f"the GPUs are in use by others: {'; '.join(users)}",
                lever="end those processes or choose other GPUs",
            )
        )


def _environment(plan: LaunchPlan, gpu_ids: tuple[str, ...], extra: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not NOT_INHERITED.match(name)}
    # An empty list hides every GPU on purpose: a CPU trial must not take a context on a busy one.
    env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    env.update(extra)
    env.update(plan.env)
    env[MARKER] = _marker()
    if plan.path_prefix:
        env["PATH"] = os.pathsep.join([plan.path_prefix, env.get("PATH", os.defpath)])
    return env


def _spawn(
    engine: Engine, plan: LaunchPlan, spec: EngineSpec, gpu_ids: tuple[str, ...], extra: Mapping[str, str]
) -> Server:
    key = secrets.token_urlsafe(24)
    env = _environment(plan, gpu_ids, extra)
    argv = list(plan.argv)
    if plan.api_key_variable:
        env[plan.api_key_variable] = key
    elif plan.api_key_flag:
        argv += [plan.api_key_flag, key]
    plan.log_path.parent.mkdir(parents=True, exist_ok=True)
    ours, keepers = socket.socketpair()
    with keepers, plan.log_path.open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, str(KEEPER), str(keepers.fileno()), str(spec.stop.grace_s), "--", *argv],
            pass_fds=(keepers.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    target = Target(base_url=plan.base_url, model=plan.model_name, api_key=key)
    return Server(plan=plan, engine=engine, target=target, keeper=keeper, owner_end=ours)


def _wait_ready(server: Server, spec: EngineSpec) -> None:
    """Return when the server is ready; raises EngineFailure as soon as it is clear that it will not be."""
    started = progressed = time.monotonic()
    size = -1
    while True:
        server.check_alive()
        stage = _stage(server, spec.ready.stall_s)
        if stage is None:
            _check_listener(server)
            return
        now = time.monotonic()
        grown = server.plan.log_path.stat().st_size
        if grown != size:
            size, progressed = grown, now
        if now - progressed > spec.ready.stall_s or now - started > spec.ready.timeout_s:
            raise EngineFailure(_not_ready(server, stage, now - started, now - progressed, spec))
        server._wait(POLL_S)


def _stage(server: Server, patience_s: float) -> str | None:
    """What readiness still waits for, as a sentence; None when a real completion has returned a token."""
    target = server.target
    status = asyncio.run(_status(target.base_url + server.engine.health_path))
    if status != 200:
        return f"{server.engine.health_path} answers {status}" if status else "nothing answers on its port"
    try:
        models = client.list_models(target.base_url, target.api_key)
        if target.model not in models:
            return f"it lists the models {models}, not {target.model!r}"
        client.one_completion(target, patience_s)
    except client.RequestError as error:
        return str(error)
    return None


async def _status(url: str) -> int | None:
    """The HTTP status of a GET, None when nothing answers."""
    try:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return response.status
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


def _not_ready(server: Server, stage: str, waited_s: float, silent_s: float, spec: EngineSpec) -> Diagnosis:
    seen = server.engine.diagnose(server.log_text(), None)
    limit = "engine.ready.stall_s" if silent_s > spec.ready.stall_s else "engine.ready.timeout_s"
    return Diagnosis(
        status=TrialStatus.FAILED,
        cause="no_progress",
        summary=f"not ready after {waited_s:.0f} s, {silent_s:.0f} s without a new line in its log; {stage}",
        lever=f"raise {limit} if the log shows that it was still working",
        evidence=seen.evidence or server.log_text()[-500:].strip() or None,
        facts=seen.facts,
    )


def _check_listener(server: Server) -> None:
    """A stranger that answers on our port must never be measured: the listening process has to be the engine's."""
    port = int(server.plan.base_url.rsplit(":", 1)[1])
    try:
        listeners = {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        }
    except psutil.AccessDenied:
        return
    if listeners and None not in listeners and not listeners & server.pids():
        raise EngineFailure(
            Diagnosis(
                status=TrialStatus.INFRASTRUCTURE,
                cause="port_taken",
                summary=f"another process (pid {min(filter(None, listeners))}) answers on port {port}",
            )
        )


def _stop(server: Server, grace_s: float) -> None:
    """End the tree through the keeper, reap it, and close what we hold."""
    with contextlib.suppress(OSError):
        server.owner_end.send(b"T")
    if not server._wait(grace_s + 15.0):
        server.keeper.kill()
        server.keeper.wait()
    server.owner_end.close()
    if server.keeper.returncode != 0:
        server.left = _kill_marked(lambda marker: marker == _marker())


def sweep_leftovers() -> tuple[int, ...]:
    """Kill processes of engines whose owner is gone; needed only where keeper and owner were killed together."""
    return _kill_marked(lambda marker: marker != _marker() and not _owner_lives(marker))


def _marker() -> str:
    """Names this process, also after its pid was given to another."""
    return f"{os.getpid()}:{psutil.Process().create_time():.2f}"


def _owner_lives(marker: str) -> bool:
    pid, _, created = marker.partition(":")
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == created
    except (psutil.NoSuchProcess, ValueError):
        return False


def _kill_marked(wanted: Callable[[str], bool]) -> tuple[int, ...]:
    """KILL every process that carries the launch marker in its environment and is wanted. Returns the survivors."""
    victims = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marker = process.environ().get(MARKER)
            if marker is not None and wanted(marker):
                process.kill()
                victims.append(process)
    _, alive = psutil.wait_procs(victims, timeout=10)
    return tuple(process.pid for process in alive)


def launch_record(plan: LaunchPlan) -> dict[str, Any]:
    """What is written down of a start: argv, the environment we add (secrets masked), base URL."""
    return {
        "argv": list(plan.argv),
        "env": masked(plan.env),
        "base_url": plan.base_url,
        "proposals": plan.proposals,
        "parallel_size": plan.parallel_size,
        "warnings": list(plan.warnings),
    }
