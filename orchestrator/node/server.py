"""A running engine seen from its owner: its log, its processes, whether it lives, and its end through the keeper."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.engines.base import Engine, LaunchPlan
from orchestrator.errors import EngineFailure
from orchestrator.measure.client import Target
from orchestrator.node import gpus, leftovers
from orchestrator.node.keeper import shared_memory
from orchestrator.node.memory import tree_pids
from orchestrator.node.program import public_env
from orchestrator.outcome import Diagnosis, TrialStatus

LISTEN_S = 0.025
# The keeper's own patience after KILL, and a little more.
KEEPER_SLACK_S = 15.0
LOG_HEAD_BYTES, LOG_TAIL_BYTES = 4 << 20, 8 << 20


@dataclass(slots=True, kw_only=True)
class Server:
    """A running engine. Everything about it is read here; only launch.run_engine starts and ends it."""

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
    # On its GPUs, and not shown by this node: its own processes as the host counts them.
    hidden_pids: frozenset[int] = frozenset()
    _unread: bytes = field(default=b"", repr=False)
    _seen_pids: frozenset[int] = frozenset()
    _shared_memory: frozenset[Path] = frozenset()

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
        return gpus.find_foreign_users(self.gpu_ids, self.pids() | self.hidden_pids) if self.gpu_ids else ()

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
            "env": public_env(self.plan),
            "given_env": dict(self.given_env),
            "gpu_ids": list(self.gpu_ids),
            "base_url": self.plan.base_url,
            "log": str(self.plan.log_path),
            "speculation": None if self.plan.speculation is None else asdict(self.plan.speculation),
            "parallel_size": self.plan.parallel_size,
            "warnings": list(self.plan.warnings),
        }

    def _listen(self, timeout_s: float) -> None:
        """Read the keeper's messages, each a whole JSON line."""
        self.owner_end.settimeout(timeout_s or 0.000001)
        try:
            self._unread += self.owner_end.recv(4096)
        except (TimeoutError, BlockingIOError):
            return
        except ConnectionResetError:
            # The keeper is gone; poll() returns its exit code in a moment.
            time.sleep(timeout_s)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.pid = message.get("pid", self.pid)
            self.exit_code = message.get("exit", self.exit_code)
            self.left = tuple(message.get("left", self.left))

    def stop(self, grace_s: float, hurried: bool) -> None:
        """End the tree through the keeper, reap it, remove what it left. hurried: without time to end by itself."""
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
