"""When may an engine be measured? Health answers, the port is its own, its model is listed, a completion gave a token.

Waiting ends at once when the engine ends, soon when its log names a fatal error and it hangs, and when its log has not
grown for engine.ready.stall_s. A slow start whose log grows is waited for up to engine.ready.timeout_s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from typing import Any

import aiohttp
import psutil

from orchestrator.config import EngineSpec
from orchestrator.engines import Engine
from orchestrator.errors import EngineFailure
from orchestrator.measure import client
from orchestrator.node.server import Server
from orchestrator.outcome import Diagnosis, TrialStatus

# A start of minutes need not be looked at as often as one of a second.
FIRST_POLL_S, LONGEST_POLL_S = 0.05, 0.5
HEALTH_TIMEOUT_S = 10.0
# A worker that failed may leave its siblings hanging for good: after this silence the log is asked whether that is so.
HANGS_AFTER_S = 10.0
LOOKED_AT_BYTES = 1 << 20
# What is asked of every engine, beside its own health path.
_ASKED_PATHS = ("/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


def wait_ready(server: Server, spec: EngineSpec) -> None:
    """Return when the server is ready; raises EngineFailure as soon as it is clear that it will not be."""
    started = time.monotonic()
    progress = _Progress(server)
    question = _Question(server, spec.ready.stall_s)
    asked_at_bytes = 0
    while True:
        server.check_alive()
        if question.answered():
            if question.waits_for is None:
                return
            question = _Question(server, spec.ready.stall_s, question.waits_for)
        waited_s, silent_s = time.monotonic() - started, progress.silent_s()
        if silent_s > spec.ready.stall_s or waited_s > spec.ready.timeout_s:
            raise EngineFailure(_not_ready(server, question.waits_for or "", waited_s, silent_s, spec))
        if silent_s > HANGS_AFTER_S and asked_at_bytes != progress.read_bytes:
            asked_at_bytes = progress.read_bytes
            if (seen := server.engine.diagnose(server.log_text(), None)).status is not TrialStatus.COMPLETE:
                raise EngineFailure(seen)
        server.wait(min(LONGEST_POLL_S, max(FIRST_POLL_S, waited_s / 50)))


def own_request(engine: Engine) -> re.Pattern[bytes]:
    """Matches our own requests in the engine's access log, which are no progress of the engine."""
    paths = "|".join(map(re.escape, (engine.health_path, *_ASKED_PATHS)))
    return re.compile(rf"\b(?:GET|POST) (?:{paths})\b".encode())


class _Progress:
    """How long the engine's log has had no new line."""

    def __init__(self, server: Server) -> None:
        self._path = server.plan.log_path
        self._own_request = own_request(server.engine)
        self.read_bytes = 0
        self._progressed_s = time.monotonic()

    def silent_s(self) -> float:
        with self._path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(self.read_bytes, size - LOOKED_AT_BYTES))
            grown = log.read(LOOKED_AT_BYTES)
            self.read_bytes = log.tell()
        if any(line.strip() and not self._own_request.search(line) for line in grown.splitlines()):
            self._progressed_s = time.monotonic()
        return time.monotonic() - self._progressed_s


class _Question:
    """Asks once whether the server is ready, in a thread: a hanging completion must not hide that the engine ended."""

    def __init__(self, server: Server, patience_s: float, waits_for: str = "nothing answers on its port") -> None:
        self.waits_for: str | None = waits_for
        self._failure: EngineFailure | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, patience_s), name="readiness", daemon=True)
        self._thread.start()

    def answered(self) -> bool:
        """Whether the answer is there; raises what makes waiting pointless."""
        if self._thread.is_alive():
            return False
        if self._failure:
            raise self._failure
        return True

    def _ask(self, server: Server, patience_s: float) -> None:
        try:
            self.waits_for = self._stage(server, patience_s)
        except EngineFailure as failure:
            self._failure = failure

    def _stage(self, server: Server, patience_s: float) -> str | None:
        """What readiness still waits for, as a sentence; None when a real completion has returned a token."""
        target, path = server.target, server.engine.health_path
        status = asyncio.run(_status(target.base_url + path))
        if status is not None:
            # Before the key is shown to whoever listens there.
            check_listener(server)
        if status != 200:
            return f"{path} answers {status}" if status else "nothing answers on its port"
        try:
            models = client.list_models(target.base_url, target.api_key)
            if target.model not in models:
                return f"it lists the models {models}, not {target.model!r}"
            self.waits_for = "a first completion is not answered"
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


def _not_ready(server: Server, waits_for: str, waited_s: float, silent_s: float, spec: EngineSpec) -> Diagnosis:
    seen = server.engine.diagnose(server.log_text(), None)
    limit = "engine.ready.stall_s" if silent_s > spec.ready.stall_s else "engine.ready.timeout_s"
    if seen.status is not TrialStatus.COMPLETE:
        # The front end lives on though its engine is dead: the log has the cause.
        return seen
    return Diagnosis(
        status=TrialStatus.FAILED,
        cause="no_progress",
        summary=f"not ready after {waited_s:.0f} s, {silent_s:.0f} s without a new line in its log; {waits_for}",
        lever=f"raise {limit} if the log shows that it was still working",
        evidence=seen.evidence or server.log_text()[-500:].strip() or None,
        facts=seen.facts,
    )


def check_listener(server: Server) -> None:
    """A stranger that answers on our port must never be measured: every listener there has to be the engine's.

    Raises EngineFailure. Where this node hides the sockets of our own processes, nothing is checked.
    """
    port = int(server.plan.base_url.rsplit(":", 1)[1])
    own = server.pids()
    try:
        ours = {pid for pid in own if _listens(pid, port)}
        everyone = {c.pid for c in psutil.net_connections("tcp") if _is_listener(c, port)}
    except psutil.AccessDenied:
        return
    strangers = everyone - own
    # A listener without a pid belongs to another user, who cannot share a port with us.
    if not everyone or (ours and strangers <= {None}):
        return
    pid = next((pid for pid in strangers if pid is not None), None)
    who = "a process of another user" if pid is None else f"pid {pid} ({_name(pid)})"
    raise EngineFailure(
        Diagnosis(
            status=TrialStatus.INFRASTRUCTURE,
            cause="port_taken",
            summary=f"{who}, which is not the engine, listens on its port {port}",
        )
    )


def _listens(pid: int, port: int) -> bool:
    try:
        return any(_is_listener(c, port) for c in psutil.Process(pid).net_connections("tcp"))
    except psutil.NoSuchProcess:
        return False


def _is_listener(connection: Any, port: int) -> bool:
    address = connection.laddr
    return connection.status == psutil.CONN_LISTEN and bool(address) and address.port == port


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return "already gone"
