"""LaunchPlan -> ready process -> gone, with the GPU memory free again.

An engine runs below a keeper (keeper.py) in its own session, on ports, GPUs and a compile-cache slot that nobody else
on this node uses. What it leaves behind all the same is found by its mark (leftovers.py).
"""

from __future__ import annotations

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import EngineSpec
from orchestrator.engines.base import Engine, LaunchPlan
from orchestrator.errors import EngineFailure, MachineError
from orchestrator.masking import mask_env
from orchestrator.measure.client import Target
from orchestrator.node import claims, gpus, leftovers
from orchestrator.node.keeper import shared_memory
from orchestrator.node.memory import tree_pids
from orchestrator.node.readiness import wait_ready
from orchestrator.outcome import Diagnosis, TrialStatus

KEEPER = Path(__file__).with_name("keeper.py")
LISTEN_S = 0.025
GPU_RELEASE_TIMEOUT_S = 90.0
# A process that was just killed is shown on its GPU for a moment longer.
GPU_BUSY_PATIENCE_S = 10.0
# The keeper's own patience after KILL, and a little more.
KEEPER_SLACK_S = 15.0
LOG_HEAD_BYTES, LOG_TAIL_BYTES = 4 << 20, 8 << 20
# What Ray, a launcher and our own environment put into this process and an engine must not inherit: it would change
# how it runs, or where its processes meet.
NOT_INHERITED = re.compile(
    r"^(RAY_|TUNE_|SERVE_|MLFLOW_|PYTEST_|PYTHONHOME$|PYTHONPATH$|PYTHONSTARTUP$|VIRTUAL_ENV|CONDA_|OMP_NUM_THREADS$"
    r"|CUDA_VISIBLE_DEVICES$|MASTER_ADDR$|MASTER_PORT$|(LOCAL_|GROUP_|NODE_)?RANK$|(LOCAL_)?WORLD_SIZE$|TORCHELASTIC_"
    r"|VLLM_(PORT|HOST_IP|DP_\w+|API_KEY)$|LLAMA_ARG_|LLAMA_API_KEY$)"
)
# What a person has set for engines in the shell reaches them, and is written down with the result.
ENGINE_SETTING = re.compile(r"^(VLLM|SGLANG|LLAMA|GGML|NCCL|TORCH|PYTORCH|CUDA|TRITON|FLASHINFER|HF|OMP|MKL|KMP)_")


@dataclass(slots=True, kw_only=True)
class Server:
    """A running engine. Everything about it is read here; only `running` starts and ends it."""

    plan: LaunchPlan
    engine: Engine
    target: Target
    keeper: subprocess.Popen[bytes]
    owner_end: socket.socket
    mark: str
    gpu_ids: tuple[str, ...] = ()
    # The environment it was given beyond what the plan says, secrets masked: claims, and engine settings inherited.
    given_env: Mapping[str, str] = field(default_factory=dict)
    started_s: float = field(default_factory=time.time)
    pid: int | None = None
    exit_code: int | None = None
    left: tuple[int, ...] = ()
    # Sentences about GPUs that did not return to their baseline after the end; such a GPU is not to be used again.
    held: tuple[str, ...] = ()
    _unread: bytes = field(default=b"", repr=False)
    _seen_pids: frozenset[int] = frozenset()
    _shared_memory: frozenset[Path] = frozenset()
    _hidden_pids: frozenset[int] = frozenset()

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
        return tree_pids(self.keeper.pid)

    def foreign_gpu_users(self) -> tuple[str, ...]:
        """Who else is on the engine's GPUs."""
        return gpus.foreign_users(self.gpu_ids, self.pids() | self._hidden_pids) if self.gpu_ids else ()

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
                    summary=f"the engine's keeper ended before the engine (exit code {self.keeper.returncode}, "
                    "negative: killed by that signal)",
                )
            )

    def wait(self, timeout_s: float) -> bool:
        """Whether the keeper, or the engine, ended within the time."""
        deadline = time.monotonic() + timeout_s
        while self.keeper.poll() is None and self.exit_code is None and time.monotonic() < deadline:
            self._listen(LISTEN_S)
        return self.keeper.poll() is not None

    def note_traces(self) -> None:
        """Remember what would be left if every process of the engine were killed now."""
        pids = self.pids()
        self._seen_pids |= pids | ({self.pid} if self.pid else set())
        self._shared_memory |= shared_memory(pids)

    def record(self) -> dict[str, Any]:
        """What is written down of this start: argv, environment (secrets masked), where it ran."""
        return {
            "argv": list(self.plan.argv),
            "env": mask_env(self.plan.env),
            "given_env": dict(self.given_env),
            "gpu_ids": list(self.gpu_ids),
            "base_url": self.plan.base_url,
            "log": str(self.plan.log_path),
            "speculation": None if self.plan.speculation is None else asdict(self.plan.speculation),
            "parallel_size": self.plan.parallel_size,
            "warnings": list(self.plan.warnings),
        }

    def _listen(self, timeout_s: float) -> None:
        """Take in what the keeper said; its messages are whole JSON lines."""
        self.owner_end.settimeout(timeout_s or 0.000001)
        try:
            self._unread += self.owner_end.recv(4096)
        except (TimeoutError, BlockingIOError):
            return
        except ConnectionResetError:
            # The keeper is gone; poll() says so in a moment.
            time.sleep(timeout_s)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.pid = message.get("pid", self.pid)
            self.exit_code = message.get("exit", self.exit_code)
            self.left = tuple(message.get("left", self.left))

    def _stop(self, grace_s: float, hurried: bool) -> None:
        """End the tree through the keeper, reap it, and remove what it left."""
        # Closed whatever happens: should the wait be interrupted, the keeper ends the engine in a hurry.
        with contextlib.closing(self.owner_end):
            self.note_traces()
            with contextlib.suppress(OSError):
                self.owner_end.send(b"Q" if hurried else b"T")
            deadline = time.monotonic() + grace_s + KEEPER_SLACK_S
            while self.keeper.poll() is None and time.monotonic() < deadline:
                self._listen(LISTEN_S)
            self._listen(0.0)
        if self.keeper.poll() is None:
            self.keeper.kill()
            self.keeper.wait()
        if self.keeper.returncode != 0:
            self.left = leftovers.kill_marked(self.mark)
        leftovers.remove_shared_memory(self._shared_memory, self._seen_pids, self.started_s - 1.0)


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
    leftovers.sweep()
    with (
        claims.reserved_port(ports) as port,
        claims.cache_slot(Path(spec.root) / ".engines" / ".cache") as caches,
        claims.scrap_folder() as scraps,
    ):
        plan = engine.plan(spec, port, workdir)
        check_program(plan)
        with _gpus_of_our_own(plan, gpu_ids) as baseline:
            given = {**caches, "TMPDIR": str(scraps), **(extra_env or {})}
            server = _spawn(engine, plan, spec, gpu_ids, given)
            hurried = False
            try:
                on_start(server)
                wait_ready(server, spec)
                server.note_traces()
                server._hidden_pids = gpus.hidden_users(gpu_ids) if gpu_ids else frozenset()
                yield server
            except EngineFailure as failure:
                if failure.diagnosis.cause == "cache_broken":
                    claims.empty(caches)
                raise
            except (KeyboardInterrupt, SystemExit):
                # A person who interrupts does not wait for an orderly end.
                hurried = True
                raise
            finally:
                server._stop(spec.stop.grace_s, hurried)
                if gpu_ids:
                    server.held = gpus.wait_until_free(gpu_ids, baseline, GPU_RELEASE_TIMEOUT_S)


def shell_line(plan: LaunchPlan) -> str:
    """The plan as one line for a shell, secrets masked."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in mask_env(plan.env).items()]
    return " ".join([*variables, shlex.join(plan.argv)])


def check_program(plan: LaunchPlan) -> None:
    """Raises MachineError when the program of the plan is not there."""
    path = os.pathsep.join(filter(None, [plan.path_prefix, os.environ.get("PATH")]))
    program = plan.argv[0]
    found = next((p for p in path.split(os.pathsep) if os.access(Path(p) / program, os.X_OK)), None)
    if found is None and not ("/" in program and os.access(program, os.X_OK)):
        name = Path(plan.path_prefix).parent.name if plan.path_prefix else "NAME"
        raise MachineError(
            f"{program}: there is no such program; install the engine's environment with "
            f"`python -m orchestrator engine install {name}`, or set engine.command"
        )


@contextlib.contextmanager
def _gpus_of_our_own(plan: LaunchPlan, gpu_ids: tuple[str, ...]) -> Iterator[dict[str, float | None]]:
    """Claim the GPUs and yield their memory in use (per UUID, GiB) before the start; raises when one is in use."""
    if not gpu_ids:
        yield {}
        return
    if len(gpu_ids) != plan.parallel_size:
        raise MachineError(
            f"the command line asks for {plan.parallel_size} GPUs (tensor x pipeline parallel), "
            f"the trial was given {len(gpu_ids)}: {', '.join(gpu_ids)}"
        )
    seen = gpus.gpus(gpu_ids)
    if len(seen) != len(gpu_ids) and (here := gpus.gpus()):
        indexes = ", ".join(str(gpu.index) for gpu in here)
        raise MachineError(f"the trial was given the GPUs {', '.join(gpu_ids)}; this node has {indexes}")
    with claims.gpus_claimed([gpu.uuid for gpu in seen]) as claimed:
        others = tuple(f"GPU {gpu.index}: another engine of ours has it" for gpu in seen if gpu.uuid in claimed)
        faults = tuple(f"GPU {gpu.index}: {gpu.fault}" for gpu in seen if gpu.fault)
        in_use = faults or others or gpus.quarantined(gpu_ids) or gpus.wait_until_unused(gpu_ids, GPU_BUSY_PATIENCE_S)
        if in_use:
            raise EngineFailure(
                Diagnosis(
                    status=TrialStatus.INFRASTRUCTURE,
                    cause="gpu_busy",
                    summary=f"the GPUs cannot be used: {'; '.join(in_use)}",
                    lever="end those processes or choose other GPUs",
                )
            )
        yield gpus.settled(gpu_ids, GPU_RELEASE_TIMEOUT_S)


def environment(plan: LaunchPlan) -> dict[str, str]:
    """What the program of `plan` gets when it is only asked something: no GPU, none of the claims of a start."""
    return _environment(plan, (), {})[0]


def _environment(
    plan: LaunchPlan, gpu_ids: tuple[str, ...], given: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(everything the engine gets, the part of it that is written down beside the plan's own)."""
    env = {name: value for name, value in os.environ.items() if not NOT_INHERITED.match(name)}
    told = {name: value for name, value in env.items() if ENGINE_SETTING.match(name)}
    # An empty list hides every GPU on purpose: a CPU trial must not take a context on a busy one. The order is NVML's,
    # so that an index means the same GPU to the engine and to us.
    told |= {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **given}
    if plan.rendezvous_variable:
        told[plan.rendezvous_variable] = str(_rendezvous_port(plan))
    env |= {**told, **plan.env}
    if plan.path_prefix:
        env["PATH"] = os.pathsep.join([plan.path_prefix, env.get("PATH", os.defpath)])
    return env, {name: value for name, value in mask_env(told).items() if name not in plan.env}


def new_key() -> str:
    """A key for one start. Hexadecimal: one that began with a dash would be taken for a flag on a command line."""
    return secrets.token_hex(24)


def _rendezvous_port(plan: LaunchPlan) -> int:
    """The first port of the block behind the HTTP port, for the engine's own processes."""
    return int(plan.base_url.rsplit(":", 1)[1]) + 1


def _spawn(
    engine: Engine, plan: LaunchPlan, spec: EngineSpec, gpu_ids: tuple[str, ...], given: Mapping[str, str]
) -> Server:
    key, mark = new_key(), leftovers.new_mark()
    env, told = _environment(plan, gpu_ids, given)
    env[leftovers.MARKER] = mark
    argv = list(plan.argv)
    if plan.rendezvous_flag:
        argv += [plan.rendezvous_flag, str(_rendezvous_port(plan))]
    if plan.api_key_variable:
        env[plan.api_key_variable] = key
    elif plan.api_key_flag:
        argv += [plan.api_key_flag, key]
    plan.log_path.parent.mkdir(parents=True, exist_ok=True)
    ours, keepers = socket.socketpair()
    with keepers, plan.log_path.open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-I", str(KEEPER), str(keepers.fileno()), str(spec.stop.grace_s), "--", *argv],
            pass_fds=(keepers.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    target = Target(base_url=plan.base_url, model=plan.model_name, api_key=key)
    return Server(
        plan=plan,
        engine=engine,
        target=target,
        keeper=keeper,
        owner_end=ours,
        mark=mark,
        gpu_ids=gpu_ids,
        given_env=told,
    )
